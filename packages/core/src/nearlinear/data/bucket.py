"""A split of token shards in a bucket: ranges of their files, in a cache that all ranks share.

What comes is blocks of 4 MiB, each checked against its xxh3 in the manifest when it comes and when
a process first reads it from the cache. Nothing is downloaded that is not read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .. import storage
from ..errors import DataError, StorageError
from .block_cache import BlockCache, Wanted
from .cache import locked, put
from .documents import DocumentIndex
from .format import BLOCK_BYTES, MANIFEST_FILE, TOKENIZER_FILE, Manifest
from .split import Split

AT_ONCE = 8
"""blocks under way: one connection alone is slower than the network"""
_MAPPED = 64
"""blocks that a process keeps mapped: 256 MiB, of the page cache that ranks share"""


class Bucket(Split):
    """Shards under `address`, s3://bucket/prefix. What S3 says no to is a `DataError` too."""

    def __init__(self, address: str, split: str, cache: Path, cache_gib: float):
        with _told():
            self._place = storage.at(address)
        raw = self._whole(self._place / MANIFEST_FILE)
        super().__init__(str(self._place), split, Manifest.parse(raw, f"{address}/{MANIFEST_FILE}"))
        self._check_sizes()
        self.files = [str(self._place / shard.file) for shard in self.shards]
        self._copied: set[Path] = set()
        self._cache, self._blocks = cache, BlockCache(cache / "blocks", int(cache_gib * 2**30))
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="nearlinear-blocks")
        self._block = functools.lru_cache(_MAPPED)(
            functools.partial(_block, self._blocks, self._place, self.shards)
        )

    def tokens(self, shard: int) -> _Remote:
        return _Remote(self._block, shard, self.shards[shard].tokens, self.dtype)

    def documents(self, shard: int) -> DocumentIndex:
        found = self.shards[shard]
        path = self._cache / "indexes" / f"{found.idx_sha256}.idx"
        return DocumentIndex(self._copy(found.idx_file, path, found.idx_sha256), found.bytes)

    def tokenizer(self) -> Path:
        sha256 = self.manifest.tokenizer["sha256"]
        return self._copy(TOKENIZER_FILE, self._cache / "tokenizers" / f"{sha256}.json", sha256)

    def bring(self, extents: np.ndarray) -> np.ndarray:
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

    def __del__(self):
        with contextlib.suppress(AttributeError):  # of one that was never there
            self._threads.shutdown(wait=False)

    def _check_sizes(self) -> None:
        with _told():
            sizes = (self._place / self.split).sizes()
        for shard in self.shards:
            found = sizes.get(shard.file.rpartition("/")[2])
            if found != shard.bytes:
                what = "is missing" if found is None else f"has {found} of {shard.bytes} bytes"
                raise DataError(f"{self._place / shard.file} {what}: copy it there again")
            if len(shard.blocks) != -(-shard.bytes // BLOCK_BYTES):
                raise DataError(
                    f"{self._place / shard.file} has no checksums of its blocks in the manifest, "
                    "by which what comes is checked: prepare the data again"
                )

    def _copy(self, name: str, path: Path, sha256: str) -> Path:
        """A file under ``name``, whole, at ``path``: what is there is looked at once."""
        if path in self._copied and path.exists():
            return path
        with locked(path.with_suffix(".lock")):
            if not (path.exists() and _is(path.read_bytes(), sha256)):
                raw = self._whole(self._place / name)
                if not _is(raw, sha256):
                    raise DataError(
                        f"{self._place / name} is altered: its sha256 differs; copy it again"
                    )
                put(path, raw)
        self._copied.add(path)
        return path

    def _whole(self, place: storage.Place) -> bytes:
        with _told():
            try:
                return place.read()
            except FileNotFoundError:
                raise DataError(
                    f"{place} is not there: name a prefix with token shards, and copy them whole "
                    "(aws s3 sync)"
                ) from None


class _Remote:
    """A shard's tokens, to be sliced."""

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


def _block(cache: BlockCache, place: storage.Place, shards: tuple, shard: int, number: int):
    """A block's bytes, uint8, mapped."""
    found = shards[shard]
    first = number * BLOCK_BYTES
    end = min(first + BLOCK_BYTES, found.bytes)
    file = place / found.file

    def fetch() -> bytes:
        with _told():
            return b"".join(file.stream(first, end))

    wanted = Wanted(found.sha256, number, end - first, found.blocks[number])
    return cache.block(wanted, fetch, f"block {number} of {file} (from byte {first})")


def _is(raw: bytes, sha256: str) -> bool:
    return hashlib.sha256(raw).hexdigest() == sha256


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What storage says no to, as `DataError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{error.filename} is not there: copy it again") from None
    except (StorageError, OSError) as error:
        raise DataError(f"the data cannot be read: {error}") from None
