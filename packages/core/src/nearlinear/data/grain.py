"""Adapter that exposes the windows of a dataset as a Grain data source.

    source = grain.MapDataset.source(nl.data.GrainSource(dataset)).shuffle(seed=0).repeat()
    share = grain.sharding.ShardOptions(rank, ranks)
    batches = grain.experimental.ElasticIterator(source, 24, share)

`nl.Loader` does not use Grain: its order is equally elastic, its state equally small, its cost per
window a fraction (`python -m ci.benchmarks.reader`), and it needs only numpy. Checked with Grain
0.2.18. This module does not import Grain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .dataset import TokenDataset
from .masking import NO_MASKS, Masks, batch_arrays
from .mixture import Mixture


class GrainSource:
    """Random-access Grain source. Element i is window i: the arrays [S] of `masking.make_batch`."""

    def __init__(self, dataset: TokenDataset | Mixture, masks: Masks = NO_MASKS):
        self.dataset, self.masks = dataset, masks

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self._getitems([index])[0]

    def _getitems(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Return several elements at once. Grain calls this method by its name."""
        found = batch_arrays(self.dataset, np.asarray(indices, dtype=np.int64), self.masks)
        return [{name: array[i] for name, array in found.items()} for i in range(len(indices))]

    def __repr__(self) -> str:
        return f"GrainSource({self.dataset!r})"
