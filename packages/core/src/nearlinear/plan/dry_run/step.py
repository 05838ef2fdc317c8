"""One training step of the really wrapped model, at any number of ranks, on none.

The trainer's own functions build, split and shard the model and run the step, in whole depth; its
tensors have no memory, and the other ranks are not there (`ranks`). The CPU stands in for the GPU:
FSDP2's own communication is taken, whose order and buffers are the same, and fused AdamW. Not in
it: two-stage and coded gathers, and what kernels need inside. The other stages of a pipeline send
nothing and take everything at once; routers choose all experts equally often.
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
from ...mesh import Mesh
from ...parallel.accumulate import accumulate
from ...parallel.clip import clip_grad_norm_
from ...parallel.expert.layers import is_stacked
from ...parallel.layout import local
from ...parallel.roots import roots_of
from ...train import config as train_config
from ...train.config import TrainConfig
from ...train.model import build_model
from ...train.optimizer import build_optimizer
from ...train.split import split
from ..memory.estimate import estimate, vocabulary_of
from ..memory.report import MemoryPlan
from .ranks import BACKEND, AlikeGroup
from .reading import read
from .tracker import BETWEEN, REDUCING, FewPieces, Tracker

SPLITTING = ("tensor", "context", "expert")
MOST_MICRO_BATCHES = 2  # the second has all that a step's later ones find


def measure(
    config: TrainConfig | dict | str | os.PathLike,
    world_size: int,
    *,
    vocabulary: int = 0,
    pipeline_rank: int | None = None,
) -> MemoryPlan:
    """The memory of one rank of ``world_size`` in a step of ``config``: of the first that has it.

    ``vocabulary``: ids; 0: what `vocabulary_of` finds. ``pipeline_rank``: which of a pipeline;
    default: the one that by the closed form needs the most, or the first. Raises ConfigError where
    the config cannot be, or asks for what has no meaning where host memory is all there is, and
    NearlinearError inside a job.
    """
    asked = config if isinstance(config, TrainConfig) else train_config.load(config)
    words = vocabulary or vocabulary_of(asked)
    _refuse(asked)
    asked = _as_on_a_gpu(asked)
    place = _place(asked, world_size, words) if pipeline_rank is None else pipeline_rank
    tracker = Tracker()
    with _job(asked, world_size, place):
        model = build_model(asked.model, words)
        now = runtime.current()
        _open_groups(now)
        AlikeGroup.seen = _seer(tracker, now)
        _route_evenly(model, asked.parallel.precision)
        with tracker, FewPieces():
            model, blocks = split(model, asked)
            optimizer = build_optimizer(model, asked.optimizer)
            copies = (each for root in roots_of(model) for each in root.parameters())
            _mark(tracker, "parameters", [*model.parameters(), *copies, *model.buffers()])
            _make_states(optimizer)
        states = [value for state in optimizer.state.values() for value in state.values()]
        _mark(tracker, "optimizer", [each for each in states if isinstance(each, torch.Tensor)])
        _follow(model, blocks, tracker)
        if asked.activations.checkpoint.endswith("B"):  # a budget looks at a micro-batch first
            _step(model, optimizer, asked, tracker)
        begin = len(tracker.events)
        _step(model, optimizer, asked, tracker)
    found = read(tracker.events, begin)
    staged = asked.parallel.pipeline_parallel_degree > 1
    return dataclasses.replace(found, pipeline_rank=place if staged else None)


def _refuse(config: TrainConfig) -> None:
    """Raise ConfigError for what a dry run cannot show."""
    moves = "it has one kind of memory and cannot tell the host's from a GPU's"
    for key, value in (
        ("parallel.offload_optimizer", config.parallel.offload_optimizer),
        ("activations.offload", config.activations.offload),
    ):
        if value:
            raise ConfigError(f"a dry run with {key} = true: {moves}; set {key} = false for it")


def _as_on_a_gpu(config: TrainConfig) -> TrainConfig:
    parallel = dataclasses.replace(
        config.parallel,
        overlap_communication=False,  # ours, for the CPU
        hierarchical_all_gather="off",
        gather_dtype="same",
    )
    return dataclasses.replace(config, parallel=parallel)


def _place(config: TrainConfig, world: int, words: int) -> int:
    """The pipeline rank that by the closed form needs the most."""
    if config.parallel.pipeline_parallel_degree == 1:
        return 0
    return estimate(config, world, vocabulary=words).pipeline_rank


@contextlib.contextmanager
def _job(config: TrainConfig, world: int, place: int) -> Iterator[None]:
    """This process as the first of the ranks of ``world`` at ``place`` in a pipeline; the others
    are not there."""
    if dist.is_initialized():
        raise NearlinearError("a dry run is a job of its own: run it in a process without one")
    mesh = Mesh.from_config(config.parallel, world)  # raises ConfigError, and nothing is started
    if not 0 <= place < mesh.pipeline:
        raise ConfigError(f"pipeline rank {place} of a dry run: there are {mesh.pipeline}")
    rank = mesh.group("pipeline", 0)[place]
    dist.init_process_group(BACKEND, rank=rank, world_size=world, store=dist.HashStore())
    try:
        runtime.init(config.parallel, ranks_per_node=0)
        with warnings.catch_warnings():
            # where slices of a shard lie: all fake tensors lie at 0, as slices do in their shard
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        AlikeGroup.seen = None
        _torch.forget_layouts()
        runtime.shutdown()


def _open_groups(now: runtime.Runtime) -> None:
    """Meshes look into tensors of ranks, which must be real."""
    names = now.device_mesh.mesh_dim_names
    if "replicate" in names:
        _ = now.device_mesh["replicate", "shard"]


def _seer(tracker: Tracker, now: runtime.Runtime):
    """What travels are FSDP2's buffers, but for what ranks that split a model exchange."""
    splitting = [now.group(axis) for axis in SPLITTING if getattr(now.mesh, axis) > 1]
    line = now.group("pipeline") if now.mesh.pipeline > 1 else None

    def see(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
        if group is line:
            tracker.see(tensor, "handed")
        elif group not in splitting:
            tracker.see(tensor, "communication")

    return see


def _route_evenly(model: nn.Module, precision: str) -> None:
    """Have every mixture's experts get equally many tokens, where routers have no numbers.

    Raises ConfigError for what PyTorch cannot multiply without memory.
    """

    def routed(experts: int):
        def hook(module, args):
            x_TE, index_TK, weights_TK = args
            pairs = torch.arange(index_TK.numel(), dtype=torch.long)
            return x_TE, (pairs % experts).view(index_TK.shape), weights_TK

        return hook

    for module in model.modules():
        if is_stacked(module):
            if precision != "bf16":
                raise ConfigError(
                    f"a dry run of experts in {precision}: PyTorch knows the product of all of "
                    "them without memory in bf16 only; set parallel.bf16 = true for it"
                )
            module.register_forward_pre_hook(routed(module.num_experts))


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
    engine = getattr(model, "_nearlinear_pipeline", None)
    if engine is None:
        _follow_part(model, blocks, range(len(blocks)), len(blocks), tracker)
        return
    count = engine.split[-1].stop
    for number, stage in engine.stages.items():
        _follow_part(stage, engine.blocks_of(stage), engine.split[number], count, tracker)
        reduce = stage.set_requires_gradient_sync

        def told(required: bool, *, recurse: bool = True, reduce=reduce) -> None:
            if required:  # torch's schedules say so before they reduce
                tracker.where = REDUCING
            reduce(required, recurse=recurse)

        stage.set_requires_gradient_sync = told


def _follow_part(part: nn.Module, blocks, numbers: range, count: int, tracker: Tracker) -> None:
    """``part`` of a model has ``blocks``, which are these ``numbers`` of ``count``, from 0."""

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

    part.register_forward_pre_hook(comes(BETWEEN if numbers.start else "the embedding"))
    for number, block in zip(numbers, blocks, strict=True):
        name = f"block {number + 1} of {count}"
        last = "head" if number + 1 == count else BETWEEN
        block.register_forward_pre_hook(comes(name), prepend=True)
        block.register_forward_hook(leaves(name, name if number < numbers[-1] else last))


def _step(model: nn.Module, optimizer, config: TrainConfig, tracker: Tracker) -> None:
    """A step as the trainer's."""
    size = (config.batch.micro_batch_size, config.sequence_length)
    asked = config.batch.micro_batches(runtime.current().mesh.data_ranks)
    ids = torch.zeros(size, dtype=torch.long)
    micro_batches = min(asked, MOST_MICRO_BATCHES)
    batches = [{"input_ids": ids, "labels": ids.clone()} for _ in range(micro_batches)]
    steps = accumulate(model, batches, two_hop=config.train.two_hop)  # counts targets, for real
    staged = hasattr(model, "_nearlinear_pipeline")
    with tracker:
        for batch in steps:
            if staged:
                model.step(batch)
                continue
            loss = model(**batch).loss
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
