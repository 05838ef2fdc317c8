"""Lifecycle of a group: leaks, memory, timeouts, debug mode, the trace."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nearlinear_collectives.autoload import autoload
from tests.collectives.ranks import BACKEND
from tests.collectives.runner import all_gather_single
from tests.collectives.worker import join, store

CPU = torch.device("cpu")


def total(group=None) -> float:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def held() -> dict[str, int]:
    """Count the system resources that this process holds."""
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def use_everything(round_: int) -> None:
    """Create, use and destroy the default group, with every kind of resource."""
    join(BACKEND, name=f"round {round_}")
    pair = dist.new_group([0, 1])
    backend = dist.group.WORLD._get_backend(CPU)
    pooled = torch.empty(600_000)
    if BACKEND != "gloo":
        pooled = backend.allocate_tensor(600_000, dtype=torch.float32, device=CPU)
    for size in (3, 100_000, 600_000):
        dist.all_reduce(pooled[:size])
        dist.all_reduce(pooled[:size], async_op=True).wait()
    all_gather_single(pooled, pooled[: 600_000 // 2][:300_000].clone())
    if pair is not dist.GroupMember.NON_GROUP_MEMBER:
        total(pair)
    if round_ % 10 == 0:  # also create a fallback sometimes
        dist.all_to_all_single(torch.empty(2), torch.ones(2))
    dist.destroy_process_group()


def live_many_times(rank, rounds):
    for number in range(10):
        use_everything(number)
    before = held()
    for number in range(10, 10 + rounds):
        use_everything(number)
    deadline = time.monotonic() + 10  # spare threads outlive their group briefly
    while held()["threads"] > before["threads"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return before, held()


def test_hundred_groups_leak_nothing(pool):
    for before, after in pool.run(live_many_times, 100, ranks=2, backend=None, limit=180):
        assert after["files"] <= before["files"] + 2, (before, after)
        assert after["threads"] <= before["threads"] + 1, (before, after)
        assert after["mappings"] <= before["mappings"] + 20, (before, after)


def pooled_tensors(rank):
    backend = dist.group.WORLD._get_backend(CPU)
    assert backend.supports_tensor_alloc(CPU)
    tensors = {
        dtype: backend.allocate_tensor(1000, dtype=dtype, device=CPU).fill_(1)
        for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool)
    }
    for dtype, tensor in tensors.items():
        assert tensor.shape == (1000,) and tensor.dtype == dtype and tensor.device == CPU
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    assert backend.allocate_tensor(0, dtype=torch.float32, device=CPU).numel() == 0
    size = dist.get_world_size()
    gathered = backend.allocate_tensor(size * 400_000, dtype=torch.float32, device=CPU)
    own = gathered[rank * 400_000 : (rank + 1) * 400_000]
    own.fill_(rank + 1.0)
    all_gather_single(gathered, own)
    before = held()["mappings"]
    for _ in range(200):  # freed memory is reused with new content
        again = backend.allocate_tensor(300_000, dtype=torch.float32, device=CPU)
        again.fill_(-5)
        del again
    grown = held()["mappings"] - before
    dist.destroy_process_group()
    # Tensors outlive their group.
    parts = [part.unique().tolist() for part in gathered.view(size, -1)]
    gathered.add_(1)
    return parts, gathered[-1].item(), tensors[torch.int64].sum().item(), grown


def test_pool_tensors_behave_like_ordinary_tensors(pool):
    if BACKEND == "gloo":
        pytest.skip("gloo has no tensor allocation")
    for found in pool.run(pooled_tensors, ranks=3):
        parts, last, ones, grown = found
        assert (parts, last, ones) == ([[1.0], [2.0], [3.0]], 4.0, 1000)
        assert grown <= 2


def leave_early(rank):
    """Leave as soon as the own calls are done, while slower ranks are still reading."""
    size = dist.get_world_size()
    source, output = torch.full((500_000,), float(rank)), torch.empty(size * 500_000)
    if rank:
        time.sleep(0.02 * rank)
    all_gather_single(output, source)
    source.fill_(-1)
    last = torch.full((5_000,), 1.0)
    dist.broadcast(last, 0)
    dist.destroy_process_group()
    return [part.unique().tolist() for part in output.view(size, -1)], last.sum().item()


def test_leaving_a_group_does_not_affect_slower_ranks(pool):
    if BACKEND == "gloo":
        pytest.skip("gloo needs a barrier first")
    expected = ([[0.0], [1.0], [2.0], [3.0]], 5_000.0)
    for _ in range(10):
        assert pool.run(leave_early, ranks=4) == [expected] * 4


def destroy_with_calls_in_flight(rank):
    """Rank 1 never joins the call; leaving ends the call in bounded time with an error."""
    work = dist.all_reduce(torch.ones(4), async_op=True) if rank == 0 else None
    store("gate").set(f"ready {rank}", b"")
    store("gate").wait(["ready 0", "ready 1"])
    begun = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - begun < 10
    if work is not None:
        with pytest.raises(RuntimeError):
            work.wait()
    return True


def test_leaving_fails_calls_in_flight(pool):
    assert pool.run(destroy_with_calls_in_flight, ranks=2, limit=30) == [True, True]


def use_after_destroy(rank):
    group = dist.new_group()
    backend = group._get_backend(CPU)
    total(group)
    dist.destroy_process_group(group)
    with pytest.raises((RuntimeError, ValueError)):
        backend.allreduce([torch.ones(1)]).wait()
    return total()


def test_destroyed_group_raises(pool):
    if BACKEND == "gloo":
        pytest.skip("gloo's groups can be used after shutdown")
    assert pool.run(use_after_destroy, ranks=2) == [2.0, 2.0]


def respect_timeouts(rank):
    """Check the default timeout, a later change of it, and a group with another timeout."""
    own = dist.new_group(timeout=timedelta(seconds=1.5))
    gate = store("gate")
    if rank == 1:
        gate.wait(["over"])
        return None
    took = []
    for group in (dist.group.WORLD, own):
        if group is dist.group.WORLD:
            group.set_timeout(timedelta(seconds=1))
        begun = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        took.append(time.monotonic() - begun)
    gate.set("over", b"")
    return took


def test_group_timeouts_are_independent(pool):
    first, second = pool.run(respect_timeouts, ranks=2, limit=40)[0]
    assert 0.9 <= first <= 10 and 1.4 <= second <= 10


def debug_mode(rank):
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        join(BACKEND)
        group = dist.new_group([0, 1])
        tensor, gathered = torch.ones(3), torch.empty(6)
        dist.all_reduce(tensor, async_op=True).wait()
        all_gather_single(gathered, tensor)
        total(group)
        dist.barrier()
        objects = [None, None]
        dist.all_gather_object(objects, rank)
        mismatch = ""
        try:
            dist.all_reduce(torch.ones(3 + rank))
        except RuntimeError as error:
            mismatch = str(error)
        return tensor.tolist(), gathered.tolist(), objects, mismatch
    finally:
        dist.set_debug_level(level)


def test_debug_wrapper_supports_the_backend(pool):
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend in c10d's checking group."""
    for tensor, gathered, objects, mismatch in pool.run(debug_mode, ranks=2, backend=None):
        assert (tensor, gathered, objects) == ([2.0] * 3, [2.0] * 6, [0, 1])
        assert "mismatch" in mismatch.lower()


def look_at_trace(rank):
    import nearlinear_collectives

    group = dist.new_group()
    dist.all_reduce(torch.ones(1000, dtype=torch.bfloat16))
    all_gather_single(torch.empty(14), torch.ones(7), group=group)
    dist.all_reduce(torch.ones(2), async_op=True).wait()
    dist.broadcast(torch.ones(5, dtype=torch.int64), 0)
    names = [dist.group.WORLD.group_name, group.group_name]
    return names, nearlinear_collectives.trace()


def test_trace_lists_the_last_operations(pool):
    if BACKEND == "gloo":
        pytest.skip("the trace is nearlinear's")
    for (world, second), trace in pool.run(look_at_trace, ranks=2):
        last = [entry for entry in trace if entry["group"] in (world, second)][-4:]
        keys = ("group", "operation", "bytes", "dtype", "state")
        assert [tuple(entry[key] for key in keys) for entry in last] == [
            (world, "all_reduce", 2000, "bfloat16", "done"),
            (second, "all_gather", 28, "float32", "done"),
            (world, "all_reduce", 8, "float32", "done"),
            (world, "broadcast", 40, "int64", "done"),
        ]
        numbers = [entry["sequence"] for entry in last if entry["group"] == world]
        assert numbers == list(range(numbers[0], numbers[0] + 3))


AUTOLOADED = """
import resource
import sys
limit = int(sys.argv[3]) * 2**30 or resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
import torch
import torch.distributed as dist
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("nearlinear", store=store, rank=int(sys.argv[2]), world_size=2)
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
for group in (None, *(dist.new_group([0, 1]) for _ in range(3))):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3 and dist.get_backend() == "nearlinear"
for size in (2**20, 2**26):
    pooled = backend.allocate_tensor(size, dtype=torch.float32, device=torch.device("cpu"))
    pooled.fill_(1.0)
    dist.all_reduce(pooled)
    assert pooled[:: size // 8].tolist() == [2.0] * 8
dist.destroy_process_group()
"""


@pytest.mark.skipif(BACKEND == "gloo", reason="gloo is part of torch")
@pytest.mark.parametrize("limit_gib", [0, 16])  # of the address space; 0: none
def test_import_of_torch_registers_the_backend(tmp_path, limit_gib):
    names = {point.name for point in entry_points(group="torch.backends")}
    assert "nearlinear" in names, "install the package again"
    command = [sys.executable, "-c", AUTOLOADED, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank), str(limit_gib)]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]


@pytest.mark.skipif(BACKEND == "gloo", reason="gloo is part of torch")
@pytest.mark.parametrize(
    "first", ["nearlinear_collectives", "nearlinear_collectives.backend", "torch.distributed"]
)
def test_package_and_torch_may_be_imported_in_any_order(first):
    check = "assert 'nearlinear' in torch.distributed.Backend.backend_list"
    program = f"import {first}; import torch, nearlinear_collectives; {check}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_errors_of_registration_do_not_end_the_import_of_torch(monkeypatch, caplog):
    def fail():
        raise RuntimeError("no room")

    monkeypatch.setattr("nearlinear_collectives.backend.register", fail)
    autoload()
    assert "the backend nearlinear is not registered: no room" in caplog.text
