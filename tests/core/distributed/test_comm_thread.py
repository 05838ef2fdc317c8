"""`CommThread`: order of operations, propagation of failures, and collective counts."""

import threading
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives
from nearlinear.distributed.comm_thread import CommThread


def test_submitted_items_run_in_order_on_a_single_thread():
    comm_thread, seen = CommThread("test"), []
    items = [
        comm_thread.submit(n=lambda n=n: seen.append((n, threading.get_ident()))) for n in range(50)
    ]
    items[-1].wait()
    assert [n for n, _ in seen] == list(range(50))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1
    assert all(item.is_success() for item in items)


def test_submit_does_not_block_the_caller():
    comm_thread, gate = CommThread("test"), threading.Event()
    item = comm_thread.submit(waits=gate.wait)
    assert not item.is_completed()
    gate.set()
    assert item.wait()


def test_failure_is_raised_by_wait_of_failed_and_later_items():
    comm_thread, ran = CommThread("test"), []

    def fail():
        raise RuntimeError("rank 3 died")

    before, failing = comm_thread.submit(a=lambda: None), comm_thread.submit(b=fail)
    after = comm_thread.submit(c=lambda: ran.append(1))
    assert before.wait()
    for item in (failing, after, comm_thread.submit(d=lambda: ran.append(1))):
        with pytest.raises(RuntimeError, match="rank 3 died"):
            item.wait()
    assert not ran


def test_inline_comm_thread_runs_and_raises_in_submit():
    comm_thread, seen = CommThread("test", inline=True), []
    assert comm_thread.submit(a=lambda: seen.append(threading.get_ident())).is_success()
    assert seen == [threading.get_ident()]
    with pytest.raises(ZeroDivisionError):
        comm_thread.submit(b=lambda: 1 / 0)


def test_spans_record_start_and_end_of_items():
    comm_thread = CommThread("test")
    comm_thread.spans = []
    comm_thread.submit(first=lambda: time.sleep(0.01))
    comm_thread.submit(second=lambda: None).wait()
    (one, begin, end), (two, later, _) = comm_thread.spans
    assert (one, two) == ("first", "second") and begin + 0.01 <= end <= later


def test_deleted_comm_thread_ends_its_thread():
    comm_thread = CommThread("a comm thread to drop")
    comm_thread.submit(a=lambda: None).wait()
    thread = next(t for t in threading.enumerate() if t.name == "a comm thread to drop")
    del comm_thread
    thread.join(5)
    assert not thread.is_alive()


def count_on_comm_thread(rank):
    nl.init()
    comm_thread = CommThread("test")
    with count_collectives() as counts:
        comm_thread.submit(a=lambda: dist.all_reduce(torch.ones(4))).wait()
    comm_thread.submit(b=lambda: dist.all_reduce(torch.ones(4))).wait()
    return counts.calls


def test_count_collectives_includes_comm_thread_of_the_caller():
    assert nl.spmd.run(count_on_comm_thread, 2, processes=True) == [Counter(all_reduce=1)] * 2
