"""Token shards on disk and the resumable loader that feeds them to training.

Example::

    dataset = nl.data.TokenDataset("data/botocore", sequence_length=64)
    loader = nl.data.Loader(dataset, micro_batch_size=2, micro_batches=4)
    micro_batches = next(loader)

- `format`: token shards, their manifest and their verification.
- `open`, `source`, `bucket`: sources of token shards, local and remote, their tokens and documents.
- `cache`: the node-local cache.
- `dataset`, `packing`, `mixture`: windows of fixed length and a model of their file system load,
  packing of documents, weighted mixtures.
- `sampler`, `loader`, `masking`: sample order, batches of a data rank with resumable state, labels
  and positions, and an adapter for Grain pipelines.
- `read_ahead`: prefetching.

Names are imported on first use. Only `loader` and `masking` need torch, so data preparation does
not import it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dataset import TokenDataset as TokenDataset
    from .format.manifest import Manifest as Manifest
    from .format.manifest import verify as verify
    from .format.shards import ShardWriter as ShardWriter
    from .loader import BlockShuffle as BlockShuffle
    from .loader import Loader as Loader
    from .loader import evaluation_batches as evaluation_batches
    from .masking import GrainSource as GrainSource
    from .masking import Masks as Masks
    from .masking import cu_seqlens as cu_seqlens
    from .mixture import Mixture as Mixture
    from .packing import packing_efficiency as packing_efficiency
    from .sampler import permute as permute

_PUBLIC = {
    "Manifest": "format.manifest",
    "ShardWriter": "format.shards",
    "verify": "format.manifest",
    "TokenDataset": "dataset",
    "Mixture": "mixture",
    "packing_efficiency": "packing",
    "GrainSource": "masking",
    "permute": "sampler",
    "Masks": "masking",
    "cu_seqlens": "masking",
    "BlockShuffle": "loader",
    "Loader": "loader",
    "evaluation_batches": "loader",
}

__all__ = list(_PUBLIC)


if not TYPE_CHECKING:  # pyright then reports misspelled names

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'nearlinear.data' has no attribute {name!r}")
        value = getattr(import_module(f"nearlinear.data.{_PUBLIC[name]}"), name)
        globals()[name] = value
        return value


def __dir__():
    return sorted(__all__)
