"""The windows of a dataset as a source of Grain, for who has a pipeline of Grain's.

    source = grain.MapDataset.source(nl.data.GrainSource(dataset)).shuffle(seed=0).repeat()
    share = grain.sharding.ShardOptions(rank, ranks)
    batches = grain.experimental.ElasticIterator(source, 24, share)

`nl.Loader` does not stand on it: its own order is as elastic, with a state as small, costs a
fraction for each window (``python -m ci.benchmarks.reader``), and needs numpy alone. Checked with
Grain 0.2.18, which is not imported here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .blend import Blend
from .dataset import TokenDataset
from .masking import NOTHING, Masks, arrays


class GrainSource:
    """A random-access source of Grain: element i is window i, as `masking.batch` has it, [S]."""

    def __init__(self, dataset: TokenDataset | Blend, masks: Masks = NOTHING):
        self.dataset, self.masks = dataset, masks

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._getitems([index])[0]

    def _getitems(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Several at once: by this name Grain asks for them."""
        found = arrays(self.dataset, np.asarray(indices, dtype=np.int64), self.masks)
        return [{name: array[i] for name, array in found.items()} for i in range(len(indices))]

    def __repr__(self) -> str:
        return f"GrainSource({self.dataset!r})"
