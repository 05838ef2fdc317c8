"""Token shards on disk and the resumable loader that feeds them to training.

`opening` says what a name means: a `folder` of shards, a `bucket` (with `block_cache`), `foreign`
files; each is a `split`, and `format` is our files. `stream` has their tokens end to end, and
`documents` where documents begin in them; `dataset` has the sequences of a fixed length, `packing`
how documents fill them, by a `plan` in a `cache`, and `blend` mixes datasets. `shuffle` and `order`
say which come when, `blocks` is another order for large reads. `loader` has the batches of one data
rank, `state` what a run keeps of their order, `masking` what a batch hides, `fetch` reads ahead,
`reads` counts what that asks of a file system, and `grain` is for who uses Grain. Names are
imported on first use: but for `loader`, `masking`, `fetch` and `grain` nothing needs torch, so
preparing data does not import it.
"""

from importlib import import_module

_PUBLIC = {
    "Manifest": "format",
    "ShardWriter": "format",
    "verify": "format",
    "TokenDataset": "dataset",
    "Blend": "blend",
    "kept": "packing",
    "GrainSource": "grain",
    "permute": "shuffle",
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
