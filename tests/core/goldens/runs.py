"""Short deterministic training runs that together use every technique of the library.

`test_goldens.py` repeats the runs and compares them with ``goldens.json``. Record the file anew
after an intended change of the numerics, from the root of the repository::

    python -m tests.core.goldens.runs --record

All runs are computed in one child process whose environment fixes the CPU kernels, so that results
depend as little as possible on the machine. Only public names of the library are used.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

GOLDENS = Path(__file__).with_name("goldens.json")
ROOT = Path(__file__).parents[3]

KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",  # torch's own kernels: no AVX
    "MKL_CBWR": "COMPATIBLE",  # one code path of MKL on every CPU, for every alignment
    "ONEDNN_MAX_CPU_ISA": "SSE41",  # products in bfloat16 are left to torch
    "OMP_NUM_THREADS": "1",
}
VOCABULARY, TOKENS, ROWS = 97, 16, 8

_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_COMMON = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.1,
}
_LLAMA = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
FAMILIES = {
    "gpt2": ("GPT2Config", _COMMON | {"n_embd": 32, "n_head": 4, "n_positions": 32} | _NO_DROPOUT),
    "llama": ("LlamaConfig", _LLAMA),
    "mixtral": ("MixtralConfig", _LLAMA | {"num_local_experts": 4}),
}

TENSOR = {"tensor_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}
EXPERT = {"expert_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
EACH_MICRO_BATCH = {"gradient_reduction": "micro_batch"}
"""schedule of every run but those that name another: first hop after every micro-batch"""


@dataclass(frozen=True)
class GoldenRun:
    """One model trained for a few steps on one layout."""

    family: str
    ranks: int
    config: dict
    micro_batches: int = 2
    layers: int = 2
    steps: int = 3
    ranks_per_node: int | None = None
    processes: bool = False
    """ranks are processes over gloo, which communicate on threads beside the computation"""
    deferred: bool = False
    smp_step: bool = False
    """write the step as a function of one micro-batch, decorated by smp.step"""
    moe: dict | None = None
    checkpoint: str = ""
    """strategy of activation checkpointing"""
    offload: bool = False
    """offload activations"""
    resume_at: int = 0
    """save after this step, and continue in a new model laid out by ``resume_config``"""
    resume_config: dict = field(default_factory=dict)
    tolerance: float = 1e-4
    """relative, of losses on other machines"""


RUNS = {
    "full_shard_deferred_init": GoldenRun(
        "gpt2",
        4,
        {"sdp_max_live_parameters": 0, "prefetch_depth": 2},
        micro_batches=1,
        deferred=True,
    ),
    "mics_two_hop": GoldenRun("gpt2", 4, {"hybrid_shard_degree": 2}),
    "hierarchical_gather_in_fp8": GoldenRun(
        "llama",
        4,
        {"hierarchical_all_gather": "on", "gather_dtype": "fp8"},
        micro_batches=1,
        ranks_per_node=2,
        tolerance=2e-2,
    ),
    "sliced_optimizer_selective_checkpointing": GoldenRun(
        "llama",
        4,
        {"hybrid_shard_degree": 2, "shard_optimizer_state": True},
        checkpoint="selective",
    ),
    "offloaded_optimizer_and_activations": GoldenRun(
        "gpt2",
        4,
        {"hybrid_shard_degree": 2, "offload_optimizer": True},
        micro_batches=1,
        checkpoint="each",
        offload=True,
    ),
    "tensor_x_shard": GoldenRun("llama", 4, TENSOR | {"hybrid_shard_degree": 2}),
    "context_ring": GoldenRun("llama", 2, CONTEXT, micro_batches=1),
    "context_all_gather_x_shard": GoldenRun("gpt2", 4, CONTEXT | {"cp_comm_type": "all_gather"}),
    "expert_x_shard": GoldenRun(
        "mixtral",
        4,
        EXPERT | {"hybrid_shard_degree": 4},
        moe={
            "moe_load_balancing": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_z_loss_coeff": 1e-3,
        },
    ),
    "expert_tensor": GoldenRun(
        "mixtral", 4, EXPERT | TENSOR, moe={"moe_load_balancing": "sinkhorn"}, tolerance=1e-2
    ),
    "pipeline_1f1b": GoldenRun(
        "gpt2", 2, PIPELINE | {"pipeline": "1f1b"}, smp_step=True, checkpoint="group_2", layers=4
    ),
    "pipeline_zero_bubble": GoldenRun(
        "llama", 2, PIPELINE | {"pipeline": "zbv_zero_bubble"}, layers=4
    ),
    "pipeline_x_tensor_x_shard": GoldenRun(
        "llama",
        8,
        PIPELINE | TENSOR | {"hybrid_shard_degree": 2},
        micro_batches=1,
        layers=4,
        deferred=True,
    ),
    "fp16_loss_scaling": GoldenRun(
        "llama",
        4,
        {"hybrid_shard_degree": 2, "fp16": True, "init_scale": 2.0**17, "scale_window": 2},
        steps=5,
        tolerance=2e-2,
    ),
    "bf16": GoldenRun("gpt2", 4, {"hybrid_shard_degree": 2, "bf16": True}, tolerance=2e-2),
    "resumed_on_another_layout": GoldenRun(
        "llama", 4, {"hybrid_shard_degree": 2}, steps=4, resume_at=2, resume_config=TENSOR
    ),
    "overlap_two_hop": GoldenRun(
        "gpt2", 4, {"hybrid_shard_degree": 2, "sdp_max_live_parameters": 0}, processes=True
    ),
    "overlap_sliced_optimizer": GoldenRun(
        "gpt2", 4, {"hybrid_shard_degree": 2, "shard_optimizer_state": True}, processes=True
    ),
    "overlap_hierarchical_gather_in_bf16": GoldenRun(
        "llama",
        4,
        {"hierarchical_all_gather": "on", "gather_dtype": "bf16", "sdp_reduce_bucket_size": 0},
        ranks_per_node=2,
        processes=True,
        tolerance=2e-2,
    ),
}
TRAINER = "trainer"
TOLERANCES = {name: run.tolerance for name, run in RUNS.items()} | {TRAINER: 1e-4}


@dataclass
class RankResult:
    """Observations of one rank."""

    losses: list[list[tuple[float, int]]] = field(default_factory=list)
    """(loss, number of targets) of every micro-batch, by step"""
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    """loss scale after every step; empty unless the run computes in float16"""
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    """calls and bytes of the last step, by kind of collective"""
    shards: str = ""
    """SHA-256 of the final parameters' local shards"""


def train(rank: int, name: str, folder: Path) -> RankResult:
    """Train on one rank as ``RUNS[name]`` says. ``folder`` is for checkpoints."""
    import nearlinear as nl

    run, result = RUNS[name], RankResult()
    mesh = nl.init(EACH_MICRO_BATCH | run.config, ranks_per_node=run.ranks_per_node)
    model, optimizer = build(run, mesh)
    for step in range(run.steps):
        if run.resume_at and step == run.resume_at:
            nl.save(folder / "checkpoint", model, optimizer, step=step, wait=True)
            nl.export_hf(folder / "exported", model)
            mesh = nl.init(EACH_MICRO_BATCH | run.resume_config)
            model, optimizer = build(run, mesh, seed=9)
            assert nl.load(folder / "checkpoint", model, optimizer) == step
        batch = split(rows(step), mesh.data_ranks)[mesh.data_rank(rank)]
        last = step == run.steps - 1
        with nl.count_collectives() if last else contextlib.nullcontext() as counted:
            result.losses.append(forward_and_backward(model, batch, run, mesh))
            result.norms.append(float(nl.clip_grad_norm_(model, 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        if run.config.get("fp16"):
            result.scales.append(nl.loss_scaler(model).loss_scale)
    result.collectives = {
        kind: (counted.calls[kind], counted.bytes[kind]) for kind in counted.calls
    }
    result.shards = hash_of_shards(model)
    return result


def build(run: GoldenRun, mesh, seed: int = 0):
    """The model of ``run``, ready to train, and its optimizer."""
    import torch

    import nearlinear as nl

    with nl.deferred_init() if run.deferred else nl.spmd.one_at_a_time(seed):
        model = untouched_model(run.family, run.layers)
    model = nl.transform(model, run.moe)
    if mesh.pipeline > 1:
        model = nl.pipeline(model)
    model = nl.shard(model)
    if run.checkpoint:
        nl.checkpoint_activations(model, run.checkpoint)
    if run.offload:
        nl.offload_activations(model, horizon=1, smallest=1)
    # A large eps keeps rounding errors of vanishing gradients small on other machines.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, fused=True)
    return model, nl.shard_optimizer(optimizer, model)


def untouched_model(family: str, layers: int):
    import transformers

    name, arguments = FAMILIES[family]
    key = "n_layer" if family == "gpt2" else "num_hidden_layers"
    config = getattr(transformers, name)(**arguments, **{key: layers})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def forward_and_backward(model, batch: dict, run: GoldenRun, mesh) -> list[tuple[float, int]]:
    """(loss, number of targets) of every micro-batch of a step."""
    import nearlinear as nl

    if run.smp_step:
        from nearlinear.compat import smp

        @smp.step
        def step(model, input_ids, labels):
            loss = model(input_ids=input_ids, labels=labels).loss
            model.backward(loss)
            return loss

        return [(step(model, **batch).reduce_mean().item(), targets(batch))]
    losses = []
    for micro_batch in nl.accumulate(model, split(batch, run.micro_batches)):
        if mesh.pipeline > 1:
            loss = model.step(micro_batch)
        else:
            loss = model(**micro_batch).loss
            loss.backward()
        losses.append((loss.item(), targets(micro_batch)))
    return losses


def rows(step: int) -> dict:
    """`ROWS` sequences; each ignores another number of labels."""
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : (3 * row) % (TOKENS - 2)] = -100
    return {"input_ids": ids, "labels": labels}


def split(batch: dict, parts: int) -> list[dict]:
    chunks = zip(*(value.chunk(parts) for value in batch.values()), strict=True)
    return [dict(zip(batch, values, strict=True)) for values in chunks]


def targets(batch: dict) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def hash_of_shards(model) -> str:
    """SHA-256 of names, dtypes, shapes and values of this rank's shards."""
    import torch
    from torch.distributed.tensor import DTensor

    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        value = value.to_local() if isinstance(value, DTensor) else value
        found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train_all(rank: int, names: list[str], folder: Path) -> list[RankResult]:
    return [train(rank, name, folder / name) for name in names]


def combine(results: list[RankResult]) -> dict:
    """One run's record, as plain data, from those of its ranks."""
    losses = []
    for by_rank in zip(*(result.losses for result in results), strict=True):
        weighted = [pair for losses_of_rank in by_rank for pair in losses_of_rank]
        count = sum(number for _, number in weighted)
        losses.append(math.fsum(loss * number for loss, number in weighted) / count)
    calls, sizes = Counter(), Counter()
    for result in results:
        for kind, (number, size) in result.collectives.items():
            calls[kind] += number
            sizes[kind] += size
    record = {
        "losses": [loss.hex() for loss in losses],
        "norms": [norm.hex() for norm in results[0].norms],
        "parameters": sha256("".join(result.shards for result in results).encode()),
        "collectives": {kind: [calls[kind], sizes[kind]] for kind in sorted(calls)},
    }
    if results[0].scales:
        record["scales"] = results[0].scales
    return record


def hash_of_files(folder: Path) -> dict[str, str]:
    """SHA-256 of the index and the tensor files below ``folder``."""
    files = [*folder.rglob("*.safetensors"), *folder.rglob("index.json")]
    return {str(file.relative_to(folder)): sha256(file.read_bytes()) for file in sorted(files)}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def train_by_trainer(rank: int, config: dict) -> str:
    """The hash of the trained model's local shards."""
    import nearlinear as nl

    trainer = nl.Trainer(config)
    trainer.fit()
    return hash_of_shards(trainer.model)


def trainer_run(folder: Path) -> dict:
    """The record of a run of `nearlinear.Trainer`, stopped after two steps and resumed."""
    import numpy as np

    import nearlinear as nl

    (folder / "tokens").mkdir(parents=True)
    generator = np.random.Generator(np.random.PCG64(0))
    for name, count in (("train", 2000), ("val", 400)):
        ids = generator.integers(0, VOCABULARY, count, dtype=np.uint16)
        (folder / "tokens" / f"{name}.bin").write_bytes(ids.astype("<u2").tobytes())
    config = {
        "model": {"preset": "gpt2-tiny", "overrides": {"n_layer": 2, "n_embd": 32, "n_head": 2}},
        "data": {
            "path": str(folder / "tokens"),
            "sequence_length": TOKENS,
            "vocab_size": VOCABULARY,
        },
        "batch": {"micro_batch_size": 2, "accumulation": 2},
        "optimizer": {"lr": 5e-3, "warmup_steps": 2, "eps": 1e-5},
        "activations": {"checkpoint": "each"},
        "parallel": {"hybrid_shard_degree": 2} | EACH_MICRO_BATCH,
        "checkpoint": {"folder": str(folder / "checkpoints"), "every": 2},
        "run": {
            "folder": str(folder / "run"),
            "tensorboard": False,
            "peak_tflops": 1.0,
            "memory_report": False,
        },
    }
    loop = {"steps": 4, "eval_every": 2, "eval_sequences": 8, "sample_tokens": 0}
    written = []
    for stop_after in (2, 4):
        shards = nl.spmd.run(
            train_by_trainer, 4, args=(config | {"train": loop | {"stop_after": stop_after}},)
        )
        written += (folder / "run" / "metrics.jsonl").read_text().splitlines()[-2:]
    metrics = [json.loads(line) for line in written]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    return {
        "losses": [row["loss"].hex() for row in metrics],
        "norms": [row["grad_norm"].hex() for row in metrics],
        "eval_losses": [row["eval_loss"].hex() for row in metrics if "eval_loss" in row],
        "learning_rates": [row["lr"].hex() for row in metrics],
        "batches": [row["batch_id"] for row in metrics],
        "parameters": sha256("".join(shards).encode()),
    }


def compute() -> dict:
    """All records, by name of the run."""
    import torch

    import nearlinear as nl

    records: dict[str, dict] = {}
    with tempfile.TemporaryDirectory(prefix="nearlinear-goldens-") as temporary:
        folder = Path(temporary)
        for name, run in RUNS.items():
            if run.processes:
                continue
            torch.manual_seed(0)  # checkpoints keep the generator's state
            records[name] = combine(
                nl.spmd.run(train, run.ranks, args=(name, folder / name), timeout=120)
            )
            if run.resume_at:
                records[name]["files"] = hash_of_files(folder / name)
        records[TRAINER] = trainer_run(folder / TRAINER)
        together = [name for name, run in RUNS.items() if run.processes]
        (ranks,) = {RUNS[name].ranks for name in together}
        results = nl.spmd.run(
            train_all, ranks, args=(together, folder), processes=True, timeout=240
        )
        for name, of_ranks in zip(together, zip(*results, strict=True), strict=True):
            records[name] = combine(list(of_ranks))
    return records


def compute_in_child() -> dict:
    """`compute` in a process of its own, whose environment fixes the CPU kernels."""
    unset = ("SM_HP_MP_PARAMETERS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= KERNELS | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}
    with tempfile.TemporaryDirectory(prefix="nearlinear-goldens-") as folder:
        output = Path(folder, "records.json")
        command = [sys.executable, "-m", "tests.core.goldens.runs", "--compute", str(output)]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise RuntimeError(
                f"the golden runs failed:\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
            )
        return json.loads(output.read_text())


def machine() -> dict[str, str]:
    """Versions and hardware that decide about bits."""
    import torch

    return {
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "cpu": f"{platform.machine()} {_cpu_model()}".strip(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--record", action="store_true", help="write goldens.json anew")
    action.add_argument("--compute", metavar="FILE", type=Path, help="write all records to FILE")
    arguments = parser.parse_args()
    if arguments.record:
        content = {"machine": machine(), "runs": compute_in_child()}
        GOLDENS.write_text(json.dumps(content, indent=1) + "\n")
    else:
        # The module under its own name: ranks that are processes import it to find their function.
        from tests.core.goldens import runs

        arguments.compute.write_text(json.dumps(runs.compute()))


if __name__ == "__main__":
    main()
