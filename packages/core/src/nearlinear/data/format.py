"""Token shards: the files that data preparation writes and training reads.

A shard is a pair: `shard-00000.bin`, raw little-endian token ids (the payload nanoGPT, OLMo and
datatrove read), and `shard-00000.idx`, a Megatron MMIDIDX version 1 index, so that Megatron-Core
opens the pair as it is. `index.json` lists every shard with its size and sha256, and is written
last: a folder without it is not a dataset. Needs numpy only; knows nothing of text.
"""

import functools
import hashlib
import json
import os
import struct
from array import array
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from ..errors import DataError

FORMAT_NAME = "nearlinear-token-shards"
FORMAT_VERSION = 1
MANIFEST_FILE = "index.json"
TOKENIZER_FILE = "tokenizer/tokenizer.json"
DEFAULT_SHARD_TOKENS = 64 * 1024 * 1024
SPLITS = ("train", "val")

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
_INDEX_DTYPE_CODE = {"uint16": 8, "uint32": 4}  # Megatron has no uint32: our ids fit its int32


def dtype_for(vocab_size: int) -> np.dtype:
    """The token dtype of a vocabulary: uint16 up to 65,536 entries, else uint32 (little-endian)."""
    return np.dtype("<u2") if vocab_size <= 65_536 else np.dtype("<u4")


def encode_index(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """The bytes of a `.idx` file whose documents have `lengths` tokens each (EOS counted).

    Layout: header, int32 lengths [n], int64 byte offsets [n], int64 document index [n + 1].
    Source: Megatron-LM, `megatron/core/datasets/indexed_dataset.py`, one sequence per document.
    """
    lengths = np.asarray(lengths, dtype="<i4")
    ends = np.cumsum(lengths, dtype="<i8") * dtype.itemsize
    offsets = ends - lengths.astype("<i8") * dtype.itemsize
    code, n = _INDEX_DTYPE_CODE[dtype.name], len(lengths)
    header = _INDEX_HEADER.pack(_INDEX_MAGIC, 1, code, n, n + 1)
    return header + lengths.tobytes() + offsets.tobytes() + np.arange(n + 1, dtype="<i8").tobytes()


@dataclass(frozen=True)
class Shard:
    """One `.bin`/`.idx` pair; `file` is the `.bin`, relative to the dataset's folder."""

    file: str
    tokens: int
    documents: int
    bytes: int
    sha256: str
    idx_bytes: int
    idx_sha256: str

    @property
    def idx_file(self) -> str:
        """The index beside `file`, relative to the dataset's folder."""
        return str(PurePosixPath(self.file).with_suffix(".idx"))


def read_index(folder: str | Path, shard: Shard, dtype: np.dtype) -> np.ndarray:
    """Document lengths in tokens, int32 [documents], EOS counted, from a shard's `.idx`.

    Raises `DataError` when the index does not describe exactly this shard.
    """
    raw = (Path(folder) / shard.idx_file).read_bytes()
    lengths = np.frombuffer(raw[_INDEX_HEADER.size :][: 4 * shard.documents], dtype="<i4")
    if int(lengths.sum(dtype=np.int64)) != shard.tokens or raw != encode_index(lengths, dtype):
        raise DataError(
            f"{Path(folder) / shard.idx_file} disagrees with {shard.file} "
            f"({shard.documents} documents, {shard.tokens} tokens): prepare the data again"
        )
    return lengths


class ShardWriter:
    """Writes the documents of one split as shards of about `shard_tokens` tokens.

    Memory stays bounded by one document plus 4 bytes per document of the open shard. A document
    is never cut between shards, so a shard is larger than `shard_tokens` only when one document
    is. Call `add` per document, then `close`; the shards are of use once a `Manifest` lists them.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str,
        *,
        vocab_size: int,
        eos_id: int,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
    ):
        if shard_tokens < 1:
            raise DataError(f"shard_tokens is {shard_tokens}: give at least 1")
        self.folder, self.split = Path(folder), split
        self.vocab_size, self.shard_tokens = vocab_size, shard_tokens
        self.dtype = dtype_for(vocab_size)
        self._eos = np.array([eos_id], dtype=self.dtype).tobytes()
        self._shards: list[Shard] = []
        self._file = None
        (self.folder / split).mkdir(parents=True, exist_ok=True)

    def add(self, ids) -> None:
        """Append one document: token ids [n] without EOS, which is added here.

        Raises `DataError` for an id outside the vocabulary.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise DataError(
                f"a document holds token id {int(ids.max())} but the vocabulary has "
                f"{self.vocab_size} entries: the tokenizer does not match its vocab_size"
            )
        count = len(ids) + 1
        if self._file is not None and self._tokens + count > self.shard_tokens:
            self._finish()
        if self._file is None:
            self._start()
        for data in (ids.astype(self.dtype).tobytes(), self._eos):
            self._file.write(data)
            self._hash.update(data)
        self._lengths.append(count)
        self._tokens += count

    def close(self) -> tuple[Shard, ...]:
        """Finish the open shard and return all shards of the split, in order."""
        if self._file is not None:
            self._finish()
        return tuple(self._shards)

    def _start(self) -> None:
        self._name = f"{self.split}/shard-{len(self._shards):05d}.bin"
        self._file = open(self.folder / self._name, "wb", buffering=1 << 20)
        self._hash, self._lengths, self._tokens = hashlib.sha256(), array("i"), 0

    def _finish(self) -> None:
        _sync_and_close(self._file)
        self._file = None
        index = encode_index(np.array(self._lengths), self.dtype)
        shard = Shard(
            file=self._name,
            tokens=self._tokens,
            documents=len(self._lengths),
            bytes=self._tokens * self.dtype.itemsize,
            sha256=self._hash.hexdigest(),
            idx_bytes=len(index),
            idx_sha256=hashlib.sha256(index).hexdigest(),
        )
        with open(self.folder / shard.idx_file, "wb") as file:
            file.write(index)
            _sync_and_close(file)
        self._shards.append(shard)


@dataclass(frozen=True)
class Manifest:
    """What `index.json` says. `settings` are identity; `source` and `libraries` provenance."""

    vocab_size: int
    eos_id: int
    tokenizer: dict  # name, file, sha256
    splits: dict[str, tuple[Shard, ...]]
    settings: dict = field(default_factory=dict)
    source: dict = field(default_factory=dict)
    libraries: dict = field(default_factory=dict)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the `.bin` files."""
        return dtype_for(self.vocab_size)

    @functools.cached_property
    def fingerprint(self) -> str:
        """64 hex digits over everything that decides which tokens are read, and nothing else.

        Library versions, machine and source description do not change it.
        """
        identity = {
            "format": [FORMAT_NAME, FORMAT_VERSION],
            "vocabulary": [self.vocab_size, self.eos_id, self.tokenizer["sha256"]],
            "settings": self.settings,
            "shards": {s: [[p.tokens, p.documents, p.sha256] for p in shards]
                       for s, shards in self.splits.items()},
        }  # fmt: skip
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @property
    def words(self) -> dict:
        """Whose ids the tokens are: the tokenizer's name, and the sha256 of its file."""
        return {name: self.tokenizer[name] for name in ("name", "sha256")}

    def total(self, name: str, split: str | None = None) -> int:
        """The sum of a shard field (`tokens`, `documents`, `bytes`) over one split, or all."""
        splits = self.splits.values() if split is None else [self.splits[split]]
        return sum(getattr(shard, name) for shards in splits for shard in shards)

    def write(self, folder: str | Path) -> None:
        """Write `index.json` so that it is either absent or complete, whatever happens."""
        totals = {s: {n: self.total(n, s) for n in ("tokens", "documents", "bytes")}
                  for s in self.splits}  # fmt: skip
        document = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "dtype": self.dtype.name,
            "fingerprint": self.fingerprint,
            "totals": totals,
            **asdict(self),
        }
        temporary = Path(folder) / (MANIFEST_FILE + ".tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, ensure_ascii=False)
            _sync_and_close(file)
        os.replace(temporary, Path(folder) / MANIFEST_FILE)

    @classmethod
    def read(cls, folder: str | Path) -> "Manifest":
        """Read and check `folder/index.json`. Raises `DataError` saying what to do instead."""
        path = Path(folder) / MANIFEST_FILE
        prepare = f"prepare it with `python -m data_prep botocore --out {folder}`"
        if not Path(folder).exists():
            raise DataError(f"no token shards at {folder}: {prepare}")
        if not path.is_file():
            raise DataError(
                f"{folder} holds no {MANIFEST_FILE}: it is not a folder of token shards, or its "
                f"preparation did not finish; {prepare}"
            )
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
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
            return cls._parse(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path} is damaged ({error}): copy it again, or prepare the data again"
            ) from None

    @classmethod
    def _parse(cls, document: dict) -> "Manifest":
        splits = {s: tuple(Shard(**p) for p in shards) for s, shards in document["splits"].items()}
        names = ("vocab_size", "eos_id", "tokenizer", "settings", "source", "libraries")
        manifest = cls(splits=splits, **{name: document[name] for name in names})
        for split, shards in splits.items():
            for number, shard in enumerate(shards):
                if shard.file != f"{split}/shard-{number:05d}.bin":
                    raise ValueError(f"unexpected file name {shard.file}")
                if shard.bytes != shard.tokens * manifest.dtype.itemsize or shard.tokens < 1:
                    raise ValueError(f"sizes of {shard.file} do not add up")
        if document["dtype"] != manifest.dtype.name:
            raise ValueError("dtype does not suit vocab_size")
        if document["fingerprint"] != manifest.fingerprint:
            raise ValueError("fingerprint does not match the contents")
        return manifest


def verify(
    folder: str | Path, full: bool = True, splits: tuple[str, ...] | None = None
) -> Manifest:
    """Check the files of a dataset against its manifest and return the manifest.

    Sizes are always checked; `full` also checks every index against its shard and the sha256 of
    every file (about 1.5 GB/s). Raises `DataError` naming the first file that is missing,
    truncated, altered or swapped, or whose index disagrees. `splits` limits the check.
    """
    folder, manifest = Path(folder), Manifest.read(folder)
    remedy = "copy it again or prepare the data again with --overwrite"
    shards = [p for s, ps in manifest.splits.items() if splits is None or s in splits for p in ps]
    for shard in shards:
        for name, size in ((shard.file, shard.bytes), (shard.idx_file, shard.idx_bytes)):
            if not (folder / name).is_file():
                raise DataError(f"{folder / name} is missing: {remedy}")
            found = (folder / name).stat().st_size
            if found != size:
                what = "truncated" if found < size else "too long"
                raise DataError(f"{folder / name} is {what}: {found} of {size} bytes; {remedy}")
    if not full:
        return manifest
    files = [(TOKENIZER_FILE, manifest.tokenizer["sha256"])]
    for shard in shards:
        read_index(folder, shard, manifest.dtype)
        files += [(shard.file, shard.sha256), (shard.idx_file, shard.idx_sha256)]
    owner = {digest: name for name, digest in files}
    for name, digest in files:
        if not (folder / name).is_file():
            raise DataError(f"{folder / name} is missing: {remedy}")
        with open(folder / name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            swapped = f" (it holds the content of {owner[found]})" if found in owner else ""
            raise DataError(f"{folder / name} is altered: its sha256 differs{swapped}; {remedy}")
    return manifest


def _sync_and_close(file) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
