"""JSON lines and Parquet: files of this machine or of a bucket, cut into splits."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data_prep.places import elsewhere
from data_prep.sources import fields
from data_prep.sources.files import (
    cut,
    describe,
    inputs_of,
    is_compressed,
    line_splits,
    lines,
    opened,
    plain_size,
    whole_lines,
)
from data_prep.sources.source import Source, Split, of_files, one_by_one
from nearlinear.errors import DataError, NearlinearError

logger = logging.getLogger("data_prep")

_JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst")
_PARQUET_ROWS = 256
_FEW_BYTES = 1024 * 1024  # of rows that are encoded together


def jsonl(
    files: Sequence[str | Path], text_field: str = "text", skip_bad_lines: bool = False
) -> Source:
    """JSON lines (`.jsonl`, also `.gz` and `.zst`, or folders of them): one object per line.

    Its `text_field` is the document. Raises `DataError` naming file and line for a line that is
    not such an object; with `skip_bad_lines` those are left out and counted in a warning.
    """
    inputs = inputs_of(files, folders=_JSON_SUFFIXES)

    def read(split: Split) -> Iterator[list[str]]:
        path, field = inputs[split.input].path, fields.TextField(text_field)
        skipped, first, number = 0, None, 0
        for whole in whole_lines(path, split.start, split.end):
            texts = field.of_lines(whole)
            if texts is not None:
                number += len(texts)
                del whole  # a line may be large, and waits until its text is encoded
                yield texts
                del texts
                continue
            for line in cut(whole):
                number += 1
                text = field.of_line(line)
                if text is not None:
                    yield [text]
                elif line.strip():
                    if not skip_bad_lines:
                        where = f"{path}:{number + _lines_before(path, split.start)}"
                        raise fields.complaint(line, text_field, where)
                    skipped += 1
                    first = first or fields.complaint(line, text_field, _where(split, path, number))
        if skipped:
            logger.warning("skipped %d bad lines, the first: %s", skipped, first)

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


def parquet(files: Sequence[str | Path], text_field: str = "text") -> Source:
    """Parquet files, or folders of them: column `text_field`, a row one document.

    Splits are runs of row groups, so one row group is what is in memory. Raises `DataError` for a
    file that is none, a column that is not there or not text; rows without a value are left out.
    """
    inputs = inputs_of(files, folders=(".parquet",))

    def read(split: Split) -> Iterator[list[str]]:
        with _parquet(inputs[split.input].path, text_field) as table:
            groups = range(split.start, split.end)
            for batch in table.iter_batches(_PARQUET_ROWS, row_groups=groups, columns=[text_field],
                                            use_threads=False):  # fmt: skip
                texts = [text for text in batch.column(0).to_pylist() if text is not None]
                yield from [texts] if batch.nbytes < _FEW_BYTES else one_by_one(texts)

    def plan(target: int) -> list[Split]:
        splits = []
        for number, file in enumerate(inputs):
            with _parquet(file.path, text_field) as table:
                leaves = [table.schema.column(leaf).path for leaf in range(len(table.schema))]
                column = leaves.index(text_field)  # a column of structs has several
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


def _where(split: Split, path: str, number: int) -> str:
    """The line of that number of a split, without reading what lies before it."""
    return f"{path} (line {number} from byte {split.start})" if split.start else f"{path}:{number}"


def _lines_before(path: str, start: int) -> int:
    """How many lines of a file lie before byte `start`: to name a line that is wrong."""
    return sum(1 for _ in lines(path, 0, start)) if start and not is_compressed(path) else 0


@contextmanager
def _parquet(path: str, text_field: str):
    """An open Parquet file that has a column of text `text_field`. Raises `DataError`.

    Also for what is found to be damaged while it is read.
    """
    import pyarrow
    from pyarrow import parquet as pq

    source = opened(path) if elsewhere(path) else path
    try:
        with pq.ParquetFile(source, memory_map=False, buffer_size=2**20) as table:
            _check_column(table.schema_arrow, path, text_field)
            yield table
    except (NearlinearError, MemoryError):
        raise
    except (pyarrow.ArrowException, OSError, ValueError, IndexError) as error:
        if getattr(error, "errno", None) is not None:  # of the file system, which names it
            raise
        why = " ".join(str(error).split())
        raise DataError(
            f"{path} is not a Parquet file, or damaged ({why}): copy it again"
        ) from None


def _check_column(schema, path: str, text_field: str) -> None:
    import pyarrow

    names = schema.names
    if text_field not in names:
        raise DataError(
            f"{path} has no column {text_field!r}, it has {', '.join(map(repr, names))}: name one "
            "with --text-field"
        )
    kind = schema.field(text_field).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(
            f"{path} has {kind} in {text_field!r}, not text: name another column with --text-field"
        )
