"""`spmd.run` on threads and processes: results, failures, timeouts, and messages."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import nearlinear as nl
from nearlinear.distributed.runtime import current_mesh
from nearlinear.distributed.thread_backend import _Base

threads_and_processes = pytest.mark.parametrize(
    "processes", [False, pytest.param(True, marks=pytest.mark.slow)]
)


@threads_and_processes
def test_results_are_returned_in_rank_order(processes):
    def work(rank, offset):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        return rank + offset, total.item(), dist.get_world_size()

    results = nl.spmd.run(work, 3, args=(10,), processes=processes)
    assert results == [(10, 3.0, 3), (11, 3.0, 3), (12, 3.0, 3)]


@threads_and_processes
def test_error_names_first_failing_rank_with_traceback(processes):
    def work(rank):
        if rank == 2:
            raise ValueError("no such luck")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(
        nl.spmd.RankError, match="rank 2 of 4 failed: ValueError: no such luck"
    ) as e:
        nl.spmd.run(work, 4, processes=processes, timeout=120)
    assert time.monotonic() - start < 60
    assert e.value.rank == 2
    assert 'raise ValueError("no such luck")' in e.value.rank_traceback
    assert processes or isinstance(e.value.__cause__, ValueError)


@pytest.mark.parametrize("how", ["seed", "preserve"])
def test_generators_of_models_in_construction_are_left_alone(how):
    building, preserving = threading.Event(), threading.Event()

    def work(rank):
        if rank == 0:
            preserving.wait(60)
            with nl.spmd.one_at_a_time(seed=0):
                first = torch.rand(3)
                building.set()
                time.sleep(0.2)
                return torch.cat([first, torch.rand(3)])
        if how == "seed":
            preserving.set()
            building.wait(60)
            nl.spmd.seed_generators(7)
        else:
            nl.spmd.seed_generators(7)
            with nl.spmd.preserve_generators():
                torch.rand(3)
                preserving.set()
                building.wait(60)
        return torch.rand(3)

    built, drawn = nl.spmd.run(work, 2)
    assert torch.equal(built, torch.rand(6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))


def test_group_creation_ends_when_another_rank_fails():
    def work(rank):
        nl.init({"hybrid_shard_degree": 2})
        if rank == 3:
            raise ValueError("before sharding")
        current_mesh().device_mesh("cpu")

    start = time.monotonic()
    with pytest.raises(nl.spmd.RankError, match="rank 3 of 4 failed: ValueError"):
        nl.spmd.run(work, 4, timeout=200)
    assert time.monotonic() - start < 60


def test_collectives_started_during_a_failure_end(monkeypatch):
    """Simulate a table of collectives that changes while the failing rank iterates over it."""

    class Changing(dict):
        def values(self):
            monkeypatch.setattr(Changing, "values", dict.values)
            raise RuntimeError("dictionary keys changed during iteration")

    monkeypatch.setattr(_Base, "_cur_coll_on_pgs", Changing())

    def work(rank):
        if rank == 1:
            while not _Base._cur_coll_on_pgs:
                time.sleep(0.1)
            raise ValueError("first")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(nl.spmd.RankError, match="rank 1 of 3 failed: ValueError: first"):
        nl.spmd.run(work, 3, timeout=100)
    assert Changing.values is dict.values
    assert time.monotonic() - start < 60


@threads_and_processes
def test_timeout_names_ranks_that_did_not_finish(processes):
    def work(rank):
        if rank != 1:
            dist.barrier()
        time.sleep(60 if processes and rank == 1 else 0)

    with pytest.raises(nl.spmd.RankError, match="did not finish within 6 s"):
        nl.spmd.run(work, 3, processes=processes, timeout=6)


@pytest.mark.slow
def test_error_names_killed_process_and_signal():
    def work(rank):
        if rank == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()

    with pytest.raises(nl.spmd.RankError, match="rank 1 of 3 failed: .* by signal 9"):
        nl.spmd.run(work, 3, processes=True, timeout=120)


def _surroundings(rank):
    """Return the process that imported torch, a variable, and the working directory."""
    with open(f"/proc/{os.getppid()}/stat") as status:
        starter = int(status.read().rpartition(")")[2].split()[1])
    return starter, os.environ.get("OF_THIS_TEST"), os.getcwd()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_of_later_runs_see_the_current_environment_and_folder(monkeypatch, tmp_path):
    (first, *_), _ = nl.spmd.run(_surroundings, 2, processes=True)
    monkeypatch.chdir(tmp_path)
    assert nl.spmd.run(_surroundings, 1, processes=True) == [(first, None, str(tmp_path))]
    monkeypatch.setenv("OF_THIS_TEST", "set")
    (other, *values), _ = nl.spmd.run(_surroundings, 2, processes=True)
    assert other != first and values == ["set", str(tmp_path)]


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_interrupted_run_leaves_no_process(tmp_path):
    def work(rank):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        time.sleep(60)

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    # a background job of a shell ignores SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            nl.spmd.run(work, 2, processes=True)
    finally:
        signal.signal(signal.SIGINT, before)
    left = [int(path.read_text()) for path in tmp_path.iterdir()]
    deadline = time.monotonic() + 20
    while any(map(_runs, left)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, left))


@pytest.fixture
def two_threads():
    """Set two intra-op threads; tests/conftest.py sets a single thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_failed_run_restores_global_state(two_threads):
    hook = sys.excepthook

    def bad(rank):
        raise RuntimeError("x")

    for _ in range(2):
        with pytest.raises(nl.spmd.RankError):
            nl.spmd.run(bad, 4)
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert torch.get_num_threads() == two_threads
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]
    assert nl.spmd.run(lambda rank: rank, 4) == [0, 1, 2, 3]


def test_sys_exit_in_a_rank_raises_rank_error():
    with pytest.raises(nl.spmd.RankError, match="it exited"):
        nl.spmd.run(lambda rank: sys.exit(3), 1)


def test_nested_run_raises():
    def outer(rank):
        nl.spmd.run(lambda rank: None, 2)

    with pytest.raises(nl.spmd.RankError, match="already running"):
        nl.spmd.run(outer, 1)


@pytest.mark.parametrize("ranks", [0, -1, "4", 2.0])
def test_invalid_number_of_ranks_raises(ranks):
    with pytest.raises(nl.errors.ConfigError, match="at least 1"):
        nl.spmd.run(lambda rank: None, ranks)


def test_non_callable_work_raises():
    with pytest.raises(nl.errors.ConfigError, match="needs a function"):
        nl.spmd.run(3, 2)


def test_one_at_a_time_seeds_ranks_equally_and_restores_rng_state():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()

    def draw(rank):
        with nl.spmd.one_at_a_time(seed=1):
            return torch.randn(50).tolist()

    results = nl.spmd.run(draw, 8)
    assert all(result == results[0] for result in results)
    assert torch.equal(torch.random.get_rng_state(), before)


@threads_and_processes
def test_init_uses_the_running_ranks(processes):
    def work(rank):
        mesh = nl.init({"hybrid_shard_degree": 2}, ranks_per_node=2)
        return str(mesh), current_mesh() is mesh

    for text, same in nl.spmd.run(work, 4, processes=processes):
        assert text.startswith("4 ranks on 2 nodes = 2 replicate x 2 shard")
        assert same


def test_current_mesh_without_init_raises():
    with pytest.raises(nl.errors.NearlinearError, match=r"Call nl.init\(\) first"):
        nl.spmd.run(lambda rank: current_mesh(), 1)[0]


def _send_to_next_rank(rank):
    ranks, received = dist.get_world_size(), torch.full((2, 3), -1.0)
    next_rank, previous = (rank + 1) % ranks, (rank - 1) % ranks
    second = torch.empty(1)
    with nl.count_collectives() as counts:
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((2, 3), float(rank)), next_rank),
                dist.P2POp(dist.isend, torch.tensor([rank + 100.0]), next_rank),
                dist.P2POp(dist.irecv, received, previous),
                dist.P2POp(dist.irecv, second, previous),
            ]
        )
        for request in reversed(requests):  # messages match in posting order, not waiting order
            request.wait()
    if rank == 0:
        dist.send(received + 1, 1)
    elif rank == 1:
        dist.recv(received, 0)
    return received.tolist(), second.item(), dict(counts.calls), counts.bytes["recv"]


@threads_and_processes
def test_point_to_point_messages_match_in_posting_order(processes):
    results = nl.spmd.run(_send_to_next_rank, 3, processes=processes)
    for rank, (received, second, calls, size) in enumerate(results):
        previous = (rank - 1) % 3
        assert received == [[float(3 if rank == 1 else previous)] * 3] * 2
        assert second == previous + 100
        assert calls == {"send": 2, "recv": 2}
        assert size == 24 + 4


def test_recv_ends_when_the_sender_fails():
    def work(rank):
        if rank == 1:
            raise ValueError("no message")
        dist.recv(torch.empty(1), 1)

    with pytest.raises(nl.spmd.RankError, match="rank 1 of 2 failed: ValueError: no message"):
        nl.spmd.run(work, 2, timeout=100)


def test_unreceived_message_is_dropped_after_the_run():
    nl.spmd.run(lambda rank: dist.isend(torch.zeros(1), 1).wait() if rank == 0 else None, 2)

    def work(rank):
        received = torch.ones(1)
        dist.recv(received, 0) if rank == 1 else dist.send(received + 1, 1)
        return received.item()

    assert nl.spmd.run(work, 2) == [1.0, 2.0]
