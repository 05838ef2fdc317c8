"""Command line: run with faults, run undisturbed, compare, and print the table."""

import argparse
import itertools
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nearlinear.checkpoint import save
from nearlinear.checkpoint.verify import compare_checkpoints, find_faults

from . import kinds
from .kinds import KINDS, Kind, Lab
from .places import Place, Places, open_places
from .ranks import RankProcesses

RANK_TIMEOUT = 10.0
START_TIMEOUT = 240.0
PAGE = "packages/core/docs/faults.md"
SURVIVAL = 2.0
"""Seconds in which a run must go on after a fault that does not end it."""


@dataclass
class Trial:
    """The result of one fault."""

    kind: Kind
    named: bool = False
    """True if the run reported the right cause."""
    detection: float = float("nan")
    """Seconds from the fault to the end of all ranks that are able to end."""
    recovery: float = float("nan")
    """Seconds from the restart to the first new step."""
    lost: int = 0
    """Steps that were finished before the fault and had to be repeated."""
    fault: str = ""
    """Violation of a promise, or an empty string."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.faults",
        description="Inject faults into a training run and compare it with an undisturbed run.",
    )
    add = parser.add_argument
    add("--trials", type=int, default=200, help="faults in all (default: 200)")
    add("--seconds", type=float, default=float("inf"), help="start no trial after this time")
    add("--seed", type=int, default=0, help="seed of kinds, ranks and times")
    add("--only", default="", help=f"kinds, separated by commas; all: {','.join(KINDS)}")
    add("--every", type=int, default=2, help="steps between checkpoints (default: 2)")
    add("--data", help="token shards (default: botocore's documentation)")
    add("--write", nargs="?", default="", const=PAGE, metavar="FILE",
        help=f"also write the table as a page (default: {PAGE})")  # fmt: skip
    options = parser.parse_args(argv)
    unknown = sorted(set(filter(None, options.only.split(","))) - set(KINDS))
    if unknown:
        parser.error(f"--only {unknown[0]}: allowed are {', '.join(KINDS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        return run_lab(options, Path(folder))


def run_lab(options: argparse.Namespace, folder: Path) -> int:
    """Print the table and return 0 if every promise was kept, otherwise 1."""
    data = options.data or prepare_data(folder / "tokens")
    run = folder / "disturbed"
    mounted = kinds.mount_small_disk(run / "run")
    wanted = options.only.split(",") if options.only else list(KINDS)
    left_out = {}
    if not mounted and "disk" in wanted:
        left_out["disk"] = "mounting a file system needs root"
    try:
        begin = time.monotonic()
        needed = {KINDS[name].place for name in wanted}
        with open_places(needed) as (places, missing):
            left_out |= {
                name: missing[KINDS[name].place] for name in wanted if KINDS[name].place in missing
            }
            for name, reason in left_out.items():
                print(f"kind {name} is left out: {reason}")
            kinds_left = [KINDS[name] for name in wanted if name not in left_out]
            trials = run_with_faults(options, data, run, kinds_left, places)
        seconds = time.monotonic() - begin
        log = (run / "log").read_text(errors="replace")
        last = max(save.steps(run / "checkpoints"), default=0)
        compared = folder / "undisturbed"
        compared.mkdir()
        reference = run_config(options, data, compared / "undisturbed", compared, stop_after=last)
        straight = RankProcesses(2, reference, compared / "log", kinds.train)
        straight.wait_for_all(3600)
        straight.join()
        if not straight.complete:
            print((compared / "log").read_text()[-3000:])
            print("The undisturbed run failed; its log is above.")
            return 1
        different = compare_checkpoints(
            *(save.step_folder(each / "checkpoints", last) for each in (compared, run))
        )
        page = format_page(options, trials, last, len(different), seconds, left_out)
        print(page)
        for each in [*(trial for trial in trials if trial.fault or not trial.named)][:20]:
            print(f"  {each.kind.name}: {each.fault or 'the cause was not named'}")
        for each in map(str, different[:20]):
            print(f"  {each}")
        if options.write and not different:
            Path(options.write).write_text(page, encoding="utf-8")
        bad = different or any(trial.fault or not trial.named for trial in trials)
        if bad:
            keep = Path(tempfile.gettempdir(), f"faults-{os.getpid()}.log")
            keep.write_text(log)
            print(f"log of the disturbed run: {keep}")
        return 1 if bad else 0
    finally:
        if mounted:
            kinds.unmount(run / "run")


def run_with_faults(
    options: argparse.Namespace, data: str, folder: Path, wanted: list[Kind], places: Places
) -> list[Trial]:
    """Inject the faults in turn, then stop the run."""
    rng, trials = random.Random(options.seed), []
    end = time.monotonic() + options.seconds
    config = run_config(options, data, folder / "run", folder)
    checkpoints, log = folder / "checkpoints", folder / "log"
    turns = (kind for _ in itertools.count() for kind in rng.sample(wanted, len(wanted)))
    kind, waiting = next(turns), None
    ranks = start(config, log, places.opened[kind.place])
    while len(trials) < options.trials and time.monotonic() < end:
        resumed_at = wait_for_progress(ranks, folder)
        if not ranks.running:
            raise SystemExit(f"the run ended without a fault:\n{log.read_text()[-3000:]}")
        trial, lab = Trial(kind), Lab(ranks, folder / "run", checkpoints, rng, places)
        kind = next(turns)
        place = places.opened[kind.place]
        if waiting is not None:
            waiting.recovery = resumed_at
        waiting = None
        time.sleep(rng.uniform(0, 1.5))
        offset = log.stat().st_size
        before = last_step(folder)
        begin = time.monotonic()
        trial.kind.inject(lab)
        if trial.kind.ends_run:
            finish_ended(trial, lab, log, offset, begin)
            check_state(trial, checkpoints, before, options.every)
            if trial.kind.name == "rot":
                ranks = restart_with_rot(trial, lab, config, log, place)
            else:
                ranks = start(config, log, place)
            waiting = trial
        else:
            finish_survived(trial, lab, folder, log, offset)
            if place is not ranks.place:
                ranks.join_all_with(lambda process: process.terminate())
                ranks = start(config, log, place)
        trials.append(trial)
        print(
            f"{len(trials)}: {trial.kind.name}, named {trial.named}, detected after "
            f"{trial.detection:.1f} s, {trial.lost} steps lost {trial.fault}",
            flush=True,
        )
    if waiting is not None:
        waiting.recovery = wait_for_progress(ranks, folder)
    ranks.join_all_with(lambda process: process.terminate())
    return trials


def start(config: dict, log: Path, place: Place) -> RankProcesses:
    config = config | {"parallel": config["parallel"] | {"communication_backend": place.backend}}
    return RankProcesses(2, config, log, kinds.train, place)


def wait_for_progress(ranks: RankProcesses, folder: Path) -> float:
    """Wait for two new steps; return the seconds from the start to the first of them."""
    begin, first = last_step(folder), float("nan")
    deadline = time.monotonic() + START_TIMEOUT
    while ranks.running and time.monotonic() < deadline:
        step = last_step(folder)
        begin = min(begin, step)  # a resumed run discards later rows
        if step > begin and first != first:
            first = time.monotonic() - ranks.started
        if step > begin + 1:
            break
        time.sleep(0.02)
    return first


def last_step(folder: Path) -> int:
    """Return the last step in the metrics of the run."""
    path = folder / "run" / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines()
        return json.loads(lines[-1])["step"] if lines else 0
    except (FileNotFoundError, ValueError, KeyError):
        return 0


def finish_ended(trial: Trial, lab: Lab, log: Path, offset: int, begin: float) -> None:
    """Wait for the end of the ranks, and read the cause that they report."""
    stopped = trial.kind.leaves
    lab.ranks.wait_for_all(RANK_TIMEOUT * 6, but_one=stopped > 0)
    trial.detection = time.monotonic() - begin
    hung = sum(process.is_alive() for process in lab.ranks.processes) - stopped
    lab.ranks.join_all_with(lambda process: process.kill())
    if hung > 0:
        trial.fault = f"{hung} ranks did not end within {RANK_TIMEOUT * 6:.0f} s"
    (lab.folder.parent / "order").unlink(missing_ok=True)
    if trial.kind.undo is not None:
        trial.kind.undo(lab)
    with open(log, errors="replace") as file:
        file.seek(offset)
        said = file.read()
    trial.named = re.search(trial.kind.cause, said) is not None
    if not trial.named:
        trial.fault = trial.fault or f"reported: {said[-400:]!r}"


def finish_survived(trial: Trial, lab: Lab, folder: Path, log: Path, offset: int) -> None:
    """Check that the run goes on, and undo the fault."""
    before, begin = last_step(folder), time.monotonic()
    time.sleep(SURVIVAL)
    undo = trial.kind.undo
    if undo is not None and not trial.kind.lasts:
        undo(lab)
    deadline = time.monotonic() + 30
    while lab.ranks.running and last_step(folder) <= before and time.monotonic() < deadline:
        time.sleep(0.05)
    trial.detection = time.monotonic() - begin - SURVIVAL
    trial.recovery = 0.0
    if undo is not None and trial.kind.lasts:
        undo(lab)
    with open(log, errors="replace") as file:
        file.seek(0)  # one warning per start of the run
        trial.named = re.search(trial.kind.cause, file.read()) is not None
    if not lab.ranks.running or last_step(folder) <= before:
        trial.fault = "the run did not go on"


def check_state(trial: Trial, checkpoints: Path, before: int, every: int) -> None:
    """Verify all finished checkpoints, and count the steps that are lost."""
    found = [fault for path in finished_checkpoints(checkpoints) for fault in find_faults(path)]
    after = max(save.steps(checkpoints), default=0)
    trial.lost = max(0, before - after)
    # the newest checkpoint may have been in progress
    limit = 1 if trial.kind.saved else 2 * every + 1
    if trial.lost > limit:
        found.append(f"{trial.lost} steps were lost, at most {limit} may be")
    trial.fault = trial.fault or "; ".join(map(str, found[:3]))


def restart_with_rot(
    trial: Trial, lab: Lab, config: dict, log: Path, place: Place
) -> RankProcesses:
    """Restart from a damaged checkpoint: the run must refuse it, or resume from an older one."""
    repair = kinds.damage(lab)
    offset = log.stat().st_size
    ranks = start(config, log, place)
    first = last_step(lab.folder.parent)
    deadline = time.monotonic() + START_TIMEOUT
    while ranks.running and time.monotonic() < deadline:
        if "resumed after step" in (said := log.read_text(errors="replace")[offset:]):
            return ranks  # from an older checkpoint; the comparison at the end detects damage
        time.sleep(0.05)
    ranks.join()
    said = log.read_text(errors="replace")[offset:]
    if repair is not None and not re.search(
        r"(damaged|corrupt|has changed since it was written)", said
    ):
        trial.fault = f"damage after step {first} was reported as: {said[-300:]!r}"
    if repair is not None:
        repair()
    return start(config, log, place)


def finished_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that have an index."""
    return [path.parent for path in sorted(folder.glob("step-*/index.json"))]


def run_config(
    options: argparse.Namespace, data: str, run: Path, folder: Path, stop_after: int = 0
) -> dict:
    """Return the config of a run with dropout on two replicas."""
    return {
        "model": {
            "preset": "gpt2-tiny",
            "overrides": {"n_layer": 2, "n_embd": 64, "n_head": 2, "resid_pdrop": 0.1},
        },
        "data": {"path": str(data), "sequence_length": 32},
        "batch": {"micro_batch_size": 1, "accumulation": 2},
        "parallel": {"hybrid_shard_degree": 1},
        "train": {"steps": 100_000, "stop_after": stop_after, "eval_sequences": 0,
                  "sample_tokens": 0, "rank_timeout": RANK_TIMEOUT, "divergence_every": 2},
        "checkpoint": {"folder": str(folder / "checkpoints"), "every": options.every},
        "run": {"folder": str(run), "tensorboard": False, "memory_report": False},
    }  # fmt: skip


def prepare_data(folder: Path) -> str:
    """Write tokens of botocore's documentation."""
    from data_prep.__main__ import main as prepare

    code = prepare(["botocore", "--out", str(folder), "--max-tokens", "200000"])
    if code:
        raise SystemExit(code)
    return str(folder)


def format_page(
    options: argparse.Namespace,
    trials: list[Trial],
    last: int,
    different: int,
    seconds: float,
    left_out: Mapping[str, str],
) -> str:
    """Return the table with its command, as a page of the documentation."""
    command = f"python -m ci.faults --trials {len(trials)} --seed {options.seed}"
    command += f" --only {options.only}" if options.only else ""
    kept = sum(not trial.fault for trial in trials)
    lines = [
        "# Faults",
        "",
        "`ci.faults` injects faults into a training run of two replicas, restarts it, and compares "
        "the result with an undisturbed run.",
        "The ranks run on one machine: as its processes, on emulated nodes, or in a memory cgroup. "
        "Written by:",
        "",
        "```sh",
        command,
        "```",
        "",
        f"{len(trials)} trials in {seconds / 60:.0f} minutes on {os.cpu_count()} cores. "
        f"{kept} kept every promise. After the last trial, at step {last}, {different} tensors",
        "differ from the undisturbed run.",
        "",
        "Detection is the time from the fault to the end of all ranks, including the emergency "
        "checkpoint.",
        "Recovery is the time from the restart to the first new step. Lost steps are those that "
        f"were repeated; checkpoints are {options.every} steps apart. `train.rank_timeout` is "
        f"{RANK_TIMEOUT:g} s.",
        "",
        "| kind | fault | trials | cause named | detection, s: median (max) | recovery, s: median "
        "(max) | lost steps: max |",
        "|:--|:--|--:|--:|--:|--:|--:|",
    ]
    for kind in KINDS.values():
        own = [trial for trial in trials if trial.kind is kind]
        if own:
            lines.append(
                f"| {kind.name} | {kind.meaning} | {len(own)} | {sum(t.named for t in own)} | "
                f"{_spread([t.detection for t in own])} | {_spread([t.recovery for t in own])} | "
                f"{max(t.lost for t in own)} |"
            )
    survived = ", ".join(kind.name for kind in KINDS.values() if not kind.ends_run)
    lines += ["", f"The run survives {survived}; detection is then the time to its next step."]
    lines += ["", *(f"Left out: {name}, because {why}." for name, why in left_out.items())]
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    known = [value for value in values if value == value]
    return f"{statistics.median(known):.1f} ({max(known):.1f})" if known else "-"


if __name__ == "__main__":
    sys.exit(main())
