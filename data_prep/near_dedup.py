"""Find near-duplicates by MinHash and locality-sensitive hashing, in bounded memory.

Documents that share a band of their MinHash signatures are joined with union-find; the first
document of each cluster is kept. The hashes of a band are partitioned into files that are small
enough to sort in memory. The union-find forest takes eight bytes per document in a mapped file; the
root of each tree is the first document of its cluster.
"""

import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

BANDS = 14
"""Bands of a signature, each reduced to one hash; documents that share one are near-duplicates.

FineWeb's MinHash: 5-grams of words, 14 bands of 8 hashes. A pair that shares 72 % of its 5-grams is
found with probability 0.5, and one that shares 80 % with 0.92 (datatrove's defaults).
"""

_PARTITION_DOCUMENTS = 4 * 1024 * 1024
_ROW = np.dtype([("hash", "<u8"), ("ordinal", "<u8")])


def minhash_config() -> Any:
    """Return datatrove's `MinhashConfig` with SHA-1.

    datatrove passes text to xxhash, which xxhash 3.6 and later reject.
    """
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.hashing import HashConfig

    return MinhashConfig(num_buckets=BANDS, hash_config=HashConfig(hash_fc="sha1"))


@cache
def get_signatures() -> "Signatures":
    """Return a cached `Signatures`; its word tokenizer takes a second to load."""
    return Signatures()


class Signatures:
    """MinHash signatures of documents, one hash per band."""

    def __init__(self):
        from datatrove.pipeline.dedup.minhash import MinhashDedupSignature

        self._block = MinhashDedupSignature(".", minhash_config())  # the folder is not written to

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return uint64 [documents, BANDS]; zeros for a document of fewer than five words."""
        rows = np.zeros((len(texts), BANDS), np.uint64)
        for row, text in zip(rows, texts, strict=True):
            shingles = self._block.get_shingles(text)
            if shingles.size:
                bands = np.asarray(self._block.get_signature(shingles), np.uint64)
                row[:] = [xxhash.xxh3_64_intdigest(band.tobytes()) for band in bands]
        return rows


def find_near_duplicates(
    signatures: Iterable[np.ndarray], documents: int, folder: Path
) -> np.ndarray:
    """Mark the documents that are near-duplicates of an earlier one: bool [documents].

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
    found = np.memmap(folder / "near-duplicates", bool, "w+", shape=(max(documents, 1),))
    found[:] = parents != np.arange(len(parents))
    return found[:documents]


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
    rows = rows[np.lexsort((rows["ordinal"], rows["hash"]))]
    same = np.flatnonzero(np.diff(rows["hash"]) == 0)
    pairs = zip(rows["ordinal"][same].tolist(), rows["ordinal"][same + 1].tolist(), strict=True)
    for first, second in pairs:
        first, second = _find_root(parents, first), _find_root(parents, second)
        parents[max(first, second)] = min(first, second)


def _find_root(parents: np.ndarray, document: int) -> int:
    root = document
    while (parent := int(parents[root])) != root:
        root = parent
    while document != root:  # path compression
        parents[document], document = root, int(parents[document])
    return root
