"""Ranks as processes that are killed, stopped or stuck: the other ranks name them and exit."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from ci.faults.ranks import RankProcesses

pytestmark = pytest.mark.slow
UNREACHED_STEP = 10**6  # number of a step that no rank reaches


def train(rank: int, config: dict) -> None:
    """Train as the command line does; rank 1 blocks in the loader once the file `hangs` exists."""
    from nearlinear.distributed import watchdog
    from nearlinear.errors import NearlinearError
    from nearlinear.train.trainer import Trainer

    watchdog.HEARTBEAT_INTERVAL = config["train"]["rank_timeout"] / 8
    trainer = Trainer(config | {"run": config["run"] | {"log_every": 1}})
    read, hangs = trainer.loader._read, Path(config["run"]["folder"]) / "hangs"

    def read_or_hang(base):
        while rank == 1 and hangs.exists():
            time.sleep(0.1)
        return read(base)

    trainer.loader._read = read_or_hang
    try:
        trainer.fit()
    except NearlinearError as error:
        print(f"[rank {rank}] ended: {error}", flush=True)
        sys.exit(error.exit_code)


def kill(ranks: RankProcesses, folder: Path) -> None:
    ranks.kill(1)


def kill_first(ranks: RankProcesses, folder: Path) -> None:
    """Kill rank 0, which also holds the store."""
    ranks.kill(0)


def stop(ranks: RankProcesses, folder: Path) -> None:
    """Stop rank 1: its connections stay open but silent."""
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)


def stop_first(ranks: RankProcesses, folder: Path) -> None:
    """Stop rank 0, which also holds the store: reads from the store never end."""
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)


def hang(ranks: RankProcesses, folder: Path) -> None:
    (folder / "hangs").touch()


DEAD = (
    r"\(host \S+\) (died \(process \d+ has ended\)|sent no heartbeat for \d+ s: it is dead, "
    r'stopped or unreachable); its last operation was "(after )?step \d+.*, \d+ s ago. Check its'
)
SILENT = (
    r"\(host \S+\) sent no heartbeat for \d+ s: it is dead, stopped or unreachable; its last "
    r'operation was "(after )?step \d+'
)
FAULTS = {
    kill: f"rank 1 {DEAD}",
    kill_first: r"the connection to the job's store is lost: the process that holds it, rank 0's "
    rf"or its launcher's on \S+, has died|rank 0 {DEAD}",
    stop: rf"rank 1 {SILENT}",
    stop_first: rf"rank 0 {SILENT}",
    hang: r'rank 1 \(host \S+\) has been stuck in "step \d+, loading a batch" '
    r"\(distributed/test_watchdog_processes.py:\d+ in read_or_hang\) for \d+ s; rank \d and "
    r'others are waiting in "step \d+, micro-batch 1',
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_other_ranks_name_the_faulty_rank_and_exit(small_run, tmp_path, fault):
    small_run["train"] = {"steps": UNREACHED_STEP, "eval_sequences": 0, "sample_tokens": 0}
    # Without rank 0's store, the others learn nothing after its first heartbeat.
    small_run["train"]["rank_timeout"] = 240 if fault is kill_first else 6
    small_run["optimizer"] = {}
    log, folder = tmp_path / "log", Path(small_run["run"]["folder"])
    small_run["run"]["memory_report"] = False
    ranks = RankProcesses(3, small_run, log, train)
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while ranks.running and time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) > 2:
            break
        time.sleep(0.05)
    fault(ranks, folder)
    faulty = ranks.processes[0 if fault in (kill_first, stop_first) else 1]
    others = [process for process in ranks.processes if process is not faulty]
    for process in others:
        process.join(60)
    codes = [process.exitcode for process in others]
    faulty.kill()
    ranks.join()
    log_text = log.read_text()
    assert codes == [128 + signal.SIGTERM] * 2, log_text
    for rank in {0, 1, 2} - {ranks.processes.index(faulty)}:
        assert re.search(rf"\[rank {rank}\] (ended|error): ({FAULTS[fault]})", log_text), log_text
