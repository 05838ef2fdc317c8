"""The origin of each document: `documents.parquet`, written beside the shards.

The table has a row for every document that was read, in the order of the input: where it came from,
in which split it is or why it was left out, and the fields that were kept with it.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from data_prep.documents import DROPPED
from data_prep.sources.source import Rows
from data_prep.storage_paths import absolute_path
from nearlinear.data.format import SPLITS, Manifest
from nearlinear.errors import DataError
from nearlinear.storage import StoragePath

if TYPE_CHECKING:
    import pyarrow

TABLE_FILE = "documents.parquet"
DUPLICATE, NEAR_DUPLICATE, LIMIT = "exact duplicate", "near-duplicate", "limit"
"""Reasons to leave out a document that are found when all documents are known."""
DROPPED_LOG = np.dtype([("input", "<u4"), ("number", "<u4"), ("rule", "<u2")])
"""Document that a rule dropped: input in its split, number as in `documents.LOG`, and rule."""

_FATES = (*SPLITS, LIMIT, DUPLICATE, NEAR_DUPLICATE)
_FIELD_ROWS = 10_000
"""Rows of kept fields that are written at a time."""


class FieldsWriter:
    """Writes the kept fields of the documents of an input split; does nothing without fields."""

    def __init__(self, path: Path, fields: tuple[str, ...]):
        self._path, self._fields = path, fields
        self._rows: Rows = []
        self._used: set[str] = set()
        self._writer: Any = None

    def take(self, rows: Rows) -> None:
        """Take all rows out of a list."""
        if self._fields:
            self._rows += rows
            rows.clear()
            if len(self._rows) >= _FIELD_ROWS:
                self._write()

    def close(self, number: int) -> dict[str, Any]:
        """Flush the file to disk, and return its `bytes` and `xxh3`, or nothing without fields.

        Raises:
            DataError: This is the first split, ``number`` 0, and none of its documents has one of
                the fields.
        """
        if not self._fields:
            return {}
        self._write()
        self._writer.close()
        missing = [name for name in self._fields if name not in self._used]
        if missing and number == 0:
            raise DataError(
                f"no document of the first input split has the field {missing[0]!r}: correct "
                "--keep-fields"
            )
        _sync(self._path)
        raw = self._path.read_bytes()
        return {"bytes": len(raw), "xxh3": xxhash.xxh3_64_hexdigest(raw)}

    def _write(self) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        columns = [pa.array([_without_surrogates(row[place]) for row in self._rows], pa.string())
                   for place in range(len(self._fields))]  # fmt: skip
        self._rows = []
        self._used.update(
            name for name, column in zip(self._fields, columns, strict=True)
            if column.null_count < len(column)
        )  # fmt: skip
        table = pa.table(columns, names=list(self._fields))
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._path, table.schema, compression="zstd")
        self._writer.write_table(table)


class DocumentTable:
    """Writer of `documents.parquet`; input splits are added in order."""

    def __init__(self, path: Path, fields: tuple[str, ...]):
        """Create the file.

        Args:
            path: The file.
            fields: Names of the kept fields.
        """
        import pyarrow as pa
        from pyarrow import parquet

        self.path, self._fields = path, fields
        columns = [
            ("input", pa.int32()), ("number", pa.int64()), ("fate", pa.string()),
            ("document", pa.int64()), ("tokens", pa.int64()), ("bytes", pa.int64()),
            ("hash", pa.binary(16)), ("ordinal", pa.int64()), ("first", pa.int64()),
        ]  # fmt: skip
        if fields:
            columns.append(("fields", pa.struct([(name, pa.string()) for name in fields])))
        self._schema = pa.schema(columns)
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._read: Counter[int] = Counter()  # documents of each input
        self._counts = dict.fromkeys(SPLITS, 0)
        self._ordinal = 0

    def add(
        self,
        first_input: int,
        record: dict[str, Any],
        entries: np.ndarray,
        targets: np.ndarray,
        duplicates: np.ndarray,
        clusters: np.ndarray,
        dropped: np.ndarray,
        fields: Path | None,
    ) -> None:
        """Add the documents of an input split.

        Args:
            first_input: Index of the split's first input.
            record: Record of the split.
            entries: Its log, `documents.LOG` [documents].
            targets: Destination of each document, uint8 [documents].
            duplicates: Exact duplicates, bool [documents].
            clusters: Ordinal of the first of each document's near-duplicates or -1, int64
                [documents].
            dropped: Documents dropped by rules, `DROPPED_LOG` [documents dropped].
            fields: File of `FieldsWriter`, if fields are kept.
        """
        import pyarrow as pa

        out = targets == DROPPED
        fates = np.choose(targets, [*range(len(SPLITS)), _FATES.index(LIMIT)])
        fates[out & (clusters >= 0)] = _FATES.index(NEAR_DUPLICATE)
        fates[out & duplicates] = _FATES.index(DUPLICATE)
        places = np.zeros(len(entries), np.int64)
        for code, split in enumerate(SPLITS):
            mine = fates == code
            places[mine] = self._counts[split] + 1 + np.arange(mine.sum())
            self._counts[split] += int(mine.sum())
        inputs = np.searchsorted(record["ends"], np.arange(len(entries)), side="right")
        inputs = np.concatenate([inputs, dropped["input"]]).astype(np.int64)
        numbers = np.concatenate([entries["number"], dropped["number"]]).astype(np.int64)
        order = np.lexsort((numbers, inputs))
        absent = (np.arange(len(order)) >= len(entries))[order]  # dropped by rules

        def column(values: np.ndarray, smallest: int = 0) -> pyarrow.Array:
            """Return values in order, null for dropped documents and below ``smallest``."""
            padded = np.concatenate([values, np.zeros(len(dropped), values.dtype)])[order]
            padded = padded.astype(np.int64)
            return _array(padded, ~absent & (padded >= smallest))

        names = _strings([*_FATES, *record["rules"]])
        codes = np.concatenate([fates, dropped["rule"].astype(np.int64) + len(_FATES)])[order]
        halves = np.zeros((len(order), 2), ">u8")
        halves[: len(entries), 0], halves[: len(entries), 1] = entries["high"], entries["low"]
        hashes = pa.py_buffer(halves[order].tobytes())
        known = range(first_input, first_input + 1 + inputs.max(initial=0))
        before = np.array([self._read[number] for number in known])
        columns = [
            _array((first_input + inputs[order]).astype(np.int32)),
            _array(before[inputs[order]] + numbers[order] + 1),
            pa.DictionaryArray.from_arrays(_array(codes), names).cast(pa.string()),
            column(places, smallest=1),
            column(entries["tokens"]),
            column(entries["bytes"]),
            pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(16), len(order), [_bits(~absent), hashes]
            ),
            column(self._ordinal + np.arange(len(entries))),
            column(clusters),
        ]
        if fields is not None:
            starts = np.cumsum([0, *record["counts"]])  # the last input may be incomplete
            columns.append(self._fields_of(fields, (starts[inputs] + numbers)[order]))
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._ordinal += len(entries)
        for number, count in enumerate(record["counts"], first_input):
            self._read[number] += count

    def close(self) -> dict[str, Any]:
        """Flush the file to disk; return `file`, `bytes` and `sha256` for the manifest."""
        self._writer.close()
        _sync(self.path)
        digest = _sha256(absolute_path(self.path))
        return {"file": TABLE_FILE, "bytes": self.path.stat().st_size, "sha256": digest}

    def _fields_of(self, file: Path, numbers: np.ndarray) -> pyarrow.Array:
        """Return the fields of documents, given their numbers within the input split."""
        import pyarrow as pa
        from pyarrow import parquet

        found = parquet.read_table(file).take(_array(numbers)).combine_chunks()
        columns = [found[name].combine_chunks() for name in self._fields]
        return pa.StructArray.from_arrays(columns, names=list(self._fields))


# `pyarrow.array` imports pandas, which takes longer than to write a table of a million documents.


def _array(values: np.ndarray, is_valid: np.ndarray | None = None) -> pyarrow.Array:
    """Return numbers as an array, null where ``is_valid`` is false."""
    import pyarrow as pa

    buffers = [None if is_valid is None else _bits(is_valid), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers)


def _strings(texts: list[str]) -> pyarrow.StringArray:
    import pyarrow as pa

    raw = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, raw)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(raw), pa.py_buffer(ends), pa.py_buffer(b"".join(raw)))


def _bits(values: np.ndarray) -> pyarrow.Buffer:
    import pyarrow as pa

    return pa.py_buffer(np.packbits(values, bitorder="little").tobytes())


def describe_table(manifest: Manifest) -> dict[str, Any] | None:
    """Return the manifest's entry for `documents.parquet`; None in older datasets."""
    return manifest.plan.get("documents")


def check_table(folder: str | Path | StoragePath, manifest: Manifest) -> None:
    """Raise `DataError` if `documents.parquet` is not as it was written."""
    entry = describe_table(manifest)
    if entry is None:
        return
    path = absolute_path(folder) / entry["file"]
    try:
        found = _sha256(path)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: copy it again, or prepare the data again") from None
    if found != entry["sha256"]:
        raise DataError(
            f"{path} is altered: copy it again, or prepare the data again; the token shards do not "
            "need it"
        )


def read_table(
    folder: str | Path | StoragePath, manifest: Manifest, filters: Any = None
) -> list[dict[str, Any]]:
    """Return rows of `documents.parquet`.

    Args:
        folder: The dataset.
        manifest: Its manifest.
        filters: Conditions of `pyarrow.parquet.read_table`. None reads every row.

    Raises:
        DataError: The dataset has no such table, or the table is damaged.
    """
    import pyarrow as pa
    from pyarrow import parquet

    if describe_table(manifest) is None:
        raise DataError(
            f"{folder} does not know the origin of its documents: it was prepared by an older "
            "version; prepare it again with --overwrite"
        )
    path = absolute_path(folder) / TABLE_FILE
    try:
        source = path.path or io.BytesIO(path.read())
        return parquet.read_table(source, filters=filters).to_pylist()
    except (pa.ArrowException, FileNotFoundError):
        check_table(folder, manifest)  # names the fault
        raise


def _sha256(path: StoragePath) -> str:
    digest = hashlib.sha256()
    for chunk in path.stream():
        digest.update(chunk)
    return digest.hexdigest()


def _without_surrogates(text: str | None) -> str | None:
    return text if text is None or text.isascii() else text.encode(errors="replace").decode()


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
