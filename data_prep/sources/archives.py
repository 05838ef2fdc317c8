"""WebDataset: tar archives whose consecutive members with the same key are one sample.

The key of `crawl/0001.meta.json` is `crawl/0001`, its extension `meta.json`. The convention is that
of https://github.com/webdataset/webdataset. Members are read as text or JSON only, never unpickled.
"""

import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tarfile import HeaderError
from typing import Any

from data_prep.sources.files import (
    MAX_DOCUMENT_BYTES,
    FileFormat,
    describe_inputs,
    find_inputs,
    inputs_of_split,
    open_uncompressed,
    split_by_files,
    uncompressed_bytes,
)
from data_prep.sources.source import InputSplit, Rows, Skipped, Source, documents_of_splits
from data_prep.sources.tables import TextField, line_error
from nearlinear.errors import DataError

ARCHIVES = FileFormat((".tar",))
KEY_FIELD = "__key__"
"""Name that WebDataset gives the key of a sample."""
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
_METADATA = re.compile(r"__[^/]*__")
_BATCH_CHARACTERS = 256 * 1024
_READ_BYTES = 128 * 1024
_SKIP = "or pass --skip-bad-lines to skip such samples"


@dataclass
class _Sample:
    path: str
    key: str
    members: dict[str, bytes | None] = field(default_factory=dict)
    """Content by extension, in the order of the archive. Unwanted members are not read: None."""
    fault: str = ""
    """Why the sample cannot be read."""

    def __str__(self) -> str:
        return f"sample {self.key!r} of {self.path}"


class _Archive(tarfile.TarFile):
    """An archive that keeps the reason why no further member was read."""

    end: tarfile.HeaderError | None = None


class _Member(tarfile.TarInfo):
    @classmethod
    def fromtarfile(cls, tarfile: _Archive) -> "_Member":  # type: ignore[override]
        try:
            return super().fromtarfile(tarfile)
        except HeaderError as error:
            tarfile.end = error
            raise


def webdataset(
    files: Sequence[str | Path],
    text_member: str = "txt",
    text_field: str = "text",
    skip_bad_lines: bool = False,
    allow_unread: bool = False,
    fields: Sequence[str] = (),
) -> Source:
    """Read the text of each sample of WebDataset archives.

    Args:
        files: Archives (`.tar`, also compressed as `.tar.gz`), or folders of them.
        text_member: Extension of the member that holds the document. A JSON object if it ends in
            `json`, otherwise UTF-8 text.
        text_field: Field of a JSON object that holds the document.
        skip_bad_lines: Skip samples without readable text and count them in a warning.
        allow_unread: Leave out other files below a folder instead of raising an error.
        fields: Extensions of other members to keep with each document as text; `__key__` is the key
            of the sample.

    Raises:
        DataError: A file is no complete archive, or a sample has no text.
    """
    inputs, unread = find_inputs(files, ARCHIVES, allow_unread)
    decode = _decoder(text_member.lower(), text_field)
    members = {text_member.lower(), *map(str.lower, fields)}

    def read(split: InputSplit, rows: Rows | None = None) -> Iterator[list[str]]:
        kept = fields if rows is not None else ()
        skipped = Skipped("bad samples")
        for file in inputs_of_split(inputs, split):
            texts, size = [], 0
            for sample in _read_samples(file.path, members):
                try:
                    text, values = decode(sample), tuple(_field(sample, name) for name in kept)
                except DataError as error:
                    if not skip_bad_lines:
                        raise
                    skipped.add(error)
                    continue
                if rows is not None:
                    rows.append(values)
                texts.append(text)
                size += len(text)
                if size >= _BATCH_CHARACTERS:
                    yield texts
                    texts, size = [], 0
            if texts:
                yield texts
        skipped.warn()

    def plan(target: int) -> list[InputSplit]:
        return split_by_files(inputs, target)

    settings = {"text_member": text_member, "text_field": text_field,
                "skip_bad_lines": skip_bad_lines}  # fmt: skip
    return Source(
        name="webdataset",
        documents=documents_of_splits(plan, read),
        description=describe_inputs(inputs),
        settings=settings,
        expected_bytes=uncompressed_bytes(inputs),
        inputs=inputs,
        unread=unread,
        runs=True,
        plan=plan,
        reader=read,
        fields=tuple(fields),
        spec={"kind": "webdataset", "files": [file.path for file in inputs], **settings},
    )


def _decoder(member: str, text_field: str) -> Callable[[_Sample], str]:
    """Return a function that decodes the text of a sample or raises `DataError`."""
    json_text = TextField(text_field) if member.endswith("json") else None

    def decode(sample: _Sample) -> str:
        if sample.fault:
            raise DataError(f"{sample.fault}, {_SKIP}")
        raw = sample.members.get(member)
        if raw is None:
            raise DataError(
                f"{sample} has no member {member!r}, only {', '.join(map(repr, sample.members))}: "
                f"name one of these with --text-member, {_SKIP}"
            )
        if json_text is None:
            return _decode_member(sample, member, raw).removeprefix("\ufeff")
        text = json_text.decode_line(raw)
        if text is None:
            raise line_error(raw, text_field, f"{member!r} of {sample}")
        return text

    return decode


def _field(sample: _Sample, name: str) -> str | None:
    """Return the text of a member to keep, or the key. Raises `DataError`."""
    if name == KEY_FIELD:
        return sample.key
    raw = sample.members.get(name.lower())
    return None if raw is None else _decode_member(sample, name, raw)


def _decode_member(sample: _Sample, name: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name!r} of {sample} is not UTF-8 text (byte {error.start}): convert it, {_SKIP}"
        ) from None


def _read_samples(path: str, wanted: set[str]) -> Iterator[_Sample]:
    """Yield the samples of an archive, and a faulty one for each member that belongs to none.

    Args:
        path: Archive.
        wanted: Extensions of the members to read.
    """
    current = None
    with _open_archive(path) as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every header
            if member.isdir() or _METADATA.fullmatch(member.name):
                continue
            name = _NAME.fullmatch(member.name)
            if name is None or not member.isfile():
                kind = "no extension" if name is None else "no content of its own (a link?)"
                yield _Sample(
                    path, member.name, fault=f"{path}: {member.name} has {kind}: remove it"
                )
                continue
            key, extension = name[1], name[2].lower()
            if current is None or key != current.key:
                if current is not None:
                    yield current
                current = _Sample(path, key)
            if extension in current.members:
                current.fault = f"{current} has two members {extension!r}: rename one"
            read = extension in wanted
            current.members[extension] = _content(archive, member, path) if read else None
        _check_end(archive, path)  # first: a cut archive may end with half a sample
        if current is not None:
            yield current


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> bytes:
    if member.size > MAX_DOCUMENT_BYTES:
        raise DataError(
            f"{path}: {member.name} exceeds 1 GiB, and a document must fit into memory: cut it"
        )
    stream = archive.extractfile(member)
    assert stream is not None, "a regular member has content"
    raw = stream.read()
    if len(raw) < member.size:
        raise tarfile.ReadError(f"{member.name} is cut off")
    return raw


def _check_end(archive: _Archive, path: str) -> None:
    """Raise an error unless the end marker was read, and nothing but zeros follows it.

    tarfile takes an archive that is cut or damaged at a member's header for a complete one, and
    ignores a second archive that was appended by `cat`.
    """
    if not isinstance(archive.end, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
        raise tarfile.ReadError(str(archive.end))
    stream: Any = archive.fileobj
    while chunk := stream.read(_READ_BYTES):
        if chunk.strip(b"\0"):
            raise DataError(
                f"{path} goes on after the end of its archive, as if several were joined: separate "
                "them"
            )


@contextmanager
def _open_archive(path: str) -> Iterator[_Archive]:
    """Open an archive as a stream. Raises `DataError` at once, or for damage found in the block."""
    with open_uncompressed(path) as stream:
        try:
            with _Archive.open(
                fileobj=stream, mode="r|", bufsize=_READ_BYTES, tarinfo=_Member
            ) as archive:
                yield archive
        except tarfile.TarError as error:
            raise DataError(
                f"{path} is no complete tar archive ({error}): copy or write it again"
            ) from None
