"""Build the batches of a config's tables [data] and [batch]."""

import inspect
import json
import os
from pathlib import Path

from torch import nn

from ..config.train import DataConfig, TrainConfig
from ..data.dataset import TokenDataset
from ..data.loader import BlockShuffle, Loader
from ..data.masking import Masks
from ..data.mixture import Mixture
from ..distributed import runtime
from ..errors import ConfigError
from .objectives import Objective

MASKED_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Layer types of transformers' configs that a document mask can restrict."""


def build_loader(
    config: TrainConfig,
    dataset: TokenDataset | Mixture,
    objective: Objective | None = None,
    **place: int,
) -> Loader:
    """Return the loader of ``dataset`` for this rank.

    Args:
        config: The whole config.
        dataset: The training data.
        objective: The objective of `build_objective`.
        place: ``data_rank`` and ``data_ranks`` of another rank; default: this one.
    """
    data_ranks = place.get("data_ranks") or runtime.data_place()[1]
    return Loader(
        dataset,
        config.batch.micro_batch_size,
        config.batch.micro_batches(data_ranks),
        seed=config.data.seed,
        blocks=block_shuffle(config.data),
        read_ahead=config.data.read_ahead,
        masks=masks(config.data),
        transform=objective,
        **place,
    )


def write_data_state(folder: Path, step: int, loader: Loader) -> None:
    """Write the position in the data after ``step`` to ``data_state.json`` in ``folder``."""
    path = folder / "data_state.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"step": step, "loader": loader.state_dict()}))
    os.replace(partial, path)


def masks(data: DataConfig) -> Masks:
    """Return the masks of the table [data]."""
    return Masks(documents=data.document_mask, eos=data.mask_eos)


def block_shuffle(data: DataConfig) -> BlockShuffle | None:
    """Return the block shuffle of the table [data], or None to shuffle single sequences."""
    if not data.shuffle_block_mib:
        return None
    return BlockShuffle(data.shuffle_block_mib, data.shuffle_blocks)


def check_document_mask(model: nn.Module) -> None:
    """Raise ConfigError if ``model`` cannot be restricted to the documents of a sequence."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"data.document_mask = true: {type(model).__name__} takes no position_ids, which mark "
            "the start of each document; set it to false, or choose another model"
        )
    config = getattr(model, "config", None)
    others = set(getattr(config, "layer_types", None) or ()) - set(MASKED_LAYER_TYPES)
    if others or getattr(model, "_is_stateful", False):
        layers = ", ".join(sorted(others)) or "a recurrent state"
        raise ConfigError(
            f"data.document_mask = true: {type(model).__name__} carries {layers} from token to "
            "token, which an attention mask cannot restrict; set it to false, or choose another "
            "model"
        )
