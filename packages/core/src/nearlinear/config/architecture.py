"""Shape of a model: presets by name, and the config.json of a Hugging Face model folder.

GPT-2 sizes: Radford et al. 2019; ``gpt2-30b`` is the 30-billion model of the MiCS benchmarks (48
layers, 7168 wide, 64 heads, 2048 tokens). Llama 2: Touvron et al. 2023, table 1 and model cards.
Llama 3: Grattafiori et al. 2024 (arXiv:2407.21783), table 3. GPT-NeoX: Black et al. 2022. Mistral
7B, Mixtral 8x7B and 8x22B: Jiang et al. 2023 and 2024, model cards.
BERT: Devlin et al. 2019. T5: Raffel et al. 2020. Dropout is off, as usual in pre-training today.
Imports neither torch nor transformers, so that a wrong folder is found before a rank starts.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from ..errors import CheckpointError, ConfigError, DataError
from .schema import unknown_key


class Architecture(TypedDict):
    """A model family and the shape of one model."""

    family: str
    """``model_type`` in transformers."""
    context: int
    """Longest sequence in tokens."""
    shape: dict[str, Any]
    """Arguments of the family's config."""
    vocabulary: NotRequired[int]
    """Published number of ids, if it is not the family's: the default where no data sets one."""


def _gpt2(width: int, layers: int, heads: int, context: int) -> Architecture:
    return {
        "family": "gpt2",
        "context": context,
        "shape": {
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    }


def _hidden_sizes(width: int, layers: int, heads: int) -> dict[str, int]:
    """Return the sizes of blocks whose inner width is four times that of the hidden states."""
    return {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


def _neox(width: int, layers: int, heads: int, context: int) -> Architecture:
    return {
        "family": "gpt_neox",
        "context": context,
        "shape": {
            **_hidden_sizes(width, layers, heads),
        },
    }


def _llama(
    width: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
    family: str = "llama",
    **extra,
) -> Architecture:
    return {
        "family": family,
        "context": context,
        "shape": {
            "hidden_size": width,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            **extra,
        },
    }


def _llama3(width: int, intermediate: int, layers: int, heads: int) -> Architecture:
    found = _llama(width, intermediate, layers, heads, kv_heads=8, context=8192, rope_theta=5e5)
    return {**found, "vocabulary": 128256}


def _mixtral(*shape, experts: int, **arguments) -> Architecture:
    extra = {"num_local_experts": experts, "num_experts_per_tok": 2}
    return _llama(*shape, **arguments, family="mixtral", **extra)


def _bert(width: int, layers: int, heads: int, context: int) -> Architecture:
    return {
        "family": "bert",
        "context": context,
        "shape": {
            **_hidden_sizes(width, layers, heads),
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "pad_token_id": None,  # an attention mask excludes padding
        },
    }


def _t5(width: int, inner: int, layers: int, heads: int, context: int) -> Architecture:
    return {
        "family": "t5",
        "context": context,
        "shape": {
            "d_model": width,
            "d_kv": 64,
            "d_ff": inner,
            "num_layers": layers,
            "num_heads": heads,
            "dropout_rate": 0.0,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
    }


PRESETS: dict[str, Architecture] = {
    "gpt2-tiny": _gpt2(width=128, layers=4, heads=4, context=256),
    "gpt2-small": _gpt2(width=768, layers=12, heads=12, context=1024),
    "gpt2-xl": _gpt2(width=1600, layers=48, heads=25, context=1024),
    "gpt2-30b": _gpt2(width=7168, layers=48, heads=64, context=2048),
    "llama-tiny": _llama(128, 352, layers=4, heads=4, kv_heads=2, context=256),
    "llama2-7b": _llama(4096, 11008, layers=32, heads=32, kv_heads=32, context=4096),
    "llama2-13b": _llama(5120, 13824, layers=40, heads=40, kv_heads=40, context=4096),
    "llama2-70b": _llama(8192, 28672, layers=80, heads=64, kv_heads=8, context=4096),
    "llama3-8b": _llama3(4096, 14336, layers=32, heads=32),
    "llama3-70b": _llama3(8192, 28672, layers=80, heads=64),
    "llama3-405b": _llama3(16384, 53248, layers=126, heads=128),
    "gpt-neox-tiny": _neox(width=128, layers=4, heads=4, context=256),
    "gpt-neox-20b": _neox(width=6144, layers=44, heads=64, context=2048),
    "mistral-7b": _llama(
        4096, 14336, layers=32, heads=32, kv_heads=8, context=8192, family="mistral"
    ),
    "bert-tiny": _bert(width=128, layers=2, heads=2, context=512),
    "bert-base": _bert(width=768, layers=12, heads=12, context=512),
    "t5-tiny": _t5(width=128, inner=512, layers=2, heads=2, context=512),
    "t5-small": _t5(width=512, inner=2048, layers=6, heads=8, context=512),
    "mixtral-tiny": _mixtral(128, 176, layers=4, heads=4, kv_heads=2, context=256, experts=4),
    "mixtral-8x7b": _mixtral(4096, 14336, layers=32, heads=32, kv_heads=8, context=8192, experts=8),
    "mixtral-8x22b": _mixtral(
        6144, 16384, layers=56, heads=48, kv_heads=8, context=65536, experts=8, rope_theta=1e6
    ),
}

CONFIG_CLASSES = {
    "gpt2": "GPT2Config",
    "llama": "LlamaConfig",
    "gpt_neox": "GPTNeoXConfig",
    "mistral": "MistralConfig",
    "mixtral": "MixtralConfig",
    "bert": "BertConfig",
    "t5": "T5Config",
}
"""Config class in transformers of each family."""

CONTEXT_KEY = dict.fromkeys(CONFIG_CLASSES, "max_position_embeddings") | {
    "gpt2": "n_positions",
    "t5": "n_positions",
}
LAYERS_KEY = dict.fromkeys(CONFIG_CLASSES, "num_hidden_layers") | {
    "gpt2": "n_layer",
    "t5": "num_layers",
}

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of experts in the configs of transformers."""

MASKED_FAMILIES = ("bert", "roberta", "xlm-roberta", "modernbert")
SPAN_FAMILIES = ("t5", "mt5", "umt5")


def objective_of(family: str) -> str:
    """Return the objective that the models of ``family`` are pre-trained on."""
    if family in MASKED_FAMILIES:
        return "masked"
    return "span_corruption" if family in SPAN_FAMILIES else "causal"


def context_key(family: str) -> str:
    """Return the config key of the longest sequence, also for families without a preset."""
    return CONTEXT_KEY.get(family, "max_position_embeddings")


def layers_key(family: str) -> str:
    """Return the config key of the number of blocks, also for families without a preset."""
    return LAYERS_KEY.get(family, "num_hidden_layers")


def number_of_experts(config: Any) -> int:
    """Return the experts of each mixture in a model with transformers' ``config``; 1 without."""
    return next((n for key in EXPERT_KEYS if (n := getattr(config, key, None))), 1)


def get_preset(name: str) -> Architecture:
    """Return the architecture of the preset ``name``. Raises ConfigError if it is unknown."""
    if name not in PRESETS:
        error = unknown_key(name, "model.preset", PRESETS)
        raise ConfigError(str(error).replace("unknown key", "unknown preset"))
    return PRESETS[name]


WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

NOT_SHAPE_KEYS = ("model_type", "architectures", "dtype", "torch_dtype", "auto_map",
                  "transformers_version", "use_cache")  # fmt: skip
"""Keys of a config.json that do not describe the shape of the model."""


_TOKENIZER_PATTERNS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
                      "merges.txt", "chat_template.jinja")  # fmt: skip
_CONFIG_PATTERNS = ("config.json", "generation_config.json")
_WEIGHT_PATTERNS = ("*.safetensors", INDEX)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?(?:@[\w.-]+)?")


def model_folder(name: str, *, download: bool = True, weights: bool = True) -> Path:
    """Return the folder of a model: a local folder, or a copy of a model of the Hugging Face Hub.

    The Hub's library downloads a model once, into its cache (``HF_HOME``). A name whose first part
    is a local folder is a path.

    Args:
        name: A folder, or a name as in ``org/model`` or ``org/model@revision``.
        download: False: use the cache only.
        weights: False: the config and the tokenizer are enough.

    Raises CheckpointError if a model of the Hub is not available.
    """
    path = Path(name)
    if path.is_dir() or not HUB_NAME.fullmatch(name) or (len(path.parts) > 1
                                                          and path.parent.is_dir()):  # fmt: skip
        return path
    repository, _, revision = name.partition("@")
    wanted: list[str] = [*_CONFIG_PATTERNS, *_TOKENIZER_PATTERNS]
    wanted += _WEIGHT_PATTERNS if weights else ()
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=wanted,
            ignore_patterns=["*/*"],
            local_files_only=not download,
        )
    except Exception as error:  # each version of the library raises its own types
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{name} is not a folder, and cannot be downloaded from the Hugging Face Hub "
            f"({type(error).__name__}: {reason}): check the path or the name; without a network, "
            f"download it elsewhere (hf download {repository} --local-dir FOLDER)"
        ) from None
    return Path(found)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model in ``folder``.

    Raises CheckpointError if there are none or one is missing.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder: download the model first, as in hf download NAME "
            "--local-dir FOLDER"
        )
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    pickles = sorted(path.name for kind in _PICKLES for path in folder.glob(kind))
    if pickles:
        raise CheckpointError(
            f"{folder} has {pickles[0]} and no {WEIGHTS}. Pickle files can run code and are not "
            "read: download the model's safetensors, or convert files that you trust: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(...)"
        )
    raise CheckpointError(
        f"{folder} holds no model: neither {WEIGHTS} nor {INDEX} is in it; check the path"
    )


def read_config(path: Path) -> dict:
    """Return the config.json at ``path``. Raises CheckpointError if it cannot be read."""
    found = _read_json(path)
    if not isinstance(found.get("model_type"), str):
        raise CheckpointError(
            f"{path} has no model_type, so it is not the config of a model; check the path"
        )
    return found


def _indexed_files(folder: Path) -> list[Path]:
    found = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{folder / INDEX} has no weight_map: download it again")
    names = sorted(map(str, set(found.values())))
    for name in names:
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / INDEX} names {name!r}, which is not a safetensors file of this folder: "
                "download it again"
            )
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing: download it again")
    return [folder / name for name in names]


def _read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: download the complete model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): download it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a table of keys and values: download it again")
    return found


def check_weights(folder: str) -> None:
    """Raise ConfigError unless the safetensors files of the model in ``folder`` are complete.

    ``folder`` may be a name, see `model_folder`.
    """
    try:
        weight_files(model_folder(folder))
    except CheckpointError as error:
        raise ConfigError(f"model.init_from: {error}") from None


@cache
def read_architecture(folder: str) -> Architecture:
    """Return the architecture of the model in ``folder``, in the form of `get_preset`.

    ``folder`` may be a name, see `model_folder`, or the path of a config.json. The weights may be
    missing. Raises ConfigError if the config cannot be read or a folder holds quantized weights; a
    config.json alone can only be planned, as the model before quantization.
    """
    try:
        alone = Path(folder).is_file()
        found = read_config(Path(folder) if alone else model_folder(folder, weights=False) / CONFIG)
    except CheckpointError as error:
        raise ConfigError(f"model.init_from: {error}") from None
    family = found["model_type"]
    if "quantization_config" in found and not alone:
        raise ConfigError(
            f"model.init_from = {folder} holds quantized weights, which cannot be trained: use the "
            "model before quantization"
        )
    context = found.get(context_key(family), 0)
    if not isinstance(context, int) or context < 1:
        raise ConfigError(
            f"model.init_from: {folder}/config.json has no {context_key(family)}: set "
            f"model.overrides.{context_key(family)}"
        )
    shape = {key: value for key, value in found.items() if key not in NOT_SHAPE_KEYS}
    return {"family": family, "context": context, "shape": shape}


def check_vocabulary(folder: str, data: str, needed: int) -> None:
    """Raise DataError if the model in ``folder`` has fewer than ``needed`` ids.

    Args:
        folder: Folder of the model.
        data: Folder of the token shards, for the message.
        needed: Number of ids in the token shards.
    """
    size = read_architecture(folder)["shape"].get("vocab_size")
    if isinstance(size, int) and size < needed:
        raise DataError(
            f"{data} holds ids up to {needed - 1}, but the model in {folder} has {size} ids: "
            "prepare the data with the model's own tokenizer (nearlinear data ... --tokenizer "
            f"{folder})"
        )
