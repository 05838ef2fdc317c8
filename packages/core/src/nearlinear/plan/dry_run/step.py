"""One training step of the really wrapped model, at any number of ranks, on none.

The trainer's own functions build, split and shard the model and run the step, in whole depth; its
tensors have no memory, and the other ranks are not there (`ranks`). The CPU stands in for the GPU:
FSDP2's own communication is taken, whose order and buffers are the same, and fused AdamW. Not in
it: two-stage and coded gathers, and what kernels need inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from ... import _torch, runtime
from ...errors import ConfigError, NearlinearError
from ...parallel.accumulate import accumulate
from ...parallel.clip import clip_grad_norm_
from ...parallel.layout import local
from ...train import config as train_config
from ...train.config import TrainConfig
from ...train.model import build_model
from ...train.optimizer import build_optimizer
from ...train.split import split
from ..memory.estimate import vocabulary_of
from ..memory.report import MemoryPlan
from .ranks import BACKEND, AlikeGroup
from .reading import read
from .tracker import FewPieces, Tracker

SPLITTING = ("tensor", "context")
MOST_MICRO_BATCHES = 2  # the second has all that a step's later ones find


def measure(
    config: TrainConfig | dict | str | os.PathLike, world_size: int, *, vocabulary: int = 0
) -> MemoryPlan:
    """The memory of rank 0 of ``world_size`` in a step of ``config``.

    ``vocabulary``: ids; 0: what `vocabulary_of` finds. Raises ConfigError where the config cannot
    be, or asks for what has no meaning where host memory is all there is, and NearlinearError
    inside a job.
    """
    asked = config if isinstance(config, TrainConfig) else train_config.load(config)
    words = vocabulary or vocabulary_of(asked)
    _refuse(asked)
    asked = _as_on_a_gpu(asked)
    tracker = Tracker()
    with _job(asked, world_size):
        model = build_model(asked.model, words)
        now = runtime.current()
        _open_groups(now)
        AlikeGroup.seen = _seer(tracker, now)
        with tracker, FewPieces():
            model, blocks = split(model, asked)
            optimizer = build_optimizer(model, asked.optimizer)
            _mark(tracker, "parameters", [*model.parameters(), *model.buffers()])
            _make_states(optimizer)
        states = [value for state in optimizer.state.values() for value in state.values()]
        _mark(tracker, "optimizer", [each for each in states if isinstance(each, torch.Tensor)])
        _follow(model, blocks, tracker)
        if asked.activations.checkpoint.endswith("B"):  # a budget looks at a micro-batch first
            _step(model, optimizer, asked, tracker)
        begin = len(tracker.events)
        backward = _step(model, optimizer, asked, tracker)
    return read(tracker.events, begin, backward)


def _refuse(config: TrainConfig) -> None:
    """Raise ConfigError for what a dry run cannot show."""
    parallel = config.parallel
    moves = "it has one kind of memory and cannot tell the host's from a GPU's"
    for key, value, plain, why in (
        ("parallel.offload_optimizer", parallel.offload_optimizer, False, moves),
        ("activations.offload", config.activations.offload, False, moves),
        ("parallel.expert_parallel_degree", parallel.expert_parallel_degree, 1,
         "which tokens go to another rank is in their values, which it has not"),
        ("parallel.pipeline_parallel_degree", parallel.pipeline_parallel_degree, 1,
         "the other stages are not there to answer"),
    ):  # fmt: skip
        if value != plain:
            raise ConfigError(
                f"a dry run with {key} = {value!r}: {why}; set {key} = {plain!r} for it"
            )


def _as_on_a_gpu(config: TrainConfig) -> TrainConfig:
    parallel = dataclasses.replace(
        config.parallel,
        overlap_communication=False,  # ours, for the CPU
        hierarchical_all_gather="off",
        gather_dtype="same",
    )
    optimizer = config.optimizer
    if optimizer.kind == "adamw" and optimizer.implementation == "auto":
        optimizer = dataclasses.replace(optimizer, implementation="fused")
    return dataclasses.replace(config, parallel=parallel, optimizer=optimizer)


@contextlib.contextmanager
def _job(config: TrainConfig, world: int) -> Iterator[None]:
    """This process as rank 0 of ``world`` ranks that are not there."""
    if dist.is_initialized():
        raise NearlinearError("a dry run is a job of its own: run it in a process without one")
    config.parallel.degrees(world)  # raises ConfigError before anything is started
    dist.init_process_group(BACKEND, rank=0, world_size=world, store=dist.HashStore())
    try:
        runtime.init(config.parallel, ranks_per_node=0)
        with warnings.catch_warnings():
            # where slices of a shard lie: all fake tensors lie at 0, as slices do in their shard
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        AlikeGroup.seen = None
        runtime.shutdown()


def _open_groups(now: runtime.Runtime) -> None:
    """Meshes look into tensors of ranks, which must be real."""
    names = now.device_mesh.mesh_dim_names
    if "replicate" in names:
        _ = now.device_mesh["replicate", "shard"]


def _seer(tracker: Tracker, now: runtime.Runtime):
    """What travels are FSDP2's buffers, but for what ranks that split a model exchange."""
    splitting = [now.group(axis) for axis in SPLITTING if getattr(now.mesh, axis) > 1]

    def see(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
        if group not in splitting:
            tracker.see(tensor, "communication")

    return see


def _mark(tracker: Tracker, kind: str, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tracker.see(local(tensor.detach()), kind)


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """What the first update makes, so that the step is like all that come after."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _follow(model: nn.Module, blocks: list[nn.Module], tracker: Tracker) -> None:
    """Have the tracker know which part of the model is at work."""
    count = len(blocks)

    def comes(where: str):
        def hook(*_):
            tracker.where = where

        return hook

    def leaves(where: str, next_part: str):
        def hook(module, args, output):
            tracker.where = next_part
            if not _torch.in_backward():
                for tensor in _torch.tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(comes(where))

        return hook

    model.register_forward_pre_hook(comes("the embedding"))
    for number, block in enumerate(blocks, 1):
        name = f"block {number} of {count}"
        block.register_forward_pre_hook(comes(name), prepend=True)
        block.register_forward_hook(leaves(name, name if number < count else "head"))


def _step(model: nn.Module, optimizer, config: TrainConfig, tracker: Tracker) -> int:
    """A step as the trainer's; where in the log the last backward pass begins."""
    size = (config.batch.micro_batch_size, config.sequence_length)
    micro_batches = min(config.batch.accumulation, MOST_MICRO_BATCHES)
    ids = torch.zeros(size, dtype=torch.long)
    batches = [{"input_ids": ids, "labels": ids.clone()} for _ in range(micro_batches)]
    backward = 0
    steps = accumulate(model, batches, two_hop=config.train.two_hop)  # counts targets, for real
    with tracker:
        for batch in steps:
            loss = model(**batch).loss
            backward = len(tracker.events)
            loss.backward()
            del loss
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        _mark(tracker, "gradients", gradients)
        del gradients
        tracker.updating = True
        clip_grad_norm_(model, config.optimizer.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        tracker.updating = False
    return backward
