"""Time real optimizer steps of several configs on the ranks of the job."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...config.train import TrainConfig
from ...distributed import runtime
from ...fsdp.accumulate import accumulate
from ...fsdp.clip_grad import clip_grad_norm_
from ...train.lora import add_adapters
from ...train.model import build_model, parallelize
from ...train.optimizer import build_optimizer
from .rates import synchronize

TURNS, STEPS = 2, 2
"""Every model is built twice, so that a disturbance of the machine affects all configs."""


def time_steps(configs: Sequence[TrainConfig], vocabulary: int) -> list[float]:
    """Return the median seconds of `TURNS` x `STEPS` optimizer steps of every config.

    The tokens are random, and the slowest rank counts. A collective call of ranks that have left
    their process group.

    Args:
        configs: Configs that differ in their table ``parallel`` only, without a pipeline.
        vocabulary: Vocabulary size.
    """
    seconds: list[list[float]] = [[] for _ in configs]
    for _ in range(TURNS):
        for found, config in zip(seconds, configs, strict=True):
            found += _time_turn(config, vocabulary)
    return [statistics.median(found) for found in seconds]


def _time_turn(config: TrainConfig, vocabulary: int) -> list[float]:
    mesh = runtime.join(config.parallel)
    device = runtime.current().device
    shape = (
        config.batch.micro_batches(mesh.data_ranks),
        config.batch.micro_batch_size,
        config.sequence_length,
    )
    generator = torch.Generator().manual_seed(runtime.current().rank)
    tokens = torch.randint(vocabulary, shape, generator=generator).to(device)
    batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
    model = build_model(config.model, vocabulary)
    if config.lora.rank:
        add_adapters(model, config.lora, config.model.init_from)
    model, _ = parallelize(model, config)
    optimizer = build_optimizer(model, config.optimizer)
    taken = []
    for _ in range(1 + STEPS):
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        for batch in accumulate(model, batches, two_hop=config.train.two_hop):
            model(**batch).loss.backward()
        clip_grad_norm_(model, config.optimizer.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        taken.append(time.perf_counter() - begin)
    slowest = torch.tensor(taken[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    del model, optimizer, tokens, batches, batch
    runtime.shutdown()
    gc.collect()  # FSDP's states refer to their modules and back
    return slowest.tolist()
