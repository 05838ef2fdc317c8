"""Which files of a Hugging Face folder are a model: safetensors, in one file or with an index.

No torch here, so that a run finds out at once what is wrong with its folder.
"""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import CheckpointError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model in ``folder``. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder: download the model first, as in hf download NAME --local-dir "
            "FOLDER"
        )
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _indexed(folder)
    pickles = sorted(path.name for kind in _PICKLES for path in folder.glob(kind))
    if pickles:
        raise CheckpointError(
            f"{folder} has {pickles[0]} and no {WEIGHTS}: such files are pickles, which can run "
            "code, and are not read here; take the model's safetensors, or convert what you trust: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained(...)"
        )
    raise CheckpointError(f"{folder} holds no model: there is neither {WEIGHTS} nor {INDEX} in it")


def read_config(folder: Path) -> dict:
    """What config.json in ``folder`` says. Raises CheckpointError."""
    found = _read_json(folder / CONFIG)
    if not isinstance(found.get("model_type"), str):
        raise CheckpointError(f"{folder / CONFIG} names no model_type: it is no model's config")
    return found


def _indexed(folder: Path) -> list[Path]:
    found = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{folder / INDEX} has no weight_map: download it again")
    names = sorted(map(str, set(found.values())))
    for name in names:
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / INDEX} names {name!r}, which is no safetensors file of this folder"
            )
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing: download it again")
    return [folder / name for name in names]


def _read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: download the whole model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): download it again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a table of keys and values: download it again")
    return found
