"""Token shards on disk and the resumable loader that feeds them to training.

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

_PUBLIC = {
    "Manifest": "format",
    "ShardWriter": "format",
    "verify": "format",
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


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'nearlinear.data' has no attribute {name!r}")
    value = getattr(import_module(f"nearlinear.data.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
