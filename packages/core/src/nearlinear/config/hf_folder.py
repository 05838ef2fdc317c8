"""Read the config.json and the file names of a Hugging Face model folder.

Imports neither torch nor transformers, so that a wrong folder is found before a rank starts.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from ..errors import CheckpointError, ConfigError, DataError
from .presets import Architecture, context_key

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

NOT_SHAPE_KEYS = ("model_type", "architectures", "dtype", "torch_dtype", "auto_map",
                  "transformers_version", "use_cache")  # fmt: skip
"""Keys of a config.json that do not describe the shape of the model."""


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


def read_config(folder: Path) -> dict:
    """Return the config.json in ``folder``. Raises CheckpointError if it cannot be read."""
    found = _read_json(folder / CONFIG)
    if not isinstance(found.get("model_type"), str):
        raise CheckpointError(
            f"{folder / CONFIG} has no model_type, so it is not the config of a model; check the "
            "path"
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


@cache
def read_architecture(folder: str) -> Architecture:
    """Return the architecture of the model in ``folder``, in the form of `presets.get_preset`.

    Raises ConfigError if the folder holds no model that can be trained.
    """
    try:
        weight_files(Path(folder))
        found = read_config(Path(folder))
    except CheckpointError as error:
        raise ConfigError(f"model.init_from: {error}") from None
    family = found["model_type"]
    if "quantization_config" in found:
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
            "prepare the data with the model's own tokenizer (python -m data_prep ... --tokenizer "
            f"{folder}/tokenizer.json)"
        )
