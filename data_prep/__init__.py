"""Text to token shards: `python -m data_prep --help`, or `data_prep.prepare(...)` in a notebook.

`sources` yields documents in splits, `tokenizer` and `backends` turn them into ids, `job` is a
preparation as planned, `work` does one split, `records` is what is kept of it, `pool` does many in
processes, `engines` on a cluster, `merge` makes a dataset of them, `output` puts it in place under
a `lock`, `compare` tells whether what is there is of the same job, and `build` is all of that.
`report` and `figures` show what is in it. Imported on first use.
"""

from importlib import import_module

_PUBLIC = {
    "prepare": "build",
    "Source": "sources",
    "summary": "report",
    "inspect": "report",
}
_MODULES = ("sources", "tokenizer", "build", "job", "report", "figures", "processing")

__all__ = [*_PUBLIC, *_MODULES]


def __getattr__(name: str):
    if name in _MODULES:
        return import_module(f"data_prep.{name}")
    if name in _PUBLIC:
        return getattr(import_module(f"data_prep.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'data_prep' has no attribute {name!r}")
