"""Grain compatibility: ElasticIterator yields one order of windows for any number of ranks."""

import json

import numpy as np
import pytest

from nearlinear.data import GrainSource
from nearlinear.data.masking import Masks, make_batch
from tests.core.data.test_data_loader import WINDOWS, write_dataset
from tests.core.data.test_data_packing import folder as folder  # a fixture
from tests.core.data.test_data_packing import opened

grain = pytest.importorskip("grain")
from grain.experimental import ElasticIterator  # noqa: E402 - only if Grain is installed

GLOBAL_BATCH = 24


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return GrainSource(write_dataset(tmp_path_factory.mktemp("grain")))


def elastic_iterators(source, ranks, state=None):
    windows = grain.MapDataset.source(source).shuffle(seed=5).repeat()
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    made = [
        ElasticIterator(
            windows, GLOBAL_BATCH, grain.sharding.ShardOptions(rank, ranks), read_options=reading
        )
        for rank in range(ranks)
    ]
    for iterator in made if state else ():
        iterator.set_state(json.loads(json.dumps(state)))
    return made


def take(iterators, steps):
    """Return the sorted windows of each step over all ranks: Grain interleaves the ranks."""
    found = []
    for _ in range(steps):
        rows = [row for each in iterators for row in next(each)["input_ids"][:, 0] - 1]
        found.append(sorted(map(int, rows)))
    return found


def test_source_implements_the_grain_batched_read_protocol(source):
    from grain._src.python.dataset import base

    assert isinstance(source, grain.sources.RandomAccessDataSource)
    assert isinstance(source, base.SupportsBatchedReadRandomAccessDataSource)
    assert len(source) == WINDOWS


def test_elements_equal_rows_of_a_batch(folder):
    dataset, masks = opened(folder, packing="best_fit"), Masks(documents=True, eos=True)
    source = GrainSource(dataset, masks)
    expected = make_batch(dataset, np.arange(len(dataset)), masks)
    for index in (0, 5, len(dataset) - 1):
        found = source[index]
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name][index]) for name in found)


def test_order_is_independent_of_the_number_of_ranks(source):
    expected = take(elastic_iterators(source, 1), 12)
    assert sorted(sum(expected[:4], []))[:3] == [0, 1, 2], "windows come from everywhere"
    for ranks in (2, 3, 4, 8, 24):
        assert take(elastic_iterators(source, ranks), 3) == expected[:3]
    found, state = [], None
    for ranks, steps in ((4, 3), (3, 4), (8, 5)):
        iterators = elastic_iterators(source, ranks, state)
        found += take(iterators, steps)
        states = [iterator.get_state() for iterator in iterators]
        state = states[0]
        assert all(other == state for other in states)
    assert found == expected
