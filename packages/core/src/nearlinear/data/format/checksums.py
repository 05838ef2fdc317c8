"""Checksums of a shard: sha256 of the whole is its identity, xxh3 and CRC-32 are of each block.

xxh3_64 tells at many GB/s whether a block of 4 MiB is as written, so a reader can check just the
blocks it fetches. A CRC is linear, so the two CRCs of a block in which one bit flipped tell which.
"""

import hashlib
import zlib

import xxhash

BLOCK_BYTES = 4 * 1024 * 1024

_ONES = 0xFFFFFFFF
_STRIDE = 2048


class Checksums:
    """All checksums of a stream of bytes, in one pass."""

    def __init__(self):
        self.blocks: list[str] = []
        """xxh3_64 of each finished block, 16 hex digits"""
        self.crcs: list[str] = []
        """CRC-32 of each finished block, 8 hex digits"""
        self._sha256, self._room = hashlib.sha256(), BLOCK_BYTES
        self._block, self._crc = xxhash.xxh3_64(), 0

    def update(self, data) -> None:
        """Go on with `data`, anything that has a buffer."""
        data = memoryview(data).cast("B")
        self._sha256.update(data)
        while len(data):
            piece, data = data[: self._room], data[self._room :]
            self._block.update(piece)
            self._crc = zlib.crc32(piece, self._crc)
            self._room -= len(piece)
            if not self._room:
                self._end_block()

    def finish(self) -> dict:
        """`sha256`, `blocks` and `crcs` of all of it, as fields of a `Shard`."""
        if self._room < BLOCK_BYTES:
            self._end_block()
        sha256 = self._sha256.hexdigest()
        return {"sha256": sha256, "blocks": tuple(self.blocks), "crcs": tuple(self.crcs)}

    def _end_block(self) -> None:
        self.blocks.append(self._block.hexdigest())
        self.crcs.append(f"{self._crc:08x}")
        self._block, self._crc, self._room = xxhash.xxh3_64(), 0, BLOCK_BYTES


def flipped_bit(block: bytes, crc: str, xxh3: str) -> tuple[int, int] | None:
    """Byte and bit whose flip makes `block` what its checksums were taken of; None if no one does.

    A flip of bit b in byte j changes the CRC by Z^(n-1-j) t(b): Z is the step over a zero byte, t
    the table's entry. Steps of 1 from the change meet steps of 2048 from the entries: about
    20,000 in sum for 4 MiB. The answer is checked against the block's xxh3_64.
    """
    change = zlib.crc32(block) ^ int(crc, 16)
    if not change:
        return None
    entries = [(zlib.crc32(bytes([1 << bit]), _ONES) ^ _ONES, bit) for bit in range(8)]
    met = {}
    for stride in range(len(block) // _STRIDE + 2):
        for entry, bit in entries:
            met[entry] = (stride * _STRIDE, bit)
        entries = [(_skip_zeros(entry, _STRIDE), bit) for entry, bit in entries]
    for steps in range(_STRIDE):
        if change in met:
            zeros, bit = met[change]
            byte = len(block) - 1 - (zeros - steps)
            if 0 <= byte < len(block):
                mended = bytearray(block)
                mended[byte] ^= 1 << bit
                if xxhash.xxh3_64_hexdigest(mended) == xxh3:
                    return byte, bit
        change = _skip_zeros(change, 1)
    return None


def _skip_zeros(register: int, count: int) -> int:
    """The CRC register after `count` zero bytes more."""
    return zlib.crc32(bytes(count), register ^ _ONES) ^ _ONES
