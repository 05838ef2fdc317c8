"""What is kept of each document while data is prepared: its hash, sizes, and so its place.

A split's log has one entry per document, in order, 24 bytes each. The hash, xxh3_128 of the text,
tells exact duplicates and, with the seed, who is held out for validation.
"""

from codecs import readbuffer_encode
from collections.abc import Sequence

import numpy as np
import xxhash

from data_prep.pieces import PIECE
from nearlinear.data.format.index import MOST_TOKENS
from nearlinear.errors import DataError

TRAIN, VAL, DROPPED = 0, 1, 2

LOG = np.dtype([("high", "<u8"), ("low", "<u8"), ("bytes", "<u4"), ("tokens", "<u4")])
"""the text's hash in two halves; bytes of UTF-8; tokens with EOS"""


def describe(texts: Sequence[str]) -> np.ndarray:
    """The log's entries of documents, `tokens` still 0: `LOG` [documents].

    Raises `UnicodeEncodeError` for half of a surrogate pair, and `DataError` for a text that may
    have more tokens than an index counts to: a token is a byte, or more.
    """
    entries = np.zeros(len(texts), LOG)
    # An encoder asks for the UTF-8 of a text once more: with what `str.encode` gives, it is made
    # again, while a buffer of a text stays with it. Long ones are encoded in pieces.
    raw = [text.encode() if len(text) > PIECE else readbuffer_encode(text)[0] for text in texts]
    sizes = np.fromiter(map(len, raw), np.int64, len(raw))
    if (longest := int(sizes.max(initial=0))) >= MOST_TOKENS:
        raise DataError(
            f"a document has {longest} bytes, of which there may be {MOST_TOKENS - 1}: cut it "
            "before (plain text: --document paragraph or line)"
        )
    digests = b"".join(map(xxhash.xxh3_128_digest, raw))
    halves = np.frombuffer(digests, ">u8").reshape(-1, 2)
    entries["high"], entries["low"], entries["bytes"] = halves[:, 0], halves[:, 1], sizes
    return entries


def hashes(entries: np.ndarray) -> bytes:
    """The texts' hashes alone, one after another: what a text is known by."""
    return np.stack([entries["high"], entries["low"]], axis=1).tobytes()


def split_hash(entries: np.ndarray, seed: int) -> np.ndarray:
    """Uniform in [0, 2**64) for each entry, from text and seed alone: uint64 [documents].

    SplitMix64's output step over the hash and the seed (Steele, Lea, Flood 2014).
    """
    step = np.uint64((seed * 0x9E3779B97F4A7C15) % 2**64)
    mixed = entries["low"] + step
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def places(entries: np.ndarray, seed: int, threshold: int) -> np.ndarray:
    """`VAL` where the split hash is below `threshold` (at most 2**64), else `TRAIN`: uint8."""
    if threshold <= 0 or threshold >= 2**64:
        return np.full(len(entries), VAL if threshold > 0 else TRAIN, np.uint8)
    return (split_hash(entries, seed) < np.uint64(threshold)).astype(np.uint8)
