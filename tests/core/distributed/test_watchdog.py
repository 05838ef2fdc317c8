"""The watchdog names a dead, stuck or failing rank on all other ranks."""

import re
import subprocess
import threading

import pytest
import torch.distributed as dist

import nearlinear as nl
from nearlinear.distributed import watchdog
from nearlinear.distributed.diagnosis import Limits, diagnose
from nearlinear.distributed.heartbeat import Heartbeat, HeartbeatChannel, RankStatus, pid_namespace
from nearlinear.errors import RankError

LIMITS = Limits(stall_timeout=100.0, heartbeat_timeout=30.0, setting="train.rank_timeout")


def status(index=7, stalled=200.0, age=0.0, process_exited=False, **changes) -> RankStatus:
    fields = {
        "sequence": 3, "host": "node-a", "pid": 41, "pid_namespace": "", "progress": 0,
        "operation": f"operation {index}", "operation_index": index, "patience": 1.0,
        "seconds_since_progress": stalled, "in_collective": True, "source_line": "",
    }  # fmt: skip
    return RankStatus(Heartbeat(**fields | changes), age, process_exited)


def diagnosis(*ranks: RankStatus, ordered_progress: bool = True) -> tuple | None:
    found = diagnose(ranks, LIMITS, ordered_progress=ordered_progress)
    return found and (found.kind, found.rank)


BUSY = {"in_collective": False}
CASES = {
    "progress everywhere": ([status(stalled=3), status(stalled=1)], None),
    "equally slow, e.g. compiling": ([status(**BUSY), status(**BUSY)], None),
    "behind": ([status(8), status(7, **BUSY), status(8)], ("stalled", 1)),
    "behind in an unmatched collective": ([status(8), status(7), status(8)], ("stalled", 1)),
    "behind but making progress": ([status(8), status(7, stalled=2, **BUSY)], None),
    "behind while others make progress": ([status(8, stalled=2), status(7, **BUSY)], None),
    "behind with patience": ([status(8), status(7, patience=4.0, **BUSY)], None),
    "outside of the collective": ([status(), status(), status(**BUSY)], ("stalled", 2)),
    "earlier block": (
        [status(progress=4), status(progress=3), status(progress=4)],
        ("stalled", 1),
    ),
    "earlier block on accelerators": (
        [status(progress=4, **BUSY), status(progress=3, **BUSY)],
        ("stalled", 1),
    ),
    "same collective": ([status(), status()], ("deadlock", None)),
    "dead by timeout": ([status(stalled=1), status(stalled=1, age=31)], ("dead", 1)),
    "dead by pid": ([status(stalled=1), status(stalled=1, process_exited=True)], ("dead", 1)),
    "late heartbeat": ([status(stalled=1), status(stalled=1, age=29)], None),
    "exited and done": (
        [status(stalled=1), status(exited=True, age=1e6, process_exited=True)],
        None,
    ),
    "exited too early": ([status(), status(exited=True, age=1e6)], ("exited", 1)),
    "exited beside a straggler": (
        [status(**BUSY), status(), status(exited=True)],
        ("stalled", 0),
    ),
    "never started": ([status(stalled=1), RankStatus(None, 101)], ("dead", 1)),
    "about to start": ([status(stalled=1), RankStatus(None, 99)], None),
}


@pytest.mark.parametrize("case", CASES)
def test_diagnose_finds_the_faulty_rank(case):
    ranks, expected = CASES[case]
    assert diagnosis(*ranks) == expected


def test_diagnose_ignores_unordered_progress_of_pipeline_stages():
    ranks = [status(progress=4, **BUSY), status(progress=3, **BUSY)]
    assert diagnosis(*ranks, ordered_progress=False) is None
    waiting = [status(progress=4), status(progress=3)]
    assert diagnosis(*waiting, ordered_progress=False) == ("deadlock", None)


@pytest.mark.skipif(not pid_namespace(), reason="processes of peers are not visible")
def test_process_may_end_after_its_connections():
    store = dist.HashStore()
    with subprocess.Popen(["sleep", "0.4"]) as peer:
        beat = status(pid=peer.pid, pid_namespace=pid_namespace()).heartbeat
        HeartbeatChannel(store, "1", 0).send(beat)
        channel = HeartbeatChannel(store, "1", 1)
        assert not channel.status(0).process_exited
        assert channel.last_status(0, exit_delay=60).process_exited


def test_fault_messages_name_rank_operation_and_remedy():
    waiting = status(8, source_line="all_reduce, train/trainer.py:3 in step")
    late = status(7, source_line="my/data.py:8 in read", **BUSY)
    assert diagnose([waiting, late], LIMITS).text == (
        'rank 1 (host node-a) has been stuck in "operation 7" (my/data.py:8 in read) for 200 s; '
        'rank 0 is waiting in "operation 8" (all_reduce, train/trainer.py:3 in step). Check the '
        "log of rank 1, or raise train.rank_timeout (100 s) if this operation is expected to take "
        "longer."
    )
    assert diagnose([status(stalled=1), status(stalled=1, age=31)], LIMITS).text == (
        "rank 1 (host node-a) sent no heartbeat for 31 s: it is dead, stopped or unreachable; its "
        'last known operation was "operation 7", 32 s ago. Check its log and its host, then '
        "restart the run."
    )


class Stuck:
    """Operation that blocks until the other ranks have reported the fault."""

    def __init__(self):
        self.released = threading.Event()

    def wait_in_user_code(self) -> None:
        assert self.released.wait(120)


def run_until_failure(work, ranks: int = 3) -> str:
    with pytest.raises(RankError) as caught:
        nl.spmd.run(work, ranks, timeout=120)
    return str(caught.value).splitlines()[0]


def test_stuck_rank_is_named_on_all_other_ranks():
    stuck, errors = Stuck(), {}

    def work(rank):
        nl.init()
        try:
            with nl.watch_ranks(timeout=4, setting="the timeout") as watch:
                for step in range(3):
                    watch.at(f"step {step}, loading a batch")
                    if rank == 1 and step == 2:
                        stuck.wait_in_user_code()
                    watch.at(f"step {step}, adding up")
                    dist.barrier()
        except nl.errors.RankFailure as error:
            errors[rank] = str(error)
            if len(errors) == 2:
                stuck.released.set()
            raise

    run_until_failure(work)
    assert errors.keys() >= {0, 2}
    for text in errors.values():
        assert re.search(
            r'rank 1 \(host \S+\) has been stuck in "step 2, loading a batch" '
            r"\(distributed/test_watchdog.py:\d+ in wait_in_user_code\) for \d+ s; rank 0 and "
            r'others are waiting in "step 2, adding up" \(barrier, distributed/test_watchdog.*'
            r"Check the log of rank 1, or raise the timeout \(4 s\)",
            text,
        )


def test_mismatched_collectives_are_reported_as_a_deadlock():
    """Place all ranks in the same operation with different process groups."""

    def work(rank):
        nl.init()
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
        with nl.watch_ranks(timeout=3) as watch:
            watch.at("the exchange")
            dist.barrier(pairs[rank])

    text = run_until_failure(work)
    assert "all ranks have been waiting for each other for" in text
    assert len(re.findall(r'rank \d \(host \S+\) in "the exchange" \(barrier, ', text)) == 3


def test_failing_rank_is_named_on_all_other_ranks():
    errors = {}

    def work(rank):
        nl.init()
        try:
            with nl.watch_ranks(on_fault=lambda fault, consistent: f"and {consistent}") as watch:
                watch.at("step 5")
                if rank == 1:
                    raise ValueError("out of luck\nand more")
                dist.barrier()
        except nl.errors.RankFailure as error:
            errors[rank] = str(error), error.exit_code
            raise

    assert run_until_failure(work) == "rank 1 of 3 failed: ValueError: out of luck"
    assert errors.keys() == {0, 2}
    for text, code in errors.values():
        assert re.fullmatch(
            r'rank 1 \(host \S+\) failed in "step 5": ValueError: out of luck; and True', text
        )
        assert code == 1


def test_stuck_fault_handler_does_not_block_the_exit(monkeypatch):
    monkeypatch.setattr(watchdog, "HANDLER_TIMEOUT", 0.2)
    stuck, errors = Stuck(), {}

    def work(rank):
        nl.init()
        try:
            with nl.watch_ranks(on_fault=lambda *_: stuck.wait_in_user_code()) as watch:
                watch.at("step 5")
                if rank == 1:
                    raise ValueError("out of luck")
                dist.barrier()
        except nl.errors.RankFailure as error:
            errors[rank] = str(error)
            raise

    assert run_until_failure(work, 2) == "rank 1 of 2 failed: ValueError: out of luck"
    stuck.released.set()
    assert errors[0].endswith("out of luck; the fault handler did not finish within 0 s")


def test_healthy_ranks_may_exit_at_different_times():
    """Exit the ranks one after another; the next watch starts with fresh state."""

    def work(rank):
        nl.init()
        watches = nl.watch_ranks(timeout=3), nl.watch_ranks(timeout=3)
        for watch in (*watches, watches[0]):
            with watch:
                with watch.changing("a little work"):
                    dist.barrier()
                threading.Event().wait(0.2 * rank)

    nl.spmd.run(work, 3)
