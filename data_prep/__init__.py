"""Prepare text as token shards: `nearlinear data --help`, or `data_prep.prepare(...)`.

Modules in the order of the data flow: `sources` yields documents in input splits, `plan` records
all settings, `process_split` encodes one input split with `tokenizer` and `encoders`, `pool` and
`engines` run many, `assign_splits` and `merge` make a dataset, and `output` publishes it. `resume`
finds reusable work of an earlier run, and `build` runs all steps. `report` describes a dataset,
`provenance` records the origin of its documents, and `lookup` finds them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_prep import build, plan, processing, report, sources, tokenizer
    from data_prep.build import prepare
    from data_prep.report import inspect, summary
    from data_prep.sources import Source

_PUBLIC = {
    "prepare": "build",
    "Source": "sources",
    "summary": "report",
    "inspect": "report",
}
_MODULES = ("sources", "tokenizer", "build", "plan", "report", "processing")

__all__ = [
    "Source",
    "build",
    "inspect",
    "plan",
    "prepare",
    "processing",
    "report",
    "sources",
    "summary",
    "tokenizer",
]


def __getattr__(name: str) -> Any:
    """Import public names on first use."""
    if name in _MODULES:
        return import_module(f"data_prep.{name}")
    if name in _PUBLIC:
        return getattr(import_module(f"data_prep.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'data_prep' has no attribute {name!r}")
