"""Mismatched calls: every rank raises at once with both calls, and no rank hangs."""

import re
import time

import pytest
import torch
import torch.distributed as dist

from tests.collectives.ranks import BACKEND
from tests.collectives.runner import all_gather_single, reduce_scatter_single
from tests.collectives.test_failures import aftermath

pytestmark = pytest.mark.skipif(BACKEND == "gloo", reason="gloo hangs or gives garbage")

SMALL, LARGE = 1000, 150_000  # elements; the engine uses different data paths for them


def make_call(name: str, asynchronous: bool):
    """Make the call of a name: operation, elements, and special options."""
    size, options = dist.get_world_size(), {"async_op": asynchronous}
    operation, count, *special = name.split()
    count = SMALL if count == "small" else LARGE if count == "large" else int(count)
    dtype = torch.float64 if "float64" in special else torch.float32
    op = dist.ReduceOp.MAX if "max" in special else dist.ReduceOp.SUM
    if "premultiplied" in special:
        op = dist._make_nccl_premul_sum(0.5)
    tensor = torch.ones(count, dtype=dtype)
    if operation == "all_reduce":
        return dist.all_reduce(tensor, op, **options)
    if operation == "all_gather":
        return all_gather_single(torch.empty(size * count, dtype=dtype), tensor, **options)
    if operation == "reduce_scatter":
        source = torch.ones(size * count, dtype=dtype)
        return reduce_scatter_single(tensor, source, op, **options)
    if operation == "all_to_all":
        splits = [count - (rank == 0 and "short" in special) for rank in range(size)]
        source, output = torch.ones(sum(splits)), torch.empty(size * count)
        return dist.all_to_all_single(output, source, [count] * size, splits, **options)
    if operation == "broadcast":
        return dist.broadcast(tensor, 1 if "root1" in special else 0, **options)
    return dist.barrier(**options)


def differ(rank, odd, theirs, its, asynchronous):
    """Call ``its`` on rank ``odd`` and ``theirs`` on all others, after two equal calls."""
    dist.all_reduce(torch.ones(10))
    dist.barrier()
    begun = time.monotonic()
    try:
        work = make_call(its if rank == odd else theirs, asynchronous)
        if asynchronous:
            work.wait()
        dist.barrier()  # a rank whose call succeeded gets the error here
    except RuntimeError as error:
        report = aftermath(error)
        report["took"] = report["when"] - begun
        return report


# Name -> (call of the odd rank, call of the others).
DIFFERENT = {
    "operation": ("all_gather 1000", "all_reduce 1000"),
    "operation, large": ("reduce_scatter large", "all_gather large"),
    "barrier": ("barrier 0", "all_reduce small"),
    "barrier, large": ("barrier 0", "broadcast large"),
    "size": ("all_reduce 1001", "all_reduce 1000"),
    "size, moved in another way": ("all_gather large", "all_gather small"),
    "size, large": ("reduce_scatter 150001", "reduce_scatter large"),
    "size, nothing": ("all_reduce 0", "all_reduce large"),
    "size, broadcast": ("broadcast 1001", "broadcast large"),
    "dtype": ("all_reduce 500 float64", "all_reduce 1000"),
    "dtype, large": ("all_gather 75000 float64", "all_gather large"),
    "reduction": ("all_reduce small max", "all_reduce small"),
    "reduction, large": ("reduce_scatter large max", "reduce_scatter large"),
    "factor": ("all_reduce small premultiplied", "all_reduce small"),
    "root": ("broadcast small root1", "broadcast small"),
    "root, large": ("broadcast large root1", "broadcast large"),
}
SAID = {"float64": "float64", "max": "max", "root1": "root 1"}  # expected text of a special option


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", DIFFERENT)
def test_mismatch_names_both_calls_on_every_rank(pool, name, ranks, asynchronous):
    its, theirs = DIFFERENT[name]
    odd = (len(name) + ranks) % ranks
    case = pool.start(differ, odd, theirs, its, asynchronous, ranks=ranks, timeout=30)
    try:
        assert case.collect(20, grace=5), case.stacks()
        for rank in range(ranks):
            report = case.outcomes[rank].value
            assert report, f"rank {rank} noticed nothing, or failed otherwise\n{case.stacks()}"
            check_report(report, odd, its, theirs)
    finally:
        case.close(replace=True)


@pytest.mark.parametrize("count", ["small", "large"])
def test_mismatch_of_parts_names_sender_and_receiver(pool, count):
    short = f"all_to_all {count} short"  # one element less for rank 0
    case = pool.start(differ, 1, f"all_to_all {count}", short, False, ranks=3, timeout=30)
    try:
        assert case.collect(20, grace=5), case.stacks()
        elements = SMALL if count == "small" else LARGE
        for rank in range(3):
            error = case.outcomes[rank].value["error"]
            said = f"rank 1 sends {elements - 1} elements to rank 0, which expects {elements}"
            assert said in error, error
    finally:
        case.close(replace=True)


def send_something_else(rank, count, dtype):
    """Rank 1 receives other data than rank 0 sends; rank 2 exchanges messages with both."""
    dist.barrier()
    expected = torch.ones(count, dtype=dtype) if dtype else torch.ones(count + 1)
    try:
        if rank == 0:
            dist.send(torch.ones(count), 1, tag=4)
        elif rank == 1:
            dist.recv(expected, 0, tag=4)
    except RuntimeError as error:
        said = str(error)
    else:
        said = ""
    received = torch.empty(1)
    for other in (0, 1):
        if rank == 2:
            dist.send(torch.tensor([5.0]), other)
        elif rank == other:
            dist.recv(received, 2)
    dist.barrier()
    return said, received.item()


@pytest.mark.parametrize("count", ["small", "large"])
@pytest.mark.parametrize("dtype", [None, torch.int32])
def test_mismatch_of_a_message_names_both_ranks(pool, count, dtype):
    elements = SMALL if count == "small" else LARGE
    expected = f"{elements} x int32" if dtype else f"{elements + 1} x float32"
    found = pool.run(send_something_else, elements, dtype, ranks=3, timeout=30)
    said = f"rank 0 sends {elements} x float32 with tag 4, and rank 1 expects {expected}"
    for error, received in found[:2]:
        assert said in error
        assert received == 5.0
    assert found[2][0] == ""


def check_report(report: dict, odd: int, its: str, theirs: str) -> None:
    error = report["error"]
    called = re.findall(r"rank (\d+) called (.*?)(?=, rank \d+ called|$)", error)
    assert len(called) == 2 and len({rank for rank, _ in called}) == 2, error
    by_odd = [text for rank, text in called if int(rank) == odd]
    by_other = [text for rank, text in called if int(rank) != odd]
    assert len(by_odd) == len(by_other) == 1, error
    for call, text in ((its, by_odd[0]), (theirs, by_other[0])):
        operation, _, *special = call.split()
        assert operation in text and all(SAID.get(word, "") in text for word in special), error
    assert by_odd != by_other, f"two equal calls are said to differ: {error}"
    assert all("#3" in text for _, text in called), error
    assert report["took"] < 10 and report["again_took"] < 1 and report["leaving_took"] < 5, report
    assert "called" in report["again"], report


def one_call_more(rank):
    """Make an extra call on rank 0, which meets the next call of the others."""
    dist.barrier()
    try:
        if rank == 0:
            dist.broadcast(torch.ones(70_000), 0)
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(5))
    except RuntimeError as error:
        return str(error)


def test_extra_call_is_a_mismatch(pool):
    case = pool.start(one_call_more, ranks=3, timeout=30)
    try:
        assert case.collect(20, grace=5), case.stacks()
        for rank in range(3):
            error = case.outcomes[rank].value
            assert error and "broadcast #2" in error and "all_reduce #2" in error, case.stacks()
    finally:
        case.close(replace=True)


def sub_group_mismatch(rank):
    """Mismatch in a sub-group: errors use global ranks, and the default group keeps working."""
    group = dist.new_group([1, 3])
    error = ""
    if rank in (1, 3):
        try:
            dist.all_reduce(torch.ones(10 + rank), group=group)
        except RuntimeError as failure:
            error = str(failure)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return error, tensor.item()


def test_sub_group_errors_use_global_ranks(pool):
    found = pool.run(sub_group_mismatch, ranks=4)
    for rank, (error, total) in enumerate(found):
        assert total == 4
        assert rank in (0, 2) or ("rank 1 called" in error and "rank 3 called" in error), error
