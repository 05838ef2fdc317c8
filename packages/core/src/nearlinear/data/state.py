"""What a run keeps of the data order: one integer, and what the order is a function of.

It is small and JSON-able, and the same on every rank. A state of other data, or of another order,
is refused: the run would repeat some samples and never see others.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from ..errors import DataError
from .blend import Blend
from .dataset import TokenDataset
from .plan import VERSION

if TYPE_CHECKING:
    from .loader import BlockShuffle

_FORMAT, _BLOCK_FORMAT = 1, 2  # the second also names the blocks

_IDENTITY = {
    "dataset": None,
    "seed": None,
    "sequence_length": None,
    "packing": "concat",
    "packing_plan": 2,
    "shuffle_block_mib": 0,
    "shuffle_blocks": 0,
}
"""What of a state decides which windows come, and what it is where a state does not say."""


def of(
    dataset: TokenDataset | Blend, seed: int, blocks: BlockShuffle | None, next_sample: int
) -> dict:
    """The state of a loader of `dataset` that goes on with `next_sample`."""
    state = {
        "format": _BLOCK_FORMAT if blocks else _FORMAT,
        "next_sample": next_sample,
        "seed": seed,
        "sequence_length": dataset.sequence_length,
        "dataset": dataset.fingerprint,
        "tokenizer": dataset.manifest.words,
    }
    if isinstance(dataset, Blend):
        state["sources"] = dataset.describe()
    if dataset.packing != "concat":
        state["packing"] = dataset.packing
        state["packing_plan"] = VERSION
    if blocks:
        state["shuffle_block_mib"] = blocks.block_mib
        state["shuffle_blocks"] = blocks.blocks
    return state


def check(saved: dict, here: dict, path) -> None:
    """Raise `DataError` unless a loader of the data at `path`, with the state `here`, may go on."""
    words = saved.get("tokenizer", here["tokenizer"])  # older states do not say
    if words["sha256"] != here["tokenizer"]["sha256"]:
        raise DataError(
            f"the state is of a run on ids of {_tokenizer(words)}, and {path} has ids of "
            f"{_tokenizer(here['tokenizer'])}, which mean other words to its model: prepare the "
            "data with that tokenizer (python -m data_prep ... --tokenizer), or start a new run in "
            "another folder"
        )
    known = _BLOCK_FORMAT if "shuffle_block_mib" in saved else _FORMAT
    if saved.get("format") != known:
        raise DataError(
            f"the loader state has format {saved.get('format')!r}, this nearlinear reads {known}: "
            "resume with the version that wrote it, or start a new run"
        )
    differing = _other_sources(saved.get("sources", []), here.get("sources", [])) or [
        f"{name} was {saved.get(name, usual)} and is {here.get(name, usual)}"
        for name, usual in _IDENTITY.items()
        if saved.get(name, usual) != here.get(name, usual)
    ]
    if differing:
        what = ", ".join(differing)
        raise DataError(
            f"cannot resume the data order: {what}; use the settings and the nearlinear of the "
            "interrupted run, or start a new run without the loader's state"
        )


def _other_sources(before: list[dict], now: list[dict]) -> list[str]:
    """What is different of a blend's sources, in words."""
    found = []
    for number, (was, is_) in enumerate(zip_longest(before, now), 1):
        identity = [each and (each["dataset"], each["share"]) for each in (was, is_)]
        if identity[0] != identity[1]:
            found.append(f"source {number} was {_source(was)} and is {_source(is_)}")
    return found


def _source(told: dict | None) -> str:
    if told is None:
        return "none"
    return f"{told['share']:.6g} of {told['path']} ({told['dataset'][:12]})"


def _tokenizer(words: dict) -> str:
    return f"the tokenizer {words['name']} (sha256 {words['sha256'][:12]})"
