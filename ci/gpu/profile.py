"""Profile of one step of `nearlinear train`: kernels, idle share, and the largest losses."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import nearlinear as nl
from nearlinear.config.train import load
from nearlinear.distributed import runtime

from . import trace
from .measure import Recorder, peak_gib, reset_peak, seconds_per_call, significant

GROUPS = (
    ("matrix products", r"gemm|cutlass|nvjet|cublas|matmul|aten::(mm|addmm|bmm|linear)|sm90_xmma"),
    ("attention", r"flash|fmha|attention"),
    ("optimizer and gradient norm", r"adam|multi_tensor|foreach|lpnorm|norm_kernel.*foreach"),
    ("communication", r"nccl|gather|reduce_scatter|c10d|record_param_comms"),
    ("copies and casts", r"memcpy|memset|copy|cat|split|fill|_to_copy|chunk"),
    ("normalization", r"layer_?norm|rms_?norm"),
    ("loss and softmax", r"softmax|nll|cross_entropy"),
    ("embedding", r"embedding|index"),
    ("elementwise", r"elementwise|vectorized|gelu|silu|tanh|mul|add|dropout|pow|triton"),
)
"""Groups of kernels and the regular expression of their names; the first match counts."""
USEFUL = ("matrix products", "attention")
KERNELS = 20


def run(recorder: Recorder) -> None:
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        with recorder.check("one training step") as figures:
            try:
                figures |= profile(recorder, Path(folder))
            finally:
                runtime.shutdown()


def config_of(rehearse: bool, folder: Path) -> dict[str, Any]:
    """Return a run on random tokens in nanoGPT's format."""
    tokens, words = folder / "train.bin", 300 if rehearse else 50257
    count = 20_000 if rehearse else 2_000_000
    generator = np.random.default_rng(0)
    generator.integers(0, words, count, dtype=np.uint16).tofile(tokens)
    model: dict[str, Any] = {"preset": "gpt2-xl"}
    if rehearse:
        small = {"n_layer": 2, "n_embd": 32, "n_head": 2}
        model = {"preset": "gpt2-tiny", "context": 32, "overrides": small}
    return {
        "model": model,
        "data": {"path": str(tokens), "vocab_size": words},
        "parallel": {"bf16": True},
        "batch": {"micro_batch_size": 2 if rehearse else 8},
        "activations": {"checkpoint": "each"},
        "train": {"steps": 100, "eval_sequences": 0, "sample_tokens": 0},
        "run": {"folder": str(folder / "run"), "tensorboard": False, "memory_report": False},
    }


def profile(recorder: Recorder, folder: Path) -> dict[str, Any]:
    """Profile a step after warm-up, and sum its kernels by group."""
    device = recorder.device
    trainer = nl.Trainer(load(config_of(recorder.rehearse, folder), environment={}))
    with trainer.watch:
        for _ in range(2):
            trainer.step()
        reset_peak(device)
        seconds = seconds_per_call(trainer.step, device, 1 if recorder.rehearse else 5, warm_up=0)
        path = recorder.path.parent / f"{recorder.path.stem}.trace.json.gz"
        found = trace.record(trainer.step, device, path)
        metrics = trainer.step()
    trace.draw(found, path.parent / f"{recorder.path.stem}.png", "One step of nearlinear train")
    names = trace.seconds_by_name(found)
    groups: Counter[str] = Counter()
    for name, each in names.items():
        groups[group_of(name)] += each  # pyright: ignore[reportArgumentType]
    idle = trace.idle_share(found)
    total = sum(groups.values())
    losses = {f"{group} kernels": value / total * (1 - idle)
              for group, value in groups.items() if group not in USEFUL}  # fmt: skip
    losses["idle device"] = idle
    worst = sorted(losses, key=lambda name: -losses[name])[:3]
    return {
        "step_seconds": significant(seconds),
        "mfu": round(metrics["mfu"], 4),
        "peak_gib": significant(peak_gib(device)),
        "idle_share": round(idle, 4),
        "kernels": len(found),
        "largest_losses": "; ".join(f"{name} {losses[name]:.1%}" for name in worst),
        "seconds_by_group": {name: significant(value) for name, value in groups.most_common()},
        "seconds_by_kernel": {
            name[:120]: significant(value) for name, value in names.most_common(KERNELS)
        },
        "trace": path.name,
        "trace_mib": significant(path.stat().st_size / 2**20),
    }


def group_of(kernel: str) -> str:
    for group, pattern in GROUPS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return group
    return "other"
