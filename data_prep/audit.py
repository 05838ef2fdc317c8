"""List the documents of a source that quality rules drop, each with its rule."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from data_prep.documents import is_blank, load_evaluation_sets, make_filters
from data_prep.sources import Source

_SHOWN = 80


class Dropped(NamedTuple):
    """A document that a preparation with the same rules leaves out."""

    input: str
    """Path of the file, or name of a source without files."""
    document: int
    """Number of the document in its input, from 1; for JSON lines without blank ones, the line."""
    rule: str
    """Name of the rules and the reason, as in the statistics of a dataset, or ``blank``."""
    text: str
    """First characters of the document."""


def dropped_documents(
    source: Source,
    names: Sequence[str],
    decontaminate: Sequence[str | Path] = (),
    languages: Sequence[str] = (),
) -> Iterator[Dropped]:
    """Yield the dropped documents in order.

    Args:
        source: Text; it is read once and not changed.
        names: Quality rules in order, of `data_prep.documents.FILTERS`.
        decontaminate: Files of evaluation sets, as of `data_prep.prepare`.
        languages: Languages to keep, as of `data_prep.prepare`.

    Raises:
        DataError: A package of the filters is missing, or the text cannot be read.
    """
    filters = make_filters(names, load_evaluation_sets(decontaminate), languages)
    numbers: Counter[int] = Counter()
    for whole in source.splits():
        for split in source.split_by_input(whole):
            name = source.inputs[split.input].path if source.inputs else source.name
            for texts in source.read_batches(split):
                for text in texts:
                    numbers[split.input] += 1
                    reason = "blank" if is_blank(text) else filters and filters.judge(text)[0]
                    if reason:
                        yield Dropped(name, numbers[split.input], reason, text[:_SHOWN])
