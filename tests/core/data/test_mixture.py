"""Mixture of datasets: exact proportions and one order for any number of ranks."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.data.loader import BlockShuffle, Loader, evaluation_batches
from nearlinear.data.masking import Masks, make_batch
from nearlinear.data.mixture import PERIOD, Mixture, Proportions
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


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7), start=st.integers(0, 10**12))
def test_every_prefix_has_the_requested_proportions(weights, start):
    found = Proportions(weights)
    assert sum(found.parts) == found.period <= PERIOD
    for part, weight in zip(found.parts, weights, strict=True):
        assert abs(part / found.period - weight / sum(weights)) <= len(weights) / PERIOD
    samples = np.arange(start, start + 600)
    source, own = found.assign(samples)
    before = found.counts(start)
    for number, part in enumerate(found.parts):
        chosen = source == number
        assert own[chosen].tolist() == list(range(before[number], before[number] + chosen.sum()))
        counts = (before[number] + np.cumsum(chosen)).tolist()
        exact = [Fraction(g * part, found.period) for g in range(start + 1, start + 601)]
        assert all(abs(count - share) < 1 for count, share in zip(counts, exact, strict=True))


def test_decimal_weights_are_exact():
    assert Proportions([0.7, 0.2, 0.1]).parts == [7, 2, 1]
    assert Proportions([3, 1]).parts == [3, 1]
    assert Proportions([1e-9, 1.0]).parts == [1, PERIOD - 1]  # every source gets at least one part
    for bad in ([0.5, 0], [1, -1], [float("nan")], [True, "1"]):
        with pytest.raises(DataError, match="number above 0"):
            Proportions(bad)


def test_rounded_weights_are_logged(caplog):
    for exact in ([1, 2], [0.3, 0.7], [1 / 4096, 4095 / 4096]):
        Proportions(exact)
    assert not caplog.text
    shares = Proportions([0.00001, 0.5, 0.49999]).shares
    assert shares[0] == 1 / 4096
    assert "weights are rounded to 4096 parts: source 1 gets 0.0244 % of" in caplog.text
    assert "instead of 0.0010 %" in caplog.text


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


def test_incompatible_datasets_are_rejected(sources, tmp_path):
    other = nl.data.TokenDataset(sources[1].path, sequence_length=8, verify="size")
    with pytest.raises(DataError, match="their sequence length differs .4 and 8"):
        Mixture({sources[0]: 1, other: 1})
    with pytest.raises(DataError, match="no datasets"):
        Mixture({})
    with pytest.raises(DataError, match=r"drop data\.shuffle_block_mib, or data\.sources"):
        Loader(mixture(sources), 1, blocks=BlockShuffle())


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
    with pytest.raises(ConfigError, match="within a single folder"):
        train_config.load(small_run, ["data.shuffle_block_mib=4"], environment={})
    config = train_config.load(small_run, environment={})
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
