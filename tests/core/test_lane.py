"""A lane keeps order, tells what failed, and lets counters see through it."""

import threading
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import nearlinear as nl
from nearlinear.counts import count_collectives
from nearlinear.parallel.lane import Lane


def test_items_run_in_order_on_one_other_thread():
    lane, seen = Lane("test"), []
    items = [lane.give(n=lambda n=n: seen.append((n, threading.get_ident()))) for n in range(50)]
    items[-1].wait()
    assert [n for n, _ in seen] == list(range(50))
    assert len({thread for _, thread in seen} - {threading.get_ident()}) == 1
    assert all(item.is_success() for item in items)


def test_the_caller_goes_on_while_an_item_runs():
    lane, gate = Lane("test"), threading.Event()
    item = lane.give(waits=gate.wait)
    assert not item.is_completed()
    gate.set()
    assert item.wait()


def test_a_failure_is_raised_by_who_waits_and_by_all_that_follows():
    lane, ran = Lane("test"), []

    def fail():
        raise RuntimeError("rank 3 died")

    before, failing = lane.give(a=lambda: None), lane.give(b=fail)
    after = lane.give(c=lambda: ran.append(1))
    assert before.wait()
    for item in (failing, after, lane.give(d=lambda: ran.append(1))):
        with pytest.raises(RuntimeError, match="rank 3 died"):
            item.wait()
    assert not ran


def test_inline_lanes_run_at_once_and_raise_at_once():
    lane, seen = Lane("test", inline=True), []
    assert lane.give(a=lambda: seen.append(threading.get_ident())).is_success()
    assert seen == [threading.get_ident()]
    with pytest.raises(ZeroDivisionError):
        lane.give(b=lambda: 1 / 0)


def test_spans_say_when_items_ran():
    lane = Lane("test")
    lane.spans = []
    lane.give(first=lambda: time.sleep(0.01))
    lane.give(second=lambda: None).wait()
    (one, begin, end), (two, later, _) = lane.spans
    assert (one, two) == ("first", "second") and begin + 0.01 <= end <= later


def test_a_lane_that_is_dropped_ends_its_thread():
    lane = Lane("a lane to drop")
    lane.give(a=lambda: None).wait()
    thread = next(t for t in threading.enumerate() if t.name == "a lane to drop")
    del lane
    thread.join(5)
    assert not thread.is_alive()


def counted(rank):
    nl.init()
    lane = Lane("test")
    with count_collectives() as counts:
        lane.give(a=lambda: dist.all_reduce(torch.ones(4))).wait()
    lane.give(b=lambda: dist.all_reduce(torch.ones(4))).wait()
    return counts.calls


def test_counters_of_the_giving_thread_count_what_the_lane_does():
    assert nl.spmd.run(counted, 2, processes=True) == [Counter(all_reduce=1)] * 2
