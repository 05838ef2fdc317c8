"""JSON lines, plain text and Parquet: files of this machine or of a bucket, cut into splits."""

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep.places import elsewhere
from data_prep.sources import fields
from data_prep.sources.files import (
    decoded,
    describe,
    inputs_of,
    is_compressed,
    line_batches,
    line_splits,
    lines,
    opened,
    plain_size,
)
from data_prep.sources.source import Input, Source, Split, of_files
from nearlinear.errors import DataError

logger = logging.getLogger("data_prep")

_TEXT_SUFFIXES = (".txt", ".md")
_JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst")
_PARQUET_ROWS = 256


def jsonl(
    files: Sequence[str | Path], text_field: str = "text", skip_bad_lines: bool = False
) -> Source:
    """JSON lines (`.jsonl`, also `.gz` and `.zst`, or folders of them): one object per line.

    Its `text_field` is the document. Raises `DataError` naming file and line for a line that is
    not such an object; with `skip_bad_lines` those are left out and counted in a warning.
    """
    inputs = inputs_of(files, folders=_JSON_SUFFIXES)

    def read(split: Split) -> Iterator[str]:
        path = inputs[split.input].path
        skipped, number = [], 0
        for batch in line_batches(path, split.start, split.end):
            texts = fields.of_lines(batch, text_field)
            if texts is not None:
                number += len(batch)
                yield from texts
                continue
            for line in batch:
                number += 1
                text = fields.of_line(line, text_field)
                if text is not None:
                    yield text
                elif line.strip():
                    where = f"{path}:{number + _lines_before(path, split.start)}"
                    error = fields.complaint(line, text_field, where)
                    if not skip_bad_lines:
                        raise error
                    skipped.append(None if skipped else error)
        if skipped:
            logger.warning("skipped %d bad lines, the first: %s", len(skipped), skipped[0])

    def plan(target: int) -> list[Split]:
        return line_splits(inputs, target)

    return Source(
        name="jsonl",
        documents=of_files(plan, read),
        description=describe(inputs),
        settings={"text_field": text_field, "skip_bad_lines": skip_bad_lines},
        expected_bytes=plain_size(inputs),
        inputs=inputs,
        plan=plan,
        reader=read,
        spec={"kind": "jsonl", "files": [file.path for file in inputs],
              "text_field": text_field, "skip_bad_lines": skip_bad_lines},
    )  # fmt: skip


def text(paths: Sequence[str | Path], document: str = "file") -> Source:
    """Plain UTF-8 text: files, and folders searched for `.txt` and `.md` files.

    `document` says what one document is: a whole "file", a "line", or a "paragraph" (text between
    blank lines). Raises `DataError` for missing paths and for files that are not UTF-8.
    """
    if document not in ("file", "line", "paragraph"):
        raise DataError(f"document is {document!r}: use 'file', 'line' or 'paragraph'")
    inputs = inputs_of(paths, folders=_TEXT_SUFFIXES)

    def read(split: Split) -> Iterator[str]:
        path = inputs[split.input].path
        if document == "line":
            for line in lines(path, split.start, split.end):
                yield decoded(line, path).rstrip("\r\n")
            return
        last = split.input + 1 if split.end is None else split.end
        for file in inputs[split.input : last]:
            whole = decoded(b"".join(lines(file.path)), file.path)
            yield from [whole] if document == "file" else re.split(r"\n\s*\n", whole)

    def plan(target: int) -> list[Split]:
        return line_splits(inputs, target) if document == "line" else _runs(inputs, target)

    return Source(
        name="text",
        documents=of_files(plan, read),
        description=describe(inputs),
        settings={"document": document},
        expected_bytes=plain_size(inputs),
        inputs=inputs,
        plan=plan,
        reader=read,
        spec={"kind": "text", "paths": [file.path for file in inputs], "document": document},
    )


def parquet(files: Sequence[str | Path], text_field: str = "text") -> Source:
    """Parquet files, or folders of them: column `text_field`, a row one document.

    Splits are runs of row groups, so one row group is what is in memory. Raises `DataError` for a
    file that is none, a column that is not there or not text; rows without a value are left out.
    """
    inputs = inputs_of(files, folders=(".parquet",))

    def read(split: Split) -> Iterator[str]:
        with _parquet(inputs[split.input].path, text_field) as table:
            groups = range(split.start, split.end)
            for batch in table.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=[text_field],
                                            use_threads=False):  # fmt: skip
                yield from (text for text in batch.column(0).to_pylist() if text is not None)

    def plan(target: int) -> list[Split]:
        splits = []
        for number, file in enumerate(inputs):
            with _parquet(file.path, text_field) as table:
                column = table.schema_arrow.get_field_index(text_field)
                sizes = [table.metadata.row_group(group).column(column).total_uncompressed_size
                         for group in range(table.num_row_groups)]  # fmt: skip
            start = size = 0
            for group, more in enumerate(sizes):
                size += more
                if size >= target or group == len(sizes) - 1:
                    splits.append(Split(number, start, group + 1, size))
                    start, size = group + 1, 0
        return splits

    return Source(
        name="parquet",
        documents=of_files(plan, read),
        description=describe(inputs),
        settings={"text_field": text_field},
        expected_bytes=sum(split.bytes for split in plan(2**40)),
        inputs=inputs,
        plan=plan,
        reader=read,
        spec={"kind": "parquet", "files": [file.path for file in inputs], "text_field": text_field},
    )


def _runs(inputs: Sequence[Input], target: int) -> list[Split]:
    """Whole files in runs of about `target` bytes: `end` is a number of a file."""
    splits, start, size = [], 0, 0
    for number, file in enumerate(inputs):
        size += file.bytes
        if size >= target or number == len(inputs) - 1:
            splits.append(Split(start, 0, number + 1, size))
            start, size = number + 1, 0
    return splits


def _lines_before(path: str, start: int) -> int:
    """How many lines of a file lie before byte `start`: to name a line that is wrong."""
    return sum(1 for _ in lines(path, 0, start)) if start and not is_compressed(path) else 0


def _parquet(path: str, text_field: str):
    """An open Parquet file that has a column of text `text_field`."""
    import pyarrow
    from pyarrow import parquet as pq

    try:
        table = pq.ParquetFile(opened(path) if elsewhere(path) else path, memory_map=False,
                               buffer_size=2**20)  # fmt: skip
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file ({error}): copy it again") from None
    names = table.schema_arrow.names
    if text_field not in names:
        table.close()
        raise DataError(
            f"{path} has no column {text_field!r}, it has {', '.join(map(repr, names))}: name one "
            "with --text-field"
        )
    kind = table.schema_arrow.field(text_field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        table.close()
        raise DataError(
            f"{path} has {kind} in {text_field!r}, not text: name another column with --text-field"
        )
    return table
