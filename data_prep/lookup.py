"""Find text in a dataset, and tell the origin and the fate of documents."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_prep.documents import runs_of_documents
from data_prep.provenance import DUPLICATE, describe_table, read_table
from data_prep.storage_paths import absolute_path
from data_prep.tokenizer import TextTokenizer, tokenizer_of
from nearlinear.data.format import SPLITS, Manifest, Shard, read_index
from nearlinear.errors import DataError
from nearlinear.storage import StoragePath

_CONTEXT = 60  # bytes of text that are shown on either side of a match
_BATCH_TOKENS = 1 << 20


class Origin(NamedTuple):
    """A document that a preparation read."""

    input: str
    """Path of the file, or name of a source without files."""
    number: int
    """Number of the document in its input, from 1; for JSON lines without blank ones, the line."""
    fate: str
    """``train``, ``val``, or why the document was left out: ``blank``, a rule with its reason,
    ``exact duplicate``, ``near-duplicate``, or ``limit``."""
    document: int | None
    """Number of the document in train or val, from 1."""
    tokens: int | None
    """Tokens with end-of-text. None if a rule dropped the document."""
    fields: dict[str, str | None]
    """Fields that were kept with it."""
    like: str | None = None
    """Origin of the document for which a duplicate was left out, as ``input:number``."""

    def __str__(self) -> str:
        if self.document is None:
            place = f"left out: {self.fate}"
        else:
            place = f"document {self.document} of {self.fate}"
        tokens = "" if self.tokens is None else f", {self.tokens} tokens"
        like = "" if self.like is None else f" of {self.like}"
        fields = "".join(f"\n  {name}: {value}" for name, value in self.fields.items())
        return f"{self.input}:{self.number}  {place}{like}{tokens}{fields}"


class Match(NamedTuple):
    """A place where a text occurs."""

    split: str
    document: int
    """Number of the document in its split, from 1."""
    before: str
    text: str
    after: str
    origin: Origin | None
    """None in datasets of older versions."""


def why(folder: str | Path, reference: str) -> Origin:
    """Return the origin and the fate of a document.

    Args:
        folder: A dataset.
        reference: ``FILE:NUMBER``, a document of the source as `audit` prints it, where ``FILE``
            may be the end of a path; ``train:NUMBER``, a document of a split; or
            ``train@POSITION``, the document of a token, from 0.

    Raises:
        DataError: There is no such document, or the dataset does not know its documents.
    """
    manifest = Manifest.read(folder)
    split, at, position = reference.rpartition("@")
    if at and split in SPLITS and position.isdigit():
        number = _document_of_token(folder, manifest, split, int(position))
        return _of_split(folder, manifest, split, number)
    name, _, number = reference.rpartition(":")
    if not number.isdigit() or not name:
        raise DataError(
            f"{reference!r} is no document: write FILE:NUMBER, train:NUMBER or train@TOKEN"
        )
    if name in SPLITS:
        return _of_split(folder, manifest, name, int(number))
    place = _find_input(manifest, name)
    rows = read_table(folder, manifest, [("input", "==", place), ("number", "==", int(number))])
    if not rows:
        raise DataError(
            f"{_input_name(manifest, place)} has no document {number} that was read: numbers begin "
            "with 1, and a limit ends a preparation early"
        )
    return _origin(folder, manifest, rows[0])


def find(folder: str | Path, text: str) -> Iterator[Match]:
    """Yield the places where a text occurs, in the order of the documents.

    Raises:
        DataError: ``text`` is empty.
    """
    if not text:
        raise DataError("the text to find is empty: give at least one character")
    manifest, path = Manifest.read(folder), absolute_path(folder)
    as_bytes = _decoder(path, manifest)
    wanted = text.encode(errors="replace")
    is_known = describe_table(manifest) is not None
    for split, shards in manifest.splits.items():
        first = 1
        for shard in shards:
            for documents, ids, lengths in _batches(path, shard, manifest):
                data, ends = as_bytes(ids, lengths)
                begin_of_batch, origins = first + documents, {}
                for begin in _places(data, wanted):
                    end = begin + len(wanted)
                    place = int(np.searchsorted(ends, begin, side="right"))
                    if end > ends[place]:  # begins in one document and ends in another
                        continue
                    low = max(begin - _CONTEXT, int(ends[place - 1]) if place else 0)
                    high = min(end + _CONTEXT, int(ends[place]))
                    number = begin_of_batch + place
                    if is_known and not origins:
                        last = begin_of_batch + len(lengths) - 1
                        origins = _origins(folder, manifest, split, begin_of_batch, last)
                    yield Match(
                        split,
                        number,
                        data[low:begin].decode(errors="ignore"),
                        text,
                        data[end:high].decode(errors="ignore"),
                        origins.get(number),
                    )
            first += shard.documents


def _places(data: bytes, wanted: bytes) -> Iterator[int]:
    """Yield the places where bytes occur, each after the end of the one before."""
    place = data.find(wanted)
    while place >= 0:
        yield place
        place = data.find(wanted, place + len(wanted))


def _of_split(folder: str | Path, manifest: Manifest, split: str, number: int) -> Origin:
    found = _origins(folder, manifest, split, number, number)
    if not found:
        count = manifest.total("documents", split)
        raise DataError(f"{split} has no document {number}: it has {count:,}, from 1")
    return found[number]


def _origins(
    folder: str | Path, manifest: Manifest, split: str, first: int, last: int
) -> dict[int, Origin]:
    """Return the origin of each document of a split from ``first`` to ``last``."""
    conditions = [("fate", "==", split), ("document", ">=", first), ("document", "<=", last)]
    rows = read_table(folder, manifest, conditions)
    return {row["document"]: _origin(folder, manifest, row) for row in rows}


def _origin(folder: str | Path, manifest: Manifest, row: dict[str, Any]) -> Origin:
    like: list[dict[str, Any]] = []
    if row["fate"] == DUPLICATE:
        like = read_table(folder, manifest, [("hash", "==", row["hash"])])
    elif row["first"] is not None:
        like = read_table(folder, manifest, [("ordinal", "==", row["first"])])
    return Origin(
        _input_name(manifest, row["input"]),
        row["number"],
        row["fate"],
        row["document"],
        row["tokens"],
        row.get("fields", {}),
        f"{_input_name(manifest, like[0]['input'])}:{like[0]['number']}" if like else None,
    )


def _input_name(manifest: Manifest, number: int) -> str:
    inputs = manifest.plan["inputs"]
    return inputs[number]["path"] if inputs else manifest.source["name"]


def _find_input(manifest: Manifest, name: str) -> int:
    """Return the number of the input with a path or the end of a path."""
    count = max(len(manifest.plan["inputs"]), 1)
    names = [_input_name(manifest, number) for number in range(count)]
    exact = [number for number, each in enumerate(names) if each == name]
    found = exact or [number for number, each in enumerate(names) if each.endswith(f"/{name}")]
    if len(found) == 1:
        return found[0]
    if not found:
        raise DataError(f"{name} is no input of this dataset; the first one is {names[0]}")
    raise DataError(
        f"{len(found)} inputs end in {name}, such as {names[found[0]]} and {names[found[1]]}: "
        "write more of the path"
    )


def _document_of_token(folder: str | Path, manifest: Manifest, split: str, position: int) -> int:
    """Return the number, from 1, of the document with a token of a split."""
    first, left = 1, position
    for shard in manifest.splits[split]:
        if left < shard.tokens:
            ends = np.cumsum(read_index(folder, shard, manifest.dtype), dtype=np.int64)
            return first + int(np.searchsorted(ends, left, side="right"))
        first, left = first + shard.documents, left - shard.tokens
    raise DataError(f"{split} has {manifest.total('tokens', split):,} tokens, from 0")


def _batches(
    folder: StoragePath, shard: Shard, manifest: Manifest
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield runs of a shard's documents: the number of the first, from 0, token ids, lengths."""
    path = (folder / shard.file).path
    if path is None:
        stored = np.frombuffer((folder / shard.file).read(), manifest.dtype)
    else:
        stored = np.memmap(path, manifest.dtype, "r")
    lengths = read_index(folder, shard, manifest.dtype).astype(np.int64)
    for run, place in runs_of_documents(lengths, _BATCH_TOKENS):
        yield run.start, stored[place] % manifest.vocab_size, lengths[run]


_Decoder = Callable[[np.ndarray, np.ndarray], tuple[bytes, np.ndarray]]
"""Function of token ids and lengths of documents that returns their bytes, and where each ends."""


def _decoder(folder: StoragePath, manifest: Manifest) -> _Decoder:
    """Return a decoder: a table of the bytes of each token, if the tokenizer allows it."""
    tokenizer = tokenizer_of(folder, manifest)
    decoder = json.loads(tokenizer.json_text).get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return _table_decoder(tokenizer, manifest.vocab_size)

    def decode(ids: np.ndarray, lengths: np.ndarray) -> tuple[bytes, np.ndarray]:
        documents = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
        texts = [text.encode() for text in tokenizer.tokenizer.decode_batch(documents)]
        return b"".join(texts), np.cumsum([len(text) for text in texts])

    return decode


def _table_decoder(tokenizer: TextTokenizer, vocab_size: int) -> _Decoder:
    """Return a decoder for byte-level tokenizers, whose tokens are bytes."""
    table, bytes_of = [b""] * vocab_size, _bytes_of_characters()
    for token, number in tokenizer.tokenizer.get_vocab(with_added_tokens=False).items():
        table[number] = bytes(bytes_of[character] for character in token if character in bytes_of)
    for number, added in tokenizer.tokenizer.get_added_tokens_decoder().items():
        table[number] = b"" if added.special else added.content.encode()
    sizes = np.array([len(each) for each in table], np.int64)
    starts = np.cumsum(sizes) - sizes
    flat = np.frombuffer(b"".join(table), np.uint8)

    def decode(ids: np.ndarray, lengths: np.ndarray) -> tuple[bytes, np.ndarray]:
        size = sizes[ids]
        ends = np.cumsum(size)
        places = np.repeat(starts[ids] - (ends - size), size) + np.arange(ends[-1])
        return flat[places].tobytes(), ends[np.cumsum(lengths) - 1]

    return decode


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Return the byte of each character of GPT-2's vocabulary.

    Printable bytes are their own characters, and the others have those from 256 on, in order.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted({*range(256)} - {*printable})
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
