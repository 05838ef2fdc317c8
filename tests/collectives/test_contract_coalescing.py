"""Coalesced collectives: the coalescing manager, its device form, and the coalesced calls."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.collectives.ranks import BACKEND
from tests.collectives.runner import all_gather_single, reduce_scatter_single

CPU = torch.device("cpu")
COUNTS = (3, 40_001, 0, 1)


def coalesce(rank, device, asynchronous, kind):
    """Run one kind of call on all tensors in the manager, and return the flat results."""
    size = dist.get_world_size()
    each = {"all_gather": (1, size), "reduce_scatter": (size, 1), "all_reduce": (1, 1)}[kind]
    sources = [torch.full((each[0] * count,), rank + 1.0) for count in COUNTS]
    outputs = [torch.empty(each[1] * count) for count in COUNTS]
    place = CPU if device else None
    with dist._coalescing_manager(device=place, async_ops=asynchronous) as manager:
        for output, source in zip(outputs, sources, strict=True):
            if kind == "all_gather":
                all_gather_single(output, source)
            elif kind == "reduce_scatter":
                reduce_scatter_single(output, source)
            else:
                dist.all_reduce(source)
    if asynchronous:
        manager.wait()
    results = sources if kind == "all_reduce" else outputs
    after = torch.ones(1)
    dist.all_reduce(after)  # the group is no longer coalescing
    return [result.unique().tolist() for result in results], after.item()


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("device", [False, True])
def test_coalescing_manager_equals_single_calls(pool, device, asynchronous, kind):
    if BACKEND == "gloo" and device:
        pytest.skip("gloo has no startCoalescing")
    values = [1.0, 2.0, 3.0] if kind == "all_gather" else [6.0]
    expected = [values, values, [], values]
    found = pool.run(coalesce, device, asynchronous, kind, ranks=3)
    assert found == [(expected, 3.0)] * 3


def repeated(rank):
    first, other = torch.full((5,), rank + 1.0), torch.full((2,), rank + 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but still called
        dist.all_reduce_coalesced([first, other, first, first.view(5)])
    return first.unique().tolist(), other.unique().tolist()


def test_repeated_tensors_are_reduced_once(pool):
    assert pool.run(repeated, ranks=3) == [([6.0], [6.0])] * 3


def different_dtypes(rank):
    size, dtypes = dist.get_world_size(), (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    sources = [torch.full((7,), rank + 1).to(dtype) for dtype in dtypes]
    outputs = [torch.empty(7 * size, dtype=dtype) for dtype in dtypes]
    with dist._coalescing_manager():
        for output, source in zip(outputs, sources, strict=True):
            all_gather_single(output, source)
    return [output.float().tolist() for output in outputs]


def test_coalesced_gather_supports_mixed_dtypes(pool):
    wanted = [1.0] * 7 + [2.0] * 7
    assert pool.run(different_dtypes, ranks=2) == [[wanted] * 4] * 2


def deprecated_calls(rank):
    warnings.simplefilter("ignore")
    reduced = [torch.full((count,), rank + 1.0) for count in (3, 5)]
    dist.all_reduce_coalesced(reduced)
    gathered = [[torch.empty(count) for count in (3, 5)] for _ in range(2)]
    dist.all_gather_coalesced(gathered, [torch.full((count,), float(rank)) for count in (3, 5)])
    return [t.unique().item() for t in reduced], [[t.unique().item() for t in g] for g in gathered]


def test_deprecated_coalesced_calls_work(pool):
    assert pool.run(deprecated_calls, ranks=2) == [([3.0, 3.0], [[0.0, 0.0], [1.0, 1.0]])] * 2


def functional(rank):
    group, tensor = dist.group.WORLD, torch.full((4,), rank + 1.0)
    summed = funcol.all_reduce(tensor, "sum", group)
    mean = funcol.all_reduce(tensor, "avg", group)
    gathered = funcol.all_gather_tensor(tensor, 0, group)
    columns = funcol.all_gather_tensor(tensor.view(2, 2), 1, group)
    scattered = funcol.reduce_scatter_tensor(torch.ones(4), "sum", 0, group)
    sent = funcol.broadcast(tensor, 1, group)
    many = funcol.all_gather_into_tensor_coalesced([tensor, tensor[:1]], group)
    ones = [torch.ones(4), torch.ones(2)]
    fewer = funcol.reduce_scatter_tensor_coalesced(ones, "sum", [0, 0], group)
    permuted = funcol.permute_tensor(tensor, [1, 0], group)
    results = [summed, mean, gathered, columns, scattered, sent, *many, *fewer, permuted]
    return tensor.tolist(), [result.flatten().tolist() for result in results]


def test_functional_collectives_work(pool):
    for rank, (unchanged, found) in enumerate(pool.run(functional, ranks=2)):
        assert unchanged == [rank + 1.0] * 4
        both = [1.0] * 4 + [2.0] * 4
        assert found == [
            [3.0] * 4,
            [1.5] * 4,
            both,
            [1.0, 1.0, 2.0, 2.0] * 2,
            [2.0] * 2,
            [2.0] * 4,
            both,
            [1.0, 2.0],
            [2.0] * 2,
            [2.0],
            [2.0 - rank] * 4,
        ]
