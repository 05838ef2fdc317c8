"""Documents of an input split: read, filter, hash, and assign to train or val.

Each input split has a log with one 28-byte entry per document, in order. The hash, xxh3_128 of the
text, identifies exact duplicates and, together with the seed, selects the validation documents.
"""

import sys
from codecs import readbuffer_encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from data_prep.language import check_codes
from data_prep.plan import PreparationPlan
from data_prep.sources.source import Rows
from data_prep.text_chunks import CHUNK_CHARACTERS
from nearlinear.data.format.shards import MOST_TOKENS
from nearlinear.errors import DataError

if TYPE_CHECKING:
    from data_prep.decontaminate import EvaluationSets
    from data_prep.quality import QualityFilters

TRAIN, VAL, DROPPED = 0, 1, 2
"""Destinations of a document."""

LOG = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("bytes", "<u4"), ("tokens", "<u4"), ("number", "<u4")]
)
"""Entry of a log: the two halves of the hash, UTF-8 bytes, tokens including EOS, and the number of
the document among all those of its input that the split reads, from 0."""

BLANK = "blank"
"""Rule that drops documents without text; it is not counted among the filters."""

FILTERS = ("gopher", "c4", "fineweb", "pii")
"""Rules by their name on the command line."""

_BATCH_CHARACTERS = 256 * 1024


def _check_filters(names: Sequence[str]) -> None:
    """Raise `DataError` for a name that is not one of `FILTERS`."""
    for name in names:
        if name not in FILTERS:
            raise DataError(f"no filter {name!r}: use {', '.join(FILTERS)}")


def load_evaluation_sets(paths: Sequence[str | Path]) -> "EvaluationSets | None":
    """Read evaluation sets, or return None for no paths.

    Raises `DataError` if numba or spaCy is missing, or if a file cannot be used.
    """
    if not paths:
        return None
    with _requiring_filters():
        from data_prep.decontaminate import read_evaluation_sets

        return read_evaluation_sets(paths)


def make_filters(
    names: Sequence[str],
    evaluation_sets: "EvaluationSets | None" = None,
    languages: Sequence[str] = (),
) -> "QualityFilters | None":
    """Return rules in order, or None if there are none; numba compiles them on first use.

    Raises `DataError` for unknown names and languages, or if a package of the filters is missing.
    """
    _check_filters(names)
    check_codes(languages)
    if not names and not languages and evaluation_sets is None:
        return None
    with _requiring_filters():
        from data_prep.decontaminate import Decontamination
        from data_prep.language import LanguageRule
        from data_prep.quality import QualityFilters, Rule, named_rules

        rules: list[tuple[str, Rule]] = []
        if languages:
            rules.append(("language", LanguageRule(languages)))
        rules += named_rules(names)
        if evaluation_sets is not None:
            rules.append(("decontaminate", Decontamination(evaluation_sets)))
        return QualityFilters(rules)


def filters_of(plan: PreparationPlan) -> "QualityFilters | None":
    """Return the rules of a plan, or None if there are none."""
    return make_filters(plan.filters, plan.evaluation_sets, plan.settings.get("languages", ()))


@contextmanager
def _requiring_filters() -> Iterator[None]:
    """Raise `DataError` with the remedy if a package of the filters is missing."""
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"filters need more packages ({error}): run `pip install 'nearlinear[filters]'`"
        ) from None


def is_blank(text: str) -> bool:
    """Return True for text without any character that is not whitespace."""
    return not text or text.isspace()


@dataclass
class ReadLog:
    """Documents of an input split, added by `read_documents`."""

    ends: list[int] = field(default_factory=list)
    """Documents that passed up to the end of each completed input."""
    counts: list[int] = field(default_factory=list)
    """All documents of each completed input."""
    dropped: list[tuple[int, int, str]] = field(default_factory=list)
    """Input in the split, number as in `LOG`, and rule of each document that did not pass."""
    rows: Rows = field(default_factory=list)
    """Fields of the documents, in order, if the source keeps any; the reader of this log takes
    them out."""


Batch = tuple[list[str], list[int]]
"""Texts, and the number of each as in `LOG`."""


def read_documents(
    plan: PreparationPlan, number: int, filters: "QualityFilters | None", log: ReadLog
) -> Iterator[Batch]:
    """Yield the non-blank documents of an input split that pass the filters.

    Args:
        log: Receives what is read.
    """
    passed = 0
    rows = log.rows if plan.source.fields else None
    for split in plan.source.split_by_input(plan.splits[number]):
        count = 0
        for texts in plan.source.read_batches(split, rows):
            if isinstance(texts, str):
                raise TypeError(
                    f"the reader of source {plan.source.name!r} yields strings: yield lists"
                )
            numbers = range(count, count + len(texts))
            count += len(texts)
            batch: Batch = ([], [])
            for at, text in zip(numbers, texts, strict=True):
                rule = BLANK if is_blank(text) else None
                if filters is not None and rule is None:
                    rule, text = filters.judge(text)
                if rule is None:
                    batch[0].append(text)
                    batch[1].append(at)
                else:
                    log.dropped.append((len(log.ends), at, rule))
                del text
            passed += len(batch[0])
            del texts  # may be large
            yield batch
            del batch  # is encoded by now
        log.ends.append(passed)
        log.counts.append(count)


def group_batches(batches: Iterator[Batch], limit: int | None) -> Iterator[Batch]:
    """Regroup documents into batches to encode together; stop after `limit` documents."""
    left = sys.maxsize if limit is None else limit
    batch: Batch = ([], [])
    size = 0
    while left > 0 and (more := next(batches, None)) is not None:
        for part, items in zip(batch, more, strict=True):
            part += items[:left]
        left -= len(more[0])
        size += sum(map(len, more[0]))
        del more  # may be large
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = ([], []), 0
    if batch[0]:
        yield batch


def runs_of_documents(lengths: np.ndarray, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Cut documents into runs of up to a number of tokens, or of one longer document.

    Yields the slice of the documents and that of their tokens.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    first = start = 0
    while first < len(ends):
        after = max(int(np.searchsorted(ends, start + tokens, side="right")), first + 1)
        end = int(ends[after - 1])
        yield slice(first, after), slice(start, end)
        first, start = after, end


def log_entries(texts: list[str]) -> tuple[np.ndarray, list[str]]:
    """Return log entries for texts, and the texts with lone surrogates replaced by `?`."""
    try:
        return describe(texts), texts
    except UnicodeEncodeError:
        texts = [text.encode("utf-8", errors="replace").decode("utf-8") for text in texts]
        return describe(texts), texts


def describe(texts: Sequence[str]) -> np.ndarray:
    """Return the log entries of documents with `tokens` still 0: `LOG` [documents].

    Raises:
        UnicodeEncodeError: A text contains a lone surrogate.
        DataError: A text has more bytes than an index can count tokens; a token is a byte or more.
    """
    entries = np.zeros(len(texts), LOG)
    # The encoder asks for the UTF-8 of each text again. A buffer request caches it in the string,
    # str.encode does not. Long texts are encoded in chunks, so theirs is not reused.
    raw = [
        text.encode() if len(text) > CHUNK_CHARACTERS else readbuffer_encode(text)[0]
        for text in texts
    ]
    sizes = np.fromiter(map(len, raw), np.int64, len(raw))
    if (longest := int(sizes.max(initial=0))) >= MOST_TOKENS:
        raise DataError(
            f"a document has {longest} bytes, but at most {MOST_TOKENS - 1} are supported: cut it "
            "first (plain text: --document paragraph or line)"
        )
    digests = b"".join(map(xxhash.xxh3_128_digest, raw))
    halves = np.frombuffer(digests, ">u8").reshape(-1, 2)
    entries["high"], entries["low"], entries["bytes"] = halves[:, 0], halves[:, 1], sizes
    return entries


def text_hashes(entries: np.ndarray) -> bytes:
    """Return the concatenated text hashes, the input of a split's text digest."""
    return np.stack([entries["high"], entries["low"]], axis=1).tobytes()


def has_same_text(plan: PreparationPlan, number: int, count: int, digest: str) -> bool:
    """Read an input split again and compare document count and text digest with a record."""
    limit, current, found = plan.settings["max_documents"], xxhash.xxh3_64(), 0
    # Read one document more than recorded to notice appended text, unless a limit ended the split.
    one_more = plan.settings["max_tokens"] is None and count != limit
    filters, log = filters_of(plan), ReadLog()
    for texts, _ in group_batches(read_documents(plan, number, filters, log), count + one_more):
        log.rows.clear()
        entries, _ = log_entries(texts)
        current.update(text_hashes(entries))
        found += len(texts)
    return found == count and current.hexdigest() == digest


def split_hash(entries: np.ndarray, seed: int) -> np.ndarray:
    """Return a hash uniform in [0, 2**64) of text and seed alone: uint64 [documents].

    SplitMix64's output step over the text hash and the seed (Steele, Lea, Flood 2014).
    """
    step = np.uint64((seed * 0x9E3779B97F4A7C15) % 2**64)
    mixed = entries["low"] + step
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def destinations(entries: np.ndarray, seed: int, val_threshold: int) -> np.ndarray:
    """Return `VAL` where the split hash is below the threshold, else `TRAIN`: uint8 [documents]."""
    if val_threshold <= 0 or val_threshold >= 2**64:
        return np.full(len(entries), VAL if val_threshold > 0 else TRAIN, np.uint8)
    return (split_hash(entries, seed) < np.uint64(val_threshold)).astype(np.uint8)
