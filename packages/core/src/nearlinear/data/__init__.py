"""Token shards on disk and the resumable loader that feeds them to training.

`format` is the files, `dataset` the fixed-length windows over them, `shuffle` the order and
`blocks` another for large reads, `loader` the batches of one data rank, `fetch` reads ahead for it,
and `reads` counts what that asks of a file system. Names are imported on first use: `format`,
`shuffle` and `dataset` need numpy only, so preparing data does not import torch.
"""

from importlib import import_module

_PUBLIC = {
    "Manifest": "format",
    "ShardWriter": "format",
    "verify": "format",
    "TokenDataset": "dataset",
    "permute": "shuffle",
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
