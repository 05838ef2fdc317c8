"""JSON lines and Parquet: rows of which one field is the document, in local files or in S3."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from data_prep.sources.files import (
    FileFormat,
    describe_inputs,
    find_inputs,
    is_compressed,
    open_file,
    read_line_blocks,
    read_lines,
    split_by_lines,
    split_lines,
    uncompressed_bytes,
)
from data_prep.sources.source import (
    InputSplit,
    Rows,
    Skipped,
    Source,
    documents_of_splits,
    single_document_batches,
    value_as_text,
)
from data_prep.storage_paths import is_remote
from nearlinear.errors import DataError, NearlinearError

JSON_FILES = FileFormat((".jsonl", ".ndjson", ".json"))
PARQUET_FILES = FileFormat((".parquet",), compressed=False)
_NEWLINE, _OPENING_BRACE, _CLOSING_BRACE = b"\n{}"
_PARQUET_ROWS = 256
_MAX_BATCH_BYTES = 1024 * 1024
"""Parquet rows up to this size are encoded together."""


def jsonl(
    files: Sequence[str | Path],
    text_field: str = "text",
    skip_bad_lines: bool = False,
    allow_unread: bool = False,
    fields: Sequence[str] = (),
) -> Source:
    """Read JSON lines, an object per line.

    Args:
        files: Files (`.jsonl`, `.ndjson` or `.json`, also compressed), or folders of them.
        text_field: Field that holds the document.
        skip_bad_lines: Skip unreadable lines and count them in a warning.
        allow_unread: Leave out other files below a folder instead of raising an error.
        fields: Other fields to keep with each document.

    Raises:
        DataError: A line is not an object with the field; the message names file and line.
    """
    inputs, unread = find_inputs(files, JSON_FILES, allow_unread)

    def read(split: InputSplit, rows: Rows | None = None) -> Iterator[list[str]]:
        path, field = inputs[split.input].path, TextField(text_field, fields, rows)
        skipped, number = Skipped("bad lines"), 0
        for block in read_line_blocks(path, split.start, split.end):
            texts = field.decode_block(block)
            if texts is not None:
                number += len(texts)
                del block  # may be large, and would stay until its text is encoded
                yield texts
                del texts
                continue
            for line in split_lines(block):
                number += 1
                text = field.decode_line(line)
                if text is not None:
                    yield [text]
                elif line.strip():
                    if not skip_bad_lines:
                        where = f"{path}:{number + _count_lines_before(path, split.start)}"
                        raise line_error(line, text_field, where)
                    where = line_location(split, path, number)
                    # parses the line again: for the first one only
                    skipped.add(None if skipped.count else line_error(line, text_field, where))
        skipped.warn()

    def plan(target: int) -> list[InputSplit]:
        return split_by_lines(inputs, target)

    settings = {"text_field": text_field, "skip_bad_lines": skip_bad_lines}
    return Source(
        name="jsonl",
        documents=documents_of_splits(plan, read),
        description=describe_inputs(inputs),
        settings=settings,
        expected_bytes=uncompressed_bytes(inputs),
        inputs=inputs,
        unread=unread,
        plan=plan,
        reader=read,
        fields=tuple(fields),
        spec={"kind": "jsonl", "files": [file.path for file in inputs], **settings},
    )


class TextField:
    """Decoder of one text field of JSON objects; other fields are only checked to be JSON."""

    def __init__(self, name: str, others: Sequence[str] = (), rows: Rows | None = None):
        """Create a decoder.

        Args:
            name: The field.
            others: Fields whose values are added to ``rows``.
            rows: Receives a tuple per decoded document. None decodes the text alone.
        """
        self.name, self._rows = name, rows
        self._others = tuple(others) if rows is not None else ()
        named = {f"other{number}": other for number, other in enumerate(self._others)}
        optional = [(attribute, Any, None) for attribute in named]
        row = msgspec.defstruct(
            "Row", [("text", str), *optional], rename={"text": name, **named}, gc=False
        )
        self._values = attrgetter("text", *named)
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(row)

    def decode_block(self, block: bytes) -> list[str] | None:
        """Decode a block of lines. Return None if a line is not one object with the field.

        The decoder itself accepts an object over several lines, and several objects on a line. If
        every line starts with `{` and every line but the last ends with `}`, no object crosses a
        line end, and equal counts of objects and lines prove one object per line.
        """
        raw = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(raw == _NEWLINE)
        count = len(ends) + (not block.endswith(b"\n"))
        inner = ends[: count - 1]
        starts_object = raw[inner + 1] == _OPENING_BRACE
        ends_object = raw[inner - 1] == _CLOSING_BRACE
        if not (block.startswith(b"{") and starts_object.all() and ends_object.all()):
            return None
        try:
            rows = self._decoder.decode_lines(block)
        except (ValueError, RecursionError):
            return None
        if len(rows) != count:
            return None
        if self._rows is not None:
            self._keep(map(self._values, rows))
        return [row.text for row in rows]

    def decode_line(self, line: bytes) -> str | None:
        """Decode one line. Return None if it is blank or invalid."""
        try:
            row = self._decoder.decode(line)
            values = (row.text,) if self._rows is None else self._values(row)
        except (ValueError, RecursionError):  # Python's json accepts more: a lone surrogate, NaN
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                return None
            if not isinstance(found, dict) or not isinstance(found.get(self.name), str):
                return None
            values = tuple(map(found.get, (self.name, *self._others)))
        if self._rows is not None:
            self._keep([values])
        return values[0]

    def _keep(self, found: Iterable[tuple[Any, ...]]) -> None:
        """Add the values that follow the text."""
        assert self._rows is not None
        self._rows += [tuple(map(value_as_text, values[1:])) for values in found]


def get_text(row: dict[str, Any], text_field: str, where: str, remedy: str = "") -> str:
    """Return the text field of a row. Raises `DataError` if it is missing or not a string."""
    if text_field not in row:
        raise DataError(
            f"{where} has no field {text_field!r}, only {', '.join(map(repr, row)) or 'none'}: "
            f"name one of these with --text-field{remedy}"
        )
    if not isinstance(row[text_field], str):
        kind = type(row[text_field]).__name__
        raise DataError(
            f"{where} has a {kind} in field {text_field!r}, not text: name another field with "
            f"--text-field{remedy}"
        )
    return row[text_field]


def line_error(line: bytes, text_field: str, where: str) -> DataError:
    """Return the error for a line that `TextField.decode_line` rejected."""
    remedy = "correct the line, or pass --skip-bad-lines to skip such lines"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return DataError(f"{where} is not JSON ({error}): {remedy}")
    if not isinstance(row, dict):
        return DataError(f"{where} is JSON but not an object: {remedy}")
    try:
        get_text(row, text_field, where, f"; {remedy}")
    except DataError as error:
        return error
    raise AssertionError(f"{where} is valid")


def line_location(split: InputSplit, path: str, number: int) -> str:
    """Locate line `number` of a split without reading the file before the split."""
    return f"{path} (line {number} from byte {split.start})" if split.start else f"{path}:{number}"


def _count_lines_before(path: str, start: int) -> int:
    return sum(1 for _ in read_lines(path, 0, start)) if start and not is_compressed(path) else 0


def parquet(
    files: Sequence[str | Path],
    text_field: str = "text",
    skip_bad_lines: bool = False,
    allow_unread: bool = False,
    fields: Sequence[str] = (),
) -> Source:
    """Read Parquet files: each row is a document.

    An input split is a run of row groups, so one row group is in memory.

    Args:
        files: Files, or folders of `.parquet` files.
        text_field: Column that holds the document: strings, or bytes of UTF-8.
        skip_bad_lines: Skip rows without a value or with invalid bytes, and count them in a
            warning.
        allow_unread: Leave out other files below a folder instead of raising an error.
        fields: Other columns to keep with each document.

    Raises:
        DataError: A file is not Parquet, a column is missing or not text, or a row has none.
    """
    inputs, unread = find_inputs(files, PARQUET_FILES, allow_unread)

    def read(split: InputSplit, rows: Rows | None = None) -> Iterator[list[str]]:
        assert split.end is not None, "a split of Parquet names its last row group"
        path = inputs[split.input].path
        row, skipped = 0, Skipped("rows")
        columns = [text_field, *(fields if rows is not None else ())]
        with _open_parquet(path, text_field, fields) as table:
            groups = range(split.start, split.end)
            for batch in table.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=columns,
                                            use_threads=False):  # fmt: skip
                texts = [_decode_value(value) for value in batch.column(text_field).to_pylist()]
                if None in texts:
                    bad = texts.index(None)
                    where = f"{path} (row {row + bad} from row group {split.start})"
                    error = f"{where} has no text in column {text_field!r}"
                    if not skip_bad_lines:
                        raise DataError(f"{error}: pass --skip-bad-lines to skip such rows")
                    skipped.add(error, texts.count(None))
                row += len(texts)
                found = [text for text in texts if text is not None]
                if rows is not None:
                    others = (map(value_as_text, batch.column(name).to_pylist()) for name in fields)
                    each = zip(texts, *others, strict=True)
                    rows += [tuple(values) for text, *values in each if text is not None]
                if batch.nbytes < _MAX_BATCH_BYTES:
                    yield found
                else:
                    yield from single_document_batches(found)
        skipped.warn()

    def plan(target: int) -> list[InputSplit]:
        splits = []
        for number, file in enumerate(inputs):
            with _open_parquet(file.path, text_field, fields) as table:
                leaves = [table.schema.column(leaf).path for leaf in range(len(table.schema))]
                column = leaves.index(text_field)  # a struct column has several leaves
                sizes = [table.metadata.row_group(group).column(column).total_uncompressed_size
                         for group in range(table.num_row_groups)]  # fmt: skip
            start = size = 0
            for group, more in enumerate(sizes):
                size += more
                if size >= target or group == len(sizes) - 1:
                    splits.append(InputSplit(number, start, group + 1, size))
                    start, size = group + 1, 0
        return splits

    settings = {"text_field": text_field, "skip_bad_lines": skip_bad_lines}
    return Source(
        name="parquet",
        documents=documents_of_splits(plan, read),
        description=describe_inputs(inputs),
        settings=settings,
        expected_bytes=sum(split.bytes or 0 for split in plan(2**40)),
        inputs=inputs,
        unread=unread,
        plan=plan,
        reader=read,
        fields=tuple(fields),
        spec={"kind": "parquet", "files": [file.path for file in inputs], **settings},
    )


def _decode_value(value: str | bytes | None) -> str | None:
    """Return the text of a value, or None without valid text."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return None


@contextmanager
def _open_parquet(path: str, text_field: str, fields: Sequence[str]) -> Iterator[Any]:
    """Open a Parquet file with a text column `text_field`, and with the columns `fields`.

    Raises `DataError` at once, or for damage found while the block reads the file.
    """
    import pyarrow
    from pyarrow import parquet as pq

    source = open_file(path) if is_remote(path) else path
    try:
        with pq.ParquetFile(source, memory_map=False, buffer_size=2**20,
                            page_checksum_verification=True) as table:  # fmt: skip
            _check_columns(table.schema_arrow, path, text_field, fields)
            yield table
    except (NearlinearError, MemoryError):
        raise
    except (pyarrow.ArrowException, OSError, ValueError, IndexError) as error:
        if getattr(error, "errno", None) is not None:  # a file system error, which names it
            raise
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path} is damaged or not a Parquet file ({reason}): copy it again"
        ) from None


def _check_columns(schema: Any, path: str, text_field: str, fields: Sequence[str]) -> None:
    import pyarrow

    names = schema.names
    if missing := [name for name in fields if name not in names]:
        raise DataError(
            f"{path} has no column {missing[0]!r}, only {', '.join(map(repr, names))}: name one "
            "of these with --keep-fields"
        )
    if text_field not in names:
        raise DataError(
            f"{path} has no column {text_field!r}, only {', '.join(map(repr, names))}: name one "
            "of these with --text-field"
        )
    types, kind = pyarrow.types, schema.field(text_field).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    known = (types.is_string, types.is_large_string, types.is_string_view,
             types.is_binary, types.is_large_binary, types.is_binary_view)  # fmt: skip
    if not any(is_known(kind) for is_known in known):
        raise DataError(
            f"{path} has {kind} in column {text_field!r}, not text: name another column with "
            "--text-field"
        )
