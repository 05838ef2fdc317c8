"""Plain text files: a document is a file, a line, or a paragraph.

Paragraphs are read as a stream, so only one is in memory. Many small files share an input split.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from data_prep.sources.files import (
    MAX_DOCUMENT_BYTES,
    FileFormat,
    decode_utf8,
    describe_inputs,
    find_inputs,
    inputs_of_split,
    read_chunks,
    read_line_blocks,
    split_by_files,
    split_by_lines,
    uncompressed_bytes,
    utf8_error,
)
from data_prep.sources.source import (
    InputSplit,
    Source,
    documents_of_splits,
    single_document_batches,
)
from nearlinear.errors import DataError

TEXT_FILES = FileFormat((".txt", ".md"))
_PARAGRAPH_BREAK = re.compile(r"\n\s*\n")


def text(paths: Sequence[str | Path], document: str = "file", allow_unread: bool = False) -> Source:
    """Read plain UTF-8 text files, or folders of `.txt` and `.md` files, also compressed.

    Args:
        paths: Files and folders.
        document: Unit of a document: "file", "line", or "paragraph" (text between blank lines).
        allow_unread: Leave out other files below a folder instead of raising an error.

    Raises:
        DataError: A path is missing, a file is not UTF-8, or a document exceeds 1 GiB.
    """
    if document not in ("file", "line", "paragraph"):
        raise DataError(f"document is {document!r}: use 'file', 'line' or 'paragraph'")
    inputs, unread = find_inputs(paths, TEXT_FILES, allow_unread)
    for file in inputs if document == "file" else ():
        if file.bytes > MAX_DOCUMENT_BYTES:
            raise _too_long_error(file.path, document)

    def read(split: InputSplit) -> Iterator[list[str]]:
        path = inputs[split.input].path
        if document == "line":
            offset = split.start
            for block in read_line_blocks(path, offset, split.end):
                if not offset:
                    _refuse_archive(block, path)
                found = decode_utf8(block, path, offset).removesuffix("\n").split("\n")
                yield [line.rstrip("\r") for line in found]
                offset += len(block)
            return
        for file in inputs_of_split(inputs, split):
            found = [_read_file(file.path)] if document == "file" else _read_paragraphs(file.path)
            yield from single_document_batches(found)

    def plan(target: int) -> list[InputSplit]:
        return (
            split_by_lines(inputs, target) if document == "line" else split_by_files(inputs, target)
        )

    return Source(
        name="text",
        documents=documents_of_splits(plan, read),
        description=describe_inputs(inputs),
        settings={"document": document},
        expected_bytes=uncompressed_bytes(inputs),
        inputs=inputs,
        unread=unread,
        runs=document != "line",
        plan=plan,
        reader=read,
        spec={"kind": "text", "paths": [file.path for file in inputs], "document": document},
    )


def _read_file(path: str) -> str:
    raw = bytearray()
    for chunk in read_chunks(path):
        raw += chunk
        if len(raw) > MAX_DOCUMENT_BYTES:
            raise _too_long_error(path, "file")
    _refuse_archive(raw, path)
    return decode_utf8(raw, path)


def _read_paragraphs(path: str) -> Iterator[str]:
    pending, size = [], 0
    for block in _cut_after_words(_decode_chunks(path)):
        first, *others = _PARAGRAPH_BREAK.split(block)
        pending.append(first)
        size += len(first)
        for other in others:
            yield "".join(pending)
            pending, size = [other], len(other)
        if size > MAX_DOCUMENT_BYTES:
            raise _too_long_error(path, "paragraph")
    yield "".join(pending)


def _cut_after_words(texts: Iterable[str]) -> Iterator[str]:
    """Regroup consecutive texts so that a run of white space is never cut."""
    held = ""
    for text in texts:
        text = held + text
        words = text.rstrip()
        held = text[len(words) :]
        yield words
    yield held


def _decode_chunks(path: str) -> Iterator[str]:
    """Decode a file chunk by chunk, without its byte order mark. Raises `DataError`."""
    decoder, offset, mark = codecs.getincrementaldecoder("utf-8")(), 0, "\ufeff"
    for chunk in chain(read_chunks(path), [b""]):
        if not offset:
            _refuse_archive(chunk, path)
        pending, _ = decoder.getstate()
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise utf8_error(path, offset - len(pending) + error.start) from None
        offset += len(chunk)
        if text:
            yield text.removeprefix(mark)
            mark = ""


def _refuse_archive(start: bytes | bytearray, path: str) -> None:
    """Raise `DataError` for a web archive, whose HTTP headers and markup are no text."""
    if start.startswith(b"WARC/"):
        raise DataError(
            f"{path} is a web archive (WARC): extract the text of its pages first, for example "
            "with datatrove's WarcReader and Trafilatura"
        )


def _too_long_error(path: str, document: str) -> DataError:
    remedy = {
        "file": "pass --document paragraph or line",
        "paragraph": "pass --document line, or separate paragraphs by empty lines",
    }
    return DataError(
        f"{path} has a {document} of more than 1 GiB, and a document must fit into memory: "
        f"{remedy[document]}"
    )
