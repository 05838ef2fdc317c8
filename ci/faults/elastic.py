"""Lose replicas of an elastic run at random moments, and compare its bits with an undisturbed run.

    python -m ci.faults.elastic --trials 100 --seed 1
    python -m ci.faults.elastic --layout 4x1 --only kill,link --trials 10
    python -m ci.faults.elastic --layout 2x2 --parallel tensor_parallel_degree=2 --trials 4

Every node of an emulated cluster is a replica. A trial kills or stops one rank, or cuts the link of
a node, waits until the other replicas have gone on, starts the lost replica again, and waits until
it has joined. At the end all replicas stop together. An undisturbed run to the same step must have
the same loss and gradient norm in every step, and the same weights and optimizer state, to the bit.

Needs root for the cluster; without, kill and stop run on this machine.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ci.command_line import make_parser
from ci.emulation.cluster import Cluster, unavailable_reason
from nearlinear.checkpoint import save
from nearlinear.checkpoint.verify import compare_checkpoints
from nearlinear.distributed import runtime
from nearlinear.errors import Interrupted, NearlinearError
from nearlinear.fsdp.model_state import local_tensor
from nearlinear.train.callbacks import Callback, TrainStep
from nearlinear.train.trainer import Trainer

from .__main__ import prepare_data
from .places import Place
from .ranks import RankProcesses

MODULE = "ci.faults.elastic"
EXAMPLES = f"""\
examples:
  python -m {MODULE} --trials 100 --seed 1
  python -m {MODULE} --layout 4x1 --only kill --trials 10 --backend nearlinear
  python -m {MODULE} --layout 2x2 --parallel tensor_parallel_degree=2 --trials 4"""
KINDS = ("kill", "stop", "link", "two", "flip")
"""kill: SIGKILL of a rank. stop: SIGSTOP, and SIGCONT when the others have gone on. link: the
node's link goes down, and up when they have gone on. two: two replicas of three or more are killed
within a second, the second one during the recovery. flip: a bit of a weight of one replica of three
or more changes, and fingerprints of every step are compared."""
SIGNALS = {"stop": signal.SIGSTOP, "flip": signal.SIGUSR2}
"""Kinds that consist of a signal to a rank."""
NEED_MAJORITY = ("two", "flip")
LAYOUTS = {"4x1": (4, 1), "2x2": (2, 2)}
"""Replicas and ranks of each."""
SILENCE = 3.0
"""``elastic.silence_seconds`` of the runs."""
LONGEST = 60.0
"""Seconds in which a run must go on."""


@dataclass
class Trial:
    """A fault and its consequences."""

    kind: str
    replica: int
    rank: int
    layout: str
    step: int = 0
    """The step before the fault."""
    stall: float = math.nan
    """Seconds of the step with the fault beyond the median of others."""
    join: float = math.nan
    """Seconds of the step before which the replica joined, beyond the median of others."""
    problem: str = ""


class Job:
    """The replicas of one run.

    Args:
        config: Config of the run.
        layout: Key of `LAYOUTS`.
        cluster: The nodes, or None to run on this machine.
        log: File for the output of all ranks.
        fresh: See `RankProcesses`.
    """

    def __init__(
        self, config: dict[str, Any], layout: str, cluster: Cluster | None, log: Path,
        fresh: bool = False,
    ):  # fmt: skip
        self.replicas, self.ranks = LAYOUTS[layout]
        self.config, self.cluster, self.log, self.fresh = config, cluster, log, fresh
        self.running: dict[int, RankProcesses] = {}
        self.port = random.Random().randrange(20000, 30000)
        for replica in range(self.replicas):
            self.start(replica)

    def start(self, replica: int) -> None:
        place = Place("replica", address="127.0.0.1")
        hosts = ["127.0.0.1"] * self.replicas
        ports = [self.port + index for index in range(self.replicas)]
        if self.cluster is not None:
            place = Place("replica", nodes=(self.cluster.holder(replica),) * self.ranks)
            hosts = [self.cluster.address(node) for node in range(self.replicas)]
            ports = [self.port] * self.replicas
        peers = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
        elastic = {**self.config["elastic"], "replicas": self.replicas, "peers": peers}
        config = {**self.config, "elastic": elastic, "replica": replica}
        self.running[replica] = RankProcesses(
            self.ranks, config, self.log, train, place, self.fresh
        )

    def end(self, replica: int) -> None:
        """Kill the remaining ranks of a replica."""
        self.running.pop(replica).end()

    def rows(self) -> list[dict[str, Any]]:
        return read_rows(Path(self.config["run"]["folder"]) / "metrics.jsonl")

    def last(self) -> dict[str, Any]:
        """Return the newest row of the metrics, or one of step 0."""
        rows = self.rows()
        return rows[-1] if rows else {"step": 0, "replicas": 0, "time": 0.0}

    def wait_until(self, reached, seconds: float = LONGEST) -> bool:
        """Wait until ``reached(row)`` of the newest row; return False after ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if reached(self.last()):
                return True
            time.sleep(0.05)
        return False


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines that a process may be writing."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


class BitFlips(Callback):
    """Flip a bit of a weight in the step after SIGUSR2."""

    def __init__(self):
        self.due = False
        signal.signal(signal.SIGUSR2, self._signalled)

    def _signalled(self, number: int, frame: object) -> None:
        self.due = True

    def on_setup(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, step: TrainStep) -> None:
        if self.due:
            self.due = False
            weights = next(p for p in self.trainer.model.parameters() if p.numel())
            local_tensor(weights.data).view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 12)


def train(rank: int, config: dict[str, Any]) -> None:
    """Train as one rank of a replica."""
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 writes the stacks to the log
    replica = config.pop("replica")
    os.environ["NEARLINEAR_REPLICA"] = str(replica)
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s [{replica}.{rank}] %(message)s")
    try:
        Trainer(config, callbacks=[BitFlips()]).fit()
    except NearlinearError as error:
        print(f"[{replica}.{rank}] {error.word}: {error}", flush=True)
        if isinstance(error, Interrupted):
            runtime.shutdown()  # rank 0 serves the store, which others may still read
        os._exit(error.exit_code)
    runtime.shutdown()


def run_config(
    data: str, folder: Path, parallel: dict[str, Any], stop_after: int, every: int = 100
) -> dict:
    """Return the config of a run with dropout, and with ``parallel`` inside of a replica.

    Args:
        data: Folder of the token shards.
        folder: Folder of the run.
        parallel: Table ``[parallel]``.
        stop_after: Last step; 0 to go on until the run is stopped.
        every: Steps between comparisons of the replicas' states.
    """
    return {
        "model": {
            "preset": "gpt2-tiny",
            "overrides": {"n_layer": 2, "n_embd": 64, "n_head": 2, "resid_pdrop": 0.1},
        },
        "data": {"path": data, "sequence_length": 32},
        "batch": {"micro_batch_size": 2, "accumulation": 3},
        "parallel": parallel,
        "train": {"steps": 100_000, "stop_after": stop_after, "eval_sequences": 4,
                  "eval_every": 10, "sample_tokens": 0, "rank_timeout": 60.0,
                  "divergence_every": every},
        "checkpoint": {"folder": str(folder / "checkpoints"), "every": 25},
        "elastic": {"silence_seconds": SILENCE, "form_seconds": 60.0},
        "run": {"folder": str(folder / "run"), "tensorboard": False, "memory_report": False,
                "peak_tflops": 1.0},
    }  # fmt: skip


def inject(job: Job, trial: Trial, rng: random.Random) -> list[int]:
    """Inject the fault of ``trial``; return the lost replicas, as far as they are known."""
    process = job.running[trial.replica].processes[trial.rank]
    assert process.pid is not None
    if trial.kind in SIGNALS:
        os.kill(process.pid, SIGNALS[trial.kind])
        return [trial.replica]
    if trial.kind == "link":
        assert job.cluster is not None
        job.cluster.link_down(trial.replica)
        return [trial.replica]
    process.kill()
    lost = [trial.replica]
    if trial.kind == "two":
        time.sleep(rng.uniform(0, 1))
        other = rng.choice([index for index in job.running if index != trial.replica])
        job.running[other].processes[0].kill()
        lost.append(other)
    return lost


def end_fault(job: Job, trial: Trial) -> str:
    """End the fault; a replica that was cut off must end by itself. Returns a problem."""
    victim = job.running[trial.replica]
    if trial.kind == "stop":
        pid = victim.processes[trial.rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGCONT)
    if trial.kind == "link":
        assert job.cluster is not None
        job.cluster.link_up(trial.replica)
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        if not victim.running:
            return ""
        other = [index for index, ranks in job.running.items() if not ranks.running]
        if trial.kind == "link" and job.replicas == 2 and other:
            trial.replica = other[0]  # of two halves, either may go on
            return ""
        time.sleep(0.05)
    return "the lost replica did not end by itself"


def run_trial(job: Job, trial: Trial, rng: random.Random) -> None:
    """Lose a replica, wait for the others, start it again, and wait until it has joined."""
    trial.step = job.last()["step"]
    lost = inject(job, trial, rng)
    left = job.replicas - len(lost)
    if not job.wait_until(lambda row: row["replicas"] == left):
        trial.problem = f"the others did not go on after step {trial.step}"
        return
    before = job.last()["step"]
    job.wait_until(lambda row: row["step"] >= before + 1)
    trial.problem = end_fault(job, trial)
    for replica in lost if trial.kind == "two" else [trial.replica]:
        job.end(replica)
        job.start(replica)
    if not job.wait_until(lambda row: row["replicas"] == job.replicas):
        trial.problem = trial.problem or "the lost replica did not join again"
        return
    joined = job.last()["step"]
    job.wait_until(lambda row: row["step"] >= joined + 2)
    measure(job, trial)


def measure(job: Job, trial: Trial) -> None:
    """Measure the stalls of the other replicas in the times of the steps."""
    rows = job.rows()
    seconds = {b["step"]: b["time"] - a["time"] for a, b in zip(rows, rows[1:], strict=False)}
    full = {row["step"] for row in rows if row["replicas"] == job.replicas}
    usual = statistics.median(s for step, s in seconds.items() if step in full)
    changes = [
        (a, b) for a, b in zip(rows, rows[1:], strict=False)
        if a["step"] >= trial.step and a["replicas"] != b["replicas"]
    ]  # fmt: skip
    trial.stall = max(s for step, s in seconds.items()
                      if trial.step < step <= changes[0][1]["step"] + 1) - usual  # fmt: skip
    _, last = changes[-1]
    trial.join = max(seconds.get(last["step"] + k, 0.0) for k in (-1, 0)) - usual


def run_layout(
    layout: str, kinds: list[str], options: argparse.Namespace, data: str, folder: Path
) -> tuple[list[Trial], list[str]]:
    """Run the trials of one layout; return them, and the differences to the undisturbed run."""
    rng = random.Random(f"{options.seed} {layout}")
    parallel = {"communication_backend": options.backend}
    for setting in options.parallel:
        key, _, value = setting.partition("=")
        parallel[key] = json.loads(value)
    replicas, ranks = LAYOUTS[layout]
    folder.mkdir()
    trials: list[Trial] = []
    emulated = nullcontext() if unavailable_reason() else Cluster(replicas, options.rate)
    with emulated as cluster:
        config = run_config(data, folder, parallel, 0, 1 if "flip" in kinds else 100)
        job = Job(config, layout, cluster, folder / "log")
        job.wait_until(lambda row: row["step"] >= 3)
        turns = [kinds[i % len(kinds)] for i in range(options.trials)]
        rng.shuffle(turns)
        for kind in turns:
            trial = Trial(kind, rng.randrange(replicas), rng.randrange(ranks), layout)
            time.sleep(rng.uniform(0, 1.0))
            run_trial(job, trial, rng)
            trials.append(trial)
            print(
                f"{layout} {len(trials)}: {kind} of rank {trial.rank} of replica {trial.replica} "
                f"after step {trial.step}: stall {trial.stall:.1f} s, join {trial.join:.1f} s "
                f"{trial.problem}",
                flush=True,
            )
            if trial.problem:
                break
        for running in job.running.values():
            for process in running.processes:
                process.terminate()
        for running in job.running.values():
            running.wait_for_all(120)
            running.join()
        last = max(save.steps(folder / "checkpoints"), default=0)
        disturbed = {row["step"]: row for row in job.rows()}
        reference = folder / "undisturbed"
        reference.mkdir()
        config = run_config(data, reference, parallel, last)
        straight = Job(config, layout, cluster, folder / "undisturbed.log")
        for running in straight.running.values():
            running.wait_for_all(3600)
            running.join()
        different = [
            f"step {row['step']}: {key} {disturbed.get(row['step'], {}).get(key)} instead of "
            f"{row[key]}"
            for row in straight.rows()
            for key in ("loss", "grad_norm", "batch_id", "eval_loss")
            if key in row and disturbed.get(row["step"], {}).get(key) != row[key]
            if row["step"] != last or key != "eval_loss"  # a run that is stopped does not evaluate
        ]
        folders = [save.step_folder(each / "checkpoints", last) for each in (reference, folder)]
        different += map(str, compare_checkpoints(*folders))
        print(f"{layout}: compared {last} steps, {len(different)} differences")
        return trials, different


def format_table(trials: list[Trial]) -> str:
    """Return a Markdown table of the trials by layout and kind."""
    lines = ["| layout | fault | trials | went on | stall p50, s | p99, s | join p50, s | p99, s |",
             "| :-- | :-- | --: | --: | --: | --: | --: | --: |"]  # fmt: skip
    for layout, kind in dict.fromkeys((trial.layout, trial.kind) for trial in trials):
        same = [trial for trial in trials if (trial.layout, trial.kind) == (layout, kind)]
        good = [trial for trial in same if not trial.problem]
        numbers = []
        for values in ([t.stall for t in good], [t.join for t in good]):
            ordered = sorted(values) or [math.nan]
            numbers += [statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1]]
        shown = " | ".join(f"{number:.1f}" for number in numbers)
        lines.append(f"| {layout} | {kind} | {len(same)} | {len(good)} | {shown} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(MODULE, __doc__, EXAMPLES)
    add = parser.add_argument
    add("--trials", type=int, default=50, help="faults for each layout (default: 50)")
    add("--seed", type=int, default=0, help="seed of kinds, ranks and times")
    add("--only", default=",".join(KINDS), help=f"kinds, separated by commas: {','.join(KINDS)}")
    add("--layout", default=",".join(LAYOUTS), help=f"layouts: {','.join(LAYOUTS)}")
    add("--backend", default="gloo", help="gloo (default) or nearlinear")
    add("--parallel", nargs="*", default=[], metavar="KEY=JSON",
        help="keys of [parallel] of a replica, such as tensor_parallel_degree=2")  # fmt: skip
    add("--rate", default=None, help="limit of each link, such as 1gbit (default: none)")
    add("--data", help="token shards (default: botocore's documentation)")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kinds = options.only.split(",")
    if reason := unavailable_reason():
        print(f"on this machine instead of an emulated cluster: {reason}")
        kinds = [kind for kind in kinds if kind != "link"]
    trials, different = [], []
    with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
        data = options.data or prepare_data(Path(folder) / "tokens")
        for layout in options.layout.split(","):
            majority = LAYOUTS[layout][0] > 2
            possible = [kind for kind in kinds if majority or kind not in NEED_MAJORITY]
            found = run_layout(layout, possible, options, data, Path(folder) / layout)
            trials += found[0]
            different += found[1]
            if different or any(trial.problem for trial in found[0]):
                keep = Path(tempfile.gettempdir(), f"elastic-{os.getpid()}-{layout}.log")
                keep.write_bytes((Path(folder) / layout / "log").read_bytes())
                print(f"log: {keep}")
    print(format_table(trials))
    for each in different[:20]:
        print(f"  {each}")
    return 1 if different or any(trial.problem for trial in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
