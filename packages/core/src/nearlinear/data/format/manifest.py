"""Manifest of a dataset, `index.json`: its shards with checksums, and the origin of the tokens.

`verify` compares token shards with their manifest. Tokens are checked with the xxh3_64 of each
block, faster than they can be read. The sha256 of a shard is computed only to diagnose a mismatch.
Errors name the block and the flipped bit, the shard a file was swapped with, or the first differing
byte of an index.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ... import storage
from ...errors import DataError
from ...own_hash import NO_HASH, insert_hash, is_intact
from ...storage import StoragePath
from .shards import BLOCK_BYTES, Shard, dtype_for, encode_index, flipped_bit, read_index

FORMAT_NAME = "nearlinear-token-shards"
FORMAT_VERSION = 2
MANIFEST_FILE = "index.json"
TOKENIZER_FILE = "tokenizer/tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer/tokenizer_config.json"
_OWN_HASH = re.compile(rb'\{[^{}\[\]]{0,200}"sha256": "([0-9a-f]{64})"')


@dataclass(frozen=True)
class Manifest:
    """Contents of `index.json`. Only vocabulary, tokenizer and shards enter the fingerprint."""

    vocab_size: int
    eos_id: int
    tokenizer: dict[str, Any]
    """Name, file and sha256 of the tokenizer; config_sha256 of its `tokenizer_config.json`."""
    splits: dict[str, tuple[Shard, ...]]
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the preparation. Later runs into the same folder must use the same settings."""
    source: dict[str, Any] = field(default_factory=dict)
    """Name, description and versions of the text source."""
    libraries: dict[str, Any] = field(default_factory=dict)
    """Versions of the libraries used by the preparation."""
    plan: dict[str, Any] = field(default_factory=dict)
    """`inputs`: path, bytes, kept documents and kept tokens of each input file. `unread`: path and
    reason of each file below a named folder that was not read. `splits`, in order: input, start,
    end, number of documents read, xxh3_64 of the hashes of their texts. `documents`: file, bytes
    and sha256 of the table of documents."""
    statistics: dict[str, Any] = field(default_factory=dict)
    """Documents, tokens, text bytes, duplicates, length histogram, tokens kept by each packing."""

    marks_targets: bool = False
    """True if a stored id is larger by `vocab_size` where the token is no target of the loss."""

    pairs: bool = False
    """True if each document is a pair: an accepted conversation and its EOS, and a rejected one,
    whose first id is larger by twice `vocab_size`."""

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the `.bin` files."""
        return dtype_for(self.vocab_size * (1 + self.marks_targets + self.pairs))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of everything that determines the token stream, 64 hex digits.

        Settings, plan, statistics, library versions and source do not enter.
        """
        identity = {
            "format": [FORMAT_NAME, FORMAT_VERSION],
            "vocabulary": [self.vocab_size, self.eos_id, self.tokenizer["sha256"]],
            "shards": {s: [[p.tokens, p.documents, p.sha256] for p in shards]
                       for s, shards in self.splits.items()},
        }  # fmt: skip
        if self.marks_targets:  # a version that does not know the marks refuses the manifest
            identity["marks_targets"] = True
        if self.pairs:
            identity["pairs"] = True
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @property
    def tokenizer_id(self) -> dict[str, Any]:
        """Tokenizer that produced the token ids: its name and the sha256 of its file."""
        return {name: self.tokenizer[name] for name in ("name", "sha256")}

    def total(self, name: str, split: str | None = None) -> int:
        """Sum the shard field `name` (`tokens`, `documents` or `bytes`) over one or all splits."""
        splits = self.splits.values() if split is None else [self.splits[split]]
        return sum(getattr(shard, name) for shards in splits for shard in shards)

    def write(self, folder: str | Path | storage.StoragePath) -> None:
        """Write `index.json` atomically."""
        totals = {s: {n: self.total(n, s) for n in ("tokens", "documents", "bytes")}
                  for s in self.splits}  # fmt: skip
        document = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "sha256": NO_HASH,
            "dtype": self.dtype.name,
            "fingerprint": self.fingerprint,
            "totals": totals,
            **asdict(self),
        }
        (storage.as_path(folder) / MANIFEST_FILE).put(encode_with_hash(document))

    @classmethod
    def read(cls, folder: str | Path | storage.StoragePath) -> Manifest:
        """Read and check `index.json` of a folder or of `s3://bucket/prefix`.

        Raises:
            DataError: If the manifest is missing, damaged or of another version.
        """
        place = storage.as_path(folder)
        try:
            raw = (place / MANIFEST_FILE).read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise DataError(_no_manifest(place)) from None
        return cls.parse(raw, f"{place / MANIFEST_FILE}")

    @classmethod
    def parse(cls, raw: bytes, path: str | Path) -> Manifest:
        """Parse the bytes of an `index.json`. `path` appears in errors.

        Raises:
            DataError: If `raw` is not a valid manifest of this version.
        """
        prepare = "prepare the data again with `nearlinear data`"
        try:
            document = json.loads(raw)
            name, version = document["format"], document["version"]
        except (ValueError, TypeError, KeyError):
            raise DataError(
                f"{path} is not a token-shard manifest: name another folder, or {prepare}"
            ) from None
        if name != FORMAT_NAME or version != FORMAT_VERSION:
            raise DataError(
                f"{path} is {name!r} version {version}, this nearlinear reads {FORMAT_NAME!r} "
                f"version {FORMAT_VERSION}: {prepare}"
            )
        try:
            if not (has_own_hash(raw) or document.keys() <= _UNHASHED_KEYS):
                raise ValueError("its sha256 does not match: it has changed since it was written")
            return cls._parse(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path} is damaged ({error}): copy it again, or prepare the data again"
            ) from None

    @classmethod
    def _parse(cls, document: dict) -> Manifest:
        splits = {s: tuple(map(Shard.parse, shards)) for s, shards in document["splits"].items()}
        names = ("vocab_size", "eos_id", "tokenizer", "settings", "source", "libraries", "plan",
                 "statistics")  # fmt: skip
        marks = {name: document.get(name, False) for name in ("marks_targets", "pairs")}
        manifest = cls(splits=splits, **marks, **{name: document[name] for name in names})
        for split, shards in splits.items():
            for number, shard in enumerate(shards):
                if shard.file != f"{split}/shard-{number:05d}.bin":
                    raise ValueError(f"unexpected file name {shard.file}")
                if shard.bytes != shard.tokens * manifest.dtype.itemsize or shard.tokens < 1:
                    raise ValueError(f"bytes and tokens of {shard.file} are inconsistent")
        if document["dtype"] != manifest.dtype.name:
            raise ValueError("dtype does not match vocab_size")
        if document["fingerprint"] != manifest.fingerprint:
            raise ValueError("fingerprint does not match the contents")
        return manifest


_UNHASHED_KEYS = frozenset(Manifest.__dataclass_fields__) | {
    "format", "version", "dtype", "fingerprint", "totals"}  # fmt: skip
"""Keys of manifests of older versions, which have no sha256 of their own."""


def encode_with_hash(document: dict[str, Any]) -> bytes:
    """Encode a document as JSON with its own hash.

    Args:
        document: Has the key "sha256" at the front, behind short values only. Its value, `NO_HASH`,
            is replaced by the SHA-256 of the encoded document.
    """
    raw = json.dumps(document, indent=1, ensure_ascii=False).encode()
    return insert_hash(raw)


def has_own_hash(raw: bytes) -> bool:
    """Return True if ``raw`` was written by `encode_with_hash` and has not changed since."""
    found = _OWN_HASH.match(raw)
    return found is not None and is_intact(raw, found.span(1))


_TEXT_SUFFIXES = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".ndjson": "jsonl",
                  ".parquet": "parquet"}  # fmt: skip
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_MOST_LISTED = 1000


def text_source(path: Path) -> str:
    """Return the command of `nearlinear data` that reads ``path``, or "" if it holds no text.

    JSON lines whose first line has ``messages`` are conversations, and those with ``chosen`` and
    ``rejected`` are pairs of them.
    """
    files = [path] if path.is_file() else itertools.islice(path.rglob("*"), _MOST_LISTED)
    for file in sorted(files):
        name = Path(file.name.lower())
        name = name.with_suffix("") if name.suffix in _COMPRESSIONS else name
        kind = _TEXT_SUFFIXES.get(name.suffix, "")
        if kind and file.is_file():
            return (_kind_of_conversations(file) if kind == "jsonl" else "") or kind
    return ""


def _kind_of_conversations(file: Path) -> str:
    if file.suffix.lower() in _COMPRESSIONS:
        return ""
    with file.open("rb") as lines:
        first = lines.readline(2**16)
    if b'"chosen"' in first and b'"rejected"' in first:
        return "preference"
    return "chat" if b'"messages"' in first else ""


def _no_manifest(place: StoragePath) -> str:
    """Return the error for a place without a manifest, with the command that prepares it."""
    if not place.exists():
        return (
            f"no token shards at {place}: check the path, or prepare them, as in `nearlinear data "
            f"text my-texts --out {place}`"
        )
    if place.path is not None and (kind := text_source(place.path)):
        out = f"{str(place).rstrip('/')}-tokens"
        return (
            f"{place} holds text, and training reads token shards: prepare them with `nearlinear "
            f"data {kind} {place} --out {out}`, and set data.path to {out}"
        )
    return (
        f"{place} holds no {MANIFEST_FILE}: it is not a folder of token shards, or its preparation "
        "did not finish; repeat its `nearlinear data` command, or name another folder"
    )


_REMEDY = "copy it again or prepare the data again with --overwrite"


def verify(
    folder: str | Path | StoragePath, full: bool = True, splits: tuple[str, ...] | None = None
) -> Manifest:
    """Check the files of a dataset and return its manifest.

    Args:
        folder: Dataset folder, or `s3://bucket/prefix`.
        full: Check every block, every index and the tokenizer, in addition to file sizes.
        splits: Splits to check. None checks all of them.

    Raises:
        DataError: If a file is missing, truncated, altered (with block and byte), swapped or of
            another dataset.
    """
    folder = storage.as_path(folder)
    manifest = Manifest.read(folder)
    shards = [p for s, ps in manifest.splits.items() if splits is None or s in splits for p in ps]
    _check_sizes(folder, shards)
    if full:
        _check_tokenizer(folder, manifest)
        for shard in shards:
            _check_shard(folder, shard, manifest)
    return manifest


def verify_shard(folder: str | Path | StoragePath, shard: Shard, manifest: Manifest) -> None:
    """Check one shard of `manifest` in full, including its sizes. Raises `DataError`."""
    folder = storage.as_path(folder)
    _check_sizes(folder, [shard])
    _check_shard(folder, shard, manifest)


def _check_shard(folder: StoragePath, shard: Shard, manifest: Manifest) -> None:
    _check_blocks(folder, shard, manifest)
    raw = (folder / shard.idx_file).read()
    if hashlib.sha256(raw).hexdigest() != shard.idx_sha256:
        raise DataError(_describe_index_mismatch(folder, shard, manifest, raw))
    read_index(folder, shard, manifest.dtype)


def _check_sizes(folder: StoragePath, shards: list[Shard]) -> None:
    sizes_found = {}
    for side in {shard.file.rpartition("/")[0] for shard in shards}:
        sizes = (folder / side).file_sizes()
        sizes_found |= {f"{side}/{name}": size for name, size in sizes.items()}
    for shard in shards:
        for name, size in ((shard.file, shard.bytes), (shard.idx_file, shard.idx_bytes)):
            if name not in sizes_found:
                raise DataError(f"{folder / name} is missing: {_REMEDY}")
            if (found := sizes_found[name]) != size:
                fault = "truncated" if found < size else "too long"
                raise DataError(f"{folder / name} is {fault}: {found} of {size} bytes; {_REMEDY}")


def _check_tokenizer(folder: StoragePath, manifest: Manifest) -> None:
    place = folder / TOKENIZER_FILE
    found = _sha256_of(place)
    if found != manifest.tokenizer["sha256"]:
        raise DataError(
            f"{place} is not the tokenizer {manifest.tokenizer['name']} that made these tokens: "
            f"its sha256 is {found[:12]}..., not {manifest.tokenizer['sha256'][:12]}...; {_REMEDY}"
        )
    if expected := manifest.tokenizer.get("config_sha256"):
        config = folder / TOKENIZER_CONFIG_FILE
        if _sha256_of(config) != expected:
            raise DataError(f"{config} is altered: {_REMEDY}")


def _sha256_of(place: StoragePath) -> str:
    try:
        return hashlib.sha256(place.read()).hexdigest()
    except FileNotFoundError:
        raise DataError(f"{place} is missing: {_REMEDY}") from None


def _check_blocks(folder: StoragePath, shard: Shard, manifest: Manifest) -> None:
    expected = -(-shard.bytes // BLOCK_BYTES)
    if len(shard.blocks) != expected:
        raise DataError(
            f"{folder / MANIFEST_FILE} lists {len(shard.blocks)} of the {expected} blocks of "
            f"{shard.file}: {_REMEDY}"
        )
    buffer = memoryview(bytearray(min(BLOCK_BYTES, shard.bytes)))
    with closing((folder / shard.file).reader()) as file:
        for number, digest in enumerate(shard.blocks):
            block = _read_into(file, buffer)
            if xxhash.xxh3_64_hexdigest(block) != digest:
                raise DataError(
                    _describe_block_mismatch(folder, shard, manifest, number, bytes(block))
                )


def _read_into(file, buffer: memoryview) -> memoryview:
    """Read until `buffer` is full or the file ends. Returns the filled part of `buffer`."""
    filled = 0
    while filled < len(buffer) and (got := file.readinto(buffer[filled:])):
        filled += got
    return buffer[:filled]


def _describe_block_mismatch(
    folder: StoragePath, shard: Shard, manifest: Manifest, number: int, block: bytes
) -> str:
    """Describe the cause of a block mismatch: swapped shards, a flipped bit, or other damage."""
    path, start = folder / shard.file, number * BLOCK_BYTES
    digest = hashlib.sha256()
    for chunk in path.stream():
        digest.update(chunk)
    found = digest.hexdigest()
    if found == shard.sha256:
        return (
            f"{folder / MANIFEST_FILE} is damaged: its checksum of block {number} of {shard.file} "
            f"is wrong, the shard is as written; {_REMEDY}"
        )
    for other in (p for shards in manifest.splits.values() for p in shards):
        if found == other.sha256:
            return f"{path} is altered: it holds the content of {other.file}; {_REMEDY}"
    where = f"{path} is altered in block {number} (bytes {start} to {start + len(block)})"
    bit = None
    if number < len(shard.crcs):
        bit = flipped_bit(block, shard.crcs[number], shard.blocks[number])
    if bit is None:
        return f"{where}; {_REMEDY}"
    return f"{where}: bit {bit[1]} of byte {start + bit[0]} is flipped; {_REMEDY}"


def _describe_index_mismatch(
    folder: StoragePath, shard: Shard, manifest: Manifest, raw: bytes
) -> str:
    """Describe the cause of an index mismatch.

    The shard is known to be intact and ends each document with EOS, so the expected index can be
    rebuilt from it.
    """
    path, found = folder / shard.idx_file, hashlib.sha256(raw).hexdigest()
    for other in (p for shards in manifest.splits.values() for p in shards):
        if found == other.idx_sha256:
            return f"{path} is altered: it holds the content of {other.idx_file}; {_REMEDY}"
    tokens = np.frombuffer((folder / shard.file).read(), dtype=manifest.dtype)
    ends = np.flatnonzero(tokens == manifest.eos_id) + 1
    right = encode_index(np.diff(ends, prepend=0), manifest.dtype)
    if hashlib.sha256(right).hexdigest() != shard.idx_sha256:
        return f"{path} is altered: it disagrees with {shard.file}; {_REMEDY}"
    wrong = np.frombuffer(right, np.uint8) != np.frombuffer(raw, np.uint8)
    changed = np.flatnonzero(wrong)
    verdict = "is of another shard" if len(changed) > len(raw) // 20 else "is altered"
    return (
        f"{path} {verdict}: it disagrees with {shard.file} in {len(changed)} bytes, first at byte "
        f"{changed[0]}; {_REMEDY}"
    )
