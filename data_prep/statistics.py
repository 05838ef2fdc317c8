"""What a dataset holds, counted from the logs of its documents a split at a time."""

from dataclasses import dataclass, field

import numpy as np

SEQUENCE_LENGTHS = (512, 1024, 2048, 4096, 8192)


BIN_EDGES = np.unique(np.round(2 ** (np.arange(64) / 2)).astype(np.int64))
"""the least tokens of each bin of the length histogram: powers of sqrt(2), int64 [bins]"""


@dataclass
class Statistics:
    """Sums over documents: call `add` with each split's entries, then `finish`."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    longest: int = 0
    duplicates: dict = field(
        default_factory=lambda: dict.fromkeys(("documents", "tokens", "text_bytes"), 0)
    )
    _histogram: np.ndarray = field(default_factory=lambda: np.zeros(len(BIN_EDGES), np.int64))
    _truncated: np.ndarray = field(
        default_factory=lambda: np.zeros(len(SEQUENCE_LENGTHS), np.int64)
    )
    _alone: np.ndarray = field(default_factory=lambda: np.zeros(len(SEQUENCE_LENGTHS), np.int64))

    def add(self, entries: np.ndarray) -> None:
        """Count the documents that are kept."""
        tokens = entries["tokens"].astype(np.int64)
        if not len(tokens):
            return
        self.documents += len(tokens)
        self.tokens += int(tokens.sum())
        self.text_bytes += int(entries["bytes"].sum(dtype=np.int64))
        self.longest = max(self.longest, int(tokens.max()))
        places = np.searchsorted(BIN_EDGES, tokens, side="right") - 1
        self._histogram += np.bincount(places, minlength=len(BIN_EDGES))
        for number, length in enumerate(SEQUENCE_LENGTHS):
            self._truncated[number] += length * int((tokens > length).sum())
            self._alone[number] += int(np.minimum(tokens, length).sum())

    def add_duplicates(self, entries: np.ndarray) -> None:
        """Count the documents whose text came before, kept or not."""
        self.duplicates["documents"] += len(entries)
        self.duplicates["tokens"] += int(entries["tokens"].sum(dtype=np.int64))
        self.duplicates["text_bytes"] += int(entries["bytes"].sum(dtype=np.int64))

    def finish(self) -> dict:
        """As in the manifest. `kept` has, by sequence length, the tokens that training sees:

        `concat` windows of the stream; `one_document` the first of each document, padded;
        `truncate` as the last, but without documents that do not fill a window.
        """
        last = int(np.flatnonzero(self._histogram)[-1]) + 1 if self.documents else 0
        kept = {
            str(length): {
                "concat": self.tokens // length * length,
                "one_document": int(self._alone[number]),
                "truncate": int(self._truncated[number]),
            }
            for number, length in enumerate(SEQUENCE_LENGTHS)
        }
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "longest": self.longest,
            "duplicates": self.duplicates,
            "length_histogram": {
                "at_least": BIN_EDGES[:last].tolist(),
                "documents": self._histogram[:last].tolist(),
            },
            "kept": kept,
        }
