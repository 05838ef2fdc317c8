"""Useful steps of a run in which a rank is killed again and again, by the way of going on.

Every node of an emulated cluster is a replica with one rank. At equal intervals a rank is killed,
and whatever ended is started again at once. The ways: replicas that may be lost (elastic), one job
that starts again from its newest checkpoint (restart), torchft's replicas on gloo (torchft, needs
``pip install torchft==0.2.0``), and one job without faults (undisturbed). Windows of all ways
alternate. Ranks are started as launchers do: each is a new Python that imports everything. With
``--forked`` a start costs a second.

A step of torchft without the lost replica has fewer samples, and counts by its share. Steps that a
restarted job repeats count once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ci.command_line import make_parser
from ci.emulation.cluster import Cluster, exit_status
from ci.faults.__main__ import prepare_data
from ci.faults.elastic import LAYOUTS, Job, read_rows
from ci.faults.places import Place
from ci.faults.ranks import RankProcesses

from .elastic import TOLERANCE, config_of, start_plainly

MODULE = "ci.benchmarks.goodput"
EXAMPLES = f"""\
examples:
  python -m {MODULE} --minutes 5 --rounds 6 --json goodput.json
  python -m {MODULE} --ways elastic,restart --checkpoint-every 10"""
LAYOUT = "4x1"
NODES, _ = LAYOUTS[LAYOUT]
LIGHTHOUSE_PORT = 29510
MODEL = {"n_layer": 4, "n_embd": 128, "n_head": 4}
POLL = 0.05
"""Seconds between two looks at the ranks."""


class Elastic:
    """Replicas of ours, of which any may be lost."""

    def __init__(self, config: dict[str, Any], folder: Path, cluster: Cluster, fresh: bool):
        self.job = Job(config, LAYOUT, cluster, folder / "log", fresh)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the finished steps."""
        return self.job.rows()

    def kill(self, node: int) -> None:
        """Kill the rank on ``node``."""
        self.job.running[node].kill(0)

    def repair(self) -> None:
        """Start lost replicas again."""
        for node in range(NODES):
            if not self.job.running[node].running:
                self.job.end(node)
                self.job.start(node)

    def end(self) -> None:
        """Kill all ranks."""
        for node in range(NODES):
            self.job.end(node)


class Restart:
    """One job of ours, started again from its newest checkpoint."""

    def __init__(self, config: dict[str, Any], folder: Path, cluster: Cluster, fresh: bool):
        self.metrics = Path(config["run"]["folder"]) / "metrics.jsonl"
        self._start = partial(start_plainly, config, LAYOUT, cluster, folder, fresh)
        self.ranks = self._start()

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.metrics)

    def kill(self, node: int) -> None:
        self.ranks.kill(node)

    def repair(self) -> None:
        """Kill the rest of the job once a rank has ended, as launchers do, and start it again."""
        if not all(process.is_alive() for process in self.ranks.processes):
            self.ranks.end()
            self.ranks = self._start()

    def end(self) -> None:
        self.ranks.end()


class Torchft:
    """Replicas of torchft over gloo, whose manager adds up the gradients.

    Its DistributedDataParallel failed in an assertion in the survivors of a killed replica.
    """

    def __init__(self, config: dict[str, Any], folder: Path, cluster: Cluster, fresh: bool):
        self.config, self.folder, self.cluster, self.fresh = config, folder, cluster, fresh
        self.lighthouse = self._start(0, serve_lighthouse)
        self.running = [self._start(node, train_with_torchft) for node in range(NODES)]

    def _start(self, node: int, work: Callable) -> RankProcesses:
        place = Place("replica", nodes=(self.cluster.holder(node),))
        told = {"run": self.config, "replica": node, "rows": str(self._rows_of(node)),
                "address": self.cluster.address(node),
                "lighthouse": f"http://{self.cluster.address(0)}:{LIGHTHOUSE_PORT}"}  # fmt: skip
        return RankProcesses(1, told, self.folder / "log", work, place, self.fresh)

    def _rows_of(self, node: int) -> Path:
        return self.folder / f"torchft-{node}.jsonl"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row of every committed step, in order."""
        rows = [row for node in range(NODES) for row in read_rows(self._rows_of(node))]
        of_steps = {row["step"]: row for row in rows}
        return [of_steps[step] for step in sorted(of_steps)]

    def kill(self, node: int) -> None:
        self.running[node].kill(0)

    def repair(self) -> None:
        """Start lost replicas again."""
        for node, ranks in enumerate(self.running):
            if not ranks.running:
                ranks.end()
                self.running[node] = self._start(node, train_with_torchft)

    def end(self) -> None:
        for ranks in [*self.running, self.lighthouse]:
            ranks.end()


WAYS = {"undisturbed": Restart, "elastic": Elastic, "restart": Restart, "torchft": Torchft}


def serve_lighthouse(rank: int, config: dict[str, Any]) -> None:
    """Serve torchft's lighthouse with the timeouts of its examples, until killed."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"[::]:{LIGHTHOUSE_PORT}", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100
    )
    while server:
        time.sleep(60)


def train_with_torchft(rank: int, config: dict[str, Any]) -> None:
    """Train the model of ``config`` as a replica of torchft until killed; report each step."""
    import torch
    import torch.distributed as dist
    from torchft import Manager, Optimizer, ProcessGroupGloo

    from nearlinear.config.train import load
    from nearlinear.data import TokenDataset
    from nearlinear.train.model import build_model

    asked = load(config["run"])
    data = TokenDataset(asked.data.path, sequence_length=asked.data.sequence_length)
    torch.manual_seed(0)
    on_meta = build_model(asked.model, data.manifest.vocab_size)
    model = type(on_meta)(on_meta.config).train()
    inner = torch.optim.AdamW(model.parameters(), lr=asked.optimizer.lr)

    def install(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore(config["address"], 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=10)),
        install,
        lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr=config["address"],
        store_port=store.port,
        hostname=config["address"],
        lighthouse_addr=config["lighthouse"],
        replica_id=f"replica-{config['replica']}",
    )
    optimizer = Optimizer(manager, inner)
    count, rows = asked.batch.micro_batch_size, Path(config["rows"])
    number = 0
    while True:
        optimizer.zero_grad()
        for _ in range(asked.batch.accumulation):
            first = (number * NODES + config["replica"]) * count
            picked = [(first + index) % len(data) for index in range(count)]
            ids = torch.as_tensor(data.windows(picked))
            (model(input_ids=ids, labels=ids).loss / asked.batch.accumulation).backward()
            number += 1
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([gradient.view(-1) for gradient in gradients])
        manager.allreduce(flat).wait()
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_([gradient.view(-1) for gradient in gradients], list(parts))
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            row = {"step": manager.current_step(), "time": time.time(),
                   "replicas": manager.num_participants()}  # fmt: skip
            with open(rows, "a") as file:
                file.write(json.dumps(row) + "\n")


def measure(
    way: str, options: argparse.Namespace, config: dict[str, Any], folder: Path, seed: str,
    cluster: Cluster,
) -> dict[str, Any]:  # fmt: skip
    """Train for a window with faults; return the useful steps, and the losses by step."""
    rng = random.Random(seed)
    running = WAYS[way](config, folder, cluster, not options.forked)
    try:
        deadline = time.monotonic() + 180
        while len(running.rows()) < 3:
            if time.monotonic() > deadline:
                raise SystemExit(f"{way} did not start:\n{(folder / 'log').read_text()[-3000:]}")
            time.sleep(POLL)
        first, begin = running.rows()[-1]["step"], time.monotonic()
        kills = 0
        while (elapsed := time.monotonic() - begin) < 60 * options.minutes:
            if way != "undisturbed" and elapsed > options.every * (kills + 0.5):
                running.kill(rng.randrange(NODES))
                kills += 1
            running.repair()
            time.sleep(POLL)
        rows = running.rows()
    finally:
        running.end()
    steps = useful_steps(rows, first, shares=way == "torchft")
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    print(f"{way:12}{steps:8.1f} useful steps, {kills} faults", flush=True)
    return {"way": way, "steps": steps, "seconds": elapsed, "kills": kills, "losses": losses}


def useful_steps(rows: list[dict[str, Any]], first: int, shares: bool = False) -> float:
    """Return the steps of ``rows`` after ``first`` that were not lost again.

    Args:
        rows: Rows of the finished steps, in the order of time.
        first: Steps up to this one do not count.
        shares: True if a step with fewer replicas has fewer samples, and counts by its share.
    """
    if not shares:
        return max(0, rows[-1]["step"] - first)
    return sum(row["replicas"] / NODES for row in rows if row["step"] > first)


def format_table(windows: list[dict[str, Any]], minutes: float) -> str:
    """Return a Markdown table of the useful steps per minute by way."""
    rates: dict[str, list[float]] = {}
    for window in windows:
        rates.setdefault(window["way"], []).append(60 * window["steps"] / window["seconds"])
    whole = statistics.median(rates.get("undisturbed", [float("nan")]))
    lines = [
        f"| way | windows of {minutes:g} min | faults | useful steps per minute, median (range) "
        "| of the undisturbed run |",
        "| :-- | --: | --: | --: | --: |",
    ]
    for way, found in rates.items():
        kills = sum(window["kills"] for window in windows if window["way"] == way)
        middle = statistics.median(found)
        lines.append(
            f"| {way} | {len(found)} | {kills} | {middle:.1f} ({min(found):.1f} to "
            f"{max(found):.1f}) | {middle / whole:.0%} |"
        )
    return "\n".join(lines)


def largest_difference(windows: list[dict[str, Any]]) -> float:
    """Return the largest relative difference of losses at equal steps of different windows."""
    seen: dict[int, float] = {}
    differences = [0.0]
    for window in windows:
        for step, loss in window["losses"].items():
            expected = seen.setdefault(step, loss)
            differences.append(abs(loss - expected) / expected)
    return max(differences)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(MODULE, __doc__, EXAMPLES)
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="length of a window (default: 5)")
    add("--rounds", type=int, default=6, help="windows of each way (default: 6)")
    add("--every", type=float, default=60.0, help="seconds between faults (default: 60)")
    add("--ways", default=",".join(WAYS), help=f"ways, separated by commas: {','.join(WAYS)}")
    add("--rate", default="1gbit", help="limit of each link (default: 1gbit)")
    add("--cores", type=float, help="processors of each node, such as 0.5 (default: shared)")
    add("--backend", default="gloo", help="backend of ours: gloo (default) or nearlinear")
    add("--forked", action="store_true", help="fork ranks from a process with all imports")
    add("--checkpoint-every", type=int, default=5, help="steps between checkpoints (default: 5)")
    add("--seed", type=int, default=0, help="seed of the killed ranks")
    add("--json", type=Path, help="also write the windows to this file")
    options = parser.parse_args(argv)
    if unknown := set(options.ways.split(",")) - set(WAYS):
        parser.error(f"--ways {unknown.pop()}: allowed are {', '.join(WAYS)}")
    options.steps = 0  # until the window ends
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return exit_status(lambda: _measure(options))


def _measure(options: argparse.Namespace) -> int:
    windows = []
    with tempfile.TemporaryDirectory(prefix="goodput-") as name:
        folder = Path(name)
        data = prepare_data(folder / "tokens")
        with Cluster(NODES, options.rate, options.cores) as cluster:
            for number in range(options.rounds):
                for way in options.ways.split(","):
                    own = folder / str(len(windows))
                    config = config_of(options, data, folder, len(windows)) | {
                        "model": {"preset": "gpt2-tiny", "overrides": MODEL},
                        "data": {"path": data, "sequence_length": 64},
                        "checkpoint": {"folder": str(own / "checkpoints"),
                                       "every": options.checkpoint_every},
                    }  # fmt: skip
                    seed = f"{options.seed} {number}"
                    windows.append(measure(way, options, config, own, seed, cluster))
    print(format_table(windows, options.minutes))
    different = largest_difference(windows)
    print(f"losses of ours differ by at most {different:.1e} at equal steps")
    if options.json:
        told = [{key: value for key, value in each.items() if key != "losses"} for each in windows]
        options.json.write_text(json.dumps({"windows": told, "different": different}, indent=1))
    return int(different > 10 * TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
