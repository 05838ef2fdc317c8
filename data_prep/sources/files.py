"""Input files, local or in S3: find them, cut them at line ends, and read their text.

Every file below a named folder is either read or listed as unread with the reason, and unread files
are an error by default. An uncompressed file is cut into byte ranges that begin and end at line
ends, found by reading only near the cuts. A compressed file (.gz, .bz2, .xz, .zst) can only be read
from its start, so it is one split.
"""

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.sources.source import Input, InputLedger, InputSplit, UnreadInput
from data_prep.storage_paths import absolute_path, is_remote
from nearlinear.errors import DataError
from nearlinear.storage import StoragePath

_CHUNK_BYTES = 128 * 1024
"""Fits the cache of a core together with the lines decoded from it."""
MAX_DOCUMENT_BYTES = 2**30
"""Limit of a document or a line, which is held in memory as a whole."""
MIN_RANGE_BYTES, MAX_RANGE_BYTES = 64 * 1024, 8 * 1024 * 1024
"""Size of the ranges fetched from S3: the first after a seek, and those of a long read."""
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
_MARKERS = frozenset({"_SUCCESS", "_metadata", "_common_metadata"})
"""Files without text that Spark and Arrow write into a dataset."""
_UNREAD_SHOWN = 3


@dataclass(frozen=True)
class FileFormat:
    """The names of the files that a source reads below a folder, in upper or lower case."""

    suffixes: tuple[str, ...]
    compressed: bool = True
    """True if a suffix of a compression may follow."""

    def matches(self, name: str) -> bool:
        """Return True if a file with this name is read."""
        path = Path(name.lower())
        if self.compressed and path.suffix in _COMPRESSIONS:
            path = path.with_suffix("")
        return path.suffix in self.suffixes

    def __str__(self) -> str:
        *others, last = self.suffixes
        return f"{', '.join(others)} or {last}" if others else last


def find_inputs(
    paths: str | Path | Sequence[str | Path], kind: FileFormat, allow_unread: bool = False
) -> InputLedger:
    """Find the input files that `paths` name.

    A folder stands for all files of `kind` below it, sorted; `s3://bucket/key` for an object, or
    all objects of `kind` below that prefix. Hidden files and markers such as `_SUCCESS` are
    ignored. A file that is named itself is read whatever its name.

    Args:
        paths: Files and folders.
        kind: Names of the files to read below a folder.
        allow_unread: Leave out what cannot be read below a folder instead of raising an error.

    Raises:
        DataError: A path is missing, nothing is to be read, or something below a folder is unread.
    """
    read: list[Input] = []
    unread: list[UnreadInput] = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        finder = _find_objects if is_remote(path) else _find_files
        found = finder(str(path), kind)
        if not found.read:
            raise DataError(_nothing_to_read(path, kind, found.unread))
        read += found.read
        unread += found.unread
    if not read:
        raise DataError("no input files were named: name at least one")
    if unread and not allow_unread:
        raise DataError(
            f"{_describe_unread(unread)} would not be read. Move them elsewhere, name the files to "
            "read, or pass --allow-unread to leave them out"
        )
    return InputLedger(tuple(read), tuple(unread))


def stat_input(path: str | Path) -> Input:
    """Return size and time of one file or object. Raises `DataError` if it is missing."""
    if not is_remote(path):
        return _local_input(Path(path))
    for item in _list_objects(str(path)):
        if item.path == str(path):
            return item
    raise DataError(f"no object {path}: check the address")


def _local_input(path: Path) -> Input:
    if not path.is_file():
        raise DataError(f"no input file {path}: check the path")
    return Input.from_path(path)


def _find_files(name: str, kind: FileFormat) -> InputLedger:
    folder = Path(name)
    if not folder.is_dir():
        return InputLedger((_local_input(folder),))
    found: list[Path] = []
    unread: list[UnreadInput] = []
    visited: set[str] = set()

    def failed(error: OSError) -> None:
        unread.append(UnreadInput(str(error.filename), error.strerror or "unreadable"))

    for place, folders, names in os.walk(folder, onerror=failed, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:
            unread.append(UnreadInput(place, "a link to a folder that is read already"))
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [each for each in folders if not each.startswith(".")]
        for path in (Path(place, each) for each in names if not _is_ignored(each)):
            if not kind.matches(path.name):
                unread.append(UnreadInput(str(path), f"not {kind}"))
            elif path.is_file():
                found.append(path)
            else:
                reason = "a link to a missing file" if path.is_symlink() else "not a file"
                unread.append(UnreadInput(str(path), reason))
    return InputLedger(tuple(map(Input.from_path, sorted(found))), tuple(sorted(unread)))


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name in _MARKERS


def _find_objects(address: str, kind: FileFormat) -> InputLedger:
    """Return the object at `address`, or else the objects below it."""
    found = sorted(_list_objects(address))
    if exact := tuple(item for item in found if item.path == address):
        return InputLedger(exact)
    prefix = address.rstrip("/") + "/"
    below = [
        item
        for item in found
        if item.path.startswith(prefix)
        and not item.path.endswith("/")  # a folder in the console of S3
        and not any(map(_is_ignored, item.path.removeprefix(prefix).split("/")))
    ]
    return InputLedger(
        tuple(item for item in below if kind.matches(item.path)),
        tuple(UnreadInput(i.path, f"not {kind}") for i in below if not kind.matches(i.path)),
    )


def _list_objects(address: str) -> Iterator[Input]:
    """Yield all objects whose address starts with `address`."""
    from nearlinear.storage.s3 import S3Path

    path = absolute_path(address)
    assert isinstance(path, S3Path)
    for item in path.list_objects():
        changed = round(item["LastModified"].timestamp() * 1e9)
        yield Input(f"s3://{path.bucket}/{item['Key']}", item["Size"], changed)


def _nothing_to_read(path: str | Path, kind: FileFormat, unread: Sequence[UnreadInput]) -> str:
    if is_remote(path):
        return f"no object {path}, and no {kind} objects below it: check the address"
    seen = f", only {_describe_unread(unread)}" if unread else ""
    return f"no {kind} files under {path}{seen}: name the files themselves"


def _describe_unread(unread: Sequence[UnreadInput]) -> str:
    shown = ", ".join(f"{path} ({reason})" for path, reason in unread[:_UNREAD_SHOWN])
    more = len(unread) - _UNREAD_SHOWN
    return shown if more <= 0 else f"{shown} and {more} more"


def open_file(path: str | Path) -> io.RawIOBase:
    """Open a local file or an S3 object for unbuffered, seekable reading."""
    return RemoteFile(absolute_path(path)) if is_remote(path) else open(path, "rb", buffering=0)


class RemoteFile(io.RawIOBase):
    """A seekable file over an S3 object, fetched in ranges.

    Ranges are small after a seek and double during sequential reading. One range of at most
    `MAX_RANGE_BYTES` is held in memory.
    """

    def __init__(self, path: StoragePath):
        super().__init__()
        self._path, self._size = path, path.size()
        self._position = self._range_start = 0
        self._range, self._next_bytes = memoryview(b""), MIN_RANGE_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        into = memoryview(buffer).cast("B")
        if self._position >= self._size or not len(into):
            return 0
        if not self._range_start <= self._position < self._range_start + len(self._range):
            self._fetch(len(into))
        first = self._position - self._range_start
        taken = self._range[first : first + len(into)]
        into[: len(taken)] = taken
        self._position += len(taken)
        return len(taken)

    def _fetch(self, wanted: int) -> None:
        sequential = self._position == self._range_start + len(self._range)
        self._next_bytes = (
            min(2 * self._next_bytes, MAX_RANGE_BYTES) if sequential else MIN_RANGE_BYTES
        )
        size = min(max(self._next_bytes, wanted), MAX_RANGE_BYTES)
        end = min(self._position + size, self._size)
        self._range = memoryview(b"".join(self._path.stream(self._position, end)))
        self._range_start = self._position


def is_compressed(path: str | Path) -> bool:
    """Return True if a file can only be read from its start."""
    return _compression(path) is not None


def _compression(path: str | Path) -> str | None:
    return _COMPRESSIONS.get(Path(path).suffix.lower())


def split_by_files(inputs: Sequence[Input], target: int) -> list[InputSplit]:
    """Group whole files into splits of about `target` bytes; `end` is the index of a file."""
    splits, start, size = [], 0, 0
    for number, file in enumerate(inputs):
        size += file.bytes
        if size >= target or number == len(inputs) - 1:
            splits.append(InputSplit(start, 0, number + 1, size))
            start, size = number + 1, 0
    return splits


def inputs_of_split(inputs: Sequence[Input], split: InputSplit) -> Sequence[Input]:
    """Return the files of a split of `split_by_files`."""
    return inputs[split.input : split.input + 1 if split.end is None else split.end]


def split_by_lines(inputs: Sequence[Input], target: int) -> list[InputSplit]:
    """Cut each file into byte ranges of about `target` bytes that begin and end at line ends."""
    splits = []
    for number, file in enumerate(inputs):
        if is_compressed(file.path):
            splits.append(InputSplit(number, 0, None, file.bytes))
            continue
        start = 0
        with open_file(file.path) as stream:
            for cut in range(target, file.bytes + target, target):
                end = _next_line_start(stream, cut) if cut < file.bytes else file.bytes
                if end > start:
                    splits.append(InputSplit(number, start, end, end - start))
                    start = end
    return splits


def _next_line_start(stream: Any, cut: int) -> int:
    """Return the offset of the first line that starts at or after `cut`, or the file's size."""
    position = cut - 1
    stream.seek(position)
    while chunk := stream.read(65_536):
        found = chunk.find(b"\n")
        if found >= 0:
            return position + found + 1
        position += len(chunk)
    return position


def read_line_blocks(path: str | Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the complete lines in bytes [start, end) of a file, about 128 KiB at a time.

    Offsets are those of the uncompressed text. Raises `DataError` for a line of more than 1 GiB.
    """
    with open_uncompressed(path) as stream:
        if start:
            stream.seek(start)
        left = float("inf") if end is None else end - start
        pending: list[memoryview] = []  # start of a line whose end has not been read
        pending_bytes = 0
        while left > 0 and (chunk := stream.read(int(min(_CHUNK_BYTES, left)))):
            left -= len(chunk)
            after = chunk.rfind(b"\n") + 1
            if not after:
                pending.append(memoryview(chunk))
                pending_bytes += len(chunk)
                if pending_bytes > MAX_DOCUMENT_BYTES:
                    raise DataError(
                        f"{path} has a line of more than 1 GiB, and a line must fit into memory. "
                        "Cut it; write a JSON array as one object per line"
                    )
                continue
            block = b"".join((*pending, memoryview(chunk)[:after]))
            pending, pending_bytes = [memoryview(chunk)[after:]], len(chunk) - after
            yield block
            del block  # a block with a long line is large: hold one at a time
        if pending_bytes:
            yield b"".join(pending)


def split_lines(block: bytes) -> list[bytes]:
    r"""Split a block after each \n. Unlike bytes.splitlines, do not split at \r."""
    if b"\r" not in block:
        return block.splitlines(keepends=True)
    *lines, last = block.split(b"\n")
    return [line + b"\n" for line in lines] + ([last] if last else [])


def read_lines(path: str | Path, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the lines in bytes [start, end) of a file, with their line ends."""
    for block in read_line_blocks(path, start, end):
        yield from split_lines(block)


def read_chunks(path: str | Path) -> Iterator[bytes]:
    """Yield the uncompressed bytes of a file, 128 KiB at a time."""
    with open_uncompressed(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk


def decode_utf8(raw: bytes | bytearray, path: str | Path, offset: int = 0) -> str:
    """Decode bytes that start at `offset` of a file; drop a byte order mark at offset 0.

    Raises `DataError` for bytes that are not UTF-8.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise utf8_error(path, offset + error.start) from None
    return text if offset else text.removeprefix("\ufeff")


def utf8_error(path: str | Path, offset: int) -> DataError:
    """Return the error for a file with invalid UTF-8 at `offset`."""
    with open_file(path) as file:
        start = file.read(max(map(len, _SIGNATURES))) or b""
    for signature, kind in _SIGNATURES.items():
        if start.startswith(signature) and not is_compressed(path):
            return DataError(f"{path} is {kind}")
    return DataError(
        f"{path} is not UTF-8 text (byte {offset}): convert it, for example with "
        "`iconv -f latin1 -t utf-8`"
    )


_SIGNATURES = {
    b"\x1f\x8b": "a gzip file: rename it so that its name ends in .gz",
    b"BZh": "a bzip2 file: rename it so that its name ends in .bz2",
    b"\xfd7zXZ": "an xz file: rename it so that its name ends in .xz",
    b"\x28\xb5\x2f\xfd": "a zstd file: rename it so that its name ends in .zst",
    b"PK\x03\x04": "a zip archive: unpack it, and name the files in it",
    b"PAR1": "a Parquet file: read it with `nearlinear data prepare parquet`",
    b"\xff\xfe": "UTF-16 text: convert it, for example with `iconv -f utf-16 -t utf-8`",
}
"""First bytes of files that are often named by mistake."""


def describe_inputs(inputs: Sequence[Input]) -> str:
    """Return the names of the first files and the number of the others."""
    names = ", ".join(Path(file.path).name for file in inputs[:3])
    return names if len(inputs) <= 3 else f"{names} and {len(inputs) - 3} more files"


def uncompressed_bytes(inputs: Sequence[Input]) -> int | None:
    """Return the total size of the text, or None if a file is compressed."""
    if any(is_compressed(file.path) for file in inputs):
        return None
    return sum(file.bytes for file in inputs)


@contextmanager
def open_uncompressed(path: str | Path) -> Iterator[Any]:
    """Open a file and decompress it by its suffix. Raises `DataError` for a corrupt file."""
    compression = _compression(path)
    with open_file(path) as file:
        if compression is None:
            yield file
            return
        if not file.seek(0, io.SEEK_END):  # libraries decompress an empty file to empty text
            raise _corrupt_error(path, "the file is empty")
        file.seek(0)
        try:
            opener = _DECOMPRESSORS[compression]
            with opener(file if is_remote(path) else str(path)) as stream:
                yield stream
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if getattr(error, "errno", None) is not None:  # a file system error, which names it
                raise
            raise _corrupt_error(path, error) from None


def _open_zstd(compressed: Any) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(compressed, "zstd")


_DECOMPRESSORS: dict[str, Any] = {
    "gzip": gzip.open,
    "bzip2": bz2.open,
    "xz": lzma.open,
    "zstd": _open_zstd,
}


def _corrupt_error(path: str | Path, reason: object) -> DataError:
    text = " ".join(str(reason).split())
    return DataError(f"{path} is not a complete {_compression(path)} file ({text}): copy it again")
