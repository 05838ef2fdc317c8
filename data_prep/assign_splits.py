"""Decide the destination of every document: train, val, or dropped.

Limits, duplicates and validation documents follow from the logs of the finished input splits, which
are read one at a time.
"""

import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import documents
from data_prep.documents import DROPPED, TRAIN, VAL
from data_prep.near_dedup import find_clusters
from data_prep.plan import PreparationPlan
from nearlinear.errors import DataError

_PARTITION_DOCUMENTS = 2 * 1024 * 1024
_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("ordinal", "<u8")])


class UnusableTextError(DataError):
    """The text cannot become a dataset, so a resumed preparation would fail in the same way."""


ReadSplit = Callable[[int], np.ndarray]
"""Function that reads per-document data of an input split by its number."""


@dataclass(frozen=True)
class Assignment:
    """Destinations of the documents of all input splits."""

    plan: PreparationPlan
    first_documents: list[int]
    """Ordinal of each split's first document."""
    document_limit: int
    """Documents read over all splits; later ones are dropped."""
    duplicates: np.ndarray
    """Exact duplicates of an earlier document: bool [documents]."""
    val_threshold: int
    """Documents with a split hash below this value are held out for validation."""
    clusters: np.ndarray | None = None
    """First document of each document's cluster of near-duplicates: int64 [documents]. None if
    these are kept."""

    def destinations(self, number: int, entries: np.ndarray) -> np.ndarray:
        """Return the destinations of one split's documents: uint8 [documents]."""
        first = self.first_documents[number]
        targets = documents.destinations(entries, self.plan.seed, self.val_threshold)
        targets[max(self.document_limit - first, 0) :] = DROPPED
        if self.plan.settings["dedup"] == "exact":
            targets[self.duplicates_of_split(number, entries)] = DROPPED
        targets[self.near_duplicates_of_split(number, entries)] = DROPPED
        return targets

    def duplicates_of_split(self, number: int, entries: np.ndarray) -> np.ndarray:
        """Return the exact duplicates among the documents read of a split: bool [documents]."""
        first = self.first_documents[number]
        return self._within_limit(self.duplicates[first : first + len(entries)], number)

    def near_duplicates_of_split(self, number: int, entries: np.ndarray) -> np.ndarray:
        """Return the near-duplicates, but for dropped exact duplicates: bool [documents]."""
        found = self._within_limit(self.cluster_of_each(number, entries) >= 0, number)
        if self.plan.settings["dedup"] == "exact":
            found &= ~self.duplicates_of_split(number, entries)
        return found

    def cluster_of_each(self, number: int, entries: np.ndarray) -> np.ndarray:
        """Return the first document of each document's cluster, or -1 for that one itself.

        Returns:
            Ordinals among the documents of all splits, int64 [documents].
        """
        if self.clusters is None:
            return np.full(len(entries), -1)
        ordinals = self.first_documents[number] + np.arange(len(entries))
        found = self.clusters[ordinals]
        return np.where(found == ordinals, -1, found)

    def _within_limit(self, marks: np.ndarray, number: int) -> np.ndarray:
        """Return a copy of marks of a split that is False from the document limit on."""
        found = np.array(marks)
        found[max(self.document_limit - self.first_documents[number], 0) :] = False
        return found


def assign_documents(
    plan: PreparationPlan,
    records: list[dict[str, Any]],
    read_log: ReadSplit,
    work: Path,
    read_signatures: ReadSplit | None = None,
) -> Assignment:
    """Assign the documents of the first input splits.

    When no document falls into val, the document with the lowest split hash is held out.

    Args:
        records: Records of the first splits, in order.
        read_log: Reads the log of a split, `LOG` [documents].
        work: Local folder for temporary files.
        read_signatures: Reads the MinHash signatures of a split; near-duplicates are then dropped.

    Raises:
        UnusableTextError: There is no document, or none for training.
    """
    count = sum(record["documents"] for record in records)
    limit = _document_limit(plan, records, read_log)
    if not limit:
        raise UnusableTextError(
            f"source {plan.source.name} has no document with text: check the path, --text-field "
            "for JSON lines, and --filters and --languages"
        )
    duplicates = find_duplicates(map(read_log, range(len(records))), count, work)
    firsts = [0, *accumulate(record["documents"] for record in records)]
    clusters = None
    if read_signatures is not None:
        rows = (read_signatures(number)[: max(limit - first, 0)]
                for number, first in zip(range(len(records)), firsts, strict=False))  # fmt: skip
        clusters = find_clusters(rows, count, work)
    found = Assignment(plan, firsts, limit, duplicates, plan.val_threshold, clusters)
    val = train = 0
    lowest, highest = 2**64, -1
    for number in range(len(records)):
        entries = read_log(number)
        targets = found.destinations(number, entries)
        val += int((targets == VAL).sum())
        train += int((targets == TRAIN).sum())
        if (kept := targets != DROPPED).any():
            hashes = documents.split_hash(entries[kept], plan.seed)
            lowest, highest = min(lowest, int(hashes.min())), max(highest, int(hashes.max()))
    if plan.val_threshold and not val and lowest < highest:
        return replace(found, val_threshold=lowest + 1)
    if not train:
        raise UnusableTextError(
            f"all documents fell into val with --val-fraction {plan.settings['val_fraction']}: "
            "lower it, or add text"
        )
    return found


def find_duplicates(logs: Iterable[np.ndarray], count: int, folder: Path) -> np.ndarray:
    """Mark the exact duplicates of an earlier document, in bounded memory: bool [count].

    Text hashes are partitioned into files that are small enough to sort in memory. The
    result is mapped from a file in `folder`.

    Args:
        logs: Logs of the input splits in order, `LOG` [documents of a split].
        count: Number of documents.
    """
    partitions = 1
    while partitions * _PARTITION_DOCUMENTS < count:
        partitions *= 2
    found = np.memmap(folder / "duplicates", dtype=bool, mode="w+", shape=(max(count, 1),))
    with tempfile.TemporaryDirectory(dir=folder) as work:
        files = [open(Path(work, str(number)), "w+b") for number in range(partitions)]
        first = 0
        for entries in logs:
            rows = np.empty(len(entries), _ROW)
            rows["high"], rows["low"] = entries["high"], entries["low"]
            rows["ordinal"] = np.arange(first, first + len(entries), dtype=np.uint64)
            first += len(entries)
            partition = rows["high"] % np.uint64(partitions)
            for number in np.unique(partition):
                files[int(number)].write(rows[partition == number].tobytes())
        for file in files:
            file.seek(0)
            rows = np.frombuffer(file.read(), _ROW)
            file.close()
            rows = rows[np.lexsort((rows["low"], rows["high"]))]  # stable: earlier documents first
            same = (np.diff(rows["high"]) == 0) & (np.diff(rows["low"]) == 0)
            found[rows["ordinal"][1:][same]] = True
    return found[:count]


def limit_reached(plan: PreparationPlan, records: Collection[dict[str, Any]]) -> bool:
    """Return True if these splits reach a limit, so that no later split is needed."""
    return any(
        limit is not None and sum(record[name] for record in records) >= limit
        for name, limit in _limits(plan)
    )


def is_complete(plan: PreparationPlan, records: list[dict[str, Any]]) -> bool:
    """Return True if the first splits, up to these, make the whole dataset."""
    return len(records) == len(plan.splits) or limit_reached(plan, records)


def required_records(plan: PreparationPlan, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first records, up to the one that reaches a limit.

    Raises `DataError` if more splits are needed.
    """
    if not is_complete(plan, records):
        raise DataError(
            f"split {len(records)} of {len(plan.splits)} is not done: run the same command again; "
            "finished splits are kept"
        )
    for count in range(1, len(records) if has_limit(plan) else 0):
        if limit_reached(plan, records[:count]):
            return records[:count]
    return records


def has_limit(plan: PreparationPlan) -> bool:
    """Return True if `max_documents` or `max_tokens` is set."""
    return any(limit is not None for _, limit in _limits(plan))


def _limits(plan: PreparationPlan) -> tuple[tuple[str, int | None], ...]:
    settings = plan.settings
    return ("documents", settings["max_documents"]), ("tokens", settings["max_tokens"])


def _document_limit(
    plan: PreparationPlan, records: list[dict[str, Any]], read_log: ReadSplit
) -> int:
    """Return the number of documents to read, in the order of the splits."""
    max_documents, max_tokens = (limit for _, limit in _limits(plan))
    count = sum(record["documents"] for record in records)
    count = count if max_documents is None else min(count, max_documents)
    first = tokens = 0
    for number, record in enumerate(records):
        if max_tokens is not None and tokens + record["tokens"] >= max_tokens:
            sums = tokens + np.cumsum(read_log(number)["tokens"], dtype=np.int64)
            return min(count, first + int(np.searchsorted(sums, max_tokens)) + 1)
        first, tokens = first + record["documents"], tokens + record["tokens"]
    return count
