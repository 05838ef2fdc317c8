"""Plain text: files of which the whole, a line, or what stands between blank lines is a document.

Paragraphs come as a file is read: one of them is what is in memory. Small files are read many to a
split.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from data_prep.sources.files import (
    MOST_BYTES,
    chunks,
    decoded,
    describe,
    inputs_of,
    line_splits,
    not_utf8,
    plain_size,
    whole_lines,
)
from data_prep.sources.source import Input, Source, Split, of_files, one_by_one
from nearlinear.errors import DataError

_SUFFIXES = (".txt", ".md")
_BETWEEN = re.compile(r"\n\s*\n")


def text(paths: Sequence[str | Path], document: str = "file") -> Source:
    """Plain UTF-8 text: files, and folders searched for `.txt` and `.md` files.

    `document` says what one document is: a whole "file", a "line", or a "paragraph" (text between
    blank lines). Raises `DataError` for missing paths, for files that are not UTF-8, and for a
    document of more than 1 GiB.
    """
    if document not in ("file", "line", "paragraph"):
        raise DataError(f"document is {document!r}: use 'file', 'line' or 'paragraph'")
    inputs = inputs_of(paths, folders=_SUFFIXES)
    for file in inputs if document == "file" else ():
        if file.bytes > MOST_BYTES:
            raise _too_long(file.path, document)

    def read(split: Split) -> Iterator[list[str]]:
        path = inputs[split.input].path
        if document == "line":
            at = split.start
            for whole in whole_lines(path, at, split.end):
                found = decoded(whole, path, at).removesuffix("\n").split("\n")
                yield [line.rstrip("\r") for line in found]
                at += len(whole)
            return
        last = split.input + 1 if split.end is None else split.end
        for file in inputs[split.input : last]:
            found = [_whole(file.path)] if document == "file" else _paragraphs(file.path)
            yield from one_by_one(found)

    def plan(target: int) -> list[Split]:
        return line_splits(inputs, target) if document == "line" else _runs(inputs, target)

    return Source(
        name="text",
        documents=of_files(plan, read),
        description=describe(inputs),
        settings={"document": document},
        expected_bytes=plain_size(inputs),
        inputs=inputs,
        runs=document != "line",
        plan=plan,
        reader=read,
        spec={"kind": "text", "paths": [file.path for file in inputs], "document": document},
    )


def _whole(path: str) -> str:
    raw = bytearray()
    for chunk in chunks(path):
        raw += chunk
        if len(raw) > MOST_BYTES:
            raise _too_long(path, "file")
    return decoded(raw, path)


def _paragraphs(path: str) -> Iterator[str]:
    begun, size = [], 0
    for some in _at_words(_texts(path)):
        first, *others = _BETWEEN.split(some)
        begun.append(first)
        size += len(first)
        for other in others:
            yield "".join(begun)
            begun, size = [other], len(other)
        if size > MOST_BYTES:
            raise _too_long(path, "paragraph")
    yield "".join(begun)


def _at_words(texts: Iterable[str]) -> Iterator[str]:
    """Texts one after another, cut after words: white space is whole, with what comes after it."""
    held = ""
    for text in texts:
        text = held + text
        words = text.rstrip()
        held = text[len(words) :]
        yield words
    yield held


def _texts(path: str) -> Iterator[str]:
    """The text of a file, a little at a time, without a byte order mark. Raises `DataError`."""
    decoder, at, mark = codecs.getincrementaldecoder("utf-8")(), 0, "\ufeff"
    for chunk in chain(chunks(path), [b""]):
        pending, _ = decoder.getstate()
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise not_utf8(path, at - len(pending) + error.start) from None
        at += len(chunk)
        if text:
            yield text.removeprefix(mark)
            mark = ""


def _runs(inputs: Sequence[Input], target: int) -> list[Split]:
    """Whole files in runs of about `target` bytes: `end` is a number of a file."""
    splits, start, size = [], 0, 0
    for number, file in enumerate(inputs):
        size += file.bytes
        if size >= target or number == len(inputs) - 1:
            splits.append(Split(start, 0, number + 1, size))
            start, size = number + 1, 0
    return splits


def _too_long(path: str, document: str) -> DataError:
    remedy = {
        "file": "pass --document paragraph or line",
        "paragraph": "pass --document line, or put empty lines between what belongs together",
    }
    return DataError(
        f"{path} has a {document} of more than 1 GiB, and a document is in memory whole: "
        f"{remedy[document]}"
    )
