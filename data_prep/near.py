"""Which documents are near-duplicates of an earlier one, in bounded memory.

Documents that share a band of their signatures are alike, and so are those that are alike to the
same: of each such cluster the first stays. A band is dealt by its hashes into files small enough to
sort in memory; clusters are a forest of eight bytes a document, in a mapped file, whose roots are
the first documents.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_prep.filters import BANDS

_BUCKET_DOCUMENTS = 4 * 1024 * 1024
_ROW = np.dtype([("hash", "<u8"), ("ordinal", "<u8")])


def find(signatures: Iterable[np.ndarray], documents: int, folder: Path) -> np.ndarray:
    """Where a document is alike to one that came before: bool [documents], mapped in `folder`.

    `signatures` are those of the splits in order, uint64 [some documents, 14]; a row of zeros is
    alike to nothing.
    """
    parents = np.memmap(folder / "clusters", np.int64, "w+", shape=(max(documents, 1),))
    parents[:] = np.arange(len(parents))
    buckets = -(-documents // _BUCKET_DOCUMENTS) or 1
    with tempfile.TemporaryDirectory(dir=folder) as place:
        paths = [[Path(place, f"{band}-{number}") for number in range(buckets)]
                 for band in range(BANDS)]  # fmt: skip
        first = 0
        for rows in signatures:
            _deal(rows, first, paths)
            first += len(rows)
        for path in (path for band in paths for path in band if path.exists()):
            _join(np.fromfile(path, _ROW), parents)
            path.unlink()
    again = np.memmap(folder / "near-duplicates", bool, "w+", shape=(max(documents, 1),))
    again[:] = parents != np.arange(len(parents))
    return again[:documents]


def _deal(rows: np.ndarray, first: int, paths: list[list[Path]]) -> None:
    used = np.flatnonzero(rows.any(axis=1))
    for band, places in enumerate(paths):
        dealt = np.empty(len(used), _ROW)
        dealt["hash"], dealt["ordinal"] = rows[used, band], first + used
        bucket = dealt["hash"] % np.uint64(len(places))
        for number in np.unique(bucket):
            with open(places[int(number)], "ab") as file:
                file.write(dealt[bucket == number].tobytes())


def _join(rows: np.ndarray, parents: np.ndarray) -> None:
    """Join the documents of equal hashes; the root of each tree is its first document."""
    rows = rows[np.lexsort((rows["ordinal"], rows["hash"]))]
    same = np.flatnonzero(np.diff(rows["hash"]) == 0)
    for one, other in zip(rows["ordinal"][same].tolist(), rows["ordinal"][same + 1].tolist(),
                          strict=True):  # fmt: skip
        one, other = _root(parents, one), _root(parents, other)
        parents[max(one, other)] = min(one, other)


def _root(parents: np.ndarray, document: int) -> int:
    root = document
    while (parent := int(parents[root])) != root:
        root = parent
    while document != root:  # the next search is shorter
        parents[document], document = root, int(parents[document])
    return root
