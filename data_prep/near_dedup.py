"""Find near-duplicates by MinHash and locality-sensitive hashing, in bounded memory.

Documents that share a band of their MinHash signatures are joined with union-find; the first
document of each cluster is kept. The hashes of a band are partitioned into files that are small
enough to sort in memory. The union-find forest takes eight bytes per document in a mapped file; the
root of each tree is the first document of its cluster.

Signatures are those of FineWeb: 5-grams of words, 14 bands of 8 hashes. A pair that shares 72 % of
its 5-grams is found with probability 0.5, one that shares 90 % with 0.9996. A word is a run of
letters, digits and other characters that are no space or punctuation; case and the values of
digits do not count. In scripts without spaces (Chinese, Japanese), every character is a word. All
steps are array operations over the bytes of a batch.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

VERSION = 3
"""Version of signatures and clusters: a preparation is continued with no other."""

WORDS = 5
"""Words of a shingle."""

BANDS, HASHES = 14, 8
"""Bands of a signature, and hashes per band. Documents that share a band are near-duplicates."""

_PARTITION_DOCUMENTS = 4 * 1024 * 1024
_ROW = np.dtype([("hash", "<u8"), ("ordinal", "<u8")])
_PIECE = 1 << 20  # bytes of text hashed at a time
_BLOCK = 1 << 15  # shingles whose minima are computed at a time, in the processor's cache


def sign(texts: Sequence[str]) -> np.ndarray:
    """Return MinHash signatures, one hash per band: uint64 [documents, BANDS].

    Rows of documents with fewer than `WORDS` words are zero.
    """
    encoded = [text.lower().encode("utf-8", "surrogatepass") for text in texts]
    words = [*_words_of_documents(encoded)]
    counts = np.array([len(each) for each in words], np.int64)
    hashes = np.concatenate([*words, np.zeros(WORDS - 1, np.uint64)])
    shingles = np.zeros(len(hashes) - WORDS + 1, np.uint64)
    for place, factor in enumerate(_odd_numbers("words", WORDS)):
        shingles += hashes[place : place + len(shingles)] * factor
    within = np.maximum(counts - WORDS + 1, 0)  # shingles of each document
    first = np.cumsum(counts) - counts
    used = np.repeat(first - (np.cumsum(within) - within), within) + np.arange(within.sum())
    minima = _minima(_mix(shingles[used]), within)
    bands = minima.reshape(len(texts), BANDS, HASHES) * _odd_numbers("bands", HASHES)
    rows = np.maximum(_mix(bands.sum(axis=2)), 1)
    rows[within == 0] = 0
    return rows


def _minima(shingles: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the smallest value of each hash function per document.

    Args:
        shingles: Hashes of the shingles of all documents, uint64 [shingles].
        counts: Shingles of each document, int64 [documents].

    Returns:
        uint64 [documents, BANDS * HASHES]; the largest number for documents without shingles.
    """
    factors, terms = (_odd_numbers(name, BANDS * HASHES) for name in ("factors", "terms"))
    minima = np.full((len(counts), BANDS * HASHES), np.iinfo(np.uint64).max)
    document = np.repeat(np.arange(len(counts)), counts)
    for begin in range(0, len(shingles), _BLOCK):
        block, owner = shingles[begin : begin + _BLOCK], document[begin : begin + _BLOCK]
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        owners, hashed = owner[starts], np.empty_like(block)
        found = np.empty((len(factors), len(starts)), np.uint64)
        for number, (factor, term) in enumerate(zip(factors, terms, strict=True)):
            np.multiply(block, factor, out=hashed)
            np.add(hashed, term, out=hashed)
            np.minimum.reduceat(hashed, starts, out=found[number])
        minima[owners] = np.minimum(minima[owners], found.T)
    return minima


def _words_of_documents(encoded: Sequence[bytes]) -> Iterator[np.ndarray]:
    """Yield the hashes of each document's words, uint64 [words]."""
    begin = 0
    while begin < len(encoded):
        end, size = begin, 0
        while end < len(encoded) and size + len(encoded[end]) < _PIECE:
            size += len(encoded[end]) + 1
            end += 1
        if end == begin:  # a document larger than a piece
            yield np.concatenate([_hash_words(piece)[0] for piece in _pieces(encoded[begin])])
            begin += 1
            continue
        hashes, places = _hash_words(b"\n".join(encoded[begin:end]))
        ends = np.cumsum([len(each) + 1 for each in encoded[begin:end]])
        yield from np.split(hashes, np.searchsorted(places, ends[:-1]))
        begin = end


def _pieces(text: bytes) -> Iterator[bytes]:
    """Divide a text at spaces, or anywhere if there is none."""
    begin = 0
    while begin < len(text):
        end = len(text)
        if end - begin > _PIECE:
            end = text.rfind(b" ", begin + 1, begin + _PIECE)
            end = begin + _PIECE if end < 0 else end
        yield text[begin:end]
        begin = end


def _hash_words(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return hash and first byte of every word of a UTF-8 text: uint64 [words], int64 [words].

    The hash of a word is a polynomial in its bytes. Powers grow with the place in the text, so that
    the hashes of all words are differences of one running sum.
    """
    if not text:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    symbols = _symbols(text)
    is_word = symbols > 0
    alone = is_word & (symbols >= 0xE3) & (symbols <= 0xE9)  # first byte of a character of three
    after = np.zeros_like(is_word)
    after[3:] = alone[:-3]
    before = np.zeros_like(is_word)
    before[1:] = is_word[:-1]
    begins = is_word & (~before | alone | after)
    goes_on = np.zeros_like(is_word)
    goes_on[:-1] = is_word[1:] & ~begins[1:]
    starts, ends = np.flatnonzero(begins), np.flatnonzero(is_word & ~goes_on) + 1
    powers, inverses = _powers()
    sums = np.zeros(len(symbols) + 1, np.uint64)
    np.cumsum(symbols * powers[: len(symbols)], out=sums[1:])
    return _mix((sums[ends] - sums[starts]) * inverses[starts]), starts


def _symbols(text: bytes) -> np.ndarray:
    """Return the bytes of a lower-case text, 0 for spaces and punctuation, "0" for digits."""
    raw = np.frombuffer(text, np.uint8)
    symbols = _table()[raw]
    following = np.append(raw[1:], np.uint8(0))
    third = np.append(raw[2:], np.zeros(min(2, len(raw)), np.uint8))[: len(raw)]
    for lead, second, width in (
        (0xC2, (0x80, 0xBF), 2),  # Latin-1
        (0xE2, (0x80, 0x81), 3),  # general punctuation
        (0xE3, (0x80, 0x80), 3),  # of Chinese and Japanese
    ):
        found = (raw == lead) & (following >= second[0]) & (following <= second[1])
        _clear(symbols, np.flatnonzero(found), width)
    wide = (raw == 0xEF) & (following == 0xBC)  # full-width forms, of which some are punctuation
    wide &= (third <= 0x8F) | (third >= 0x9A) & (third <= 0xA0)
    _clear(symbols, np.flatnonzero(wide), 3)
    return symbols


def _clear(symbols: np.ndarray, places: np.ndarray, width: int) -> None:
    for offset in range(width):
        symbols[np.minimum(places + offset, len(symbols) - 1)] = 0


@cache
def _table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint8)
    for byte in range(128):
        character = chr(byte)
        table[byte] = ord("0") if character.isdigit() else byte if character.isalpha() else 0
    return table


@cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """Return the powers of an odd number modulo 2^64 and those of its inverse."""
    base = int(_odd_numbers("base", 1)[0])
    pair = []
    for number in (base, pow(base, -1, 2**64)):
        powers = np.full(_PIECE + 1, number, np.uint64)
        powers[0] = 1
        pair.append(np.multiply.accumulate(powers))
    return pair[0], pair[1]


@cache
def _odd_numbers(name: str, count: int) -> np.ndarray:
    """Return constants of a hash function, which are part of the format of signatures."""
    seed = int.from_bytes(name.encode(), "big")
    drawn = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(drawn + np.uint64(seed % 2**64)) | np.uint64(1)


def _mix(numbers: np.ndarray) -> np.ndarray:
    """Return splitmix64's finalizer of each number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def find_clusters(signatures: Iterable[np.ndarray], documents: int, folder: Path) -> np.ndarray:
    """Return the first document of the cluster of each document: int64 [documents].

    A document that is not its own first one is a near-duplicate.

    Args:
        signatures: Signatures of the input splits in order, uint64 [documents of a split, BANDS].
            A row of zeros matches nothing.
        documents: Number of documents.
        folder: Local folder for temporary files and for the mapped result.
    """
    parents = np.memmap(folder / "clusters", np.int64, "w+", shape=(max(documents, 1),))
    parents[:] = np.arange(len(parents))
    partitions = -(-documents // _PARTITION_DOCUMENTS) or 1
    with tempfile.TemporaryDirectory(dir=folder) as work:
        paths = [[Path(work, f"{band}-{number}") for number in range(partitions)]
                 for band in range(BANDS)]  # fmt: skip
        first = 0
        for rows in signatures:
            _partition(rows, first, paths)
            first += len(rows)
        for path in (path for band in paths for path in band if path.exists()):
            _join_equal_hashes(np.fromfile(path, _ROW), parents)
            path.unlink()
    for begin in range(0, documents, _PARTITION_DOCUMENTS):
        _find_roots(parents, np.arange(begin, min(begin + _PARTITION_DOCUMENTS, documents)))
    return parents[:documents]


def _partition(rows: np.ndarray, first: int, paths: list[list[Path]]) -> None:
    """Append the hashes of each band to the files of their partitions."""
    used = np.flatnonzero(rows.any(axis=1))
    for band, files in enumerate(paths):
        hashes = np.empty(len(used), _ROW)
        hashes["hash"], hashes["ordinal"] = rows[used, band], first + used
        partition = hashes["hash"] % np.uint64(len(files))
        for number in np.unique(partition):
            with open(files[int(number)], "ab") as file:
                file.write(hashes[partition == number].tobytes())


def _join_equal_hashes(rows: np.ndarray, parents: np.ndarray) -> None:
    """Join the trees of documents with equal hashes, keeping the first document as the root."""
    rows = rows[np.argsort(rows["hash"], kind="stable")]  # stable: ordinals stay in order
    same = np.flatnonzero(np.diff(rows["hash"]) == 0)
    ones = rows["ordinal"][same].astype(np.int64)
    others = rows["ordinal"][same + 1].astype(np.int64)
    while len(ones):
        roots = _find_roots(parents, ones), _find_roots(parents, others)
        apart = roots[0] != roots[1]
        ones = np.minimum(*roots)[apart]
        others = np.maximum(*roots)[apart]
        # Of several roots offered to one tree, the first document wins; the others try again.
        np.minimum.at(parents, others, ones)


def _find_roots(parents: np.ndarray, documents: np.ndarray) -> np.ndarray:
    roots = parents[documents]
    while not np.array_equal(above := parents[roots], roots):
        roots = above
    parents[documents] = roots  # path compression
    return roots
