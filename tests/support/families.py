"""Tiny models of every family that is split, tied and untied: for parallelism inside models."""

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
)

VOCABULARY, WIDTH, HEADS = 97, 32, 4


def config_of(family: str, layers: int = 4) -> PretrainedConfig:
    """``family``, or with ``-tied`` or ``-untied`` behind it what its head shall be."""
    name, _, head = family.partition("-")
    common = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if name == "gpt2":
        sizes = {"n_positions": 32, "n_embd": WIDTH, "n_layer": layers, "n_head": HEADS}
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = GPT2Config(**common, **sizes, **off)
    else:
        common |= {
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "max_position_embeddings": 32,
        }
        grouped = {"num_key_value_heads": 2}
        config = {
            "neox": lambda: GPTNeoXConfig(**common),
            "llama": lambda: LlamaConfig(**common, **grouped),
            "mistral": lambda: MistralConfig(**common, **grouped, sliding_window=8),
            "mixtral": lambda: MixtralConfig(**common, **grouped, num_local_experts=4),
        }[name]()
    config.tie_word_embeddings = {"tied": True, "untied": False}.get(
        head, config.tie_word_embeddings
    )
    return config


def build(family: str, layers: int = 4) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(config_of(family, layers))


def batch(step: int, rows: int, sequence: int = 16) -> dict:
    """``rows`` sequences of step ``step``, each with another number of targets."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCABULARY, (rows, sequence), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : (5 * row + step) % (sequence - 2)] = -100
    return {"input_ids": ids, "labels": labels}
