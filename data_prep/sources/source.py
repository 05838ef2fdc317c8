"""What a source of text is: documents in a fixed order, in pieces that are planned once.

A piece of input (`Split`) is what one worker does at a time, and what a resumed preparation does
again at most. The pieces depend on the input alone, so the shards made of them do not depend on
who makes them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

SPLIT_BYTES = 32 * 1024 * 1024
MOST_SPLIT_BYTES = 256 * 1024 * 1024
MANY_SPLITS = 4096


class Split(NamedTuple):
    """Documents that begin in [start, end) of input number `input`, in the unit of the source."""

    input: int
    start: int
    end: int | None
    """None: to the end"""
    bytes: int | None = None
    """of the input, to tell how far a preparation is; None when unknown"""


class Input(NamedTuple):
    """A file that a source reads, as it was when the splits were planned."""

    path: str
    bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "Input":
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True)
class Source:
    """A stream of documents: `documents()` starts it anew and yields one string per document.

    A source of files has `inputs`, `plan` (target bytes to splits), `reader` (the documents of a
    split, in lists of as many as are in memory anyway), and a `spec` from which
    `data_prep.sources.rebuild` makes it again in another process.
    One without `inputs` may have a `revision`: what its text is known by, None when that cannot be
    known; it is asked when a job is planned, and is one of its settings and in its spec.
    """

    name: str
    documents: Callable[[], Iterable[str]]
    description: str = ""
    settings: dict = field(default_factory=dict)
    provenance: dict = field(default_factory=dict)
    expected_documents: int | None = None
    expected_bytes: int | None = None
    inputs: tuple[Input, ...] = ()
    runs: bool = False
    """a split is whole inputs, from `input` to `end`"""
    plan: Callable[[int], list[Split]] | None = None
    reader: Callable[[Split], Iterator[list[str]]] | None = None
    spec: dict | None = None
    revision: Callable[[], str | None] | None = None

    def splits(self) -> list[Split]:
        """The pieces of the input, in order: of 32 MiB, or of more where those would be many."""
        if self.plan is None:
            return [Split(0, 0, None, self.expected_bytes)]
        total = sum(file.bytes for file in self.inputs)
        return self.plan(min(max(SPLIT_BYTES, total // MANY_SPLITS), MOST_SPLIT_BYTES))

    def read(self, split: Split) -> Iterator[str]:
        """The documents of one of `splits`."""
        return chain.from_iterable(self.some(split))

    def some(self, split: Split) -> Iterator[list[str]]:
        """The same, a few at a time."""
        return one_by_one(self.documents()) if self.reader is None else self.reader(split)

    def by_input(self, split: Split) -> list[Split]:
        """A split as several, of one input each."""
        if not self.runs:
            return [split]
        return [Split(number, 0, number + 1) for number in range(split.input, split.end)]


def of_files(plan: Callable, reader: Callable, target: int = SPLIT_BYTES) -> Callable:
    """The `documents` of a source that has splits: those of each, one after another."""

    def documents() -> Iterator[str]:
        for split in plan(target):
            yield from chain.from_iterable(reader(split))

    return documents


def one_by_one(texts: Iterable[str]) -> Iterator[list[str]]:
    """As a `reader` has them: each may be large, so none is asked for before the last is done."""
    return ([text] for text in texts)
