"""Run a training step of the real sharded model for any number of ranks, in one process.

The trainer's own functions build, split and shard the whole model and run the step on fake tensors;
the other ranks are simulated by `process_group`. The CPU stands in for the GPU: FSDP2's own
communication, with the same order and buffers, and fused AdamW. Not included: hierarchical and
quantized all-gathers, and workspaces of kernels. Other pipeline stages exchange nothing, and
routers choose all experts equally often.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ... import _torch
from ...config import train as train_config
from ...config.train import TrainConfig
from ...distributed import runtime
from ...distributed.mesh import Mesh
from ...errors import ConfigError, NearlinearError
from ...expert_parallel.parallelize import is_stacked
from ...fsdp.accumulate import accumulate
from ...fsdp.clip_grad import clip_grad_norm_
from ...fsdp.model_state import fsdp_roots, local_tensor, model_state
from ...pipeline_parallel.runtime import PipelineRuntime
from ...train.model import build_model, parallelize
from ...train.optimizer import build_optimizer
from ..memory import MemoryEstimate, estimate, vocabulary_of
from .tracker import BETWEEN, REDUCING, SharedChunks, StorageTracker, find_peak

BACKEND = "nearlinear_alike"


class CompletedWork(dist.Work):
    """A `Work` that is already complete."""

    def wait(self, timeout=None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class MirrorGroup(dist.ProcessGroup):
    """This rank's group, of ``world`` mirrored ranks."""

    observer: Callable[[MirrorGroup, torch.Tensor], None] | None = None
    """Called with the group and every tensor of a collective."""

    def __init__(self, rank: int, world: int):
        super().__init__(rank, world)  # pyright: ignore[reportCallIssue] - torch's stub lacks this overload
        self._rank, self._world = rank, world

    def size(self) -> int:
        return self._world

    @property
    def group_name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - torch reads it
        return _torch.name_of_group(self)

    pg_name = group_name

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    def __repr__(self) -> str:
        return f"MirrorGroup(rank {self._rank} of {self._world})"

    def _observe(self, *tensors: torch.Tensor) -> bool:
        """Report ``tensors`` to the observer; return whether they have values."""
        if MirrorGroup.observer is not None:
            for tensor in tensors:
                MirrorGroup.observer(self, tensor)
        return not any(map(_torch.is_fake, tensors))

    def _reduce(self, tensor: torch.Tensor, options) -> None:
        if options.reduceOp == dist.ReduceOp.SUM:
            tensor.mul_(self._world)

    def allreduce(self, tensors, opts=None) -> CompletedWork:
        opts = opts or dist.AllreduceOptions()
        for tensor in tensors:
            if self._observe(tensor):
                self._reduce(tensor, opts)
        return CompletedWork()

    def broadcast(self, tensors, opts=None) -> CompletedWork:
        self._observe(*tensors)
        return CompletedWork()

    def barrier(self, opts=None) -> CompletedWork:
        return CompletedWork()

    def allgather(self, outputs, inputs, opts=None) -> CompletedWork:
        for parts, mine in zip(outputs, inputs, strict=True):
            if self._observe(mine, *parts):
                for part in parts:
                    part.copy_(mine)
        return CompletedWork()

    def all_gather_single(self, output, mine, opts=None) -> CompletedWork:
        if self._observe(output, mine):
            output.view(self._world, -1).copy_(mine.reshape(1, -1))
        return CompletedWork()

    def reduce_scatter_single(self, output, mine, opts=None) -> CompletedWork:
        if self._observe(output, mine):
            output.view(-1).copy_(mine.view(self._world, -1)[self._rank])
            self._reduce(output, opts or dist.ReduceScatterOptions())
        return CompletedWork()

    def send(self, tensors, to, tag=0) -> CompletedWork:
        self._observe(*tensors)
        return CompletedWork()

    def recv(self, tensors, of, tag=0) -> CompletedWork:
        """Receive ones: torch's pipelines exchange integers as votes, which must all agree."""
        if self._observe(*tensors):
            for tensor in tensors:
                tensor.fill_(1)
        return CompletedWork()

    def all_to_all_single(self, output, mine, to=None, of=None, opts=None) -> CompletedWork:
        if self._observe(output, mine):
            parts = list(mine.split(of)) if of else list(mine.chunk(self._world))
            output.copy_(torch.cat([parts[self._rank]] * self._world))
        return CompletedWork()

    # names before torch 2.13; torch's stubs declare other parameter names
    _allgather_base = all_gather_single  # pyright: ignore[reportAssignmentType] - see above
    _reduce_scatter_base = reduce_scatter_single  # pyright: ignore[reportAssignmentType] - see above
    alltoall_base = all_to_all_single  # pyright: ignore[reportAssignmentType] - see above


def _create(store, rank: int, world: int, timeout) -> MirrorGroup:
    return MirrorGroup(rank, world)


dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


SPLITTING = ("tensor", "context", "expert")
MAX_MICRO_BATCHES = 2  # all later micro-batches are identical to the second


def measure(
    config: TrainConfig | dict | str | Path,
    world_size: int,
    *,
    vocabulary: int = 0,
    pipeline_rank: int | None = None,
) -> MemoryEstimate:
    """Measure the peak memory of one rank in a step of ``config``.

    Args:
        config: A config, its contents as a dict, or its file.
        world_size: Number of ranks.
        vocabulary: Vocabulary size; 0: see `vocabulary_of`.
        pipeline_rank: Rank of a pipeline; default: the one with the highest estimate.

    Raises ConfigError for an invalid config, and for offloading, which a dry run cannot measure;
    NearlinearError inside a job.
    """
    if not isinstance(config, TrainConfig):
        config = train_config.load(config)
    words = vocabulary or vocabulary_of(config)
    _check_offload(config)
    config = _with_gpu_defaults(config)
    place = pipeline_rank
    if place is None:
        place = _largest_pipeline_rank(config, world_size, words)
    tracker = StorageTracker()
    with _simulated_job(config, world_size, place):
        model = build_model(config.model, words)
        now = runtime.current()
        _open_submesh(now)
        MirrorGroup.observer = _communication_observer(tracker, now)
        _route_evenly(model, config.parallel.precision)
        with tracker, SharedChunks():
            model, blocks = parallelize(model, config)
            optimizer = build_optimizer(model, config.optimizer)
            copies = (each for root in fsdp_roots(model) for each in root.parameters())
            _mark(tracker, "parameters", [*model.parameters(), *copies, *model.buffers()])
            _create_states(optimizer)
        states = [value for state in optimizer.state.values() for value in state.values()]
        _mark(tracker, "optimizer", [each for each in states if isinstance(each, torch.Tensor)])
        _track_blocks(model, blocks, tracker)
        if config.activations.checkpoint.endswith("B"):  # a budget measures a micro-batch first
            _run_step(model, optimizer, config, tracker)
        begin = len(tracker.events)
        _run_step(model, optimizer, config, tracker)
    found = find_peak(tracker.events, begin)
    pipelined = config.parallel.pipeline_parallel_degree > 1
    return dataclasses.replace(found, pipeline_rank=place if pipelined else None)


def _check_offload(config: TrainConfig) -> None:
    """Raise ConfigError if the config offloads anything."""
    for key, value in (
        ("parallel.offload_optimizer", config.parallel.offload_optimizer),
        ("activations.offload", config.activations.offload),
    ):
        if value:
            raise ConfigError(
                f"{key} = true: a dry run cannot tell host memory from GPU memory. Set {key} = "
                "false for it."
            )


def _with_gpu_defaults(config: TrainConfig) -> TrainConfig:
    parallel = dataclasses.replace(
        config.parallel,
        overlap_communication=False,  # only used on the CPU
        hierarchical_all_gather="off",
        gather_dtype="same",
    )
    return dataclasses.replace(config, parallel=parallel)


def _largest_pipeline_rank(config: TrainConfig, world: int, words: int) -> int:
    """Return the pipeline rank with the highest estimate; 0 without a pipeline."""
    return estimate(config, world, vocabulary=words).pipeline_rank or 0


@contextlib.contextmanager
def _simulated_job(config: TrainConfig, world: int, place: int) -> Iterator[None]:
    """Initialize this process as the first rank of pipeline stage ``place``, without the others."""
    if dist.is_initialized():
        raise NearlinearError(
            "a dry run needs its own process: torch.distributed is already initialized"
        )
    mesh = Mesh.from_config(config.parallel, world)  # raises ConfigError before anything starts
    if not 0 <= place < mesh.pipeline:
        raise ConfigError(f"pipeline rank {place}: must be between 0 and {mesh.pipeline - 1}")
    rank = mesh.group("pipeline", 0)[place]
    dist.init_process_group(BACKEND, rank=rank, world_size=world, store=dist.HashStore())
    try:
        runtime.init(config.parallel, ranks_per_node=0)
        with warnings.catch_warnings():
            # all fake tensors have address 0, which slices of a shard compare
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        MirrorGroup.observer = None
        _torch.forget_layouts()
        runtime.shutdown()


def _open_submesh(now: runtime.Runtime) -> None:
    """Create the submesh early: a DeviceMesh reads its rank tensors, which must not be fake."""
    names = now.device_mesh.mesh_dim_names
    if names and "replicate" in names:
        _ = now.device_mesh["replicate", "shard"]


def _communication_observer(
    tracker: StorageTracker, now: runtime.Runtime
) -> Callable[[dist.ProcessGroup, torch.Tensor], None]:
    """Attribute communicated tensors to FSDP2, except in tensor, context and expert groups."""
    splitting = [now.group(axis) for axis in SPLITTING if getattr(now.mesh, axis) > 1]
    line = now.group("pipeline") if now.mesh.pipeline > 1 else None

    def observe(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
        if group is line:
            tracker.record(tensor, "handed")
        elif group not in splitting:
            tracker.record(tensor, "communication")

    return observe


def _route_evenly(model: nn.Module, precision: str) -> None:
    """Route tokens to all experts equally often, because routers of fake tensors have no scores.

    Raises ConfigError for precisions whose grouped product does not support fake tensors.
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
                    f"a dry run of experts does not support {precision}: PyTorch's grouped product "
                    "runs on fake tensors in bf16 only. Set parallel.bf16 = true for it."
                )
            module.register_forward_pre_hook(routed(int(module.num_experts)))  # pyright: ignore[reportArgumentType] - stacked experts have it


def _mark(tracker: StorageTracker, kind: str, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tracker.record(local_tensor(tensor.detach()), kind)


def _create_states(optimizer: torch.optim.Optimizer) -> None:
    """Create optimizer states by a first update, so that the measured step is a typical one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _track_blocks(model: nn.Module, blocks: list[nn.Module], tracker: StorageTracker) -> None:
    """Keep ``tracker.where`` up to date with hooks on the parts of the model."""
    pipeline = model_state(model).pipeline
    if pipeline is None:
        _track_stage(model, blocks, range(len(blocks)), len(blocks), tracker)
        return
    assert isinstance(pipeline, PipelineRuntime)
    count = pipeline.partition[-1].stop
    for number, stage in pipeline.stages.items():
        _track_stage(stage, pipeline.blocks_of(stage), pipeline.partition[number], count, tracker)
        _track_reduction(stage, tracker)


def _track_reduction(stage: nn.Module, tracker: StorageTracker) -> None:
    """Mark the reduction: torch's schedules call this method of FSDP2 before they reduce."""
    reduce: Any = stage.set_requires_gradient_sync

    def set_gradient_sync(required: bool, *, recurse: bool = True) -> None:
        if required:
            tracker.where = REDUCING
        reduce(required, recurse=recurse)

    setattr(stage, "set_requires_gradient_sync", set_gradient_sync)  # noqa: B010 - a method


def _track_stage(
    part: nn.Module,
    blocks: list[nn.Module],
    numbers: range,
    count: int,
    tracker: StorageTracker,
) -> None:
    """Track ``part``, whose ``blocks`` have these ``numbers`` of ``count``, from 0."""

    def enters(where: str):
        def hook(*_):
            tracker.where = where

        return hook

    def leaves(where: str, next_part: str):
        def hook(module, args, output):
            tracker.where = next_part
            if not _torch.in_backward():
                for tensor in _torch.tensors_in(output):
                    if tensor.requires_grad:
                        tensor.register_hook(enters(where))

        return hook

    part.register_forward_pre_hook(enters(BETWEEN if numbers.start else "the embedding"))
    for number, block in zip(numbers, blocks, strict=True):
        name = f"block {number + 1} of {count}"
        last = "head" if number + 1 == count else BETWEEN
        block.register_forward_pre_hook(enters(name), prepend=True)
        block.register_forward_hook(leaves(name, name if number < numbers[-1] else last))


def _run_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    tracker: StorageTracker,
) -> None:
    """Run a step as the trainer does."""
    size = (config.batch.micro_batch_size, config.sequence_length)
    count = config.batch.micro_batches(runtime.current().mesh.data_ranks)
    ids = torch.zeros(size, dtype=torch.long)
    micro_batches = min(count, MAX_MICRO_BATCHES)
    batches = [{"input_ids": ids, "labels": ids.clone()} for _ in range(micro_batches)]
    steps = accumulate(model, batches, two_hop=config.train.two_hop)  # counts real targets
    pipelined = model_state(model).pipeline is not None
    with tracker:
        for batch in steps:
            if pipelined:
                model.step(batch)  # pyright: ignore[reportCallIssue] - added by nl.pipeline
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
