"""Tiny models of many objectives and kinds, and uneven batches for them."""

from __future__ import annotations

import torch
import transformers

VOCABULARY, TOKENS, ROWS = 61, 12, 8
PAD = 0

_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": PAD,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 40,
    "dropout": 0.0,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "pad_token_id": PAD,
    "decoder_start_token_id": PAD,
}
_WHISPER = {key: value for key, value in _BART.items() if not key.startswith("max_position")} | {
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 40,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
_VIT = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_labels": 5,
}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": PAD,
}

MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", _BART),
    "bart_causal": ("BartForCausalLM", "BartConfig", _BART | {"is_decoder": True}),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "bert_tokens": ("BertForTokenClassification", "BertConfig", _BERT | {"num_labels": 5}),
    "bert_multi_label": (
        "BertForSequenceClassification",
        "BertConfig",
        _BERT | {"num_labels": 5, "problem_type": "multi_label_classification"},
    ),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _BERT),
    "xlm_roberta": ("XLMRobertaForMaskedLM", "XLMRobertaConfig", _BERT),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {key: value for key, value in _BERT.items() if "dropout" not in key}
        | {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", _VIT),
}

_QWEN3_NEXT = {
    **_LLAMA,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
_RECURRENT = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
_MAMBA = _RECURRENT | {"state_size": 4, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}

RECURRENT = {
    "mamba": ("MambaForCausalLM", "MambaConfig", _MAMBA),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        _MAMBA | {"num_heads": 4, "head_dim": 8, "n_groups": 1},
    ),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", _RECURRENT | {"context_length": 32}),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", _QWEN3_NEXT),
}


def build(name: str) -> torch.nn.Module:
    """Return the model ``name``."""
    kind, config, arguments = (MODELS | RECURRENT)[name]
    return getattr(transformers, kind)(getattr(transformers, config)(**arguments))


def batch(name: str, side: str = "right", rows: int = ROWS) -> dict[str, torch.Tensor]:
    """Return ``rows`` rows with different numbers of targets; the last has none.

    ``side``: ``left``, ``right``, ``none`` or ``packed``: place of the padding of inputs and
    labels, or no padding but ``position_ids`` that restart in the middle of every row.
    """
    generator = torch.Generator().manual_seed(7)
    classes = 5 if name in ("vit", "bert_tokens", "bert_multi_label") else VOCABULARY
    if name == "vit":
        pixels = torch.randn(rows, 3, 8, 8, generator=generator)
        return {"pixel_values": pixels, "labels": torch.arange(rows) % classes}
    ids = torch.randint(3, VOCABULARY, (rows, TOKENS), generator=generator)
    if name == "bert_multi_label":
        labels = torch.rand(rows, classes, generator=generator).round()
        return {"input_ids": ids, "labels": labels}
    labels = torch.randint(3, classes, (rows, TOKENS), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        missing = row * (TOKENS - 3) // rows
        padding = slice(0, missing) if side == "left" else slice(TOKENS - missing, TOKENS)
        if side in ("left", "right"):
            ids[row, padding], mask[row, padding], labels[row, padding] = PAD, 0, -100
        labels[row, row : 2 * row : 3] = -100
    labels[-1] = -100
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if name == "whisper":
        given = {"input_features": torch.randn(rows, 8, 20, generator=generator), "labels": labels}
    elif side == "packed":
        del given["attention_mask"]
        positions = torch.arange(TOKENS) % (TOKENS // 2)
        given["position_ids"] = positions.expand(rows, -1).contiguous()
    return given


def part(given: dict[str, torch.Tensor], index: int, parts: int) -> dict[str, torch.Tensor]:
    """Return part ``index`` of ``parts`` equal parts of a batch."""
    return {key: value.chunk(parts)[index] for key, value in given.items()}


def reference(name: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients of the whole batch on one process."""
    torch.manual_seed(0)
    model = build(name)
    model(**given).loss.backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
