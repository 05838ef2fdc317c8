"""Block-shuffled loader order: epoch coverage, resume, read-ahead and file-system reads."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.config import train as train_config
from nearlinear.data.dataset import PAGE, UNIT, ReadCounters, TokenDataset
from nearlinear.data.format import Manifest, Shard, encode_index
from nearlinear.data.loader import BlockShuffle, Loader
from nearlinear.data.sampler import BlockOrder
from nearlinear.errors import ConfigError, DataError
from nearlinear.train.data import block_shuffle

LENGTH = 2048  # tokens per window: 4 KiB


def make_dataset(folder: Path, mib: list[float], length: int = LENGTH, fill=False) -> TokenDataset:
    """Write shards of the given sizes in MiB, plus 37 tokens each.

    Without ``fill`` the shards are sparse files, which use no disk space.
    """
    (folder / "train").mkdir(parents=True)
    shards, dtype = [], np.dtype("<u2")
    for number, size in enumerate(mib):
        tokens = int(size * UNIT) // 2 + 37
        path = folder / f"train/shard-{number:05d}.bin"
        with open(path, "wb") as file:
            if fill:
                file.write(np.random.default_rng(number).bytes(2 * tokens))
                os.fsync(file.fileno())
            file.truncate(2 * tokens)
        index = encode_index(np.array([tokens]), dtype)
        path.with_suffix(".idx").write_bytes(index)
        shards.append(Shard(f"train/{path.name}", tokens, 1, 2 * tokens, "0", len(index), "0"))
    tokenizer = {"name": "t", "file": "tokenizer/tokenizer.json", "sha256": "0"}
    Manifest(60_000, 0, tokenizer, {"train": tuple(shards)}).write(folder)
    return TokenDataset(folder, sequence_length=length, verify="size")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """130 MiB in three files whose sizes are not multiples of the 4 MiB block size."""
    return make_dataset(tmp_path_factory.mktemp("reads") / "tokens", [48, 30.5, 51.2])


# Block order.

PARTS = st.lists(st.integers(1, 9), min_size=1, max_size=30)  # block sizes


@settings(max_examples=150, deadline=None)
@given(sizes=PARTS, group=st.integers(1, 12), seed=st.integers(0, 2**40), epoch=st.integers(0, 3))
def test_block_order_epoch_has_every_window_once(sizes, group, seed, epoch):
    n = sum(sizes)
    order = BlockOrder(np.cumsum([0, *sizes[:-1]]), n, group, lambda *words: hash((seed, *words)))
    places = order.places(np.arange(epoch * n, (epoch + 1) * n))
    assert (places[:, 0] == epoch).all()
    assert sorted(order.windows(places)) == list(range(n))
    # A place depends neither on the other samples of a call nor on earlier calls.
    again = (
        order.places(np.arange((epoch + 5) * n, (epoch + 6) * n))[:1],
        order.places(np.array([epoch * n + n // 2])),
    )
    assert (again[1] == places[[n // 2]]).all()


@settings(max_examples=100, deadline=None)
@given(sizes=PARTS, group=st.integers(1, 12))
def test_group_interleaves_its_blocks_evenly(sizes, group):
    """Groups are sequential. Within a group, unfinished blocks differ by at most one window."""
    n, starts = sum(sizes), np.cumsum([0, *sizes[:-1]])
    order = BlockOrder(starts, n, group, lambda *words: hash(words))
    blocks = order.places(np.arange(n))[:, 1]
    first = {block: i for i, block in reversed(list(enumerate(blocks)))}
    in_order = sorted(first, key=first.get)
    assert len(in_order) == len(sizes)
    done = 0
    while done < n:  # group by group
        counts, inside = dict.fromkeys(set(), 0), set()
        total = 0
        position = done
        while position < n and (len(inside) < group or blocks[position] in inside):
            inside.add(blocks[position])
            counts[blocks[position]] = counts.get(blocks[position], 0) + 1
            position += 1
            behind = [sizes[b] - counts.get(b, 0) for b in inside]
            left = [b for b in inside if sizes[b] > counts[b]]
            if left:
                assert max(counts.values()) - min(counts[b] for b in left) <= 1, behind
        total = sum(sizes[b] for b in inside)
        assert position - done == total  # a group ends before the next begins
        done = position


def test_block_order_is_stable_across_versions():
    """A change of the pinned order requires a new state format."""
    order = BlockOrder(np.array([0, 4, 8]), 11, 2, lambda *words: sum(words) + 7)
    assert order.windows(order.places(np.arange(11))).tolist() == PINNED[0]
    assert order.windows(order.places(np.arange(11, 22))).tolist() == PINNED[1]


PINNED = [[0, 5, 1, 6, 2, 7, 3, 4, 10, 8, 9], [10, 7, 9, 4, 8, 5, 6, 1, 2, 3, 0]]


def test_each_block_has_an_independent_order():
    size = 500
    order = BlockOrder(np.arange(0, 4 * size, size), 4 * size, 4, lambda *words: hash(words))
    places = order.places(np.arange(4 * size))
    windows = order.windows(places)
    inner = [windows[places[:, 1] == block] - block * size for block in range(4)]
    for one, other in ((0, 1), (1, 2), (2, 3)):
        # Two random orders agree at about one position.
        assert (inner[one] == inner[other]).sum() < 12
    again = order.windows(order.places(np.arange(4 * size, 8 * size)))
    assert (again == windows).sum() < 12


def test_blocks_are_aligned_to_file_offsets(dataset):
    starts = dataset.block_starts(4 * UNIT)
    where = dataset.extents(starts)
    begins = where[np.searchsorted(where[:, 0], [0, 1, 2])]
    assert (begins[:, 2] > begins[:, 1]).all()
    for shard, offset, _ in where[: len(starts)]:
        previous = offset // (4 * UNIT) * (4 * UNIT)
        # No window begins between the block's edge and its first window.
        assert offset - previous < 2 * LENGTH, (shard, offset)
    assert len(starts) == 12 + 1 + 8 + 13  # the first file's 37 extra tokens begin a 13th
    assert starts[0] == 0 and (np.diff(starts) > 0).all()


def test_extents_are_the_byte_ranges_of_windows(dataset):
    crossing = 48 * UNIT // 2 // LENGTH  # begins in the last 37 tokens of the first file
    (one, two) = dataset.extents([crossing])
    assert one.tolist() == [0, 48 * UNIT, 48 * UNIT + 74] and two.tolist() == [1, 0, 4096 - 74]
    everything = dataset.extents(np.array([0]), np.array([len(dataset)]))
    assert everything[:, 0].tolist() == [0, 1, 2]
    assert (everything[:, 2] - everything[:, 1]).sum() == len(dataset) * 2 * LENGTH


# Loader with block order.

SMALL = BlockShuffle(1, 4)
STEP = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))  # B, M, ranks


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """12 blocks of 1 MiB in windows of 64 KiB."""
    folder = tmp_path_factory.mktemp("small") / "tokens"
    found = make_dataset(folder, [5.2, 2.3, 3.1], length=32_768, fill=True)
    assert len(found.block_starts(UNIT)) == 12 and len(found) == 169
    return found


def ranks_of(dataset, step, seed=0, **options):
    size, micro, ranks = step
    options = {"blocks": SMALL} | options
    return [Loader(dataset, size, micro, r, ranks, seed, **options) for r in range(ranks)]


def seen(loaders, steps) -> list[set[int]]:
    """Return the windows of each step over all ranks."""
    found = []
    for _ in range(steps):
        for loader in loaders:
            for batch in next(loader):
                assert batch["input_ids"].shape == (loader.micro_batch_size, 32_768)
        found.append(loaders[0]._windows(loaders[0]._last_step, loaders[0].samples_per_step))
    return found


def rows(loader) -> list[bytes]:
    return [row.numpy().tobytes() for batch in next(loader) for row in batch["input_ids"]]


@settings(max_examples=15, deadline=None)
@given(step=STEP, seed=st.integers(0, 2**40))
def test_step_has_the_same_windows_on_any_number_of_ranks(small, step, seed):
    size, micro, ranks = step
    one = Loader(small, size * micro * ranks, 1, 0, 1, seed, blocks=SMALL)
    many = ranks_of(small, step, seed)
    for _ in range(3):
        together = [row for loader in many for row in rows(loader)]
        assert sorted(together) == sorted(rows(one))
        assert {loader.batch_id for loader in many} == {one.batch_id}


@settings(max_examples=15, deadline=None)
@given(before=STEP, after=STEP, steps=st.integers(0, 12), seed=st.integers(0, 99))
def test_resume_on_another_number_of_ranks_continues_the_block_order(
    small, before, after, steps, seed
):
    first = ranks_of(small, before, seed)
    for loader in first:
        loader._next_sample = steps * loader.samples_per_step  # the position after `steps` steps
    state = json.loads(json.dumps(first[-1].state_dict()))
    second = ranks_of(small, after, seed)
    for loader in second:
        loader.load_state_dict(state)
    taken = [row for loader in second for row in rows(loader)]
    reference = Loader(small, len(taken), 1, 0, 1, seed, blocks=SMALL)
    reference._next_sample = state["next_sample"]
    assert sorted(taken) == sorted(rows(reference))


def test_epoch_covers_every_window_and_the_next_epoch_differs(small):
    loaders, windows = ranks_of(small, (2, 1, 2)), len(small)
    order = np.concatenate(seen(loaders, -(-2 * windows // 4)))
    assert sorted(order[:windows]) == list(range(windows))
    assert sorted(order[windows : 2 * windows]) == list(range(windows))
    assert (order[:windows] != order[windows : 2 * windows]).any()


def test_state_of_another_order_is_rejected(small):
    plain, blocks = Loader(small, 2), Loader(small, 2, blocks=SMALL)
    assert plain.state_dict()["format"] == 1 and "shuffle_blocks" not in plain.state_dict()
    with pytest.raises(DataError, match="shuffle_block_mib was 1 and is 0"):
        plain.load_state_dict(blocks.state_dict())
    with pytest.raises(DataError, match="shuffle_block_mib was 0 and is 1"):
        blocks.load_state_dict(plain.state_dict())
    with pytest.raises(DataError, match="shuffle_blocks was 4 and is 5"):
        Loader(small, 2, blocks=BlockShuffle(1, 5)).load_state_dict(blocks.state_dict())
    with pytest.raises(DataError, match="format 1"):  # the format of states without block order
        blocks.load_state_dict(blocks.state_dict() | {"format": 1})


@pytest.mark.parametrize("blocks", [None, SMALL])
def test_read_ahead_yields_the_same_batches(small, blocks):
    usual = Loader(small, 3, 2, 1, 2, blocks=blocks)
    ahead = Loader(small, 3, 2, 1, 2, blocks=blocks, read_ahead=3)
    state = None
    for step in range(12):
        assert rows(ahead) == rows(usual)
        state = ahead.state_dict() if step == 5 else state
    ahead.load_state_dict(state)
    usual.load_state_dict(state)
    assert not ahead._pending  # reads ahead of the previous position are dropped
    assert rows(ahead) == rows(usual)


def test_read_ahead_windows_are_buffered_before_use(small):
    counts = small.count_reads()
    loader = Loader(small, 2, blocks=SMALL, read_ahead=5)
    try:
        next(loader)
        for _, reading in list(loader._pending.values()):
            reading.result()
        counts.clear()
        coming = [share for share, _ in loader._pending.values()]
        assert len(coming) == 5
        for share in coming:
            small.windows(share.reshape(-1))
        assert counts.requests == 0 and counts.used == 5 * 2 * 65_536
    finally:
        small.reads = None


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files, of Linux")
@pytest.mark.parametrize("read_ahead", [0, 2])
def test_system_calls_read_each_block_once(small, monkeypatch, read_ahead):
    """Count the `preadv` calls of the loader instead of modelled reads."""
    calls, real = [], os.preadv

    def preadv(file, buffers, offset):
        calls.append((os.readlink(f"/proc/self/fd/{file}"), offset, len(buffers[0])))
        return real(file, buffers, offset)

    monkeypatch.setattr("nearlinear.data.read_ahead.os.preadv", preadv)
    loader = Loader(small, 13, blocks=SMALL, read_ahead=read_ahead)
    for _ in range(13 - read_ahead):  # one epoch is 13 x 13 windows
        next(loader)
    for _, reading in loader._pending.values():
        reading.result()
    assert sum(size for *_, size in calls) == len(small) * 65_536
    assert len(calls) <= 12 + 2  # one per block, one more for a block that spans two files
    ends: dict[str, int] = {}
    for name, start, size in sorted(calls):
        assert start >= ends.get(name, 0)  # no byte is read twice
        ends[name] = start + size


def test_unreadable_file_is_reported(tmp_path):
    found = make_dataset(tmp_path / "tokens", [2, 2], fill=True)
    loader = Loader(found, 2, blocks=SMALL, read_ahead=1)
    for path in found.files:
        path.unlink()
    with pytest.raises(DataError, match=r"shard-0000\d.bin cannot be read \(No such file"):
        for _ in range(600):
            next(loader)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocks": BlockShuffle(0, 4)}, "block_mib is 0"),
        ({"blocks": BlockShuffle(4, 0)}, "blocks is 0"),
        ({"read_ahead": -1}, "read_ahead is -1"),
    ],
)
def test_invalid_options_are_rejected(small, options, words):
    with pytest.raises(DataError, match=words):
        Loader(small, 2, **options)


def test_config_selects_the_block_order():
    config = train_config.load({}, ["data.shuffle_block_mib=8", "data.shuffle_blocks=16"])
    assert block_shuffle(config.data) == BlockShuffle(8, 16)
    assert block_shuffle(train_config.load({}).data) is None
    with pytest.raises(ConfigError, match="data.shuffle_blocks = 0: must be at least 1"):
        train_config.load({}, ["data.shuffle_blocks=0"])


# Read counters.


def test_page_fault_fetches_a_unit_and_explicit_read_fetches_its_range():
    reads = ReadCounters([10 * UNIT], memory=4 * UNIT)
    reads.faults(np.array([[0, 5000, 9000]]))
    assert (reads.used, reads.requests, reads.rpcs, reads.fetched) == (4000, 1, 1, UNIT)
    reads.faults(np.array([[0, 9000, 13_000]]))  # already cached
    assert (reads.used, reads.requests, reads.fetched) == (8000, 1, UNIT)
    reads.faults(np.array([[0, UNIT - 1, UNIT + 1]]))  # two units, one of them cached
    assert (reads.requests, reads.rpcs, reads.seeks, reads.fetched) == (2, 3, 2, 2 * UNIT)
    reads.explicit(np.array([[0, 2 * UNIT, 3 * UNIT + 1]]))  # continues the previous read
    assert (reads.requests, reads.rpcs, reads.seeks) == (3, 5, 2)
    assert reads.fetched == 3 * UNIT + PAGE
    reads.explicit(np.array([[0, 6 * UNIT, 9 * UNIT]]))  # the cache holds 4 MiB: evicts unit 0
    reads.clear()
    reads.faults(np.array([[0, 5000, 9000], [0, 8 * UNIT, 8 * UNIT + 5]]))
    assert (reads.requests, reads.fetched) == (1, UNIT)


def epoch_reads(dataset, ranks: int, **options) -> list[ReadCounters]:
    """Return the read counters of one epoch, for ranks with a 32 MiB cache each."""
    found = []
    for rank in range(ranks):
        reads = dataset.count_reads(memory=32 * UNIT)
        loader = Loader(dataset, 32 // ranks, 2, rank, ranks, **options)
        for _ in range(len(dataset) // 64):
            next(loader)
        found.append(reads)
    dataset.reads = None
    return found


def test_default_order_reads_are_small_and_amplified(dataset):
    (reads,) = epoch_reads(dataset, 1)
    windows = len(dataset) // 64 * 64
    assert reads.used == windows * 2 * LENGTH
    # The cache holds 32 of 130 units, so three of four windows fetch a unit.
    assert 0.70 * windows < reads.requests < 0.82 * windows
    assert reads.seeks > 0.95 * reads.requests
    assert 170 < reads.amplification < 210


@pytest.mark.parametrize(
    ("ranks", "blocks", "most"), [(1, BlockShuffle(4, 4), 1.01), (4, BlockShuffle(2, 16), 1.4)]
)
def test_block_order_reads_are_large_and_rarely_repeated(dataset, ranks, blocks, most):
    """Short blocks at file ends misalign the shares of four ranks: some bytes are refetched."""
    every = epoch_reads(dataset, ranks, blocks=blocks)
    fetched, used = sum(r.fetched for r in every), sum(r.used for r in every)
    assert used == len(dataset) // 64 * 64 * 2 * LENGTH
    assert 1 <= fetched / used < most
    assert min(r.bytes_per_seek for r in every) > 0.9 * blocks.block_mib * UNIT
    # A block begins slightly after a unit boundary, so its end is a separate small RPC.
    assert min(r.bytes_per_rpc for r in every) > 0.9 * UNIT * blocks.block_mib / (
        blocks.block_mib + 1
    )


def test_ranks_read_whole_blocks_of_equal_size_once(tmp_path):
    equal = make_dataset(tmp_path / "tokens", [64])
    equal.tokens = 64 * UNIT // 2  # without the 37 extra tokens
    every = epoch_reads(equal, 4, blocks=BlockShuffle(4, 8))
    assert sum(r.fetched for r in every) == sum(r.used for r in every) == 64 * UNIT
    assert sum(r.requests for r in every) <= 16  # fewer if adjacent blocks are in one group


def kernel_reads() -> int:
    """Return the number of bytes that the kernel read from disk for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def half_an_epoch(folder: Path, **options) -> tuple[int, ReadCounters]:
    """Read half an epoch with a cold page cache.

    Returns:
        The number of bytes read by the kernel, and the modelled read counters.
    """
    for path in folder.glob("train/*.bin"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dataset = TokenDataset(folder, sequence_length=LENGTH, verify="size")
    reads, before = dataset.count_reads(), kernel_reads()
    loader = Loader(dataset, 16, 1, 0, 1, **options)
    for _ in range(len(dataset) // 16 // 2):
        next(loader)
    return kernel_reads() - before, reads


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not tell its reads")
def test_read_counters_match_kernel_statistics(tmp_path):
    """Explicit reads match. Without Lustre, a page fault fetches less than 1 MiB."""
    make_dataset(tmp_path / "tokens", [16], fill=True)
    found, blocks = half_an_epoch(tmp_path / "tokens", blocks=BlockShuffle(1, 8))
    if found == 0:
        pytest.skip("this folder is not on a disk whose reads the kernel counts")
    assert blocks.used == 8 * UNIT and blocks.fetched < 1.01 * blocks.used
    assert 0.95 * blocks.fetched < found < 1.05 * blocks.fetched
    wasteful, usual = half_an_epoch(tmp_path / "tokens")
    assert usual.used == blocks.used and wasteful > 1.5 * found
