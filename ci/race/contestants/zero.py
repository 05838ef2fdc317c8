"""DeepSpeed ZeRO-3 on the CPU, with thresholds in proportion to the model, or its default ones.

The defaults are for models of billions of parameters: here they keep the whole model gathered
within a micro-batch. Gradient clipping, on by default, is off, as it is for everybody else.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist
from torch.utils import cpp_extension

from .. import model
from ..plan import Plan

BUILD = 300.0  # seconds; DeepSpeed's extension takes 70 on two cores


def forget_killed_builds(folder: str) -> None:
    """Remove DeepSpeed's locks in ``folder`` older than any build, and wait for younger ones to go.

    A build that was killed leaves its lock, and torch would wait for it for ever.
    """
    for lock in Path(folder).rglob("deepspeed*/lock"):
        while (born := _born(lock)) is not None:
            if time.time() - born > BUILD:
                lock.unlink(missing_ok=True)
            else:
                time.sleep(0.1)


def _born(lock: Path) -> float | None:
    """When it was made; None if it is gone."""
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:
        return None


def settings(plan: Plan, zero: dict) -> dict:
    """DeepSpeed's configuration for one optimizer step of ``plan``."""
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3, **zero},
    }


def thresholds(built) -> dict:
    """One block is fetched ahead, two live at once: what the other libraries do here."""
    block = sum(p.numel() for p in model.blocks(built)[0].parameters())
    return {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": 2 * block,
        "reduce_bucket_size": block,
    }


class Zero3:
    def __init__(self, plan: Plan, scaled: bool = True):
        import deepspeed

        if dist.get_rank() == 0:
            known = cpp_extension.get_default_build_root()
            forget_killed_builds(os.environ.get("TORCH_EXTENSIONS_DIR", known))
        dist.barrier()
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        built = model.build(plan)
        config = settings(plan, thresholds(built) if scaled else {})
        self.prepare(built, config, plan)
        self.engine, *_ = deepspeed.initialize(
            model=built, optimizer=model.optimizer(built.parameters(), plan), config=config
        )

    def prepare(self, built, config: dict, plan: Plan) -> None:
        """What must happen to the model before DeepSpeed takes it."""

    def step(self, batches) -> float:
        total = 0.0
        for batch in batches:
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item()
        return total / len(batches)


def build(plan: Plan, **options) -> Zero3:
    return Zero3(plan, **options)
