"""The command line: one run in peace, one that is killed, and what both came to."""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from nearlinear.checkpoint import kept
from nearlinear.checkpoint.diff import differences
from nearlinear.checkpoint.verify import faults

from .ranks import Ranks


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.kills")
    parser.add_argument("--kills", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of the run (default: %(default)s)")
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints (2)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--data", help="token shards (default: made of this machine's own text)")
    options = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        return test(options, Path(folder))


def test(options, folder: Path) -> int:
    """0 if nothing was lost; what was, in words on the terminal."""
    data = options.data or prepared(folder / "tokens")
    peace = run_of(options, data, folder / "peace")
    ranks = Ranks(options.ranks, peace, folder / "peace.log")
    begin = time.monotonic()
    metrics = folder / "peace" / "metrics.jsonl"
    while ranks.running and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.02)
    start_up = time.monotonic() - begin
    ranks.wait(3600)
    ranks.end()
    if not ranks.complete:
        print((folder / "peace.log").read_text()[-3000:])
        print("the run that nobody disturbed has failed: see above")
        return 1
    steps = time.monotonic() - begin - start_up
    print(
        f"undisturbed: up in {start_up:.1f} s, {options.steps} steps in {steps:.1f} s", flush=True
    )
    war = run_of(options, data, folder / "war")
    latest = 1.5 * start_up + 2 * steps / max(
        1, options.kills
    )  # a kill comes at any moment until then
    killed, starts, wrong = disturbed(options, war, folder, latest)
    apart = differences(*(newest(each) for each in (peace, war)))
    print(f"{killed} ranks killed in {starts} starts, {len(wrong)} checkpoints at fault, "
          f"{len(apart)} tensors differ at step {options.steps}")  # fmt: skip
    for each in [*wrong, *map(str, apart)][:20]:
        print(f"  {each}")
    if killed < options.kills:
        print("the run came to its end before: give it more --steps")
    return 1 if wrong or apart or killed < options.kills else 0


def disturbed(options, config: dict, folder: Path, latest: float) -> tuple[int, int, list[str]]:
    """Kills, starts, and faults of checkpoints of a run that goes on to its end all the same."""
    dice, wrong, killed, starts = random.Random(options.seed), [], 0, 0
    kept_in, log = Path(config["checkpoint"]["folder"]), folder / "war.log"
    while True:
        before = max(kept.steps(kept_in), default=0)
        ranks, starts = Ranks(options.ranks, config, log), starts + 1
        if killed < options.kills:
            ranks.wait(dice.uniform(0, latest))
            ranks.kill(dice.randrange(options.ranks))
        else:
            ranks.wait(3600)
        took = ranks.end()
        killed += ranks.killed
        found = [fault for path in whole(kept_in) for fault in faults(path)]
        after = max(kept.steps(kept_in), default=0)
        if after < before:
            found.append(f"start {starts}: checkpoint {before} was there, and is lost")
        wrong += found
        print(f"start {starts}: steps {before} to {after}, others ended after {took:.1f} s"
              f"{', FAULT' if found else ''}", flush=True)  # fmt: skip
        if ranks.complete:
            return killed, starts, wrong


def whole(folder: Path) -> list[Path]:
    """The checkpoints that have an index."""
    return [path.parent for path in sorted(folder.glob("step-*/index.json"))]


def newest(config: dict) -> Path:
    folder = Path(config["checkpoint"]["folder"])
    return kept.folder_of(folder, max(kept.steps(folder)))


def run_of(options, data, folder: Path) -> dict:
    """Of two shards and two replicas where there are four ranks, with dropout."""
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


def prepared(folder: Path) -> Path:
    """Tokens of the documentation that botocore brings along."""
    from data_prep.__main__ import main as prepare

    code = prepare(["botocore", "--out", str(folder), "--max-tokens", "200000"])
    if code:
        raise SystemExit(code)
    return folder


if __name__ == "__main__":
    sys.exit(main())
