"""Token shards in an S3 bucket, read through a block cache shared by all ranks of a node.

Shards are downloaded on demand in blocks of 4 MiB. Each block is checked against its xxh3_64 in the
manifest after the download and again on the first read by each process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .. import storage
from ..errors import DataError, StorageError
from .cache import BlockCache, BlockId, locked, write_cached
from .format import BLOCK_BYTES, MANIFEST_FILE, TOKENIZER_FILE, Manifest
from .source import DocumentIndex, ShardSource

AT_ONCE = 8
"""Concurrent block downloads. A single connection does not saturate the network."""
_MAPPED = 64
"""Blocks mapped by a process: 256 MiB of the page cache, which ranks share."""


class RemoteShards(ShardSource):
    """Token shards under the URL `address` (s3://bucket/prefix). S3 errors raise `DataError`."""

    downloads = True

    def __init__(self, address: str, split: str, cache: Path, cache_gib: float):
        with _data_errors():
            self._place = storage.as_path(address)
        raw = self._read_file(self._place / MANIFEST_FILE)
        super().__init__(str(self._place), split, Manifest.parse(raw, f"{address}/{MANIFEST_FILE}"))
        self._check_sizes()
        self.files = [str(self._place / shard.file) for shard in self.shards]
        self._copied: set[Path] = set()
        self._cache, self._blocks = cache, BlockCache(cache / "blocks", int(cache_gib * 2**30))
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="nearlinear-blocks")
        # At exit, Python ends the threads itself, before the modules that a shutdown needs.
        weakref.finalize(self, self._threads.shutdown, wait=False).atexit = False
        self._block = functools.lru_cache(_MAPPED)(
            functools.partial(_block, self._blocks, self._place, self.shards)
        )

    def tokens(self, shard: int) -> RemoteTokens:
        return RemoteTokens(self._block, shard, self.shards[shard].tokens, self.dtype)

    def documents(self, shard: int) -> DocumentIndex:
        found = self.shards[shard]
        path = self._cache / "indexes" / f"{found.idx_sha256}.idx"
        return DocumentIndex(self._copy(found.idx_file, path, found.idx_sha256), found.bytes)

    def tokenizer(self) -> Path:
        sha256 = self.manifest.tokenizer["sha256"]
        return self._copy(TOKENIZER_FILE, self._cache / "tokenizers" / f"{sha256}.json", sha256)

    def prefetch(self, extents: np.ndarray) -> np.ndarray:
        numbers = {
            (shard, block)
            for shard, start, end in extents.tolist()
            for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES))
        }
        if len(numbers) == 1:
            self._block(*numbers.pop())
        else:
            list(self._threads.map(lambda number: self._block(*number), sorted(numbers)))
        return extents[:0]

    def _check_sizes(self) -> None:
        with _data_errors():
            sizes = (self._place / self.split).file_sizes()
        for shard in self.shards:
            found = sizes.get(shard.file.rpartition("/")[2])
            if found != shard.bytes:
                fault = "is missing" if found is None else f"has {found} of {shard.bytes} bytes"
                raise DataError(f"{self._place / shard.file} {fault}: upload it again")
            if len(shard.blocks) != -(-shard.bytes // BLOCK_BYTES):
                raise DataError(
                    f"{self._place / shard.file} has no block checksums in the manifest, so "
                    "downloads cannot be checked: prepare the data again"
                )

    def _copy(self, name: str, path: Path, sha256: str) -> Path:
        """Copy the file `name` to `path` and return `path`. An existing copy is checked once."""
        if path in self._copied and path.exists():
            return path
        with locked(path.with_suffix(".lock")):
            if not (path.exists() and _has_sha256(path.read_bytes(), sha256)):
                raw = self._read_file(self._place / name)
                if not _has_sha256(raw, sha256):
                    raise DataError(
                        f"{self._place / name} is altered: its sha256 differs from the manifest; "
                        "upload it again"
                    )
                write_cached(path, raw)
        self._copied.add(path)
        return path

    def _read_file(self, place: storage.StoragePath) -> bytes:
        with _data_errors():
            try:
                return place.read()
            except FileNotFoundError:
                raise DataError(
                    f"{place} does not exist: give a prefix with token shards, and upload all of "
                    "their files (aws s3 sync)"
                ) from None


class RemoteTokens:
    """Tokens of a remote shard. Slicing downloads the blocks that it needs."""

    def __init__(self, block, shard: int, tokens: int, dtype: np.dtype):
        self._block, self._shard, self._tokens, self._dtype = block, shard, tokens, dtype

    def __len__(self) -> int:
        return self._tokens

    def __getitem__(self, part: slice) -> np.ndarray:
        size = self._dtype.itemsize
        start, stop, _ = part.indices(self._tokens)
        start, stop, found = start * size, stop * size, [np.empty(0, dtype=np.uint8)]
        for number in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            first = number * BLOCK_BYTES
            found.append(self._block(self._shard, number)[max(0, start - first) : stop - first])
        return (found[1] if len(found) == 2 else np.concatenate(found)).view(self._dtype)


def _block(cache: BlockCache, place: storage.StoragePath, shards: tuple, shard: int, number: int):
    """Return the memory-mapped bytes of a block, uint8."""
    found = shards[shard]
    first = number * BLOCK_BYTES
    end = min(first + BLOCK_BYTES, found.bytes)
    file = place / found.file

    def fetch() -> bytes:
        with _data_errors():
            return b"".join(file.stream(first, end))

    block_id = BlockId(found.sha256, number, end - first, found.blocks[number])
    return cache.block(block_id, fetch, f"block {number} of {file} (from byte {first})")


def _has_sha256(raw: bytes, sha256: str) -> bool:
    return hashlib.sha256(raw).hexdigest() == sha256


@contextlib.contextmanager
def _data_errors() -> Iterator[None]:
    """Convert storage errors to `DataError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} does not exist: upload it again") from None
    except (StorageError, OSError) as error:
        raise DataError(f"cannot read the data: {error}") from None
