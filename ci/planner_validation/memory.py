"""Compare the planner's closed form of memory with its dry run, for two dozen configurations.

    python -m ci.planner_validation.memory                 exit 1 if a peak is off by more than 5 %
    python -m ci.planner_validation.memory --only 30b 70b  rows whose name contains a part

Every dry run is a separate process, so that its time and host memory can be measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from nearlinear.config.architecture import get_preset
from nearlinear.config.schema import to_toml
from nearlinear.config.train import TrainConfig, load
from nearlinear.planner import memory

GIB = 2**30
MAX_ERROR = 0.05
MAX_LENGTH = 4096  # tokens of a sequence
WIDE_10B = {"n_embd": 4096, "n_layer": 50, "n_head": 32}


@dataclass(frozen=True)
class MemoryCase:
    """A configuration of the table."""

    name: str
    gpus: int
    shard: int
    micro_batch: int
    checkpoint: str = ""
    tensor: int = 1
    accumulation: int = 1
    pipeline: int = 1
    microbatches: int = 1
    """Micro-batches of a pipeline, each of ``micro_batch`` sequences."""
    schedule: str = "1f1b"
    expert: int = 1
    context: int = 1
    keys: str = "p2p"
    """Exchange of keys and values between context ranks (``cp_comm_type``)."""

    @property
    def config(self) -> TrainConfig:
        preset, overrides = MODELS[self.name]
        return load(
            {
                "model": {"preset": preset, "overrides": overrides},
                "data": {"sequence_length": min(MAX_LENGTH, get_preset(preset)["context"])},
                "parallel": {
                    "hybrid_shard_degree": self.shard,
                    "tensor_parallel_degree": self.tensor,
                    "expert_parallel_degree": self.expert,
                    "context_parallel_degree": self.context,
                    "cp_comm_type": self.keys,
                    "pipeline_parallel_degree": self.pipeline,
                    "pipeline": self.schedule,
                    "microbatches": self.microbatches,
                    "bf16": True,
                },
                "batch": {
                    "micro_batch_size": self.micro_batch * self.microbatches,
                    "accumulation": self.accumulation,
                },
                "activations": {"checkpoint": self.checkpoint},
            }
        )


MODELS = {
    "gpt2 1.5b": ("gpt2-xl", {}),
    "gpt2 10b": ("gpt2-30b", WIDE_10B),
    "gpt2 30b": ("gpt2-30b", {}),
    "llama 7b": ("llama2-7b", {}),
    "llama 13b": ("llama2-13b", {}),
    "llama 70b": ("llama2-70b", {}),
    "mixtral": ("mixtral-8x7b", {}),
}

CASES = (
    MemoryCase("gpt2 1.5b", gpus=8, shard=8, micro_batch=4),
    MemoryCase("gpt2 1.5b", gpus=32, shard=16, micro_batch=8, checkpoint="each"),
    MemoryCase("gpt2 10b", gpus=128, shard=64, micro_batch=1),
    MemoryCase("gpt2 10b", gpus=64, shard=32, micro_batch=4, checkpoint="each"),
    MemoryCase("gpt2 30b", gpus=256, shard=128, micro_batch=6, checkpoint="each"),
    MemoryCase("gpt2 30b", gpus=256, shard=32, micro_batch=4, checkpoint="each", tensor=8),
    MemoryCase("llama 7b", gpus=8, shard=8, micro_batch=1, checkpoint="each"),
    MemoryCase("llama 7b", gpus=64, shard=16, micro_batch=1, tensor=4),
    MemoryCase("llama 13b", gpus=64, shard=64, micro_batch=2, checkpoint="each", accumulation=4),
    MemoryCase("llama 13b", gpus=32, shard=16, micro_batch=1, tensor=2),
    MemoryCase("llama 70b", gpus=256, shard=256, micro_batch=1, checkpoint="each"),
    MemoryCase("llama 70b", gpus=256, shard=32, micro_batch=2, checkpoint="each", tensor=8),
    MemoryCase("gpt2 30b", gpus=256, shard=8, micro_batch=1, checkpoint="each", tensor=8,
               pipeline=4, microbatches=16),
    MemoryCase("gpt2 1.5b", gpus=8, shard=2, micro_batch=1, pipeline=4, microbatches=8),
    MemoryCase("llama 7b", gpus=16, shard=4, micro_batch=1, pipeline=4, microbatches=6,
               schedule="gpipe"),
    MemoryCase("llama 13b", gpus=32, shard=8, micro_batch=1, checkpoint="each", pipeline=4,
               microbatches=8, schedule="interleaved_1f1b"),
    MemoryCase("llama 70b", gpus=64, shard=1, micro_batch=1, checkpoint="each", tensor=8,
               pipeline=8, microbatches=16),
    MemoryCase("gpt2 10b", gpus=32, shard=8, micro_batch=1, checkpoint="selective", pipeline=4,
               microbatches=8, schedule="looped_bfs"),
    MemoryCase("llama 7b", gpus=16, shard=4, micro_batch=1, pipeline=4, microbatches=8,
               schedule="zbv_zero_bubble"),
    MemoryCase("mixtral", gpus=8, shard=8, micro_batch=1, checkpoint="each"),
    MemoryCase("mixtral", gpus=64, shard=64, micro_batch=1, checkpoint="each", expert=8),
    MemoryCase("mixtral", gpus=32, shard=8, micro_batch=2, expert=8),
    MemoryCase("mixtral", gpus=64, shard=16, micro_batch=1, tensor=4, expert=4, accumulation=2,
               checkpoint="each"),
    MemoryCase("mixtral", gpus=32, shard=8, micro_batch=1, checkpoint="each", expert=8, pipeline=4,
               microbatches=8),
    MemoryCase("gpt2 10b", gpus=64, shard=64, micro_batch=4, checkpoint="each", context=4),
    MemoryCase("llama 7b", gpus=32, shard=32, micro_batch=1, context=4, keys="all_gather"),
)  # fmt: skip


def dry_run(case: MemoryCase) -> dict:
    """Run ``python -m nearlinear.planner.dry_run`` for a case and return its result."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.toml")
        path.write_text(to_toml(case.config), encoding="utf-8")
        command = [sys.executable, "-m", "nearlinear.planner.dry_run", str(path), "--json"]
        done = subprocess.run(
            [*command, "--gpus", str(case.gpus)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


HEAD = (
    f"{'model':10} GPUs shard CP TP EP PP  mb  acc micro schedule {'':8} {'ckpt':9}  plan GiB  ms  "
    f"dry run GiB   error  states{'s':>7}{'host GiB':>10}"
)


def table_row(case: MemoryCase) -> tuple[str, bool]:
    """Return a line of the table, and True if the states are exact and the peak within bounds."""
    begin = time.perf_counter()
    plan = memory.estimate(case.config, case.gpus)
    took = time.perf_counter() - begin
    measured = dry_run(case)
    error = plan.peak / measured["peak"] - 1
    exact = plan.persistent == measured["persistent"]
    layout = f"{case.name:10} {case.gpus:4} {case.shard:5} {case.context:2} "
    layout += f"{case.tensor:2} {case.expert:2}"
    schedule = case.schedule if case.pipeline > 1 else "-"
    batch = f"{case.pipeline:2} {case.micro_batch:3} {case.accumulation:4} {case.microbatches:5} "
    batch += f"{schedule:17} {case.checkpoint or '-':9}"
    peaks = f"{plan.peak / GIB:9.2f} {took * 1e3:3.0f} {measured['peak'] / GIB:12.2f} {error:+7.2%}"
    states = "exact" if exact else "WRONG"
    cost = f"{measured['seconds']:6.0f} {measured['host_memory'] / GIB:9.2f}"
    line = f"{layout} {batch} {peaks}  {states} {cost}"
    return line, exact and abs(error) <= MAX_ERROR


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="parts of model names")
    options = parser.parse_args()
    print(HEAD)
    success = True
    for case in CASES:
        if any(part in case.name for part in options.only):
            line, passed = table_row(case)
            print(line, flush=True)
            success = success and passed
    return 0 if success else 1


if __name__ == "__main__":
    sys.exit(main())
