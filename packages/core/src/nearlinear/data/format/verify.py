"""Compare token shards with their manifest and diagnose the first damaged file.

Tokens are checked with the xxh3_64 of each block, faster than they can be read. The sha256 of a
shard is computed only to diagnose a mismatch. Errors name the block and the flipped bit, the shard
a file was swapped with, or the first differing byte of an index.
"""

import hashlib
from contextlib import closing
from pathlib import Path

import numpy as np
import xxhash

from ... import storage
from ...errors import DataError
from ...storage import StoragePath
from .checksums import BLOCK_BYTES, flipped_bit
from .manifest import MANIFEST_FILE, TOKENIZER_FILE, Manifest
from .shards import Shard, encode_index, read_index

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
    try:
        raw = place.read()
    except FileNotFoundError:
        raise DataError(f"{place} is missing: {_REMEDY}") from None
    found = hashlib.sha256(raw).hexdigest()
    if found != manifest.tokenizer["sha256"]:
        raise DataError(
            f"{place} is not the tokenizer {manifest.tokenizer['name']} that made these tokens: "
            f"its sha256 is {found[:12]}..., not {manifest.tokenizer['sha256'][:12]}...; {_REMEDY}"
        )


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
