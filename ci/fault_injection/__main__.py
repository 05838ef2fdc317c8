"""Command line: run once undisturbed and once with kills, and compare the results."""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from nearlinear.checkpoint import save
from nearlinear.checkpoint.verify import compare_checkpoints, find_faults

from .ranks import RankProcesses


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.fault_injection",
        description="Kill ranks of a training run and compare the result with an undisturbed run.",
    )
    for name, default, meaning in (
        ("kills", 100, "kills in all"),
        ("ranks", 4, "ranks of the run"),
        ("steps", 300, "steps of the run"),
        ("every", 2, "steps between checkpoints"),
        ("seed", 0, "seed of the kill times"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})"
        )
    parser.add_argument("--data", help="token shards (default: botocore's documentation)")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="fault-injection-") as folder:
        return run_test(options, Path(folder))


def run_test(options, folder: Path) -> int:
    """Print the differences of the two runs and return 0 without any, otherwise 1."""
    data = options.data or prepare_data(folder / "tokens")
    reference = run_config(options, data, folder / "undisturbed")
    ranks = RankProcesses(options.ranks, reference, folder / "undisturbed.log")
    begin = time.monotonic()
    metrics = folder / "undisturbed" / "metrics.jsonl"
    while ranks.running and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.02)
    start_up = time.monotonic() - begin
    ranks.wait_for_exit(3600)
    ranks.join()
    if not ranks.complete:
        print((folder / "undisturbed.log").read_text()[-3000:])
        print("The undisturbed run failed; its log is above.")
        return 1
    steps = time.monotonic() - begin - start_up
    print(
        f"undisturbed: started in {start_up:.1f} s, {options.steps} steps in {steps:.1f} s",
        flush=True,
    )
    disturbed = run_config(options, data, folder / "disturbed")
    # A kill comes at a random time until `latest` seconds after a start.
    latest = 1.5 * start_up + 2 * steps / max(1, options.kills)
    killed, starts, faulty = run_with_kills(options, disturbed, folder, latest)
    different = compare_checkpoints(*(latest_checkpoint(each) for each in (reference, disturbed)))
    print(f"{killed} ranks killed in {starts} starts, {len(faulty)} faulty checkpoints, "
          f"{len(different)} tensors differ at step {options.steps}")  # fmt: skip
    for each in [*faulty, *map(str, different)][:20]:
        print(f"  {each}")
    if killed < options.kills:
        print("The run ended before the last kill. Raise --steps.")
    return 1 if faulty or different or killed < options.kills else 0


def run_with_kills(
    options, config: dict, folder: Path, latest: float
) -> tuple[int, int, list[str]]:
    """Run to the end despite kills; return the kills, the starts and the checkpoint faults."""
    rng, faulty, killed, starts = random.Random(options.seed), [], 0, 0
    checkpoints, log = Path(config["checkpoint"]["folder"]), folder / "disturbed.log"
    while True:
        before = max(save.steps(checkpoints), default=0)
        ranks, starts = RankProcesses(options.ranks, config, log), starts + 1
        if killed < options.kills:
            ranks.wait_for_exit(rng.uniform(0, latest))
            ranks.kill(rng.randrange(options.ranks))
        else:
            ranks.wait_for_exit(3600)
        waited = ranks.join()
        killed += ranks.killed
        found = [fault for path in finished_checkpoints(checkpoints) for fault in find_faults(path)]
        after = max(save.steps(checkpoints), default=0)
        if after < before:
            found.append(f"start {starts}: checkpoint {before} was lost")
        faulty += found
        print(f"start {starts}: steps {before} to {after}, other ranks ended after {waited:.1f} s"
              f"{', FAULT' if found else ''}", flush=True)  # fmt: skip
        if ranks.complete:
            return killed, starts, faulty


def finished_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that have an index."""
    return [path.parent for path in sorted(folder.glob("step-*/index.json"))]


def latest_checkpoint(config: dict) -> Path:
    folder = Path(config["checkpoint"]["folder"])
    return save.step_folder(folder, max(save.steps(folder)))


def run_config(options, data, folder: Path) -> dict:
    """Return a run config with dropout; four ranks are two replicas of two shards."""
    return {
        "model": {
            "preset": "gpt2-tiny",
            "overrides": {"n_layer": 2, "n_embd": 64, "n_head": 2, "resid_pdrop": 0.1},
        },
        "data": {"path": str(data), "sequence_length": 32},
        "batch": {"micro_batch_size": 1, "accumulation": 2},
        "parallel": {"hybrid_shard_degree": max(1, options.ranks // 2)},
        "train": {"steps": options.steps, "eval_sequences": 0, "sample_tokens": 0},
        "checkpoint": {"folder": str(folder / "checkpoints"), "every": options.every},
        "run": {"folder": str(folder), "tensorboard": False, "memory_report": False},
    }


def prepare_data(folder: Path) -> Path:
    """Write tokens of botocore's documentation."""
    from data_prep.__main__ import main as prepare

    code = prepare(["botocore", "--out", str(folder), "--max-tokens", "200000"])
    if code:
        raise SystemExit(code)
    return folder


if __name__ == "__main__":
    sys.exit(main())
