"""Kinds of faults: how they are injected, and the cause that the run must report."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import places
from .places import Places
from .ranks import RankProcesses

STEP_PAUSE = 0.1
"""Seconds between the steps of a disturbed run, so that it does not end before the last trial."""
SLOW_RATE = "50mbit"
SPARE_MEMORY = 64 << 20
"""Bytes that the ranks of a cgroup may have beyond their own when the limit is set."""


@dataclass
class Lab:
    """A run in progress, as faults see it."""

    ranks: RankProcesses
    folder: Path
    """Folder of the run, on a small file system of its own where the lab may mount one."""
    checkpoints: Path
    rng: random.Random
    places: Places

    def order(self, act: str, rank: int) -> None:
        """Make ``rank`` do ``act`` in its next step, see `Orders`."""
        partial = self.folder.parent / "order.partial"
        partial.write_text(json.dumps({"act": act, "rank": rank}))
        partial.rename(self.folder.parent / "order")


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    meaning: str
    inject: Callable[[Lab], None]
    cause: str
    """Pattern of the report. It follows ``rank N`` in the output of the run."""
    ends_run: bool = True
    undo: Callable[[Lab], None] | None = None
    """Called before the restart, or at the end of a fault that the run survives."""
    lasts: bool = False
    """True if the run must go on before the fault is undone."""
    saved: bool = False
    """True if the ranks are able to save the last complete step."""
    place: str = "launcher"
    """Place of the ranks, see `ci.faults.places`."""
    leaves: int = 0
    """Number of ranks that cannot end by themselves."""


def victim(lab: Lab) -> int:
    return lab.rng.randrange(len(lab.ranks.processes))


def kill(lab: Lab) -> None:
    lab.ranks.kill(victim(lab))


def stop(lab: Lab) -> None:
    process = lab.ranks.processes[victim(lab)]
    if process.is_alive():
        os.kill(process.pid, signal.SIGSTOP)


def stop_first(lab: Lab) -> None:
    process = lab.ranks.processes[0]
    if process.is_alive():
        os.kill(process.pid, signal.SIGSTOP)


def cut_link(lab: Lab) -> None:
    assert lab.places.cluster is not None
    lab.places.cluster.link_down(1)


def restore_link(lab: Lab) -> None:
    assert lab.places.cluster is not None
    lab.places.cluster.link_up(1)


def slow_link(lab: Lab) -> None:
    assert lab.places.cluster is not None
    lab.places.cluster.set_rate(SLOW_RATE)


def restore_rate(lab: Lab) -> None:
    assert lab.places.cluster is not None
    lab.places.cluster.set_rate(None)


def fill_shm(lab: Lab) -> None:
    places.fill_shm(lab.ranks.place.nodes[0])


def limit_memory(lab: Lab) -> None:
    """Limit the memory of both ranks, and let one of them exceed the limit."""
    places.limit_memory(lab.ranks.place.cgroup, SPARE_MEMORY)
    lab.order("allocate", victim(lab))


def lift_limit(lab: Lab) -> None:
    places.limit_memory(lab.ranks.place.cgroup, None)


def interrupt(lab: Lab) -> None:
    """Send SIGINT to all ranks, as a terminal does."""
    for process in lab.ranks.processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGINT)


def terminate(lab: Lab) -> None:
    """Send SIGTERM to one rank."""
    process = lab.ranks.processes[victim(lab)]
    if process.is_alive():
        os.kill(process.pid, signal.SIGTERM)


def ordered(act: str) -> Callable[[Lab], None]:
    return lambda lab: lab.order(act, victim(lab))


def fill_disk(lab: Lab) -> None:
    try:
        with open(lab.folder / "ballast", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
    except OSError:
        pass


def free_disk(lab: Lab) -> None:
    (lab.folder / "ballast").unlink(missing_ok=True)


def rot(lab: Lab) -> None:
    """Kill a rank, and flip a bit of the newest checkpoint once all have ended (see `damage`)."""
    kill(lab)


def damage(lab: Lab) -> Callable[[], None] | None:
    """Flip one bit of a data file of the newest checkpoint; return the repair."""
    folders = sorted(path.parent for path in lab.checkpoints.glob("step-*/index.json"))
    files = [f for f in sorted(folders[-1].glob("*.safetensors")) if f.stat().st_size > 4096] \
        if folders else []  # fmt: skip
    if not files:
        return None
    file = lab.rng.choice(files)
    offset, bit = file.stat().st_size - 1 - lab.rng.randrange(1024), lab.rng.randrange(8)

    def flip() -> None:
        if file.exists():
            with open(file, "r+b") as opened:
                opened.seek(offset)
                [byte] = opened.read(1)
                opened.seek(offset)
                opened.write(bytes([byte ^ 1 << bit]))

    flip()
    return flip


_DEAD = r"\(host \S+\) died \(process \d+ has ended\); its last operation was"
_LOST = r"the connection to the job's store is lost"
_SILENT = r"\(host \S+\) sent no heartbeat for \d+ s: it is dead, stopped or unreachable"
KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", "SIGKILL of a rank", kill, rf"rank \d {_DEAD}|{_LOST}"),
        Kind("stop", "SIGSTOP of a rank", stop,
             rf"rank \d {_SILENT}", leaves=1),
        Kind("freeze", "SIGSTOP of rank 0, which holds the store", stop_first,
             rf"rank 0 {_SILENT}", place="rank 0", leaves=1),
        Kind("exit", "sys.exit(3) in a rank", ordered("exit"),
             r"rank \d \(host \S+\) ended the run in .*: sys.exit\(3\)", saved=True),
        Kind("raise", "an exception in a rank", ordered("raise"),
             r"rank \d \(host \S+\) failed in .*: RuntimeError: ordered|RuntimeError: ordered",
             saved=True),
        Kind("hang", "an endless loop in a rank", ordered("hang"),
             r"rank \d \(host \S+\) has been stuck in .*kinds.py:\d+ in obey", saved=True),
        Kind("mismatch", "a collective of another size in a rank", ordered("mismatch"),
             r"the ranks' collectives do not match: rank \d"),
        Kind("flip", "a flipped mantissa bit of a weight of a replica", ordered("flip"),
             r"replicas hold different states: one of rank 0 .*, rank 1 .* in \S+"),
        Kind("interrupt", "Ctrl-C: SIGINT to all ranks", interrupt,
             r"SIG\w+: stopped after step \d+ and saved it", saved=True),
        Kind("terminate", "SIGTERM to one rank", terminate,
             r"SIGTERM: stopped after step \d+ and saved it", saved=True),
        Kind("partition", "a link between two nodes that drops all packets", cut_link,
             rf"(?s)(?=.*rank 0 {_SILENT})(?=.*rank 1 {_SILENT})", place="nodes",
             undo=restore_link),
        Kind("outage", "the same for two seconds", cut_link, "", place="nodes",
             ends_run=False, undo=restore_link),
        Kind("slow", f"links of {SLOW_RATE} between two nodes", slow_link, "", place="nodes",
             ends_run=False, undo=restore_rate, lasts=True),
        Kind("shm", "a full /dev/shm from the start on", fill_shm, "", place="shm",
             ends_run=False),
        Kind("memory", "a rank that exceeds the memory limit of its cgroup", limit_memory,
             r"rank \d \(host \S+\) died \(process \d+ has ended; the kernel's out-of-memory",
             place="cgroup", undo=lift_limit),
        Kind("disk", "a full run.folder", fill_disk, r"cannot be written \(\[Errno 28\]",
             ends_run=False, undo=free_disk),
        Kind("clock", "a wall clock that jumps by an hour on a rank", ordered("clock"), "",
             ends_run=False),
        Kind("rot", "a flipped bit in the newest checkpoint, after SIGKILL", rot,
             rf"rank \d {_DEAD}|{_LOST}"),
    )
}  # fmt: skip


def train(rank: int, config: dict[str, Any]) -> None:
    """Train as one rank, and obey the orders of the lab."""
    import logging

    from nearlinear.distributed import runtime
    from nearlinear.errors import NearlinearError
    from nearlinear.train.trainer import Trainer

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    orders = [] if config["run"].get("folder", "").endswith("undisturbed") else [make_orders(rank)]
    try:
        Trainer(config, callbacks=orders).fit()
    except NearlinearError as error:
        print(f"[rank {rank}] {error.word}: {error}", flush=True)
        sys.exit(error.exit_code)
    runtime.shutdown()


def make_orders(rank: int) -> Any:
    """Return a callback that obeys the orders of the lab."""
    from nearlinear.train.callbacks import Callback

    class Orders(Callback):
        def on_setup(self, trainer: Any) -> None:
            self.trainer = trainer
            self.path = Path(trainer.config.run.folder).parent / "order"

        def on_data_loaded(self, step: Any) -> None:
            time.sleep(STEP_PAUSE)
            try:
                order = json.loads(self.path.read_text())
            except FileNotFoundError:
                return
            if order["rank"] == rank:
                self.path.unlink()
                obey(order["act"], self.trainer)

    return Orders()


def obey(act: str, trainer: Any) -> None:
    """Commit a fault inside of a rank."""
    import torch
    import torch.distributed as dist

    if act == "exit":
        sys.exit(3)
    if act == "raise":
        raise RuntimeError("ordered")
    if act == "mismatch":
        dist.all_reduce(torch.zeros(1 << 20))
        time.sleep(60)
    if act == "flip":
        parameter = next(trainer.model.parameters()).detach().to_local()
        parameter.view(-1).view(torch.int32)[5] ^= 1 << 7
    if act == "clock":
        now, shift = time.time, random.choice((-3600.0, 3600.0))
        time.time = lambda: now() + shift  # type: ignore[assignment]
    hoard = []
    while act == "allocate":
        hoard.append(bytes([1]) * (4 << 20))
    while act == "hang":
        time.sleep(0.1)


def mount_small_disk(folder: Path) -> bool:
    """Mount a file system of 8 MiB at ``folder``; return False without the right to do so."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def unmount(folder: Path) -> None:
    subprocess.run(["umount", str(folder)], check=False, capture_output=True)
