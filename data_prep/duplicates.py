"""Which documents are exact duplicates of an earlier one, in bounded memory.

The hashes of all documents are dealt by their first bits into files small enough to sort in
memory; in each the first of equal hashes stays. One byte per document, in a mapped file, says so.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_BUCKET_DOCUMENTS = 2 * 1024 * 1024
_ROW = np.dtype([("high", "<u8"), ("low", "<u8"), ("ordinal", "<u8")])


def find(logs: Iterable[np.ndarray], documents: int, folder: Path) -> np.ndarray:
    """Where a text is one that came before: bool [documents] over `logs`, mapped in `folder`.

    `logs` are the entries (`data_prep.documents.LOG`) of the splits, in order.
    """
    buckets = 1
    while buckets * _BUCKET_DOCUMENTS < documents:
        buckets *= 2
    again = np.memmap(folder / "duplicates", dtype=bool, mode="w+", shape=(max(documents, 1),))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        files = [open(Path(place, str(bucket)), "w+b") for bucket in range(buckets)]
        first = 0
        for entries in logs:
            rows = np.empty(len(entries), _ROW)
            rows["high"], rows["low"] = entries["high"], entries["low"]
            rows["ordinal"] = np.arange(first, first + len(entries), dtype=np.uint64)
            first += len(entries)
            bucket_of = rows["high"] % np.uint64(buckets)
            for bucket in np.unique(bucket_of):
                files[int(bucket)].write(rows[bucket_of == bucket].tobytes())
        for file in files:
            file.seek(0)
            rows = np.frombuffer(file.read(), _ROW)
            file.close()
            rows = rows[np.lexsort((rows["low"], rows["high"]))]  # stable: earlier ones first
            same = (np.diff(rows["high"]) == 0) & (np.diff(rows["low"]) == 0)
            again[rows["ordinal"][1:][same]] = True
    return again[:documents]
