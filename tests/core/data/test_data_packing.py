"""Document packing: token retention, window layout, document masks and the cached plan."""

import errno
import fcntl
import json
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.data import loader as data_state
from nearlinear.data import packing
from nearlinear.data import packing as plan
from nearlinear.data.cache import locked
from nearlinear.data.dataset import TokenDataset
from nearlinear.data.loader import Loader, evaluation_batches
from nearlinear.data.masking import Masks, cu_seqlens, make_batch
from nearlinear.errors import DataError
from tests.core.data.test_data_dataset import write_dataset
from tests.support import parity

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def reference_best_fit(sizes, capacity):
    """Pack items largest first, each into the bin with the least sufficient room.

    Returns:
        The number of bins and their sorted remaining room.
    """
    rooms, found = [], {}
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = [room for room in rooms if room >= sizes[item]]
        room = min(fitting, default=capacity)
        if fitting:
            rooms.remove(room)
        rooms.append(room - sizes[item])
        found[item] = room
    return len(rooms), sorted(rooms)


@settings(max_examples=200, deadline=None)
@given(sizes=SIZES, capacity=st.integers(40, 90))
def test_best_fit_matches_a_sequential_reference(sizes, capacity):
    bins = packing.best_fit(np.array(sizes), capacity)
    used = np.bincount(bins, sizes)
    count, rooms = reference_best_fit(sizes, capacity)
    assert len(used) == count and (used <= capacity).all()
    assert sorted((capacity - used).astype(int).tolist()) == rooms


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192])
def test_best_fit_and_concat_retain_nearly_all_tokens(length):
    """Use a log-normal length distribution like that of web pages: mean 1,050, median 700."""
    lengths = 1 + np.random.default_rng(0).lognormal(6.55, 0.9, 20_000).astype(np.int64)
    kept = packing.packing_efficiency(lengths, length)
    assert kept["best_fit"].share > 0.9999 and kept["best_fit"].filled > 0.995
    assert kept["concat"].share > 0.995 and kept["concat"].filled == 1
    assert kept["one_document"].share > 0.999
    assert kept["one_document"].filled < kept["best_fit"].filled
    text = lengths - 1
    assert kept["truncate"].tokens == length * np.count_nonzero(text >= length)
    assert kept["truncate"].share < 0.6


def places(rows):
    """Return the row and column of each document start."""
    return np.stack(np.divmod(rows.begins, rows.tokens.shape[1]), axis=1).tolist()


def filled_of(rows):
    count, length = rows.tokens.shape
    return np.full(count, length) if rows.filled is None else rows.filled


@settings(max_examples=60, deadline=None)
@given(
    lengths=SIZES.map(lambda sizes: [2, *sizes]),
    shard_tokens=st.integers(30, 80),
    length=st.integers(2, 50),
    way=st.sampled_from(packing.PACKINGS),
    data=st.data(),
)
def test_windows_hold_contiguous_pieces_of_documents(
    tmp_path_factory, lengths, shard_tokens, length, way, data
):
    folder = tmp_path_factory.mktemp("packed")
    stream = write_dataset(folder / "d", lengths, shard_tokens)
    options = {"sequence_length": length, "verify": "size", "cache": folder / "cache"}
    if way == "concat" and len(stream) < length:
        return
    tokens = TokenDataset(folder / "d", packing=way, **options)
    everything = np.arange(len(tokens))
    found = tokens.rows(everything, documents=True)
    windows, filled = found.tokens, filled_of(found)
    # A token's value gives its stream position, so each piece identifies its document.
    ends = np.cumsum(lengths)
    seen = {}
    for row, column in places(found):
        if column < filled[row]:
            seen.setdefault(row, []).append(column)
        else:
            assert column == filled[row] < length and (windows[row, column:] == 0).all()
    got = []
    for row, columns in seen.items():
        assert columns[0] == 0
        for first, last in zip(columns, [*columns[1:], filled[row]], strict=True):
            piece = windows[row, first:last]
            document = np.searchsorted(ends, piece[0], side="left") if piece[0] else None
            if document is not None:
                start = piece[0] - 1
                assert np.array_equal(piece, stream[start : start + len(piece)])
                assert start + len(piece) <= ends[document]
                begins = ends[document] - lengths[document]
                if way != "concat":  # documents are cut only if longer than a window
                    assert (start - begins) % length == 0
                    assert len(piece) == min(length, ends[document] - start)
            else:  # a piece that holds only the EOS of a document
                assert len(piece) == 1
            got += piece.tolist()
        if way == "one_document":
            assert len(columns) == 1
    if way == "concat":
        assert got == stream[: len(tokens) * length].tolist()
    else:
        assert sorted(t for t in got if t) == [t for t in stream.tolist() if t]
        # Documents of n * length + 1 tokens can lose their last token.
        alone = sum(count % length == 1 for count in lengths)
        assert len(stream) - alone <= len(got) <= len(stream)
        assert (filled > 1).all()
    chosen = data.draw(st.lists(st.integers(0, max(0, len(tokens) - 1)), max_size=9))
    if len(tokens) and chosen:
        some = tokens.rows(chosen, documents=True)
        assert np.array_equal(some.tokens, windows[chosen])
        expected = [[i, c] for i, w in enumerate(chosen) for r, c in places(found) if r == w]
        assert places(some) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("packing")
    write_dataset(path / "d", [9, 3, 21, 1, 5, 16, 2, 30, 7, 7, 12] * 4, shard_tokens=150)
    return path


def opened(folder, **options):
    return TokenDataset(
        folder / "d",
        **{"sequence_length": 16, "cache": folder / "cache", "verify": "size"} | options,
    )


def test_concurrent_ranks_compute_the_plan_once_and_repair_damaged_files(
    folder, tmp_path, monkeypatch
):
    made = []
    for step in ("sequences", "pieces"):
        real = getattr(packing, step)
        monkeypatch.setattr(
            plan, step, lambda *a, step=step, real=real: (made.append(step), real(*a))[1]
        )
    read = []

    def rank():
        dataset = opened(folder, packing="best_fit", cache=tmp_path)
        read.append(dataset.windows([0, len(dataset) - 1]).tolist())

    threads = [threading.Thread(target=rank) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 8 and all(found == read[0] for found in read)
    files = sorted(tmp_path.glob("packing/*/*.npy"))
    shards = made.count("sequences")
    assert shards > 2 and made.count("pieces") == 2, "only the groups that were read are packed"
    assert [path.name for path in files] == ["group-0.npy", f"group-{shards - 1}.npy", "groups.npy"]
    for path in files:
        path.write_bytes(path.read_bytes()[:-9])
    rank()
    assert read[-1] == read[0] and len(made) == 2 * (shards + 2)


def test_plan_stays_in_memory_when_the_cache_disk_is_full(folder, tmp_path, monkeypatch, caplog):
    usual = opened(folder, packing="best_fit")
    expected = usual.windows(np.arange(len(usual)))

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    found = opened(folder, packing="best_fit", cache=tmp_path)
    assert np.array_equal(found.windows(np.arange(len(found))), expected)
    assert caplog.text.count("has no room left") == 1


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 120), min_size=1, max_size=60),
    length=st.integers(1, 60),
    way=st.sampled_from(["best_fit", "one_document"]),
)
def test_sequence_and_token_counts_equal_the_packed_pieces(lengths, length, way):
    _, tokens, firsts = packing.pieces(lengths, length, way)
    assert packing.sequences(lengths, length, way) == len(firsts)
    kept = packing.packing_efficiency(lengths, length)[way]
    assert (kept.tokens, kept.sequences) == (tokens.sum(), len(firsts))


def test_document_groups_are_packed_independently(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "GROUP", 5)
    small = opened(folder, packing="best_fit", cache=tmp_path)
    found = small.windows(np.arange(len(small)))
    whole = opened(folder, packing="best_fit")
    assert sorted(found[found > 0]) == sorted(t for t in whole.windows(range(len(whole))).flat if t)
    assert len(small) >= len(whole)


def test_batch_masks_padding_eos_and_document_starts(folder):
    dataset = opened(folder, packing="best_fit")
    windows = np.arange(len(dataset))
    plain = make_batch(dataset, windows, Masks())
    assert set(plain) == {"input_ids", "labels"}
    found = dataset.rows(windows, documents=True)
    padding = torch.arange(16) >= torch.from_numpy(found.filled)[:, None]
    assert padding.any() and (plain["labels"][padding] == -100).all()
    assert torch.equal(plain["labels"][~padding], plain["input_ids"][~padding])
    eos = make_batch(dataset, windows, Masks(eos=True))
    assert torch.equal(eos["labels"] == -100, eos["input_ids"] == 0)
    masked = make_batch(dataset, windows, Masks(documents=True))
    begins = torch.zeros_like(padding)
    begins.view(-1)[torch.from_numpy(found.begins)] = True
    assert torch.equal(masked["labels"] == -100, padding | begins)
    positions = masked["position_ids"]
    assert torch.equal(positions == 0, begins)
    assert (positions.diff(dim=1)[~begins[:, 1:]] == 1).all()
    ends = cu_seqlens(positions)
    assert ends.dtype == torch.int32
    assert ends.tolist() == [*torch.nonzero(begins.view(-1))[:, 0].tolist(), 16 * len(windows)]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "mistral", "mixtral"])
@pytest.mark.parametrize("way", ["concat", "best_fit"])
def test_document_mask_equals_separate_forward_passes(tmp_path, family, way):
    lengths = np.random.default_rng(0).integers(2, 14, 60)
    write_dataset(tmp_path / "d", lengths.tolist(), 300, vocab_size=60_000)
    dataset = opened(tmp_path, packing=way, cache=tmp_path / "cache")
    whole = make_batch(dataset, np.arange(len(dataset))[-6:], Masks(documents=True))
    whole["input_ids"] %= parity.VOCABULARY
    whole["labels"] = torch.where(
        whole["labels"] < 0, whole["labels"], whole["labels"] % parity.VOCABULARY
    )
    model = parity.build(family).eval()
    model.config.use_cache = False
    with torch.no_grad():
        together = model(**whole)
        total, targets = 0.0, 0
        ends = cu_seqlens(whole["position_ids"]).tolist()
        ids, labels = whole["input_ids"].view(-1), whole["labels"].view(-1)
        logits = together.logits.flatten(0, 1)
        assert len(ends) > 10
        for begin, end in zip(ends, ends[1:], strict=False):
            alone = model(input_ids=ids[None, begin:end]).logits[0]
            torch.testing.assert_close(logits[begin:end], alone, rtol=1e-4, atol=2e-5)
            if (labels[begin + 1 : end] >= 0).any():
                total += torch.nn.functional.cross_entropy(
                    alone[:-1], labels[begin + 1 : end], reduction="sum"
                ).item()
                targets += int((labels[begin + 1 : end] >= 0).sum())
        torch.testing.assert_close(together.loss.item(), total / targets, rtol=1e-5, atol=1e-5)
        unmasked = model(input_ids=whole["input_ids"]).logits.flatten(0, 1)
        assert (unmasked - logits).abs().max() > 1e-2, "hiding documents must matter"


def test_evaluation_and_training_batches_have_the_same_rows(folder):
    dataset = opened(folder, packing="one_document")
    masks = Masks(documents=True)
    (found,) = evaluation_batches(dataset, len(dataset) + 3, masks=masks)
    expected = make_batch(dataset, np.arange(len(dataset)), masks)
    for name, value in expected.items():
        assert torch.equal(found[name][: len(dataset)], value)
    assert (found["labels"][len(dataset) :] == -100).all()


def test_dataset_of_single_token_documents_is_rejected(tmp_path):
    write_dataset(tmp_path / "d", [1])
    with pytest.raises(DataError, match="no document of two tokens"):
        opened(tmp_path, packing="best_fit", cache=tmp_path)


def test_resume_with_another_packing_is_rejected(folder, monkeypatch):
    state = Loader(opened(folder, packing="best_fit"), 2).state_dict()
    state = json.loads(json.dumps(state))
    Loader(opened(folder, packing="best_fit"), 2).load_state_dict(state)
    with pytest.raises(DataError, match="packing was best_fit and is concat"):
        Loader(opened(folder), 2).load_state_dict(state)
    before = {name: value for name, value in Loader(opened(folder), 2).state_dict().items()}
    assert "packing" not in before, "states of the default are as they were"
    del state["packing_plan"]
    # States of older versions have no packing_plan.
    Loader(opened(folder, packing="best_fit"), 2).load_state_dict(state)
    monkeypatch.setattr(data_state, "VERSION", plan.VERSION + 1)
    Loader(opened(folder), 2).load_state_dict(before)
    with pytest.raises(DataError, match="packing_plan was 2 and is 3; use .* the nearlinear of"):
        Loader(opened(folder, packing="best_fit"), 2).load_state_dict(state)
    with pytest.raises(DataError, match="packing is 'tight': use 'concat', 'best_fit', 'one_doc"):
        opened(folder, packing="tight")


def losses(rank, config):
    trainer = nl.Trainer(train_config.load(config, environment={}))
    found = [trainer.step()["loss"] for _ in range(2)], trainer.evaluate()
    trainer.reporter.close()
    return found


@pytest.mark.parametrize(
    "layout",
    [
        {"hybrid_shard_degree": 2},
        {"context_parallel_degree": 2},
        {"pipeline_parallel_degree": 2, "microbatches": 2},
        {"tensor_parallel_degree": 2},
    ],
    ids=lambda layout: next(iter(layout)),
)
def test_document_masks_give_the_same_loss_in_every_layout(small_run, layout):
    small_run["data"] |= {
        "sequence_length": 128,
        "document_mask": True,
        "mask_eos": True,
    }
    small_run["model"]["overrides"]["initializer_range"] = 0.3  # so that attention matters
    small_run["batch"] = {"micro_batch_size": 4, "sequences": 8}
    alone = nl.spmd.run(losses, 1, args=(small_run,))[0]
    together = nl.spmd.run(losses, 2, args=(small_run | {"parallel": layout},))
    for found in together:
        assert found[0] == pytest.approx(alone[0], rel=1e-4)
        assert found[1] == pytest.approx(alone[1], rel=1e-4)
    del small_run["data"]["document_mask"]
    unmasked = nl.spmd.run(losses, 1, args=(small_run,))[0]
    assert abs(unmasked[1] / alone[1] - 1) > 1e-3, "hiding documents must matter"


def test_file_system_without_locks_is_reported(tmp_path, monkeypatch):
    def none_left(number, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none_left)
    remedy = r"c cannot be written \(No locks available\): set data.cache to another folder"
    with pytest.raises(DataError, match=remedy), locked(tmp_path / "c" / "lock"):
        pass
    monkeypatch.undo()
    with pytest.raises(OSError, match="of the caller"), locked(tmp_path / "c" / "lock"):
        raise OSError("of the caller")
