"""Which documents of finished splits are kept, and where: limits, duplicates, validation.

All of it follows from the logs of the splits alone, a split at a time.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from data_prep import documents, duplicates, near
from data_prep.documents import DROPPED, TRAIN, VAL
from data_prep.job import Job
from nearlinear.errors import DataError


class Unfit(DataError):
    """Text of which no dataset can be made: doing any of it again changes nothing."""


Log = Callable[[int], np.ndarray]
"""the log's entries (`data_prep.documents.LOG`) of the split of a number"""


@dataclass(frozen=True)
class Settled:
    """Where the documents of all splits belong."""

    job: Job
    firsts: list[int]
    """the number of each split's first document"""
    cut: int
    """documents that are read, over all splits"""
    again: np.ndarray
    """whose text came before: bool [documents]"""
    threshold: int
    """documents whose split hash is below it are held out"""
    alike: np.ndarray | None = None
    """which are near-duplicates of one that came before: bool [documents]; None: not asked"""

    def of(self, number: int, entries: np.ndarray) -> np.ndarray:
        """The places of the documents of one split: uint8 [documents]."""
        first = self.firsts[number]
        places = documents.places(entries, self.job.seed, self.threshold)
        places[max(self.cut - first, 0) :] = DROPPED
        if self.job.settings["dedup"] == "exact":
            places[self.repeated(number, entries)] = DROPPED
        places[self.resembling(number, entries)] = DROPPED
        return places

    def repeated(self, number: int, entries: np.ndarray) -> np.ndarray:
        """Which documents of one split are read and came before: bool [documents]."""
        return self._read(self.again, number, len(entries))

    def resembling(self, number: int, entries: np.ndarray) -> np.ndarray:
        """Which documents of one split are near-duplicates, but no duplicates: bool [documents]."""
        if self.alike is None:
            return np.zeros(len(entries), bool)
        found = self._read(self.alike, number, len(entries))
        return found & ~self.repeated(number, entries)

    def _read(self, marks: np.ndarray, number: int, count: int) -> np.ndarray:
        first = self.firsts[number]
        found = np.array(marks[first : first + count])
        found[max(self.cut - first, 0) :] = False
        return found


def settle(
    job: Job, records: list[dict], log: Log, work: Path, signatures: Log | None = None
) -> Settled:
    """Where the documents of `records`, the first splits in order, belong; `work` is for files.

    With the `signatures` of each split's documents, near-duplicates are dropped.

    Raises `Unfit` when there is no document, or none for training.
    """
    count = sum(record["documents"] for record in records)
    cut = _cut(job, records, log)
    if not cut:
        raise Unfit(
            f"the source {job.source.name} gave no document with text in it: check the path, and "
            "--text-field for JSON lines, and --filters"
        )
    logs = (log(number) for number in range(len(records)))
    again = duplicates.find(logs, count, work)
    firsts = [0, *accumulate(record["documents"] for record in records)]
    alike = None
    if signatures is not None:
        read = (signatures(number)[: max(cut - first, 0)]
                for number, first in zip(range(len(records)), firsts, strict=False))  # fmt: skip
        alike = near.find(read, count, work)
    settled = Settled(job, firsts, cut, again, job.threshold, alike)
    held_out = training = 0
    lowest, highest = 2**64, -1
    for number in range(len(records)):
        entries = log(number)
        places = settled.of(number, entries)
        held_out += int((places == VAL).sum())
        training += int((places == TRAIN).sum())
        if (kept := places != DROPPED).any():
            hashes = documents.split_hash(entries[kept], job.seed)
            lowest, highest = min(lowest, int(hashes.min())), max(highest, int(hashes.max()))
    if job.threshold and not held_out and lowest < highest:
        return replace(settled, threshold=lowest + 1)
    if not training:
        raise Unfit(
            f"all documents fell into val at --val-fraction {job.settings['val_fraction']}: lower "
            "it, or give more text"
        )
    return settled


def reached(job: Job, records: Collection[dict]) -> bool:
    """Whether splits hold all that the limits let be read: none is needed that comes after them."""
    return any(
        limit is not None and sum(record[name] for record in records) >= limit
        for name, limit in _limits(job)
    )


def enough(job: Job, records: list[dict]) -> bool:
    """Whether the splits so far, the first ones in order, make all of the dataset."""
    return len(records) == len(job.splits) or reached(job, records)


def needed(job: Job, records: list[dict]) -> list[dict]:
    """The first records, up to the one that reaches a limit: others may be done as well.

    Raises `DataError` when others are needed, too.
    """
    if not enough(job, records):
        raise DataError(
            f"split {len(records)} of {len(job.splits)} is not done: run the same command again, "
            "what is done is kept"
        )
    for count in range(1, len(records) if limited(job) else 0):
        if reached(job, records[:count]):
            return records[:count]
    return records


def limited(job: Job) -> bool:
    """Whether not all of the input is to be read."""
    return any(limit is not None for _, limit in _limits(job))


def _limits(job: Job) -> tuple[tuple[str, int | None], ...]:
    settings = job.settings
    return ("documents", settings["max_documents"]), ("tokens", settings["max_tokens"])


def _cut(job: Job, records: list[dict], log: Log) -> int:
    """How many documents the limits let be read, in the order of the splits."""
    most, limit = (limit for _, limit in _limits(job))
    count = sum(record["documents"] for record in records)
    count = count if most is None else min(count, most)
    first = tokens = 0
    for number, record in enumerate(records):
        if limit is not None and tokens + record["tokens"] >= limit:
            sums = tokens + np.cumsum(log(number)["tokens"], dtype=np.int64)
            return min(count, first + int(np.searchsorted(sums, limit)) + 1)
        first, tokens = first + record["documents"], tokens + record["tokens"]
    return count
