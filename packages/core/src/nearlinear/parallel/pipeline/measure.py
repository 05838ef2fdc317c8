"""What blocks, embedding and head take on this machine: one of each kind, forward and backward.

The model is not needed whole, nor its values: the probe is a model with one block, run with a
batch of one sequence. Memory is the training states of the parameters (`BYTES`, AdamW in float32)
and what the forward pass keeps for the backward pass, for as many micro-batches as are in flight.
"""

from __future__ import annotations

import copy
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from ...runtime import Runtime
from .partition import Cost, Costs
from .parts import Parts
from .stage import Skip, Work, stage_of

BYTES = 16
"""of a parameter, its gradient and AdamW's two moments"""
ROUNDS = 3
LONGEST = 512


def measured(model: nn.Module, parts: Parts, now: Runtime) -> Costs:
    """Costs in seconds and bytes, the slowest rank's. A collective call of all ranks."""
    stack = parts.list_of(model)
    kinds: dict[tuple, int] = {}
    kind_of = []
    for i, block in enumerate(stack):
        shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
        kind_of.append(kinds.setdefault((type(block), shapes), i))
    found = {i: _probe(model, parts, i, now.device) for i in dict.fromkeys(kind_of)}
    flat = torch.tensor([list(found[i]) for i in found], dtype=torch.float64, device=now.device)
    dist.all_reduce(flat, op=dist.ReduceOp.MAX)
    times = dict(zip(found, flat.tolist(), strict=True))
    flight = now.config.active_microbatches or min(
        now.config.microbatches, now.config.pipeline_parallel_degree + 2
    )

    def cost(modules, seconds: float, kept: float) -> Cost:
        held = {parameter for module in modules for parameter in module.parameters()}
        count = sum(parameter.numel() for parameter in held)
        return Cost(count, seconds, BYTES * count + flight * kept)

    ends = times[0]
    return Costs(
        cost(parts.before(model), *ends[0:2]),
        tuple(cost([b], *times[kind][2:4]) for b, kind in zip(stack, kind_of, strict=True)),
        cost(parts.after(model), *ends[4:6]),
    )


def _probe(model: nn.Module, parts: Parts, block: int, device: torch.device) -> list[float]:
    """Seconds and bytes kept: of what comes before the blocks, of ``block``, and after them."""
    probe = stage_of(model, parts, range(parts.count(model)), parts.count(model))
    stack = parts.list_of(probe)
    for name in list(stack._modules):
        if int(name) != block:
            stack._modules[name] = Skip()
    probe = _with_values(copy.deepcopy(probe), device).train()
    length = min(LONGEST, getattr(model.config, "max_position_embeddings", LONGEST))
    ids = torch.zeros(1, length, dtype=torch.long, device=device)
    probe._nearlinear_work = Work(
        True, True, [{"input_ids": ids, "labels": ids}], lambda _, output: output.loss
    )
    clock = _Clock(probe, parts.list_of(probe)[block], device)
    rounds = [clock.round() for _ in range(1 + ROUNDS)][1:]
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


def _with_values(probe: nn.Module, device: torch.device) -> nn.Module:
    """``probe`` on ``device``, with values where `delayed_init` left it without: any will do."""
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


class _Clock:
    """Stops the time at both ends of ``block``, there and back, and weighs what is kept."""

    def __init__(self, probe: nn.Module, block: nn.Module, device: torch.device):
        self.probe, self.device = probe, device
        self.own = {parameter.data_ptr() for parameter in probe.parameters()}
        block.register_forward_pre_hook(lambda _, args: self._pass(args[0]))
        block.register_forward_hook(
            lambda _, args, output: self._pass(output[0] if isinstance(output, tuple) else output)
        )

    def round(self) -> list[float]:
        """Seconds and bytes before, in and after the block."""
        self.stamps, self.kept = [], [0.0]
        self._stamp()
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            loss = self.probe()
        self._stamp()
        loss.backward()
        self._stamp()
        for parameter in self.probe.parameters():
            parameter.grad = None
        took = [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]
        before, inside, head, head_back, inside_back, before_back = took
        times = (before + before_back, inside + inside_back, head + head_back)
        return [value for pair in zip(times, self.kept, strict=True) for value in pair]

    def _pass(self, hidden: torch.Tensor) -> None:
        self._stamp()
        self.kept.append(0.0)
        hidden.register_hook(lambda gradient: self._stamp())

    def _stamp(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.stamps.append(time.perf_counter())

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in self.own:
            self.kept[-1] += tensor.nbytes
        return tensor
