"""Find what is wrong with a run before any rank is started: seconds, not minutes, to an error.

Checks the layout against the number of ranks, the token shards, and how they fit the model. Needs
no torch, so that a mistake costs no start-up time.
"""

import json
from pathlib import Path

from ..data.dataset import TokenDataset
from ..errors import ConfigError, DataError
from ..mesh import Mesh
from .config import TrainConfig
from .presets import preset


def check(config: TrainConfig, world: int, ranks_per_node: int = 0) -> Mesh:
    """Raise ConfigError or DataError if ``config`` cannot train on ``world`` ranks; the mesh."""
    preset(config.model.preset)
    mesh = Mesh.from_config(config.parallel, world, ranks_per_node)
    open_dataset(config, "train")
    if config.train.eval_batches:
        open_dataset(config, "val")
    read_state(config)
    return mesh


def open_dataset(config: TrainConfig, split: str) -> TokenDataset:
    """The token shards of ``split``, checked as ``data.verify`` says. Raises DataError."""
    if not config.data.path:
        raise ConfigError(
            'data.path is not set: prepare tokens with "python -m data_prep botocore" and set it '
            "to the folder that it names"
        )
    dataset = TokenDataset(
        config.data.path,
        split=split,
        sequence_length=config.sequence_length,
        verify=config.data.verify,
    )
    vocabulary = config.model.overrides.get("vocab_size")
    if vocabulary is not None and vocabulary < dataset.manifest.vocab_size:
        raise DataError(
            f"model.overrides.vocab_size = {vocabulary} but {config.data.path} holds ids up to "
            f"{dataset.manifest.vocab_size - 1}: raise it, or drop it to follow the data"
        )
    return dataset


def read_state(config: TrainConfig) -> dict | None:
    """The data state ``data.resume`` names: {"step": int, "loader": dict}, or None."""
    if not config.data.resume:
        return None
    path = Path(config.data.resume)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return {"step": int(state["step"]), "loader": dict(state["loader"])}
    except FileNotFoundError:
        raise DataError(f"data.resume = {path}: no such file; check the path") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"data.resume = {path}: not a data_state.json of a training run") from None
