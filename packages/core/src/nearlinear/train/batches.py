"""The batches that the tables [data] and [batch] of a config ask for."""

import inspect
import json
import os
from pathlib import Path

from torch import nn

from .. import runtime
from ..data.dataset import TokenDataset
from ..data.loader import BlockShuffle, Loader
from ..data.masking import Masks
from ..errors import ConfigError
from .config import TrainConfig
from .tables import DataConfig

MASKED = ("full_attention", "sliding_attention", "chunked_attention")
"""kinds of layers, as configs of transformers name them, that do not see other documents"""


def loader_of(config: TrainConfig, dataset: TokenDataset, **place: int) -> Loader:
    """The batches of ``dataset`` for the data rank at ``place``; default: this one."""
    data_ranks = place.get("data_ranks") or runtime.data_place()[1]
    return Loader(
        dataset,
        config.batch.micro_batch_size,
        config.batch.micro_batches(data_ranks),
        seed=config.data.seed,
        blocks=block_shuffle(config.data),
        read_ahead=config.data.read_ahead,
        masks=masks(config.data),
        **place,
    )


def write_state(folder: Path, step: int, loader: Loader) -> None:
    """``data_state.json`` of a run in ``folder``: the place in the data after ``step``."""
    path = folder / "data_state.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"step": step, "loader": loader.state_dict()}))
    os.replace(partial, path)


def masks(data: DataConfig) -> Masks:
    """What the table [data] hides."""
    return Masks(documents=data.document_mask, eos=data.mask_eos)


def check_positions(model: nn.Module) -> None:
    """Raise ConfigError if `model` cannot be told where documents begin."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"data.document_mask = true: {type(model).__name__} takes no position_ids, by which a "
            "model is told where documents begin; drop it, or take another model"
        )
    config = getattr(model, "config", None)
    others = set(getattr(config, "layer_types", None) or ()) - set(MASKED)
    if others or getattr(model, "_is_stateful", False):
        what = ", ".join(sorted(others)) or "a state"
        raise ConfigError(
            f"data.document_mask = true: {type(model).__name__} passes {what} from token to token, "
            "which no mask of attention hides; drop it, or take another model"
        )


def block_shuffle(data: DataConfig) -> BlockShuffle | None:
    """The order that the table [data] asks for; None: every sequence by itself."""
    if not data.shuffle_block_mib:
        return None
    return BlockShuffle(data.shuffle_block_mib, data.shuffle_blocks)
