"""c10d's contract of asynchronous calls: work, future and wait."""

import threading
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.collectives.ranks import BACKEND
from tests.collectives.runner import all_gather_single, reduce_scatter_single
from tests.collectives.worker import store


def every_call(rank: int, size: int) -> dict:
    """Map the name of a call to (asynchronous work, tensors that its future must hold)."""
    reduced, sent = torch.full((4,), rank + 1.0), torch.full((3,), float(rank))
    gathered, scattered = torch.empty(3 * size), torch.empty(2)
    listed = [torch.empty(3) for _ in range(size)]
    chunks = torch.arange(2.0 * size)
    return {
        "all_reduce": (dist.all_reduce(reduced, async_op=True), [reduced]),
        "broadcast": (dist.broadcast(sent, 1, async_op=True), [sent]),
        "all_gather": (all_gather_single(gathered, sent.clone(), async_op=True), [gathered]),
        "list": (dist.all_gather(listed, torch.full((3,), rank + 0.5), async_op=True), listed),
        "reduce_scatter": (reduce_scatter_single(scattered, chunks, async_op=True), [scattered]),
        "barrier": (dist.barrier(async_op=True), []),
    }


def look_at_works(rank):
    for name, (work, outputs) in every_call(rank, dist.get_world_size()).items():
        assert work.wait() is True, name
        assert work.is_completed(), name
        value = work.get_future().value()
        assert isinstance(value, list) and all(torch.is_tensor(part) for part in value), name
        assert torch.equal(joined(value), joined(outputs)), name


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0), *(tensor.view(-1) for tensor in tensors)])


def test_future_of_a_work_holds_the_list_of_outputs(pool):
    pool.run(look_at_works, ranks=3)


def result_is_the_outputs(rank):
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    [result] = work.result()
    assert result.data_ptr() == tensor.data_ptr() and result.tolist() == [2.0] * 4


def test_result_of_a_work_is_its_outputs(pool):
    pool.run(result_is_the_outputs, ranks=2)


def chain_callbacks(rank):
    seen = []
    tensor = torch.ones(3)
    future = dist.all_reduce(tensor, async_op=True).get_future()

    def halve(done):
        [total] = done.value()
        seen.append(total.tolist())
        return total / 2

    first = future.then(halve)
    second = first.then(lambda done: done.value() + 10)
    late = dist.all_reduce(torch.ones(1), async_op=True)
    late.wait()
    after = late.get_future().then(lambda done: done.value()[0].item())  # complete already
    return first.wait().tolist(), second.wait().tolist(), seen, after.wait()


def test_future_callbacks_run_before_and_after_completion(pool):
    for outcome in pool.run(chain_callbacks, ranks=2):
        assert outcome == ([1.0] * 3, [11.0] * 3, [[2.0] * 3], 2.0)


def call_in_callback(rank):
    """Make another call on the same group in a callback and wait for it, as PowerSGD does."""

    def again(done):
        [total] = done.value()
        [twice] = dist.all_reduce(total, async_op=True).get_future().wait()
        return twice

    found = []
    for step in range(5):
        work = dist.all_reduce(torch.full((3,), float(step)), async_op=True)
        found.append(work.get_future().then(again).wait().tolist())
    return found


def test_callbacks_can_make_calls(pool):
    expected = [[4.0 * step] * 3 for step in range(5)]
    assert pool.run(call_in_callback, ranks=2, limit=20) == [expected] * 2


def one_rank_is_late(rank):
    gate = store("gate")
    tensor = torch.ones(5)
    if rank == 1:
        gate.wait(["waited in vain"])
        dist.all_reduce(tensor)
        return tensor.tolist()
    work = dist.all_reduce(tensor, async_op=True)
    assert not work.is_completed()
    with pytest.raises(RuntimeError):
        work.wait(timeout=timedelta(milliseconds=150))
    gate.set("waited in vain", b"")
    assert work.wait(timeout=timedelta(seconds=30)) is True
    return tensor.tolist()


def test_wait_timeout_affects_neither_call_nor_group(pool):
    assert pool.run(one_rank_is_late, ranks=2) == [[2.0] * 5] * 2


def wait_without_the_gil(rank):
    """Let rank 1 join only after a Python thread ran on rank 0, which waits."""
    gate, tensor = store("gate"), torch.ones(2)

    def count_and_open():
        sum(range(200_000))
        store("gate").set("open", b"")

    for asynchronous in (False, True):
        if rank == 1:
            gate.wait(["open"])
            gate.delete_key("open")
        else:
            thread = threading.Timer(0.2, count_and_open)
            thread.start()
        work = dist.all_reduce(tensor, async_op=asynchronous)
        if asynchronous:
            work.wait()
        if rank == 0:
            thread.join()
        dist.barrier()
    return tensor.tolist()


def test_waiting_releases_the_gil(pool):
    assert pool.run(wait_without_the_gil, ranks=2, limit=30) == [[4.0] * 2] * 2


def forget_tensors(rank):
    size, count = dist.get_world_size(), 50_000
    works = []
    for step in range(6):
        source = torch.full((count,), rank + 10.0 * step)
        works.append(all_gather_single(torch.empty(size * count), source, async_op=True))
        del source
        torch.full((count,), -1.0)  # reuses memory that was freed too early
    for step, work in enumerate(works):
        work.wait()
        whole = joined(work.get_future().value())
        for other, part in enumerate(whole.view(size, count)):
            assert (part == other + 10.0 * step).all()
    all_gather_single(torch.empty(size), torch.ones(1), async_op=True)  # without a wait
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def test_work_keeps_its_tensors_alive_without_wait(pool):
    assert pool.run(forget_tensors, ranks=3) == [3.0] * 3


def wait_elsewhere(rank):
    tensor, seen = torch.ones(1000), []
    work = dist.all_reduce(tensor, async_op=True)

    def wait():
        work.wait()
        seen.append(tensor.sum().item())

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def test_several_threads_can_wait_for_one_work(pool):
    assert pool.run(wait_elsewhere, ranks=2) == [[2000.0] * 3] * 2


def overlap_compute(rank):
    """Check that asynchronous calls progress while the issuing thread computes and never polls."""
    tensor, other = torch.ones(300_000), torch.ones(128, 128)
    work = dist.all_reduce(tensor, async_op=True)
    gate = store("gate")
    gate.add("arrived", 1)
    while gate.add("arrived", 0) < dist.get_world_size():
        other @ other  # in progress on all ranks; no rank waits for it
    for _ in range(20_000):
        if work.is_completed():
            break
        other @ other
    completed = work.is_completed()
    work.wait()
    return completed


def test_asynchronous_calls_progress_without_wait(pool):
    assert pool.run(overlap_compute, ranks=2) == [True, True]


def profiled(rank):
    """Return the backend's events in a profile of every operation of the engine."""
    size = dist.get_world_size()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tensor, gathered = torch.ones(size), torch.empty(size * size)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.broadcast(tensor, 0)
        all_gather_single(gathered, tensor)
        reduce_scatter_single(torch.empty(1), tensor)
        dist.barrier()
    events = Counter(event.key for event in profile.events() if "nearlinear:" in event.key)
    return dict(events)


def test_profiler_shows_every_operation(pool):
    if BACKEND == "gloo":
        pytest.skip("gloo has names of its own")
    expected = {"all_reduce": 2, "broadcast": 1, "all_gather": 1, "reduce_scatter": 1, "barrier": 1}
    for events in pool.run(profiled, ranks=2):
        assert events == {f"nearlinear:{name}": count for name, count in expected.items()}
