"""Single calls at the edges of the API: dtypes, shapes, wrong arguments, fallbacks."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.collectives.ranks import BACKEND
from tests.collectives.runner import all_gather_single, reduce_scatter_single


def still_works() -> bool:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor.tolist() == [float(dist.get_world_size())] * 3


def wrong_calls(size: int) -> dict:
    """Invalid calls in a group of ``size`` ranks."""
    f, i = torch.ones(4), torch.ones(4, dtype=torch.int32)
    return {
        "gather: output too small": lambda: all_gather_single(torch.empty(4 * size - 1), f),
        "gather: output too big": lambda: all_gather_single(torch.empty(4 * size + 1), f),
        "gather: another dtype": lambda: all_gather_single(torch.empty(4 * size).int(), f),
        "list: too short": lambda: dist.all_gather([torch.empty(4)] * (size - 1), f),
        "list: another dtype": lambda: dist.all_gather([i.clone() for _ in range(size)], f),
        "list: another size": lambda: dist.all_gather([torch.empty(5)] * size, f),
        "scatter: input too small": lambda: reduce_scatter_single(f, torch.ones(4 * size - 1)),
        "scatter: another dtype": lambda: reduce_scatter_single(f, torch.ones(4 * size).int()),
        "scatter list: too short": lambda: dist.reduce_scatter(f, [f] * (size - 1)),
        "list: another own size": lambda: dist.all_gather([torch.empty(5), f, f, f][:size], f[:3]),
        "exchange: rows": lambda: dist.all_to_all_single(
            torch.ones(1 + size), torch.ones(1 + size)
        ),
        "exchange: splits": lambda: dist.all_to_all_single(
            torch.ones(3), torch.ones(3), [1] * size, [2] * size
        ),
        "exchange: another dtype": lambda: dist.all_to_all([i] * size, [f] * size),
        "gather list: too short": lambda: dist.gather(f, [f] * (size - 1), dst=dist.get_rank()),
        "scatter: sizes": lambda: dist.scatter(f, [i.float()[:2]] * size, src=dist.get_rank()),
        "reduce: mean of integers": lambda: dist.all_reduce(i, dist.ReduceOp.AVG),
        "reduce: bits of floats": lambda: dist.all_reduce(f, dist.ReduceOp.BXOR),
        "broadcast: no such rank": lambda: dist.broadcast(f, src=size),
        "send: to itself": lambda: dist.send(f, dist.get_rank()),
        "send: no such rank": lambda: dist.send(f, size),
        "receive: no such rank": lambda: dist.recv(f, size),
        "send: a negative tag": lambda: dist.send(f, (dist.get_rank() + 1) % size, tag=-1),
    }


def call_wrongly(rank, alone):
    """Make invalid calls; with ``alone`` only on rank 0, which must not affect the others."""
    for name, call in wrong_calls(dist.get_world_size()).items():
        if rank == 0 or not alone:
            try:
                call()
            except (RuntimeError, ValueError, TypeError) as error:
                assert str(error), name
            else:
                raise AssertionError(f"{name}: no error")
        assert still_works(), name


@pytest.mark.parametrize("alone", [False, True])
def test_invalid_call_fails_before_communication(pool, alone):
    if BACKEND == "gloo" and alone:
        pytest.skip("gloo notices some of them too late")
    pool.run(call_wrongly, alone, ranks=3)


def byte_dtypes(rank):
    size, found = dist.get_world_size(), {}
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.int16, torch.bool):
        mine = torch.full((5,), rank + 1).to(dtype)
        output = torch.zeros(5 * size).to(dtype)
        all_gather_single(output, mine)
        listed = [torch.zeros(5).to(dtype) for _ in range(size)]
        dist.all_gather(listed, mine)
        sent = mine.clone()
        dist.broadcast(sent, 1)
        parts = [output, torch.cat([part.view(-1) for part in listed]), sent]
        found[str(dtype)] = [part.to(torch.complex64).real.int().tolist() for part in parts]
    return found


def test_gather_and_broadcast_support_any_dtype(pool):
    for found in pool.run(byte_dtypes, ranks=2):
        for dtype, (single, listed, sent) in found.items():
            second = 1 if dtype == "torch.bool" else 2
            assert single == listed == [1] * 5 + [second] * 5, dtype
            assert sent == [second] * 5, dtype


def strided_fallbacks(rank):
    """Fallback reductions of tensors that are not contiguous."""
    found = []
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        flags = torch.tensor([True, rank == 0, False, rank == 1] * 3).view(3, 4)[:, :2]
        dist.all_reduce(flags, op)
        found.append(flags.tolist())
    column = torch.full((5, 3), rank + 1.0)[:, 0]
    dist.reduce(column, 0)
    return found, column.tolist()


def test_fallback_reduces_strided_tensors(pool):
    if BACKEND == "gloo":
        pytest.skip("gloo reduces the first elements of the storage")
    (found, column), (other, _) = pool.run(strided_fallbacks, ranks=2)
    assert found == other == [[row] * 3 for row in ([True, False], [True, True], [False, True])]
    assert column == [3.0] * 5


def complex_numbers(rank):
    tensor = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        dist.all_reduce(tensor, op)
    scattered = torch.empty(1, dtype=torch.complex64)
    reduce_scatter_single(scattered, torch.tensor([1 + 1j, 2 - 2j]))
    with pytest.raises(ValueError, match="complex"):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    root = torch.tensor([2j - rank])
    dist.reduce(root, 0)
    assert rank or root.item() == 4j - 1
    return tensor.tolist(), scattered.item()


def test_complex_numbers_can_be_summed_but_not_compared(pool):
    reduced = [3 + 6j, 9 - 3j]
    assert pool.run(complex_numbers, ranks=2) == [(reduced, 2 + 2j), (reduced, 4 - 4j)]


def calls_of_one_tensor(group, count: int, peer: int) -> list:
    """Return calls with ``count`` tensors in place of one."""
    tensors = [torch.ones(4) for _ in range(count)]
    lists = [[torch.ones(4), torch.ones(4)] for _ in range(count)]
    return [
        lambda: group.broadcast(tensors, dist.BroadcastOptions()),
        lambda: group.allreduce(tensors, dist.AllreduceOptions()),
        lambda: group.reduce(tensors, dist.ReduceOptions()),
        lambda: group.allgather(lists, tensors, distributed_c10d.AllgatherOptions()),
        lambda: group.reduce_scatter(tensors, lists, dist.ReduceScatterOptions()),
        lambda: group.gather(lists, tensors, dist.GatherOptions()),
        lambda: group.scatter(tensors, lists, dist.ScatterOptions()),
        lambda: group.send(tensors, peer, 0),
        lambda: group.recv(tensors, peer, 0),
    ]


def several_tensors(rank):
    """Call operations of one tensor with none and with two, and return the errors."""
    group = distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    errors = []
    for count in (0, 2):
        for call in calls_of_one_tensor(group, count, 1 - rank):
            with pytest.raises(ValueError) as caught:
                call()
            errors.append(str(caught.value))
    with pytest.raises(ValueError) as caught:
        group.alltoall([], [], dist.AllToAllOptions())
    errors.append(str(caught.value))
    after = torch.ones(1)
    dist.all_reduce(after)
    return errors, after.item()


def test_operations_of_one_tensor_refuse_others(pool):
    if BACKEND == "gloo":
        pytest.skip("gloo reduces several tensors of a rank")
    for errors, after in pool.run(several_tensors, ranks=2):
        assert after == 2.0 and len(errors) == 19
        for error in errors[:18]:
            assert re.search("takes one (tensor|list of tensors) per rank, not [02]", error), error
        assert "all_to_all needs an input tensor" in errors[18]


def sparse(rank):
    tensor = torch.sparse_coo_tensor([[rank, 3]], [1.0, 10.0], (4,))
    dist.all_reduce(tensor)
    return tensor.to_dense().tolist()


def test_sparse_all_reduce_equals_gloo(pool):
    assert pool.run(sparse, ranks=2) == [[1.0, 1.0, 0.0, 20.0]] * 2


def premultiplied(rank):
    op = dist._make_nccl_premul_sum(0.25)
    tensor, scattered = torch.full((5,), rank + 1.0), torch.empty(2)
    dist.all_reduce(tensor, op)
    reduce_scatter_single(scattered, torch.full((4,), rank + 1.0), op)
    return tensor.tolist(), scattered.tolist()


def test_premultiplied_sum_scales_inputs(pool):
    """FSDP2 uses it for gradient divide factors. gloo does not support it."""
    if BACKEND == "gloo":
        pytest.skip("gloo cannot")
    assert pool.run(premultiplied, ranks=2) == [([0.75] * 5, [0.75] * 2)] * 2


def infinities(rank):
    tensor = torch.tensor([float("inf"), float("nan"), -0.0, 1e38], dtype=torch.float32)
    if rank == 1:
        tensor = torch.tensor([1.0, 2.0, -0.0, 3e38])
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            reduced = tensor.to(dtype)
            dist.all_reduce(reduced, op)
            results.append(reduced.float())
    return results


def test_reductions_propagate_infinity_and_nan(pool):
    for found in pool.run(infinities, ranks=2):
        for summed in found[0::2]:
            assert summed[0] == float("inf") and summed[1].isnan() and summed[3] == float("inf")
            assert summed[2] == 0 and summed[2].signbit()
        for largest in found[1::2]:
            assert largest[0] == float("inf")


def shapes(rank):
    size = dist.get_world_size()
    mine = torch.full((2, 3), float(rank))
    stacked, joined = torch.empty(size, 2, 3), torch.empty(2 * size, 3)
    all_gather_single(stacked, mine)
    all_gather_single(joined, mine)
    scalar, gathered = torch.tensor(float(rank)), torch.empty(size)
    all_gather_single(gathered, scalar)
    dist.all_reduce(scalar)
    reduced = torch.empty(2, 3)
    reduce_scatter_single(reduced, torch.ones(size, 2, 3))
    graph = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(graph)
    uneven = torch.empty(1 + rank)
    dist.reduce_scatter(uneven, [torch.ones(1 + r) for r in range(size)])
    return (
        torch.equal(stacked.view(-1), joined.view(-1)),
        [stacked[r].unique().tolist() for r in range(size)],
        gathered.tolist(),
        scalar.item(),
        reduced.unique().tolist(),
        graph.tolist(),
        uneven.tolist(),
    )


def test_shapes_and_uneven_lists_are_supported(pool):
    if BACKEND == "gloo":
        pytest.skip("gloo does not take the stacked form")
    for rank, found in enumerate(pool.run(shapes, ranks=3)):
        steps = [0.0, 1.0, 2.0]
        last = [3.0] * (1 + rank)
        assert found == (True, [[s] for s in steps], steps, 3.0, [3.0], [3.0] * 3, last)


def objects(rank):
    size = dist.get_world_size()
    gathered, collected = [None] * size, [None] * size if rank == 1 else None
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (1 + 1000 * rank)})
    dist.gather_object(("from", rank), collected, dst=1)
    shared = [{"of": 2}, 3.5] if rank == 2 else [None, None]
    dist.broadcast_object_list(shared, src=2)
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    lengths = [(entry["rank"], len(entry["text"])) for entry in gathered]
    return lengths, collected, shared, mine


def test_object_collectives_return_objects(pool):
    lengths = [(rank, 1 + 1000 * rank) for rank in range(3)]
    for rank, found in enumerate(pool.run(objects, ranks=3)):
        collected = [("from", r) for r in range(3)] if rank == 1 else None
        assert found == (lengths, collected, [{"of": 2}, 3.5], [f"for {rank}"])


def point_to_point(rank):
    size = dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(4)
    works = [dist.isend(torch.full((4,), float(rank)), after), dist.irecv(received, before)]
    for work in works:
        work.wait()
    tagged = torch.empty(2)
    if rank == 0:
        sends = [dist.isend(torch.tensor([1.0, 2.0]) * tag, 1, tag=tag) for tag in (5, 6)]
        source = dist.recv(tagged, tag=7)  # from any source
        for work in sends:
            work.wait()
    elif rank == 1:
        dist.recv(tagged, 0, tag=6)
        other = torch.empty(2)
        dist.recv(other, 0, tag=5)
        tagged += other
        dist.send(tagged, 0, tag=7)
        source = 0
    batch = torch.empty(1)
    operations = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), after),
        dist.P2POp(dist.irecv, batch, before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if rank > 1:
        return received.tolist(), batch.item(), None, None
    return received.tolist(), batch.item(), tagged.tolist(), source


def test_messages_match_by_rank_and_tag(pool):
    found = pool.run(point_to_point, ranks=3)
    assert found == [
        ([2.0] * 4, 2.0, [11.0, 22.0], 1),
        ([0.0] * 4, 0.0, [11.0, 22.0], 0),
        ([1.0] * 4, 1.0, None, None),
    ]


def messages_of_every_layout(rank):
    """Send strided, pooled and empty tensors, and objects, to the other rank."""
    other, wrong = 1 - rank, []
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for count in (0, 3, 1025, 8192, 8193, 300_000):  # 32 KiB travel with the envelope
        for dtype in (torch.float32, torch.complex64, torch.float8_e4m3fn, torch.bool):
            for source in ("contiguous", "strided", "pooled"):
                room = torch.zeros(2 * count).to(dtype)
                sent = room[::2] if source == "strided" else room[:count]
                if source == "pooled" and BACKEND != "gloo":
                    sent = backend.allocate_tensor(count, dtype=dtype, device=torch.device("cpu"))
                sent.copy_(torch.arange(count) % 7 + rank)
                received = torch.zeros(2 * count).to(dtype)[::2]
                if BACKEND == "gloo":  # which refuses strided tensors
                    sent, received = sent.contiguous(), received.contiguous()
                works = [dist.isend(sent, other), dist.irecv(received, other)]
                for work in works:
                    work.wait()
                expected = (torch.arange(count) % 7 + other).to(dtype)
                if not received.to(torch.complex64).equal(expected.to(torch.complex64)):
                    wrong.append((count, dtype, source))
    objects = [None, None]
    if rank == 0:
        dist.send_object_list([{"from": 0}, "text"], 1)
    else:
        dist.recv_object_list(objects, 0)
    return wrong, objects


def test_messages_of_every_layout_arrive_exactly(pool):
    first, second = pool.run(messages_of_every_layout, ranks=2)
    assert first == ([], [None, None]) and second == ([], [{"from": 0}, "text"])


def callbacks_that_communicate(rank):
    """Wait for a message in a callback of another one, and receive without waiting."""
    other, found = 1 - rank, []

    def reply(future):
        received = torch.empty(1)
        works = [dist.isend(torch.tensor([10.0 + rank]), other, tag=2),
                 dist.irecv(received, other, tag=2)]  # fmt: skip
        for work in works:
            work.wait()
        found.append((future.value()[0].item(), received.item()))

    first = torch.empty(1)
    works = [dist.isend(torch.tensor([float(rank)]), other, tag=1),
             dist.irecv(first, other, tag=1)]  # fmt: skip
    answered = works[1].get_future().then(reply)
    answered.wait()  # an engine thread drives the messages
    works[0].wait()
    return found, works[0].is_completed(), works[1].is_success()


@pytest.mark.skipif(BACKEND == "gloo", reason="gloo's works have no futures")
def test_callbacks_may_send_and_receive(pool):
    for rank, found in enumerate(pool.run(callbacks_that_communicate, ranks=2)):
        assert found == ([(1.0 - rank, 11.0 - rank)], True, True)


def exchanges(rank):
    size = dist.get_world_size()
    received = [torch.empty(2) for _ in range(size)]
    dist.all_to_all(received, [torch.full((2,), 10.0 * rank + r) for r in range(size)])
    output = torch.empty(size * (1 + rank))
    source = torch.cat([torch.full((1 + r,), float(rank)) for r in range(size)])
    splits = [1 + r for r in range(size)]
    dist.all_to_all_single(output, source, [1 + rank] * size, splits)
    tensor = torch.full((3,), float(rank))
    dist.reduce(tensor, 1, dist.ReduceOp.MAX)
    return [part.tolist() for part in received], output.tolist(), tensor.tolist()


def test_lists_and_splits_of_all_to_all_give_exact_results(pool):
    for rank, (listed, single, reduced) in enumerate(pool.run(exchanges, ranks=3)):
        assert listed == [[10.0 * r + rank] * 2 for r in range(3)]
        assert single == [float(r) for r in range(3) for _ in range(1 + rank)]
        assert rank != 1 or reduced == [2.0] * 3


def barriers(rank):
    for arguments in ({}, {"device_ids": None}, {"async_op": True}):
        work = dist.barrier(**arguments)
        if work is not None:
            work.wait()
    if BACKEND != "gloo":
        with pytest.raises(ValueError, match="monitored_barrier"):
            dist.monitored_barrier()
    return still_works()


def test_barriers_wait_for_all_ranks(pool):
    assert pool.run(barriers, ranks=3) == [True] * 3


def collectives_and_messages(rank):
    """Keep collectives and messages in flight at the same time on one group."""
    size, works, checks = dist.get_world_size(), [], []
    for step in range(30):
        count = 1 + 997 * (step % 4)
        reduced, received = torch.full((count,), 1.0 + step), torch.empty(1)
        works.append(dist.all_reduce(reduced, async_op=True))
        source = torch.full((1,), 100.0 * step + rank)
        works.append(dist.isend(source, (rank + 1) % size, tag=step))
        works.append(dist.irecv(received, (rank - 1) % size, tag=step))
        sent = torch.full((2,), 7.0 * step if rank == 0 else 0.0)
        works.append(dist.broadcast(sent, 0, async_op=True))
        checks.append((step, reduced, received, sent))
    for work in works:
        work.wait()
    for step, reduced, received, sent in checks:
        assert (reduced == size * (1.0 + step)).all() and (sent == 7.0 * step).all()
        assert received.item() == 100.0 * step + (rank - 1) % size


def test_collectives_and_messages_overlap(pool):
    pool.run(collectives_and_messages, ranks=3)
