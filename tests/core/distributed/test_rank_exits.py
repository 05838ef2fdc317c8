"""Ranks that leave, die or call another collective: the others report cause, rank and place."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import nearlinear as nl
from ci.faults.ranks import RankProcesses
from nearlinear.distributed.watchdog import watch_ranks


def leave(rank: int) -> None:
    if rank == 1:
        sys.exit(3)


def die(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def mismatch(rank: int) -> None:
    dist.all_reduce(torch.ones(8 if rank == 1 else 4))


def work(rank: int, config: dict) -> None:
    """Do what the function named in ``config`` does, just after an operation has begun."""
    nl.init({"communication_backend": "gloo"})
    try:
        with watch_ranks(60) as watch:
            watch.at("the first operation")
            dist.all_reduce(torch.ones(4))
            time.sleep(1.5)  # at least one heartbeat
            watch.at("the last operation")
            globals()[config["act"]](rank)
            watch.at("the operation after")
            dist.all_reduce(torch.ones(4))
            dist.barrier()
    except nl.errors.RankFailure as error:
        print(f"[rank {rank}] {error}", flush=True)
        sys.exit(9)


REPORTS = {
    leave: r'rank 1 \(host \S+\) ended the run in "the last operation" '
    r"\(distributed/test_rank_exits.py:\d+ in leave\): sys.exit\(3\)",
    die: r'rank 1 \(host \S+\) died \(process \d+ has ended\); its last operation was "the last '
    'operation"',
    mismatch: r"the ranks' collectives do not match: rank \d \(host \S+\) was aborted in a "
    r'collective by its backend, in "the last operation" \(all_reduce, '
    r"distributed/test_rank_exits.py:\d+ in mismatch\)",
}
CODES = {leave: 3, die: -signal.SIGKILL, mismatch: -signal.SIGABRT}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="places after death are read from /proc")
@pytest.mark.parametrize("act", REPORTS, ids=lambda act: act.__name__)
def test_other_rank_names_cause_and_current_place(tmp_path, act):
    log = tmp_path / "log"
    ranks = RankProcesses(2, {"act": act.__name__}, log, work)
    ranks.join()
    codes = {process.exitcode for process in ranks.processes}
    assert codes == {CODES[act], 9}, log.read_text()
    assert re.search(rf"\[rank \d\] {REPORTS[act]}", log.read_text()), log.read_text()


INTERRUPTED = """
import time
from nearlinear.train.checkpoint_manager import StopSignal
stop = StopSignal()
stop.install()
print("ready", flush=True)
while not stop.number:
    time.sleep(0.01)
print("received", stop.number, flush=True)
time.sleep(60)
"""


def test_second_interrupt_ends_a_run_that_is_saving_itself():
    """The process starts with SIGINT ignored, as in the background of a shell script."""
    running = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert running.stdout.readline() == "ready\n"
    running.send_signal(signal.SIGINT)
    assert running.stdout.readline() == "received 2\n"
    time.sleep(0.6)  # longer than one Ctrl-C that arrives twice
    assert running.poll() is None
    running.send_signal(signal.SIGINT)
    assert running.wait(20) == 128 + signal.SIGINT
    running.stdout.close()
