"""Compare a folder of token shards with its manifest, and say what exactly is wrong.

Tokens are checked by the xxh3_64 of their blocks, faster than they can be read; the sha256 of a
shard is taken only to tell what else it holds. Each file is named by what is known of it: the
block and the bit that flipped, the shard it was swapped with, the byte where an index departs.
"""

import hashlib
from contextlib import closing
from pathlib import Path

import numpy as np
import xxhash

from ... import storage
from ...errors import DataError
from ...storage import Place
from .checksums import BLOCK_BYTES, flipped_bit
from .index import encode_index
from .manifest import MANIFEST_FILE, TOKENIZER_FILE, Manifest
from .shards import Shard, read_index

_REMEDY = "copy it again or prepare the data again with --overwrite"


def verify(
    folder: str | Path | Place, full: bool = True, splits: tuple[str, ...] | None = None
) -> Manifest:
    """Check the files of a dataset, in a folder or under `s3://bucket/prefix`, and return its
    manifest.

    Sizes are always checked; `full` also checks every block of every shard, every index against
    its shard, and the tokenizer. Raises `DataError` naming the first file that is missing,
    truncated, altered (with block and byte), swapped or of another dataset. `splits` limits it.
    """
    folder = storage.at(folder)
    manifest = Manifest.read(folder)
    shards = [p for s, ps in manifest.splits.items() if splits is None or s in splits for p in ps]
    _check_sizes(folder, shards)
    if full:
        _check_tokenizer(folder, manifest)
        for shard in shards:
            _check_shard(folder, shard, manifest)
    return manifest


def verify_shard(folder: str | Path | Place, shard: Shard, manifest: Manifest) -> None:
    """Check one shard of `manifest` in full, sizes included. Raises `DataError`."""
    folder = storage.at(folder)
    _check_sizes(folder, [shard])
    _check_shard(folder, shard, manifest)


def _check_shard(folder: Place, shard: Shard, manifest: Manifest) -> None:
    _check_blocks(folder, shard, manifest)
    raw = (folder / shard.idx_file).read()
    if hashlib.sha256(raw).hexdigest() != shard.idx_sha256:
        raise DataError(_about_index(folder, shard, manifest, raw))
    read_index(folder, shard, manifest.dtype)


def _check_sizes(folder: Place, shards: list[Shard]) -> None:
    there = {}
    for side in {shard.file.rpartition("/")[0] for shard in shards}:
        sizes = (folder / side).sizes()
        there |= {f"{side}/{name}": size for name, size in sizes.items()}
    for shard in shards:
        for name, size in ((shard.file, shard.bytes), (shard.idx_file, shard.idx_bytes)):
            if name not in there:
                raise DataError(f"{folder / name} is missing: {_REMEDY}")
            if (found := there[name]) != size:
                what = "truncated" if found < size else "too long"
                raise DataError(f"{folder / name} is {what}: {found} of {size} bytes; {_REMEDY}")


def _check_tokenizer(folder: Place, manifest: Manifest) -> None:
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


def _check_blocks(folder: Place, shard: Shard, manifest: Manifest) -> None:
    expected = -(-shard.bytes // BLOCK_BYTES)
    if len(shard.blocks) != expected:
        raise DataError(
            f"{folder / MANIFEST_FILE} lists {len(shard.blocks)} of the {expected} blocks of "
            f"{shard.file}: {_REMEDY}"
        )
    buffer = memoryview(bytearray(min(BLOCK_BYTES, shard.bytes)))
    with closing((folder / shard.file).reader()) as file:
        for number, digest in enumerate(shard.blocks):
            block = _fill(file, buffer)
            if xxhash.xxh3_64_hexdigest(block) != digest:
                raise DataError(_about_block(folder, shard, manifest, number, bytes(block)))


def _fill(file, buffer: memoryview) -> memoryview:
    """The next bytes of a file, as many as `buffer` holds or the file still has."""
    filled = 0
    while filled < len(buffer) and (got := file.readinto(buffer[filled:])):
        filled += got
    return buffer[:filled]


def _about_block(folder: Place, shard: Shard, manifest: Manifest, number: int, block: bytes) -> str:
    """Why a block is not as written: another shard's content, a flipped bit, or any change."""
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


def _about_index(folder: Place, shard: Shard, manifest: Manifest, raw: bytes) -> str:
    """Why an index is not the one of its shard. The shard is known to be intact: it ends documents
    with EOS, so what the index must say can be told from it."""
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
    foreign = "is of another shard" if len(changed) > len(raw) // 20 else "is altered"
    return (
        f"{path} {foreign}: it disagrees with {shard.file} in {len(changed)} bytes, first at byte "
        f"{changed[0]}; {_REMEDY}"
    )
