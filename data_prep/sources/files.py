"""Input files, here or in a bucket: which are meant, their lines from a range of bytes, their text.

A file that is not compressed is cut into ranges that begin and end at lines, found by reading at
the cuts alone; a compressed one (.gz, .zst) can only be read from its beginning and is one range.
"""

import gzip
import io
import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data_prep.places import elsewhere
from data_prep.sources import remote
from data_prep.sources.source import Input, Split
from nearlinear.errors import DataError

logger = logging.getLogger("data_prep")

_CHUNK = 128 * 1024  # fits a core's cache, with what is made of it
MOST_BYTES = 2**30
"""of a document or a line, which is in memory whole"""
_COMPRESSED = (".gz", ".zst")


def inputs_of(
    paths: str | Path | Sequence[str | Path], folders: tuple[str, ...] = ()
) -> tuple[Input, ...]:
    """The files meant by `paths`; of a folder those with suffixes `folders`, in sorted order.

    `s3://bucket/key` is an object, or all below it with those suffixes.
    """
    found: list[Input] = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        if elsewhere(path):
            found += remote.files_under(str(path), folders)
        else:
            found += map(Input.of, _files(Path(path), folders))
    if not found:
        raise DataError("no input files were named: give at least one")
    return tuple(found)


def _files(path: Path, folders: tuple[str, ...]) -> list[Path]:
    if path.is_dir() and folders:
        found = [p for p in path.rglob("*") if p.name.endswith(folders) and p.is_file()]
        if not found:
            raise DataError(
                f"no {' or '.join(folders[:2])} files under {path}: name the files themselves"
            )
        return sorted(found)
    if not path.is_file():
        raise DataError(f"no input file {path}: check the path")
    return [path]


def opened(path: str | Path):
    """A file of this machine or of a bucket, to read from and seek in, without a buffer."""
    return remote.opened(str(path)) if elsewhere(path) else open(path, "rb", buffering=0)


def is_compressed(path: str | Path) -> bool:
    """Whether a file can only be read from its beginning."""
    return Path(path).suffix in _COMPRESSED


def line_splits(inputs: Sequence[Input], target: int) -> list[Split]:
    """Ranges of about `target` bytes that begin and end at lines, for each of the files."""
    splits = []
    for number, file in enumerate(inputs):
        if is_compressed(file.path):
            splits.append(Split(number, 0, None, file.bytes))
            continue
        start = 0
        with opened(file.path) as stream:
            for cut in range(target, file.bytes + target, target):
                end = _line_start(stream, cut) if cut < file.bytes else file.bytes
                if end > start:
                    splits.append(Split(number, start, end, end - start))
                    start = end
    return splits


def whole_lines(path: str | Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The lines [start, end) of a file, with their ends, about 128 KiB of them at a time.

    Of what it packs, when the file is compressed. Raises `DataError` for a line of more than 1 GiB.
    """
    with _opened(path) as stream:
        if start:
            stream.seek(start)
        left = float("inf") if end is None else end - start
        begun: list[memoryview] = []  # of a line whose end is still to come
        held = 0  # bytes of it
        while left > 0 and (chunk := stream.read(int(min(_CHUNK, left)))):
            left -= len(chunk)
            after = chunk.rfind(b"\n") + 1
            if not after:
                begun.append(memoryview(chunk))
                held += len(chunk)
                if held > MOST_BYTES:
                    raise DataError(
                        f"{path} has a line of more than 1 GiB, and a line is in memory whole: cut "
                        "it, and write an array in JSON as one object a line"
                    )
                continue
            whole = b"".join((*begun, memoryview(chunk)[:after]))
            begun, held = [memoryview(chunk)[after:]], len(chunk) - after
            yield whole
            del whole  # it may be large, and more than one is not needed
        if held:
            yield b"".join(begun)


def cut(whole: bytes) -> list[bytes]:
    """Lines that end in \\n alone, as files have them: bytes.splitlines cuts at \\r too."""
    if b"\r" not in whole:
        return whole.splitlines(keepends=True)
    *lines, last = whole.split(b"\n")
    return [line + b"\n" for line in lines] + ([last] if last else [])


def lines(path: str | Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """The lines of `whole_lines`, one by one."""
    for whole in whole_lines(path, start, end):
        yield from cut(whole)


def chunks(path: str | Path) -> Iterator[bytes]:
    """The bytes of a file, or of what it packs, 128 KiB at a time."""
    with _opened(path) as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk


def decoded(raw: bytes | bytearray, path: str | Path, at: int = 0) -> str:
    """UTF-8 bytes of a file from its byte `at` as text, without a byte order mark at its 0.

    Raises `DataError`.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(path, at + error.start) from None
    return text if at else text.removeprefix("\ufeff")


def not_utf8(path: str | Path, byte: int) -> DataError:
    """What is wrong with a file at that byte."""
    return DataError(
        f"{path} is not UTF-8 text (byte {byte}): convert it, for example with "
        "`iconv -f latin1 -t utf-8`"
    )


def describe(inputs: Sequence[Input]) -> str:
    """A few names of files, for people."""
    names = ", ".join(Path(file.path).name for file in inputs[:3])
    return names if len(inputs) <= 3 else f"{names} and {len(inputs) - 3} more files"


def plain_size(inputs: Sequence[Input]) -> int | None:
    """Bytes of text to expect, when no file is compressed."""
    if any(is_compressed(file.path) for file in inputs):
        return None
    return sum(file.bytes for file in inputs)


def _line_start(stream, cut: int) -> int:
    """Where the first line begins that begins at `cut` or after it; the file's size if none."""
    position = cut - 1
    stream.seek(position)
    while chunk := stream.read(65_536):
        found = chunk.find(b"\n")
        if found >= 0:
            return position + found + 1
        position += len(chunk)
    return position


@contextmanager
def _opened(path: str | Path):
    """A file's bytes, unpacked by the suffix of its name. Raises `DataError` for a broken one."""
    suffix = Path(path).suffix
    with opened(path) as file:
        if suffix not in _COMPRESSED:
            yield file
            return
        if not file.seek(0, io.SEEK_END):  # which unpacks as no text at all
            raise _broken(path, "it is empty")
        file.seek(0)
        try:
            with _UNPACKED[suffix](file if elsewhere(path) else str(path)) as stream:
                yield stream
        except (EOFError, zlib.error, OSError) as error:
            if getattr(error, "errno", None) is not None:  # of the file system, which names it
                raise
            raise _broken(path, error) from None


def _zstd(packed):
    import pyarrow

    return pyarrow.CompressedInputStream(packed, "zstd")


_UNPACKED = {".gz": gzip.open, ".zst": _zstd}


def _broken(path: str | Path, why) -> DataError:
    kind, why = {".gz": "gzip", ".zst": "zstd"}[Path(path).suffix], " ".join(str(why).split())
    return DataError(f"{path} is not a whole {kind} file ({why}): copy it again")
