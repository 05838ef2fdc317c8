"""Measurement of time and memory of embedding, blocks and head on this machine.

A probe model with one block runs one sequence, forward and backward, for each kind of block. It
needs neither the whole model nor its values. Memory counts the training state of the parameters
and the activations saved for backward, times the number of micro-batches in flight.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..distributed.runtime import Runtime
from ..tensor_parallel.parallelize import HuggingFaceModel
from .partition import ModelCosts, PartitionCost
from .stage import ModelSplit, PassThrough, build_stage, stage_state

BYTES_PER_PARAMETER = 16
"""Parameter, gradient and AdamW's two moments, in float32."""
MEASURED_ROUNDS = 3
MAX_SEQUENCE_LENGTH = 512  # tokens


def measure_costs(model: HuggingFaceModel, split: ModelSplit, runtime: Runtime) -> ModelCosts:
    """Return costs in seconds and bytes, the maximum over all ranks. A collective call."""
    block_list = split.block_list(model)
    kinds: dict[tuple, int] = {}
    kind_of = []  # index of the first block of the same kind
    for i, block in enumerate(block_list):
        shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
        kind_of.append(kinds.setdefault((type(block), shapes), i))
    measured = {i: _measure_block(model, split, i, runtime.device) for i in dict.fromkeys(kind_of)}
    flat = torch.tensor(list(measured.values()), dtype=torch.float64, device=runtime.device)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    values = dict(zip(measured, flat.tolist(), strict=True))
    config = runtime.config
    in_flight = config.active_microbatches or min(
        config.microbatches, config.pipeline_parallel_degree + 2
    )

    def cost(modules: Iterable[nn.Module], seconds: float, saved_bytes: float) -> PartitionCost:
        parameters = {parameter for module in modules for parameter in module.parameters()}
        count = sum(parameter.numel() for parameter in parameters)
        return PartitionCost(count, seconds, BYTES_PER_PARAMETER * count + in_flight * saved_bytes)

    ends = values[0]
    return ModelCosts(
        cost(split.modules_before_blocks(model), *ends[0:2]),
        tuple(cost([b], *values[kind][2:4]) for b, kind in zip(block_list, kind_of, strict=True)),
        cost(split.modules_after_blocks(model), *ends[4:6]),
    )


def _measure_block(
    model: HuggingFaceModel, split: ModelSplit, block: int, device: torch.device
) -> list[float]:
    """Return (seconds, saved bytes) before the blocks, in ``block``, and after the blocks."""
    num_blocks = split.num_blocks(model)
    probe = build_stage(model, split, range(num_blocks), num_blocks)
    block_list = split.block_list(probe)
    for name in list(block_list._modules):
        if int(name) != block:
            block_list._modules[name] = PassThrough()
    probe = _materialize(copy.deepcopy(probe), device).train()
    length = min(
        MAX_SEQUENCE_LENGTH, getattr(model.config, "max_position_embeddings", MAX_SEQUENCE_LENGTH)
    )
    ids = torch.zeros(1, length, dtype=torch.long, device=device)
    stage_state(probe).begin([{"input_ids": ids, "labels": ids}], lambda _, output: output.loss)
    meter = _BlockMeter(probe, split.block_list(probe)[block], device)
    rounds = [meter.measure() for _ in range(1 + MEASURED_ROUNDS)][1:]  # the first one warms up
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


def _materialize(probe: nn.Module, device: torch.device) -> nn.Module:
    """Move ``probe`` to ``device``; fill parameters on the meta device with an arbitrary value."""
    if not any(parameter.is_meta for parameter in probe.parameters()):
        return probe.to(device)
    buffers = {name: buffer.clone() for name, buffer in probe.named_buffers()}
    probe.to_empty(device=device)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.fill_(0.01)
        for name, buffer in probe.named_buffers():
            buffer.copy_(buffers[name])
    return probe


class _BlockMeter:
    """Measures time and saved activations before, in and after ``block``."""

    def __init__(self, probe: nn.Module, block: nn.Module, device: torch.device):
        self.probe, self.device = probe, device
        self.parameter_pointers = {parameter.data_ptr() for parameter in probe.parameters()}
        self.timestamps: list[float] = []
        self.saved_bytes: list[float] = []
        block.register_forward_pre_hook(self._enter_block)
        block.register_forward_hook(self._leave_block)

    def measure(self) -> list[float]:
        """Run forward and backward once; return the values of `_measure_block`."""
        self.timestamps, self.saved_bytes = [], [0.0]
        self._record_time()
        with torch.autograd.graph.saved_tensors_hooks(self._count_saved, lambda tensor: tensor):
            loss = self.probe()
        self._record_time()
        loss.backward()
        self._record_time()
        for parameter in self.probe.parameters():
            parameter.grad = None
        stamps = self.timestamps
        seconds = [after - before for before, after in zip(stamps, stamps[1:], strict=False)]
        before, inside, head, head_back, inside_back, before_back = seconds
        totals = (before + before_back, inside + inside_back, head + head_back)
        return [value for pair in zip(totals, self.saved_bytes, strict=True) for value in pair]

    def _enter_block(self, block: nn.Module, args: tuple) -> None:
        self._cross_boundary(args[0])

    def _leave_block(self, block: nn.Module, args: Any, output: Any) -> None:
        self._cross_boundary(output[0] if isinstance(output, tuple) else output)

    def _cross_boundary(self, hidden: torch.Tensor) -> None:
        self._record_time()
        self.saved_bytes.append(0.0)
        hidden.register_hook(lambda gradient: self._record_time())

    def _record_time(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.timestamps.append(time.perf_counter())

    def _count_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in self.parameter_pointers:
            self.saved_bytes[-1] += tensor.nbytes
        return tensor
