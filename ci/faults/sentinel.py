"""Measure the divergence sentinel: clean steps without an alarm, and its cost.

    python -m ci.faults.sentinel --steps 10000 --data DATA    # token shards

Clean steps run on 4 ranks as threads with a comparison in every step, in turn on four layouts. The
cost is measured on 2 processes with a model of 19 million parameters, and is the time of one
comparison divided by the time of the steps between two comparisons.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from typing import Any

import nearlinear as nl
from nearlinear.train.callbacks.divergence import DivergenceSentinel

LAYOUTS = (
    {"hybrid_shard_degree": 1},
    {"hybrid_shard_degree": 2},
    {"hybrid_shard_degree": 2, "shard_optimizer_state": True},
    {"hybrid_shard_degree": 4},
)
TINY = {"n_layer": 1, "n_embd": 16, "n_head": 1}
LARGE = {"n_layer": 6, "n_embd": 512, "n_head": 8}  # 19 million parameters
EVERY = 100


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.faults.sentinel")
    parser.add_argument("--steps", type=int, default=10_000, help="clean steps (default: 10000)")
    parser.add_argument("--data", required=True, help="token shards")
    options = parser.parse_args(argv)
    each = options.steps // len(LAYOUTS)
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            config = run_config(options.data, folder, TINY, layout)
            compared = sum(nl.spmd.run(train, 4, args=(config, each), timeout=36_000)) // 4
            print(f"{layout}: {compared} clean steps on 4 ranks, no alarm", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(options.data, folder, LARGE, LAYOUTS[0])
        results = nl.spmd.run(measure, 2, args=(config,), processes=True, timeout=3600)
    parameters, step, state, gathered = results[0]
    cost = (state + gathered) / (EVERY * step)
    print(f"{parameters:,} parameters on 2 replicas: a step takes {step * 1e3:.0f} ms, the "
          f"fingerprint of the state {state * 1e3:.0f} ms, that of the gathered parameters "
          f"{gathered * 1e3:.0f} ms: {cost:.2%} of the steps at {EVERY} steps")  # fmt: skip
    return 0


def train(rank: int, config: dict[str, Any], steps: int) -> int:
    """Train ``steps`` steps; the sentinel raises an error if it finds a difference."""
    trainer = nl.Trainer(config)
    for _ in range(steps):
        trainer.step()
    return steps


def measure(rank: int, config: dict[str, Any]) -> tuple[int, float, float, float]:
    """Return the number of parameters, and the median seconds of a step and of fingerprints."""
    trainer = nl.Trainer(config)
    [sentinel] = (each for each in trainer.callbacks if isinstance(each, DivergenceSentinel))
    times: dict[str, list[float]] = {"step": [], "state": [], "gathered": []}
    for _ in range(8):
        times["step"].append(timed(trainer.step))
        times["state"].append(timed(sentinel.fingerprint))
        times["gathered"].append(timed(lambda: sentinel.fingerprint(optimizer=False)))
    medians = [statistics.median(times[name][2:]) for name in ("step", "state", "gathered")]
    return trainer.num_parameters, medians[0], medians[1], medians[2]


def timed(function: Any) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def run_config(data: str, folder: str, sizes: dict, layout: dict) -> dict[str, Any]:
    small = sizes is TINY
    return {
        "model": {"preset": "gpt2-tiny", "overrides": sizes},
        "data": {"path": data, "sequence_length": 8 if small else 128},
        "batch": {"micro_batch_size": 1 if small else 4, "accumulation": 1},
        "parallel": layout,
        "train": {"steps": 1_000_000, "eval_sequences": 0, "sample_tokens": 0, "rank_timeout": 0,
                  "divergence_every": 1 if small else EVERY},
        "run": {"folder": folder, "tensorboard": False, "memory_report": False,
                "log_every": 1000},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
