"""Shared gather outputs: correct data, one copy per node, no reuse while a rank reads."""

import random
import time

import pytest
import torch
import torch.distributed as dist

import nearlinear_collectives
from tests.collectives.ranks import BACKEND
from tests.collectives.runner import all_gather_single

if BACKEND != "nearlinear":
    pytest.skip("is about nearlinear alone", allow_module_level=True)

SMALLEST = (32 << 10) // 4 + 1  # float32 elements of a shared part


def backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def allocate(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate a gather output for ``count`` elements per rank; return it and this rank's part."""
    whole = backend().allocate_shared(count * dist.get_world_size(), torch.float32)
    return whole, whole[dist.get_rank() * count :][:count]


def how_it_went() -> str:
    return nearlinear_collectives.trace()[-1]["detail"]


def gather_and_check(count: int, salt: int, linger: float = 0.0, apart: bool = False) -> str:
    """Gather parts that differ at both ends and inside; read twice, the second time late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole, own = allocate(count)

    def part(r: int) -> torch.Tensor:
        values = torch.full((count,), float(1000 * salt + r))
        values[0], values[-1] = -r - 1, r + 0.5
        return values

    source = part(rank) if apart else own.copy_(part(rank))
    all_gather_single(whole, source)
    how = how_it_went()
    expected = torch.cat([part(r) for r in range(size)])
    assert torch.equal(whole, expected), (count, salt)
    time.sleep(linger)
    assert torch.equal(whole, expected), (count, salt, "changed while it was still held")
    return how


def many_gathers(rank, seed):
    draw = random.Random(seed)  # equal on all ranks, except for the time each holds its output
    ways = []
    for salt in range(60):
        count = draw.choice((SMALLEST, 9000, 20_001, 100_003, 262_144))
        apart = draw.random() < 0.3
        linger = draw.random() * 0.002 * (rank + 1)
        ways.append(gather_and_check(count, salt, linger, apart))
    return ways


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_parts_of_any_size_stay_until_all_ranks_free_them(pool, ranks):
    for ways in pool.run(many_gathers, 7, ranks=ranks):
        assert set(ways) == {"shared"}


def two_at_once(rank):
    """Hold several outputs at the same time."""
    (first, own_first), (second, own_second) = allocate(20_000), allocate(20_000)
    own_first.fill_(rank)
    own_second.fill_(10 + rank)
    all_gather_single(first, own_first)
    all_gather_single(second, own_second)
    size = dist.get_world_size()
    assert torch.equal(first.view(size, -1)[:, 7], torch.arange(size) * 1.0)
    assert torch.equal(second.view(size, -1)[:, 7], torch.arange(size) + 10.0)
    return how_it_went()


def test_outputs_held_together_do_not_overlap(pool):
    assert pool.run(two_at_once, ranks=3) == ["shared"] * 3


def physical_pages(tensor: torch.Tensor) -> int:
    """Return the proportional set size of a mapping in bytes."""
    address = tensor.data_ptr()
    total, inside = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            first = line.split(" ", 1)[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(number, 16) for number in first.split("-"))
                inside = begin < address + tensor.nbytes and end > address
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


def weigh(rank, count):
    whole, own = allocate(count)
    own.fill_(rank)
    all_gather_single(whole, own)
    assert whole.sum().item() == count * sum(range(dist.get_world_size()))
    dist.barrier()
    pages = physical_pages(whole)
    dist.barrier()
    return pages, whole.nbytes


def test_node_holds_one_copy_of_an_output(pool):
    weights = pool.run(weigh, 1 << 20, ranks=4)
    together, output = sum(pages for pages, _ in weights), weights[0][1]
    assert together < 1.2 * output  # four copies without sharing


def disagree(rank):
    """Allocate one more output on rank 0: the numbers differ, and gathers copy instead."""
    ways = [gather_and_check(20_000, 1)]
    extra = allocate(20_000) if rank == 0 else None
    ways += [gather_and_check(20_000, salt) for salt in (2, 3)]
    del extra
    ways += [gather_and_check(30_000, salt) for salt in (4, 5)]  # these numbers differ as well
    return ways


def test_ranks_that_disagree_on_outputs_gather_correct_data(pool):
    for ways in pool.run(disagree, ranks=3):
        assert ways[0] == "shared" and "shared" not in ways[1:2]


def write_then_reduce(rank):
    whole, own = allocate(20_000)
    own.fill_(1.0)
    all_gather_single(whole, own)
    dist.all_reduce(whole)
    assert torch.equal(whole, torch.full_like(whole, dist.get_world_size()))
    whole.add_(rank)  # private now: invisible to other ranks
    dist.barrier()
    assert torch.equal(whole, torch.full_like(whole, dist.get_world_size() + rank))


def test_reduced_output_becomes_private(pool):
    pool.run(write_then_reduce, ranks=3)


def tiny(rank):
    whole = backend().allocate_shared(8 * dist.get_world_size(), torch.float32)
    whole.fill_(rank)  # from the pool, so every byte is writable
    all_gather_single(whole, whole[8 * rank :][:8])
    assert torch.equal(whole, torch.arange(dist.get_world_size()).repeat_interleave(8) * 1.0)


def test_small_gathers_use_pool_memory(pool):
    pool.run(tiny, ranks=2)
