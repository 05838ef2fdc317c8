import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.data.dataset import TokenDataset
from nearlinear.data.format import Manifest, ShardWriter
from nearlinear.data.loader import Loader, evaluation_batches
from nearlinear.errors import DataError

WINDOWS, LENGTH = 97, 4
STEP = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))  # B, M, W


def write_dataset(folder, windows=WINDOWS, length=LENGTH):
    """Write windows [i + 1, i + 1, ..., EOS]: the first token of a row identifies window i."""
    writer = ShardWriter(folder, "train", vocab_size=70_000, eos_id=0, shard_tokens=50)
    for window in range(windows):
        writer.add([window + 1] * (length - 1))
    tokenizer = {"name": "t", "file": "tokenizer/tokenizer.json", "sha256": "0"}
    Manifest(70_000, 0, tokenizer, {"train": writer.close()}).write(folder)
    return TokenDataset(folder, sequence_length=length, verify="size")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("loader"))


def rows(batch):
    return (batch["input_ids"][:, 0] - 1).tolist()


def loaders(dataset, step, seed=0):
    size, micro, ranks = step
    return [Loader(dataset, size, micro, rank, ranks, seed) for rank in range(ranks)]


def take(ranks, steps):
    """Return the windows of `steps` steps in global sample order, from all ranks."""
    order = []
    for _ in range(steps):
        batches = [next(loader) for loader in ranks]
        for micro in zip(*batches, strict=True):
            order += [row for batch in micro for row in rows(batch)]
    return order


def test_batches_have_equal_inputs_and_independent_labels(dataset):
    step = next(Loader(dataset, 3, micro_batches=2))
    assert len(step) == 2
    for batch in step:
        assert set(batch) == {"input_ids", "labels"}
        assert batch["input_ids"].shape == batch["labels"].shape == (3, LENGTH)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["input_ids"], batch["labels"])
        batch["labels"].fill_(-100)  # masking labels must not touch the inputs
        assert (batch["input_ids"] >= 0).all()
        first = rows(batch)[0]
        assert np.array_equal(batch["input_ids"][0], dataset[first])


@settings(max_examples=40, deadline=None)
@given(step=STEP, seed=st.integers(0, 2**40))
def test_epoch_covers_every_window_once_across_ranks(dataset, step, seed):
    size, micro, ranks = step
    per_step = size * micro * ranks
    order = take(loaders(dataset, step, seed), -(-2 * WINDOWS // per_step))
    assert sorted(order[:WINDOWS]) == list(range(WINDOWS))
    assert sorted(order[WINDOWS : 2 * WINDOWS]) == list(range(WINDOWS))
    assert order[:WINDOWS] != order[WINDOWS : 2 * WINDOWS]  # each epoch has its own order


@settings(max_examples=40, deadline=None)
@given(before=STEP, after=STEP, steps=st.integers(0, 12), seed=st.integers(0, 99))
def test_resume_on_another_number_of_ranks_continues_the_order(dataset, before, after, steps, seed):
    first = loaders(dataset, before, seed)
    done = take(first, steps)
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    assert all(state == states[0] for state in states)
    second = loaders(dataset, after, seed)
    for loader in second:
        loader.load_state_dict(states[-1])
        assert loader.state_dict() == states[0]
    done += take(second, 1)
    uninterrupted = take(loaders(dataset, (len(done), 1, 1), seed), 1)
    assert done == uninterrupted
    assert states[0]["next_sample"] == steps * np.prod(before)


@pytest.mark.parametrize("split", [(12, 1, 1), (6, 1, 2), (1, 3, 4), (2, 2, 3), (1, 1, 12)])
def test_step_order_is_independent_of_the_number_of_ranks(dataset, split):
    reference, ranks = Loader(dataset, 4, 3, seed=5), loaders(dataset, split, 5)
    for _ in range(20):
        expected = [row for batch in next(reference) for row in rows(batch)]
        assert take(ranks, 1) == expected
        assert {loader.batch_id for loader in ranks} == {reference.batch_id}


def test_batch_id_identifies_the_step(dataset):
    loader = Loader(dataset, 4)
    with pytest.raises(DataError, match="call next"):
        _ = loader.batch_id
    ids = []
    for _ in range(30):
        next(loader)
        ids.append(loader.batch_id)
    assert len(set(ids)) == 30
    assert all(len(i) == 12 and int(i, 16) >= 0 for i in ids)
    other = Loader(dataset, 4, seed=1)
    next(other)
    assert other.batch_id not in ids


def test_step_larger_than_the_dataset_spans_epochs(dataset):
    (batch,) = next(Loader(dataset, 3 * WINDOWS))
    counts = np.bincount(rows(batch), minlength=WINDOWS)
    assert (counts == 3).all()


def test_state_of_another_data_order_is_rejected(dataset, tmp_path):
    loader = Loader(dataset, 2, seed=3)
    next(loader)
    state = loader.state_dict()
    other = write_dataset(tmp_path, windows=96)
    longer = TokenDataset(dataset.path, sequence_length=8, verify="size")
    for target, key in (
        (Loader(other, 2, seed=3), "dataset was"),
        (Loader(dataset, 2, seed=4), "seed was 3 and is 4"),
        (Loader(longer, 2, seed=3), "sequence_length was 4 and is 8"),
    ):
        with pytest.raises(DataError, match=key):
            target.load_state_dict(state)
        assert target.state_dict()["next_sample"] == 0
    with pytest.raises(DataError, match="format 2"):
        loader.load_state_dict(state | {"format": 2})
    of_another = {"tokenizer": {"name": "llama", "sha256": "12345678901234"}}
    with pytest.raises(DataError, match=r"of the tokenizer llama \(sha256 123456789012\), and .*"
                                        r" is of the tokenizer t \(sha256 0\)"):  # fmt: skip
        loader.load_state_dict(state | of_another)
    del state["tokenizer"]  # older versions did not write the tokenizer
    loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"micro_batch_size": 0}, "micro_batch_size is 0"), ({"micro_batches": 0}, "micro_batches is"),
     ({"data_rank": 2, "data_ranks": 2}, "data_rank is 2 of 2"), ({"data_rank": -1}, "data_rank")],
)  # fmt: skip
def test_invalid_arguments_are_rejected(dataset, options, match):
    with pytest.raises(DataError, match=match):
        Loader(dataset, **{"micro_batch_size": 1, **options})


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 40), ranks=st.integers(1, 8), limit=st.none() | st.integers(1, 120))
def test_evaluation_covers_every_window_once_in_equal_batches(dataset, size, ranks, limit):
    by_rank = [list(evaluation_batches(dataset, size, r, ranks, limit)) for r in range(ranks)]
    assert len({len(batches) for batches in by_rank}) == 1
    seen, padding = [], 0
    for batches in zip(*by_rank, strict=True):
        for batch in batches:
            assert batch["input_ids"].shape == batch["labels"].shape == (size, LENGTH)
            real = (batch["labels"] != -100).all(dim=1)
            assert ((batch["labels"] == -100).all(dim=1) | real).all()
            assert torch.equal(batch["input_ids"][real], batch["labels"][real])
            seen += [row for row, kept in zip(rows(batch), real, strict=True) if kept]
            padding += int((~real).sum())
    expected = WINDOWS if limit is None else min(WINDOWS, limit)
    assert seen == [row * WINDOWS // expected for row in range(expected)]
    assert padding < size * ranks


def test_evaluation_arguments_are_checked_at_the_call(dataset):
    with pytest.raises(DataError, match="batch_size is 0"):
        evaluation_batches(dataset, 0)
    with pytest.raises(DataError, match="data_rank is 1 of 1"):
        evaluation_batches(dataset, 1, data_rank=1)
