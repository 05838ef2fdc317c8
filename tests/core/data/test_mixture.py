"""Mixture of datasets: exact proportions and one order for any number of ranks."""

import json
import tomllib
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.config import schema
from nearlinear.config import train as train_config
from nearlinear.data.loader import BlockShuffle, Loader, evaluation_batches
from nearlinear.data.masking import Masks, make_batch
from nearlinear.data.mixture import PERIOD, Curriculum, Mixture, Proportions
from nearlinear.errors import ConfigError, DataError
from nearlinear.train import preflight
from tests.core.data.test_data_dataset import write_dataset as write_documents
from tests.core.data.test_data_loader import rows, take, write_dataset
from tests.core.data.test_data_packing import opened

WINDOWS = (61, 23, 40)
RANKS = (1, 2, 3, 4, 8, 24)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Three datasets. The first token of a row identifies its window within its source."""
    folder = tmp_path_factory.mktemp("mixture")
    return [write_dataset(folder / str(i), count) for i, count in enumerate(WINDOWS)]


def mixture(sources, weights=(0.5, 0.2, 0.3)):
    return Mixture(dict(zip(sources, weights, strict=True)))


@settings(max_examples=150, deadline=None)
@given(
    weights=st.lists(
        st.one_of(st.floats(1e-6, 1e6), st.integers(0, 40), st.sampled_from([0.1, 0.25, 1e-6])),
        min_size=1,
        max_size=8,
    ).filter(any),
    start=st.integers(0, 10**12),
)
def test_every_prefix_has_the_requested_proportions(weights, start):
    found = Proportions(weights)
    total = sum(Fraction(str(weight)) for weight in weights)
    for part, weight in zip(found.parts, weights, strict=True):
        assert Fraction(part, found.period) == Fraction(str(weight)) / total
    most = 1 if found.period <= PERIOD else 2
    samples = np.arange(start, start + 600)
    source, own = found.assign(samples)
    before = found.counts(start)
    assert before.sum() == start and found.counts(start + 600).sum() == start + 600
    for number, part in enumerate(found.parts):
        chosen = source == number
        assert own[chosen].tolist() == list(range(before[number], before[number] + chosen.sum()))
        counts = (before[number] + np.cumsum(chosen)).tolist()
        exact = [Fraction(g * part, found.period) for g in range(start + 1, start + 601)]
        assert all(abs(count - share) < most for count, share in zip(counts, exact, strict=True))


def test_weights_are_exact():
    assert Proportions([0.7, 0.2, 0.1]).parts == [7, 2, 1]
    assert Proportions([3, 1]).parts == [3, 1]
    rare = Proportions([1e-6, 1.0])
    assert rare.parts == [1, 10**6] and rare.counts(10**9).tolist() == [1000, 999_999_000]
    assert Proportions([1e-9, 1.0, 0]).counts(10**12).tolist() == [1000, 999_999_999_000, 0]
    for bad in ([1, -1], [0, 0], [float("nan")], [True, "1"]):
        with pytest.raises(DataError, match="number of at least 0, and one above"):
            Proportions(bad)
    with pytest.raises(DataError, match="source 2 has the weight 0: remove it"):
        Curriculum([(0, [1, 0])])


def test_a_curriculum_continues_each_source_where_it_was():
    stages = [(0, [1, 0, 1]), (100, [1, 3, 0]), (250, [1e-6, 1, 1])]
    found = Curriculum(stages)
    source, own = found.assign(np.arange(400))
    for number in range(3):
        its = own[source == number]
        assert its.tolist() == list(range(len(its)))  # without gaps or repetitions
        for samples in (0, 57, 100, 101, 250, 399):
            assert found.counts(samples)[number] == (source[:samples] == number).sum()
    assert found.counts(100).tolist() == [50, 0, 50]
    assert (found.counts(250) - found.counts(100)).tolist() == [37, 113, 0]
    with pytest.raises(DataError, match=r"begin at samples \[0, 9, 9\]: each must begin later"):
        Curriculum([(0, [1]), (9, [1]), (9, [1])])


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(
        st.sampled_from([0.0, 1e-4, 0.2, 0.5, 1.0, 3.0]), min_size=2, max_size=5
    ).filter(all),
    limits=st.data(),
)
def test_sources_end_at_their_limits(weights, limits):
    count = len(weights)
    limits = [limits.draw(st.one_of(st.none(), st.integers(1, 60))) for _ in weights]
    later = (40, [1.0] * count)
    free, found = Curriculum([(0, weights), later]), Curriculum([(0, weights), later], limits)
    end = 400 if found.end is None else min(found.end, 400)
    assert (found.end is None) == (None in limits)
    assert found.end is None or found.end == sum(limits)
    source, own = found.assign(np.arange(end))
    first = end
    for number, limit in enumerate(limits):
        its = own[source == number]
        assert its.tolist() == list(range(len(its)))
        if limit is not None:
            assert len(its) <= limit
            first = min(first, free._reaches(number, limit))
    assert np.array_equal(source[:first], free.assign(np.arange(first))[0])
    if found.end is not None:
        with pytest.raises(DataError, match=f"ends before sample {found.end}: raise data.max_ep"):
            found.assign(np.arange(found.end + 1))


def loaders(dataset, ranks, per_step=24):
    return [Loader(dataset, per_step // ranks, 1, r, ranks, seed=3) for r in range(ranks)]


def test_mixture_order_is_independent_of_the_number_of_ranks(sources):
    expected = take(loaders(mixture(sources), 1), 20)
    for ranks in RANKS[1:]:
        members = loaders(mixture(sources), ranks)
        assert take(members, 20) == expected
    assert members[0].epochs == mixture(sources).epochs(480)
    counts = Proportions((0.5, 0.2, 0.3)).counts(480)
    assert list(members[0].epochs.values()) == [c / n for c, n in zip(counts, WINDOWS, strict=True)]


def test_number_of_ranks_may_change_within_an_epoch(sources):
    """Use 4, 3 and 8 ranks in turn, with different step sizes."""
    expected = take(loaders(mixture(sources), 1, 1), 4 * 6 + 3 * 5 * 2 + 8 * 7)
    done, state = [], None
    for ranks, size, steps in ((4, 2, 3), (3, 5, 2), (8, 1, 7)):
        members = [Loader(mixture(sources), size, 1, r, ranks, seed=3) for r in range(ranks)]
        for loader in members:
            if state:
                loader.load_state_dict(state)
        done += take(members, steps)
        states = [json.loads(json.dumps(loader.state_dict())) for loader in members]
        state = states[0]
        assert all(other == state for other in states)
        assert state["next_sample"] == len(done)
    assert done == expected[: len(done)]


def test_each_source_completes_an_epoch_before_repeating(sources):
    dataset = mixture(sources)
    order = Loader(dataset, 1, 1, 0, 1, seed=3)
    windows = order._windows(0, 3 * sum(WINDOWS))
    of = np.searchsorted(dataset.offsets, windows, side="right") - 1
    for number, count in enumerate(WINDOWS):
        its = windows[of == number] - dataset.offsets[number]
        for epoch in range(len(its) // count):
            seen = its[epoch * count : (epoch + 1) * count]
            assert sorted(seen) == list(range(count))
        assert len(its) > count and its[:count].tolist() != list(range(count))


def test_state_of_another_mixture_is_rejected_with_the_difference(sources):
    state = Loader(mixture(sources), 2).state_dict()
    Loader(mixture(sources), 2).load_state_dict(json.loads(json.dumps(state)))
    with pytest.raises(
        DataError, match=r"source 2 was 0\.2 of .*1 \(.*is 0\.3 of .*, source 3 was"
    ):
        Loader(mixture(sources, (0.5, 0.3, 0.2)), 2).load_state_dict(state)
    with pytest.raises(DataError, match=r"source 3 was 0\.3 of .*2 \(.* and is none"):
        Loader(mixture(sources[:2], (0.5, 0.2)), 2).load_state_dict(state)
    with pytest.raises(DataError, match="cannot resume the data order: source 1 was none"):
        Loader(mixture(sources), 2).load_state_dict(Loader(sources[0], 2).state_dict())
    with pytest.raises(DataError, match="source 1 was 0.5 of"):
        Loader(sources[0], 2).load_state_dict(state)


def test_weights_may_change_from_the_current_position_on(sources):
    """Every sample is read once by a run on 4, then 3, then 8 ranks, with changed weights."""
    weights, later, last = (0.5, 0.2, 0.3), (48, (0, 1, 1)), (96, (1, 1, 0))

    def opened(*stages):
        return Mixture(dict(zip(sources, weights, strict=True)), stages)

    expected = take(loaders(opened(later, last), 1), 7)
    done, state = [], None
    for stages, ranks, steps in (((), 4, 2), ((later,), 3, 2), ((later, last), 8, 3)):
        members = loaders(opened(*stages), ranks)
        for loader in members:
            if state:
                loader.load_state_dict(state)
        done += take(members, steps)
        state = json.loads(json.dumps(members[0].state_dict()))
    assert done == expected
    with pytest.raises(DataError, match=r"the curriculum up to sample 168 was .*and is \[\] .new "
                       r"stages may begin at 672 tokens"):  # fmt: skip
        loaders(opened(), 1)[0].load_state_dict(state)


@pytest.mark.parametrize("ranks", [1, 4, 24])
def test_blocks_of_a_mixture_are_shuffled(sources, ranks):
    dataset = mixture(sources)
    blocks = BlockShuffle(block_mib=1, blocks=2)
    members = [Loader(dataset, 24 // ranks, 1, r, ranks, seed=3, blocks=blocks, read_ahead=1)
               for r in range(ranks)]  # fmt: skip
    steps = 3 * sum(WINDOWS) // 24
    read = []
    for _ in range(steps):
        rows_read = [row for loader in members for batch in next(loader) for row in rows(batch)]
        read.append(sorted(rows_read))
    alone = Loader(dataset, 24, 1, 0, 1, seed=3, blocks=blocks)
    assert read == [sorted(row for batch in next(alone) for row in rows(batch))
                    for _ in range(steps)]  # fmt: skip
    windows = alone._windows(0, steps * 24)
    of = np.searchsorted(dataset.offsets, windows, side="right") - 1
    for number, count in enumerate(WINDOWS):
        its = windows[of == number] - dataset.offsets[number]
        for epoch in range(len(its) // count):
            assert sorted(its[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_packed_blocks_are_read_once_per_epoch(tmp_path, monkeypatch):
    from nearlinear.data import packing

    monkeypatch.setattr(packing, "GROUP", 8)
    write_documents(tmp_path / "d", [9, 3, 21, 5, 16, 2] * 20, shard_tokens=300)
    dataset = opened(tmp_path, packing="best_fit", cache=tmp_path / "cache")
    starts = dataset.block_starts(1)
    assert len(starts) > 10 and starts[0] == 0
    loader = Loader(dataset, 1, seed=5, blocks=BlockShuffle(1, 3))
    windows = loader._windows(0, 2 * len(dataset))
    for epoch in np.split(windows, 2):
        assert sorted(epoch) == list(range(len(dataset)))
        block_of = np.searchsorted(starts, epoch, side="right")
        assert len(set(block_of[: len(dataset) // 5].tolist())) <= 6  # few groups at a time


def test_incompatible_datasets_are_rejected(sources, tmp_path):
    other = nl.data.TokenDataset(sources[1].path, sequence_length=8, verify="size")
    with pytest.raises(DataError, match="their sequence length differs .4 and 8"):
        Mixture({sources[0]: 1, other: 1})
    with pytest.raises(DataError, match="no datasets"):
        Mixture({})


def test_mixture_rows_equal_source_rows(tmp_path):
    for name, lengths in (("a", [9, 3, 21, 5, 16, 2]), ("b", [7, 7, 12, 30, 4])):
        write_documents(tmp_path / name / "d", lengths * 4, shard_tokens=150)
    parts = [
        opened(tmp_path / name, packing="best_fit", cache=tmp_path / "cache") for name in ("a", "b")
    ]
    both = Mixture(dict.fromkeys(parts, 1))
    masks = Masks(documents=True, eos=True)
    expected = [make_batch(part, np.arange(len(part)), masks) for part in parts]
    chosen = np.random.default_rng(0).permutation(len(both))
    found = make_batch(both, chosen, masks)
    for name, value in found.items():
        assert torch.equal(value, torch.cat([part[name] for part in expected])[chosen])
    (evaluated,) = evaluation_batches(both, len(both), masks=masks)
    assert torch.equal(evaluated["labels"], torch.cat([part["labels"] for part in expected]))


def test_read_ahead_yields_the_same_batches(sources):
    plain, ahead = (Loader(mixture(sources), 5, read_ahead=n) for n in (0, 2))
    for _ in range(9):
        assert [rows(b) for b in next(plain)] == [rows(b) for b in next(ahead)]


def test_training_on_a_mixture_reports_epochs_per_source(small_run, token_folder, tmp_path):
    import shutil

    shutil.copytree(token_folder, tmp_path / "copy")
    small_run["data"]["sources"] = {str(token_folder): 0.75, str(tmp_path / "copy"): 0.25}
    with pytest.raises(ConfigError, match="data.sources are both set"):
        train_config.load(small_run, environment={})
    del small_run["data"]["path"]
    for curriculum, message in (
        ({"soon": {}}, "the key must be a number of tokens above 0"),
        ({"640": {"none": 1}}, "none is not in data.sources: add it there"),
        ({"640": 3}, "expected weights by folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_config.load(
                small_run | {"data": small_run["data"] | {"curriculum": curriculum}},
                environment={},
            )
    with pytest.raises(ConfigError, match="data.max_epochs: none is not in data.sources"):
        train_config.load(
            small_run | {"data": small_run["data"] | {"max_epochs": {"none": 2}}}, environment={}
        )
    small_run["data"]["curriculum"] = {"640": {str(token_folder): 1}}  # from sequence 20 of 48 on
    small_run["data"]["max_epochs"] = {str(tmp_path / "copy"): 3}
    config = train_config.load(small_run, environment={})
    assert train_config.load(tomllib.loads(schema.to_toml(config)), environment={}) == config
    alone = preflight.open_dataset(
        train_config.load(small_run | {"data": {"path": str(token_folder), "sequence_length": 32}}),
        "val",
    )
    assert len(preflight.open_dataset(config, "val")) == 2 * len(alone)

    def run(rank):
        return nl.Trainer(config).fit()

    first, second = nl.spmd.run(run, 2)
    assert first == second and first.loss < 5.6 and first.sample
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    epochs = json.loads(metrics[-1])["epochs"]
    train = preflight.open_dataset(config, "train")
    assert epochs == train.epochs(48) and len(epochs) == 2
    assert train.proportions.counts(48).tolist() == [15 + 28, 5]
