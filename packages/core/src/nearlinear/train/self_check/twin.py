"""Small twins of Hugging Face models: the same code with few layers and small widths.

`twin_config` reduces a config of transformers by the names of its fields: every width becomes a
small multiple of the degrees, and each kind of layer remains once. A twin keeps the features of the
model (ratios of heads, norms, biases, windows, experts, tied tables). Dropout and router noise are
off, because two layouts draw different random numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...checkpoint.hf.meta_model import import_transformers
from ...errors import ConfigError
from ...spmd import one_at_a_time

HEAD_WIDTH = 16
VOCABULARY = 128
IMAGE, PATCH = 32, 8
WINDOW = 6
"""Width of sliding windows and attention chunks: shorter than the sequences of the probe."""

MOST_LAYERS = 8
"""Limit of layers in a twin whose layers differ in many ways."""


class TwinError(ConfigError):
    """A model of which no small twin can be built."""


@dataclass(frozen=True)
class TwinSize:
    """Sizes that the degrees of a layout divide."""

    layers: int = 2
    """Layers at least: one for each pipeline stage."""
    heads: int = 4
    experts: int = 4
    positions: int = 128
    """Longest sequence."""

    @property
    def width(self) -> int:
        """Width of hidden states."""
        return self.heads * HEAD_WIDTH


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LAYERS = _names(
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth "
    "num_decoder_layers num_encoder_layers speech_encoder_layers t2u_encoder_layers "
    "t2u_decoder_layers num_hidden_groups encoder_num_hidden_layers"
)
_HEADS = _names(
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "attention_heads swa_num_attention_heads linear_num_value_heads linear_num_key_heads "
    "linear_num_heads speech_encoder_attention_heads t2u_encoder_attention_heads "
    "t2u_decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "index_n_heads num_linear_attn_heads lightning_nope_heads"
)
_KEY_HEADS = _names("num_key_value_heads swa_num_key_value_heads kv_n_heads num_kv_heads "
                    "num_global_key_value_heads")  # fmt: skip
_HEAD_WIDTHS = _names(
    "head_dim swa_head_dim d_kv d_head kv_channels linear_key_head_dim linear_value_head_dim "
    "v_head_dim dim_head linear_head_dim qk_head_dim global_head_dim index_head_dim "
    "mamba_d_head mamba_head_dim attention_head_size query_pre_attn_scalar"
)
_WIDTHS = _names(
    "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim word_embed_proj_dim "
    "hidden_size_global embedding_dim projection_dim pooler_hidden_size attention_hidden_size "
    "encoder_hidden_size lru_width projection_size pooler_output_size prediction_head_size"
)
_INNER = _names(
    "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim n_inner d_ff dim_ff dff d_inner "
    "ffn_hidden_size shared_intermediate_size shared_expert_intermediate_size "
    "intermediate_size_mlp moe_shared_expert_intermediate_size speech_encoder_intermediate_size "
    "t2u_encoder_ffn_dim t2u_decoder_ffn_dim prefix_dense_intermediate_size "
    "shared_experts_intermediate_size"
)
_EXPERT_INNER = _names("moe_intermediate_size expert_ffn_hidden_size")
_EXPERTS = _names("num_experts num_local_experts n_routed_experts moe_num_experts")
_CHOSEN = _names("num_experts_per_tok moe_topk moe_top_k moe_k num_experts_per_token top_k_experts")
_POSITIONS = _names(
    "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions seq_length "
    "max_source_positions model_max_length max_sequence_length t2u_max_position_embeddings "
    "context_length"
)
_WINDOWS = _names("sliding_window sliding_window_size attention_window attention_chunk_size "
                  "window_size local_attention attention_window_size")  # fmt: skip
_STATES = _names("state_size mamba_d_state ssm_state_size")
_STATE_HEADS = _names("mamba_n_heads mamba_num_heads n_mamba_heads")
_CHUNKS = _names("mamba_chunk_size chunk_size")
_PERIODS = _names("attn_layer_period expert_layer_period full_attention_interval "
                  "sliding_window_pattern decoder_sparse_step encoder_sparse_step "
                  "global_attn_every_n_layers interleave_moe_layer_step")  # fmt: skip
_FIRST_DENSE = _names("first_k_dense_replace num_dense_layers moe_layer_start_index")
_PARTS = _names("qk_rope_head_dim qk_nope_head_dim rotary_dim")
_STAGE_WIDTHS = _names("hidden_sizes embed_dims neck_hidden_sizes stem_channels "
                       "stage_in_channels stage_mid_channels stage_out_channels")  # fmt: skip
_SMALL = {
    "n_group": 2, "num_expert_group": 2, "topk_group": 1, "time_step_rank": 4, "mamba_dt_rank": 4,
    "hidden_size_per_layer_input": 16, "laurel_rank": 8, "image_size": IMAGE, "patch_size": PATCH,
    "rel_extent": 64, "d_rel": 8, "num_kv_shared_layers": 0, "index_topk": 8, "o_groups": 2,
    "num_random_blocks": 1, "block_size": 8, "max_window_layers": 1,
    "num_nextn_predict_layers": 0, "attn_layer_offset": 1, "expert_layer_offset": 1,
    "num_mel_bins": 16, "encoder_hash_byte_group_vocab": 64, "type_vocab_size": 2,
}  # fmt: skip
"""Values of fields that are larger in the model."""

_NOT_LAYERS = _names("id2label")
"""Fields whose keys are numbers, but not of layers."""

_NOISE = _names("router_jitter_noise input_jitter_noise jitter_noise")
_IDS = ("_token_id", "_token_index", "_index", "_token_ids")

OVERRIDES: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8},
    "mobilebert": {"embedding_size": 32},  # of the hidden size it would leave a layer of no rows
    "nllb-moe": {"expert_capacity": 4096},  # no token is dropped, in a batch of any size
    "reformer": {"axial_pos_embds": False},
}
"""Further values by model type, for sizes that depend on each other."""


def twin_config(config: Any, size: TwinSize | None = None) -> Any:
    """Return a small copy of ``config``, a config of transformers.

    Raises TwinError if the config's class rejects the sizes.
    """
    size = size or TwinSize()
    described = _reduce(config.to_dict(), size)
    for name in ("auto_map", "quantization_config", "transformers_version", "_name_or_path"):
        described.pop(name, None)
    described.pop("dtype", None)
    try:
        with one_at_a_time():
            return type(config)(**described)
    except Exception as error:  # any error of the config's own checks
        raise TwinError(
            f"no small twin of {type(config).__name__} can be described: {_one_line(error)}"
        ) from error


def _reduce(full: dict[str, Any], size: TwinSize) -> dict[str, Any]:
    """Return the fields of a config, or of a config inside it, with small values."""
    kept = _kept_layers(full, size)
    reduced = {}
    for name, value in full.items():
        if _is_by_layer(value) and name not in _NOT_LAYERS:
            by_number = {int(key): part for key, part in value.items()}
            reduced[name] = {
                new: _reduce(dict(by_number[old]), size)
                if isinstance(by_number[old], Mapping)
                else by_number[old]
                for new, old in enumerate(kept)
                if old in by_number
            }
        elif isinstance(value, Mapping) and ("model_type" in value or name.endswith("_config")):
            reduced[name] = _reduce(dict(value), size)
        else:
            reduced[name] = _reduce_field(name, value, full, kept, size)
    heads = next((reduced[name] for name in _HEADS if isinstance(reduced.get(name), int)), 0)
    for name in _KEY_HEADS & reduced.keys():
        if isinstance(full[name], int):
            reduced[name] = _key_heads(full, name, heads or size.heads)
    _shrink_rotary(reduced)
    if isinstance(full.get("qk_rope_head_dim"), int) and "head_dim" in full:
        if full["head_dim"] == full["qk_rope_head_dim"]:
            reduced["head_dim"] = reduced["qk_rope_head_dim"]
    reduced.update(
        {k: v for k, v in OVERRIDES.get(full.get("model_type", ""), {}).items() if k in full}
    )
    if "use_cache" in reduced:
        reduced["use_cache"] = False
    return reduced


def _reduce_field(
    name: str, value: Any, full: dict[str, Any], kept: list[int], size: TwinSize
) -> Any:
    if name in _NOISE or ("drop" in name and isinstance(value, float)):
        return 0.0
    if isinstance(value, list | tuple):
        return _reduce_list(name, list(value), full, kept, size)
    if value is None and name == "head_dim":
        return HEAD_WIDTH
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if any(name.endswith(end) for end in _IDS):
        return _small_id(value, name)
    if value <= 0:
        return value
    if name in _LAYERS:
        return len(kept)
    for names, small in (
        (_WIDTHS, size.width), (_INNER, 3 * size.width // 2), (_EXPERT_INNER, size.width // 2),
        (_HEAD_WIDTHS, HEAD_WIDTH), (_HEADS, size.heads), (_EXPERTS, size.experts),
        (_POSITIONS, size.positions), (_PARTS, HEAD_WIDTH // 2), (_STATES, 8), (_CHUNKS, 8),
        (_STATE_HEADS, 2 * size.heads),
    ):  # fmt: skip
        if name in names:
            return small
    if name in _CHOSEN or name in _PERIODS:
        return min(value, 2)
    if name in _FIRST_DENSE:
        return min(value, 1)
    if name in _WINDOWS:
        return min(value, WINDOW)
    if name.endswith("vocab_size") or name.startswith("vocab_size"):
        return value if name == "type_vocab_size" else VOCABULARY
    if name.endswith("lora_rank"):
        return 2 * HEAD_WIDTH
    return min(value, _SMALL[name]) if name in _SMALL else value


def _reduce_list(
    name: str, value: list, full: dict[str, Any], kept: list[int], size: TwinSize
) -> list:
    layers = _layer_count(full)
    if layers and len(value) == layers:
        value = [value[index] for index in kept]
    elif value and all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        if name in ("moe_layers", "mlp_only_layers", "no_rope_layers", "attn_layer_indices",
                    "cross_attention_layers", "hybrid_layer_ids", "dense_layers"):  # fmt: skip
            return [new for new, old in enumerate(kept) if old in value]
        if any(name.endswith(end) for end in _IDS):
            return [_small_id(each, f"{name}{i}") for i, each in enumerate(value)]
    if name in _HEADS:  # of the stages of a vision model
        return [max(1, min(each, 2 ** (i + 1))) for i, each in enumerate(value)]
    if name in ("depths", "num_blocks", "layer_depths"):
        return [1] * len(value)
    if name == "stage_names":
        return ["stem", *(f"stage{i + 1}" for i in range(len(kept)))] if layers else value
    if name in ("out_features", "out_indices") and layers:
        return [f"stage{len(kept)}"] if name == "out_features" else [len(kept)]
    if name in _STAGE_WIDTHS and max(value, default=0) > 128:
        least = 2 ** math.floor(math.log2(max(value) / 128))
        return [max(8, each // least // 8 * 8) for each in value]
    widths = name in (_INNER | _EXPERTS | _WINDOWS)
    return [
        _reduce_field(name, each, full, kept, size)
        if isinstance(each, float) or (widths and type(each) is int)
        else each
        for each in value
    ]


def _layer_count(full: dict[str, Any]) -> int:
    counts = (full.get(name) for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
    return next((count for count in counts if isinstance(count, int)), 0)


def _is_by_layer(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(str(key).isdigit() for key in value)


def _kept_layers(full: dict[str, Any], size: TwinSize) -> list[int]:
    """Return the layers to keep: the first of each kind, then others up to the size."""
    layers = _layer_count(full)
    if not layers:
        return list(range(size.layers))
    lists = [
        value
        for name, value in full.items()
        if isinstance(value, list | tuple) and len(value) == layers and "drop" not in name
    ]
    by_layer = [
        {int(key): str(part) for key, part in value.items()}
        for name, value in full.items()
        if _is_by_layer(value) and name not in _NOT_LAYERS
    ]
    dense = [v for n, v in full.items() if n in _FIRST_DENSE and isinstance(v, int) and v > 0]
    sets = [set(full.get(name) or ()) for name in ("moe_layers", "mlp_only_layers")]

    def kind(layer: int) -> str:
        known = [each[layer] for each in lists]
        known += [each.get(layer) for each in by_layer]
        return repr([*known, *(layer < first for first in dense), *(layer in s for s in sets)])

    first: dict[str, int] = {}
    for layer in range(layers):
        first.setdefault(kind(layer), layer)
    chosen = sorted(first.values())[:MOST_LAYERS]
    fill = (layer for layer in range(layers) if layer not in chosen)
    while len(chosen) < size.layers:
        chosen = sorted([*chosen, next(fill, max(chosen))])
    return chosen


def _key_heads(full: dict[str, Any], name: str, heads: int) -> int:
    """Return the number of key heads: one, half of the heads, or all, as in the model."""
    every = next((full[key] for key in _HEADS if isinstance(full.get(key), int)), full[name])
    if full[name] >= every:
        return heads
    return 1 if full[name] == 1 else max(1, heads // 2)


def _shrink_rotary(reduced: dict[str, Any]) -> None:
    """Fit the lists in the rotary settings to the width of the heads."""
    todo = [v for k, v in reduced.items() if k in ("rope_parameters", "rope_scaling")]
    while todo:
        found = todo.pop()
        if not isinstance(found, dict):
            continue
        for key, value in found.items():
            if isinstance(value, dict):
                todo.append(value)
            elif key in ("short_factor", "long_factor") and isinstance(value, list):
                width = reduced.get("head_dim") or HEAD_WIDTH
                share = found.get(
                    "partial_rotary_factor", reduced.get("partial_rotary_factor", 1.0)
                )
                found[key] = value[: int(width * (share or 1.0)) // 2]
            elif key == "mrope_section" and isinstance(value, list):
                share = found.get("partial_rotary_factor", 1.0) or 1.0
                half = int(HEAD_WIDTH * share) // 2
                found[key] = [half - 2 * (half // 3), half // 3, half // 3]


def _small_id(value: int, name: str) -> int:
    """Return an id inside the twin's vocabulary; larger ids become distinct small ones."""
    if value < VOCABULARY - 32:
        return value
    return VOCABULARY - 1 - sum(name.encode()) % 32


def build_twin(kind: type[nn.Module], config: Any, seed: int = 0) -> Any:
    """Build a model of class ``kind``; raises TwinError."""
    import_transformers()
    try:
        with one_at_a_time(seed=seed):
            model = kind._from_config(copy.deepcopy(config))  # pyright: ignore
    except Exception as error:  # any error of the model's own code
        raise TwinError(
            f"no small twin of {kind.__name__} can be built: {type(error).__name__}: "
            f"{_one_line(error)}"
        ) from error
    return model


@torch.no_grad()
def spread_values(model: nn.Module, seed: int = 0) -> None:
    """Add noise to every parameter, so that each of them has an effect on the loss.

    Initial values hide faults: biases are zero, and small matrices make attention uniform.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        size = 0.1 if parameter.dim() < 2 else min(0.5, 1 / math.sqrt(parameter.shape[-1]))
        parameter.add_((noise * size).to(parameter))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
