"""From a tracker's log to a `MemoryPlan`: where the peak is, and what is there then."""

from __future__ import annotations

from collections import Counter

from ..memory.report import NAMES, PERSISTENT, MemoryPlan, reserve
from .tracker import REDUCING, Event, Storage

WORDS = {
    "forward": "in the forward pass",
    "again": "in the backward pass, where it is computed again",
    "backward": "in the backward pass",
}


def read(events: list[Event], begin: int) -> MemoryPlan:
    """The peak of the step whose events start at ``begin``.

    Bytes of the tracker's storages, of one rank.
    """
    at = _peak(events, begin)
    there: Counter[Storage] = Counter()
    for event in events[: at + 1]:
        there[event.storage] += event.bytes
    parts = dict.fromkeys(NAMES, 0)
    for storage, size in there.items():
        if size:
            parts[category(storage)] += size
    after: Counter[str] = Counter()
    for event in events:
        after[event.storage.kind] += event.bytes
    peak = sum(parts.values())
    persistent = sum(after[kind] for kind in PERSISTENT)
    return MemoryPlan(parts, persistent, in_words(*events[at].moment), reserve(peak))


def category(storage: Storage) -> str:
    """Of ``storage``: what it was marked as, or what its life tells."""
    if storage.kind:
        return storage.kind
    if storage.phase == "update":
        return "update"
    if storage.where == "head" and (storage.phase == "forward" or storage.ended[1] == "head"):
        return "logits"
    if not storage.outlived:
        return "working"
    return "kept" if storage.phase == "forward" else "gradients"


def in_words(phase: str, where: str) -> str:
    if phase == "update":
        return "in the update of the parameters"
    if where == REDUCING:
        return "in the reduction of gradients"
    what = "the loss" if where == "head" else where
    return f"{WORDS[phase]}: {what}"


def _peak(events: list[Event], begin: int) -> int:
    """The place of the event after which there is most."""
    now = most = 0
    at = begin
    for place, event in enumerate(events):
        now += event.bytes
        if place >= begin and now > most:
            most, at = now, place
    return at
