"""Ranks that die, stop or never join: the others raise in time and name the rank and the call.

Victims, calls and moments are random but seeded. NEARLINEAR_SOAK=n runs n times as many trials.
The bounds are those of the backend: 2 s after a death, the timeout after a stall.
"""

import itertools
import os
import random
import re
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.collectives import worker
from tests.collectives.programs import COLLECTIVES, KINDS, Program, Step
from tests.collectives.ranks import BACKEND
from tests.collectives.runner import Runner, all_gather_single

SOAK = int(os.environ.get("NEARLINEAR_SOAK", "1"))
DEATH = 5.0  # seconds from a death to the error of every survivor, on a loaded machine
LATE = 2.0  # seconds a loaded machine may add to a timeout
OPERATIONS = (
    "all_gather|reduce_scatter|all_reduce|broadcast|barrier|all_to_all|gather|scatter|reduce|send|"
    "receive"
)

pytestmark = pytest.mark.skipif(BACKEND == "gloo", reason="gloo names no rank")


def random_program(seed: int, ranks: int, kinds=KINDS) -> Program:
    """Draw 40 calls of these kinds and all sizes, some in flight together."""
    draw = random.Random(seed)
    steps = [
        Step(
            draw.choice(kinds),
            sizes=(draw.choice((1, 1000, 9000, 70_000, 400_000)),),
            root=draw.randrange(ranks),
            in_place=draw.random() < 0.5,
            pooled=draw.random() < 0.5,
            overlap=draw.choice((0, 0, 1, 3)),
        )
        for _ in range(40)
    ]
    return Program((tuple(range(ranks)),), tuple(steps), seed)


def aftermath(error: Exception, group=None) -> dict:
    """Report a failed call (time and error) and the behaviour of the group afterwards."""
    report = {"when": time.monotonic(), "error": str(error)}
    begun = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)
        report["again"] = ""
    except RuntimeError as second:
        report["again"] = str(second)
    report["again_took"] = time.monotonic() - begun
    begun = time.monotonic()
    dist.destroy_process_group()
    report["leaving_took"] = time.monotonic() - begun
    return report


def call_for_ever(rank, seed, busy, kinds=KINDS):
    """Make random calls until one fails; with ``busy``, mostly compute in between."""
    program, own = random_program(seed, dist.get_world_size(), kinds), random.Random(rank)
    worker.announce("joined")
    try:
        while True:
            if busy:
                time.sleep(own.random() * 0.2)
                dist.all_reduce(torch.ones(5))
            else:
                Runner(program, rank, [dist.group.WORLD]).run()
    except RuntimeError as error:
        return aftermath(error)


def check_report(report: dict, victim: int, pattern: str) -> None:
    error = report["error"]
    assert re.search(rf"\brank {victim} \(host {re.escape(socket.gethostname())}\b", error), error
    assert re.search(pattern, error), error
    operation = re.search(rf"\b({OPERATIONS}) #\d+", error)
    assert operation, error
    assert "barrier" in operation[0] or re.search(r" of [\d.]+ ([KM]i)?B\b", error), error
    assert report["again_took"] < 1 and f"rank {victim}" in report["again"], report
    assert report["leaving_took"] < 5, report


def end_abruptly(pool, seed, number, busy):
    draw = random.Random(seed)
    ranks = draw.choice((2, 3, 4, 6))
    victim = draw.randrange(ranks)
    timeout = 60 if number == signal.SIGKILL else 3
    # A message that is late names the rank that it waits for, which may wait for the stopped one.
    kinds = KINDS if number == signal.SIGKILL else COLLECTIVES
    case = pool.start(call_for_ever, seed, busy, kinds, ranks=ranks, timeout=timeout)
    survivors = [rank for rank in range(ranks) if rank != victim]
    try:
        case.heard("joined")
        time.sleep(draw.random() * 0.4)
        reap = number == signal.SIGKILL and draw.random() < 0.5
        moment = case.kill(victim, number, reap=reap)
        assert case.collect(20, ranks=survivors), case.stacks()
        reports = [case.outcomes[rank].value for rank in survivors]
        assert all(reports), case.stacks()
        if number == signal.SIGSTOP:
            case.kill(victim, signal.SIGCONT)  # gets the error late
            assert case.collect(10) and case.outcomes[victim].value, case.stacks()
    finally:
        case.close(replace=True)
    return moment, victim, reports


@pytest.mark.parametrize("busy", [False, True], ids=["calling", "computing"])
@pytest.mark.parametrize("seed", range(10 * SOAK))
def test_killed_rank_is_named_by_all_survivors(pool, seed, busy):
    moment, victim, reports = end_abruptly(pool, seed, signal.SIGKILL, busy)
    for report in reports:
        check_report(report, victim, "died")
        assert report["when"] - moment < DEATH


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["calling", "computing"])
@pytest.mark.parametrize("seed", range(2 * SOAK))
def test_stopped_rank_is_named_after_the_timeout(pool, seed, busy):
    moment, victim, reports = end_abruptly(pool, 1000 + seed, signal.SIGSTOP, busy)
    for report in reports:
        check_report(report, victim, "timeout after 3 s: .* made no progress")
        assert report["when"] - moment < 3 + LATE


def wait_in_vain(rank, operation):
    """Wait in one call on all ranks but the victim, which dies while computing."""
    steps = {
        "all_gather": Step("all_gather", sizes=(300_000,), pooled=True, in_place=True),
        "reduce_scatter": Step("reduce_scatter", sizes=(50_000,)),
        "all_reduce": Step("all_reduce", sizes=(3,)),
        "broadcast": Step("broadcast", sizes=(90_000,), root=1),
        "barrier": Step("barrier"),
        "asynchronous": Step("all_reduce", sizes=(100_000,), overlap=1),
    }
    dist.barrier()
    worker.announce("joined")
    if rank == 1:
        time.sleep(60)
    program = Program((tuple(range(dist.get_world_size())),), (steps[operation],))
    try:
        Runner(program, rank, [dist.group.WORLD]).run()
    except RuntimeError as error:
        return aftermath(error)


@pytest.mark.parametrize(
    "operation",
    ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "asynchronous"],
)
def test_death_fails_the_calls_that_wait_for_the_rank(pool, operation):
    case = pool.start(wait_in_vain, operation, ranks=3)
    try:
        case.heard("joined")
        time.sleep(0.2)
        moment = case.kill(1)
        assert case.collect(10, ranks=(0, 2)), case.stacks()
        for rank in (0, 2):
            report = case.outcomes[rank].value
            check_report(report, 1, "died")
            assert report["when"] - moment < DEATH
            assert operation in report["error"] or operation == "asynchronous"
    finally:
        case.close(replace=True)


def wait_for_a_message(rank, operation, behind):
    """Wait for messages of rank 1, or for rank 1 to receive some; rank 3 ``behind`` rank 0."""
    dist.barrier()
    worker.announce("joined")
    if rank == 1:
        time.sleep(60)
    large = torch.ones(300_000)
    try:
        if rank == 3 and not behind:
            return None
        if rank == 3:
            dist.recv(torch.empty(1), 0)  # which waits for rank 1
        elif operation == "send":
            dist.send(torch.ones(3) if rank else large, 1)
        elif operation == "receive":
            dist.irecv(large, 1).wait()
        elif operation == "any":
            dist.recv(large)
        else:  # nobody waits for these
            works = [dist.isend(large, 1), dist.irecv(torch.empty(1), 1)]
            end = time.monotonic() + 20
            while not all(work.is_completed() for work in works) and time.monotonic() < end:
                time.sleep(0.01)
            for work in works:
                work.wait()
    except RuntimeError as error:
        return aftermath(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("operation", ["send", "receive", "any", "in flight"])
def test_messages_of_a_lost_rank_name_it(pool, operation, number):
    killed = number == signal.SIGKILL
    timeout = 60 if killed else 2
    case = pool.start(wait_for_a_message, operation, killed, ranks=4, timeout=timeout)
    others = (0, 2, 3) if killed else (0, 2)
    try:
        case.heard("joined")
        time.sleep(0.2)
        moment = case.kill(1, number)
        assert case.collect(10, ranks=others), case.stacks()
        for rank in others:
            report = case.outcomes[rank].value
            assert report, case.stacks()
            assert re.search(r"\b(send|receive) #\d+ of [\d.]+ ([KM]i)?B ", report["error"])
            if killed:
                check_report(report, 1, "died")
                assert report["when"] - moment < DEATH
            else:
                one = "timeout after 2 s: rank 1 .* made no progress"
                late = "timeout after 2 s: no rank has sent" if operation == "any" else one
                assert re.search(late, report["error"]), report
                assert report["when"] - moment < 2 + LATE
    finally:
        case.close(replace=True)


def go_on_after_a_lost_message(rank):
    """Rank 1 learns of rank 2's death in a message and makes another call than rank 0."""
    dist.barrier()
    worker.announce("joined")
    try:
        if rank == 2:
            time.sleep(60)
        elif rank == 1:
            dist.recv(torch.empty(1), 2)
        else:
            all_gather_single(torch.empty(9), torch.ones(3))
    except RuntimeError as error:
        return aftermath(error)


def test_a_death_is_named_and_not_the_other_call_it_led_to(pool):
    case = pool.start(go_on_after_a_lost_message, ranks=3)
    try:
        case.heard("joined")
        time.sleep(0.2)
        case.kill(0, signal.SIGSTOP)
        case.kill(2)
        assert case.collect(10, ranks=(1,)), case.stacks()
        case.kill(0, signal.SIGCONT)
        assert case.collect(10, ranks=(0,)), case.stacks()
        for rank in (0, 1):
            check_report(case.outcomes[rank].value, 2, "died")
    finally:
        case.close(replace=True)


def leave_while_others_exchange(rank):
    """Rank 0 leaves; the others exchange messages afterwards, also from any rank."""
    received = torch.zeros(1)
    if rank == 0:
        dist.send(torch.ones(1), 1)
        dist.destroy_process_group()
        return received.item()
    if rank == 1:
        dist.recv(received)
        time.sleep(0.2)
        dist.recv(received)
        try:
            dist.recv(torch.empty(1), 0)
        except RuntimeError as error:
            return received.item(), str(error)
    time.sleep(0.1)
    dist.send(torch.tensor([7.0]), 1)
    return received.item()


def test_messages_go_on_after_a_rank_has_left(pool):
    case = pool.start(leave_while_others_exchange, ranks=3)
    try:
        assert case.collect(10), case.stacks()
        received, error = case.outcomes[1].value
        assert received == 7.0 and "rank 0 (host " in error and "left the group" in error, error
    finally:
        case.close(replace=True)


def use_what_is_left(rank):
    """Use groups without the dead rank, existing and new ones."""
    trio = dist.new_group([0, 1, 2])
    worker.announce("joined")
    if rank == 3:
        time.sleep(60)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        first = str(error)
    sums = []
    for group in (trio, dist.new_group([0, 1, 2], use_local_synchronization=True)):
        for count in (5, 200_000):
            tensor = torch.ones(count)
            dist.all_reduce(tensor, group=group)
            sums.append(tensor[-1].item())
    return "rank 3" in first, sums


def test_groups_without_the_dead_rank_keep_working(pool):
    case = pool.start(use_what_is_left, ranks=4)
    try:
        case.heard("joined")
        case.kill(3)
        assert case.collect(20, ranks=(0, 1, 2)), case.stacks()
        for rank in (0, 1, 2):
            assert case.outcomes[rank].value == (True, [3.0] * 4), case.stacks()
    finally:
        case.close(replace=True)


def leave_in_order(rank):
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        dist.destroy_process_group()
        return None
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return aftermath(error)


def test_waiting_for_a_departed_rank_names_it(pool):
    case = pool.start(leave_in_order, ranks=2)
    try:
        assert case.collect(10), case.stacks()
        check_report(case.outcomes[0].value, 1, "left the group")
    finally:
        case.close(replace=True)


def abort_from_another_thread(rank):
    dist.barrier()
    if rank == 1:
        time.sleep(60)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    threading.Timer(0.3, backend.abort).start()
    begun = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return time.monotonic() - begun, str(error)


def test_abort_fails_a_waiting_call(pool):
    case = pool.start(abort_from_another_thread, ranks=2)
    try:
        assert case.collect(10, ranks=(0,)), case.stacks()
        took, error = case.outcomes[0].value
        assert took < 5 and "aborted" in error
    finally:
        case.close(replace=True)


def test_killed_ranks_leave_nothing_in_dev_shm(pool):
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    case = pool.start(call_for_ever, 7, False, ranks=4)
    try:
        case.heard("joined")
        time.sleep(0.2)
        pids = [rank.pid for rank in case.ranks]
        for rank in range(4):
            case.kill(rank)
    finally:
        case.close(replace=True)
    left = {name for name in os.listdir("/dev/shm") if name not in before} if before else set()
    ours = [name for name in left if "nearlinear" in name or any(str(pid) in name for pid in pids)]
    assert not ours


def test_seeds_give_different_programs():
    assert len({random_program(seed, 4) for seed in range(10)}) == 10
    assert len(set(itertools.chain(*[random_program(s, 4).steps for s in range(10)]))) > 100
