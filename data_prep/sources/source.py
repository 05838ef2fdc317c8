"""The interface of a text source: documents in a fixed order, cut into input splits.

An `InputSplit` is the unit of work of one worker, and the most that a resumed preparation repeats.
Input splits depend on the input alone, so the shards do not depend on the number of workers.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nearlinear.errors import DataError

logger = logging.getLogger("data_prep")

SPLIT_BYTES = 32 * 1024 * 1024
MAX_SPLIT_BYTES = 256 * 1024 * 1024
MAX_SPLITS = 4096
"""Input splits grow beyond SPLIT_BYTES when there would be more than this many."""


Rows = list[tuple[str | None, ...]]
"""Kept fields of documents, as text."""


class InputSplit(NamedTuple):
    """The documents that begin in [start, end) of one input, in the unit of the source."""

    input: int
    """Index of the input."""
    start: int
    end: int | None
    """None: the end of the input."""
    bytes: int | None = None
    """Input bytes, for progress. None if unknown."""


class Input(NamedTuple):
    """An input file as it was when the input splits were planned."""

    path: str
    bytes: int
    mtime_ns: int

    @classmethod
    def from_path(cls, path: Path) -> "Input":
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns)


class UnreadInput(NamedTuple):
    """A file or folder below a named folder that is not read."""

    path: str
    reason: str


class InputLedger(NamedTuple):
    """All files that the arguments of a source name, directly or below a folder."""

    read: tuple[Input, ...]
    unread: tuple[UnreadInput, ...] = ()


@dataclass(frozen=True)
class Source:
    """A named, repeatable stream of documents.

    A source of files has `inputs`, `plan`, `reader` and `spec`. A source with `documents` alone is
    one input split, which only this process can read.
    """

    name: str
    documents: Callable[[], Iterable[str]]
    """Start the stream from the beginning; yields one string per document."""
    description: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Options that change the dataset; stored in the manifest and compared on resumption."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Origin of the text, such as package versions."""
    expected_documents: int | None = None
    expected_bytes: int | None = None
    inputs: tuple[Input, ...] = ()
    unread: tuple[UnreadInput, ...] = ()
    runs: bool = False
    """True if an input split is a run of whole inputs, from `input` to `end`."""
    plan: Callable[[int], list[InputSplit]] | None = None
    """Cut the input into splits of about the given number of bytes."""
    reader: Callable[..., Iterator[list[str]]] | None = None
    """Yield the documents of an input split, in lists that fit into memory. With `fields`, a second
    argument is a list to which it adds their values, a tuple per document, before it yields."""
    fields: tuple[str, ...] = ()
    """Other fields of the input that are kept with each document, such as its URL."""
    spec: dict[str, Any] | None = None
    """Arguments from which `data_prep.sources.rebuild` recreates the source elsewhere."""
    contents: Literal["text", "conversations", "pairs"] = "text"
    """What documents hold: text, or the JSON of a conversation or of two, one of them preferred."""
    revision: Callable[[], str | None] | None = None
    """Identify the text of a source without `inputs`; None if it cannot be known."""

    def __post_init__(self):
        text = self.settings.get("text_field")
        if len({*self.fields, text}) <= len(self.fields):
            raise DataError(
                f"the kept fields are {', '.join(self.fields)}, and {text} is the text: name each "
                "other field once"
            )

    def splits(self) -> list[InputSplit]:
        """Return the input splits in order, of 32 MiB or more each."""
        if self.plan is None:
            return [InputSplit(0, 0, None, self.expected_bytes)]
        total = sum(file.bytes for file in self.inputs)
        return self.plan(min(max(SPLIT_BYTES, total // MAX_SPLITS), MAX_SPLIT_BYTES))

    def read(self, split: InputSplit) -> Iterator[str]:
        """Yield the documents of an input split one by one."""
        return chain.from_iterable(self.read_batches(split))

    def read_batches(self, split: InputSplit, rows: Rows | None = None) -> Iterator[list[str]]:
        """Yield the documents of an input split in lists.

        Args:
            rows: Receives the values of `fields`, a tuple per document.
        """
        if self.reader is None:
            return single_document_batches(self.documents())
        return self.reader(split) if rows is None else self.reader(split, rows)

    def split_by_input(self, split: InputSplit) -> list[InputSplit]:
        """Cut an input split into one split per input."""
        if not self.runs:
            return [split]
        assert split.end is not None, "a run of inputs names its last one"
        return [InputSplit(number, 0, number + 1) for number in range(split.input, split.end)]


def documents_of_splits(
    plan: Callable[[int], list[InputSplit]],
    reader: Callable[[InputSplit], Iterator[list[str]]],
    target: int = SPLIT_BYTES,
) -> Callable[[], Iterator[str]]:
    """Return a `Source.documents` function that reads all input splits in order."""

    def documents() -> Iterator[str]:
        for split in plan(target):
            yield from chain.from_iterable(reader(split))

    return documents


@dataclass
class Skipped:
    """Rows without readable text that a reader left out."""

    kind: str
    """What the rows are called."""
    count: int = 0
    first: object = None
    """Why the first one was left out."""

    def add(self, reason: object, count: int = 1) -> None:
        """Count rows."""
        if not self.count:
            self.first = reason
        self.count += count

    def warn(self) -> None:
        """Log the number of rows, if any."""
        if self.count:
            logger.warning("skipped %d %s, the first: %s", self.count, self.kind, self.first)


def value_as_text(value: Any) -> str | None:
    """Return the value of a field as text: a string itself, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def single_document_batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield each text in a list of its own, so that only one large document is in memory."""
    return ([text] for text in texts)
