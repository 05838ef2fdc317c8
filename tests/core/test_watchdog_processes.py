"""Ranks that are killed, stopped or stuck as processes: the others name them, and end."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from ci.kills.ranks import Ranks

pytestmark = pytest.mark.slow
LATE = 10**6  # a step that nobody comes to


def train(rank: int, config: dict) -> None:
    """A run that ends as the command line would end it; rank 1 hangs where the config has that."""
    from nearlinear.errors import NearlinearError
    from nearlinear.train.trainer import Trainer

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


def kill(ranks: Ranks, folder: Path) -> None:
    ranks.kill(1)


def kill_first(ranks: Ranks, folder: Path) -> None:
    """Which has the store, too."""
    ranks.kill(0)


def stop(ranks: Ranks, folder: Path) -> None:
    """Its connections stay open, and nothing comes."""
    os.kill(ranks.processes[1].pid, signal.SIGSTOP)


def hang(ranks: Ranks, folder: Path) -> None:
    (folder / "hangs").touch()


FAULTS = {
    kill: r"rank 1 on \S+ (has died \(process \d+\)|is not heard of, or has died), at "
    r"step \d+, .*since \d\d:\d\d:\d\d \(\d+ s\): see its log",
    kill_first: r"the connection to the job's store is lost: the process that holds it, rank 0's "
    r"or its launcher's on \S+, has died|rank 0 on \S+ has died",
    stop: r"rank 1 on \S+ is not heard of, or has died, at step \d+, ",
    hang: r"rank 1 on \S+ hangs at step \d+, loading a batch \(core/test_watchdog_processes.py:\d+ "
    r"in read_or_hang\), since .* others wait for it, as rank \d does at step \d+, micro-batch 1 ",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_others_name_it_and_end(small_run, tmp_path, fault):
    small_run["train"] = {"steps": LATE, "eval_sequences": 0, "sample_tokens": 0, "rank_timeout": 6}
    small_run["optimizer"] = {}
    log, folder = tmp_path / "log", Path(small_run["run"]["folder"])
    small_run["run"]["memory_report"] = False
    ranks = Ranks(3, small_run, log, train)
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while ranks.running and time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) > 2:
            break
        time.sleep(0.05)
    time.sleep(2)  # they tell what they do once in a while
    fault(ranks, folder)
    guilty = ranks.processes[0 if fault is kill_first else 1]
    others = [process for process in ranks.processes if process is not guilty]
    for process in others:
        process.join(60)
    codes = [process.exitcode for process in others]
    guilty.kill()
    ranks.end()
    said = log.read_text()
    assert codes == [128 + signal.SIGTERM] * 2, said
    for rank in {0, 1, 2} - {ranks.processes.index(guilty)}:
        assert re.search(rf"\[rank {rank}\] (ended|error): ({FAULTS[fault]})", said), said
