"""What a dataset holds, counted from the logs of its documents a split at a time."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from nearlinear.data.format import SPLITS
from nearlinear.data.packing import PACKINGS, kept
from nearlinear.data.plan import GROUP

SEQUENCE_LENGTHS = (512, 1024, 2048, 4096, 8192)
WAYS = (*PACKINGS, "truncate")
"""what `kept` tells of: each packing, and the rule that cuts documents and drops the short ones"""

BIN_EDGES = np.unique(np.round(2 ** (np.arange(64) / 2)).astype(np.int64))
"""the least tokens of each bin of the length histogram: powers of sqrt(2), int64 [bins]"""


@dataclass
class Statistics:
    """Sums over documents: call `add` with each split's entries, `add_shard` with each shard's
    lengths, then `finish`.
    """

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    longest: int = 0
    duplicates: Counter = field(default_factory=Counter)
    near_duplicates: Counter = field(default_factory=Counter)
    filtered: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self._histogram = np.zeros(len(BIN_EDGES), np.int64)
        self._of_side = dict.fromkeys(SPLITS, 0)
        self._kept = {side: {length: {} for length in SEQUENCE_LENGTHS} for side in SPLITS}

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

    def add_shard(self, side: str, lengths: np.ndarray) -> None:
        """Count what each packing keeps of the documents of a shard, as training packs them."""
        self._of_side[side] += int(lengths.sum(dtype=np.int64))
        for start in range(0, len(lengths), GROUP):
            for length, sums in self._kept[side].items():
                for way, found in kept(lengths[start : start + GROUP], length).items():
                    sums[way] = sums.get(way, 0) + found.tokens

    def add_dropped(
        self, filtered: dict[str, int], duplicates: np.ndarray, near_duplicates: np.ndarray
    ) -> None:
        """Count the documents that filters dropped, the entries of those whose text came before,
        kept or not, and of those that are alike to one before, which are dropped.
        """
        self.filtered.update(filtered)
        for counts, entries in ((self.duplicates, duplicates),
                                (self.near_duplicates, near_duplicates)):  # fmt: skip
            counts["documents"] += len(entries)
            counts["tokens"] += int(entries["tokens"].sum(dtype=np.int64))
            counts["text_bytes"] += int(entries["bytes"].sum(dtype=np.int64))

    def finish(self) -> dict:
        """As in the manifest. `kept` has, by side and by sequence length, the tokens that each way
        of `nearlinear.data.packing` keeps, and `tokens`, of how many.
        """
        last = int(np.flatnonzero(self._histogram)[-1]) + 1 if self.documents else 0
        by_side = {}
        for side, tokens in self._of_side.items():
            by_side[side] = {"tokens": tokens, "lengths": {
                str(length): {**sums, "concat": tokens // length * length}
                for length, sums in self._kept[side].items()
            }}  # fmt: skip
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "longest": self.longest,
            "duplicates": dict(self.duplicates),
            "near_duplicates": dict(self.near_duplicates),
            "filtered": dict(sorted(self.filtered.items())),
            "length_histogram": {
                "at_least": BIN_EDGES[:last].tolist(),
                "documents": self._histogram[:last].tolist(),
            },
            "kept": by_side,
        }
