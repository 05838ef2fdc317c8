"""Memory of pipeline ranks: stages, micro-batches in flight, gradients until the end of a step.

A rank runs the passes of its stages in the order of its schedule (`pass_orders`). FSDP2 keeps a
stage's parameters gathered from its first backward pass on, and accumulates unsharded float32
gradients until all micro-batches are done: only then are they reduced. Every micro-batch has its
own receive buffers for hidden states and for their gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

from ...fsdp.prefetch import stage_stays_gathered
from ...pipeline_parallel import partition
from ...pipeline_parallel.schedules import (
    FORWARD,
    INPUTS,
    WEIGHTS,
    PipelineSchedule,
    StagePass,
    find_schedule,
    pass_orders,
    round_size,
)
from .rank import (
    Dims,
    ParameterUnit,
    RankModel,
    embedding_of,
    head_of,
    table_of,
)
from .report import CategoryBytes, MemoryEstimate, PeakTracker

SPLIT_BACKWARD = (
    "{} splits backward passes; what remains between the halves is known to 5 %, with activation "
    "checkpointing to a third; with offloading it is more than is counted"
)


def estimate_pipeline(rank: RankModel, most: float = math.inf) -> MemoryEstimate:
    """Estimate the pipeline rank that needs the most memory. Raises ConfigError.

    The first rank that needs more than ``most`` bytes ends the search for it.
    """
    parallel = rank.config.parallel
    plan = find_schedule(
        parallel.pipeline,
        rank.mesh.pipeline,
        parallel.virtual_pipeline_degree,
        parallel.microbatches,
    )
    cut = stages_of(rank, plan)
    stages = [StageMemory(rank, number, blocks, len(cut)) for number, blocks in enumerate(cut)]
    orders = pass_orders(plan, _with_all_states(plan, _micro_batches_in_flight(rank, plan)))
    found: list[MemoryEstimate] = []
    for place, order in enumerate(orders):
        own = [stages[number] for number in plan.stages_of(place)]
        found.append(_estimate_rank(rank, plan, own, order))
        if found[-1].total > most:
            break
    place = max(range(len(found)), key=lambda each: found[each].total)
    rough = SPLIT_BACKWARD.format(plan.name) if plan.spec.splits_backward else ""
    return dataclasses.replace(found[place], pipeline_rank=place, rough=rough)


def stages_of(rank: RankModel, plan: PipelineSchedule) -> tuple[range, ...]:
    """Return the blocks of every stage, as divided by `pipeline_parallel`. Raises ConfigError."""
    if rank.behaviour.stage_blocks:
        ends = itertools.accumulate(rank.behaviour.stage_blocks, initial=0)
        return tuple(range(*pair) for pair in itertools.pairwise(ends))
    parallel, layers = rank.config.parallel, rank.shape.layers
    if not parallel.auto_partition:
        return tuple(
            partition.explicit_partition({}, layers, plan.stages, parallel.default_partition)
        )
    shape, tensor = rank.shape, rank.mesh.tensor
    active = shape.experts_per_token / shape.experts
    block = [dims for unit in rank.block for dims in unit.parameters]
    costs = partition.ModelCosts(
        _cost(embedding_of(shape, tensor), 0.0, 0.0),
        (_cost(block, 1.0, active),) * layers,
        _cost(head_of(rank.family, shape, tensor), 1.0, active),
    )
    return _partition(costs, plan.stages, partition.memory_weight(parallel))


@cache  # a search asks for the same partition often
def _partition(costs: partition.ModelCosts, stages: int, memory_weight: float) -> tuple[range, ...]:
    return tuple(partition.partition_blocks(costs, stages, memory_weight))


def _cost(parameters: Iterable[Dims], matrices: float, experts: float) -> partition.PartitionCost:
    """Cost of parameters; ``matrices``, ``experts``: shares of them used per token."""

    def time(dims: Dims) -> float:
        share = experts if len(dims) > 2 else matrices if len(dims) == 2 else 0.0
        return 2 * math.prod(dims) * share

    parameters = list(parameters)
    count = sum(map(math.prod, parameters))
    return partition.PartitionCost(count, sum(map(time, parameters)), float(count))


def _micro_batches_in_flight(rank: RankModel, plan: PipelineSchedule) -> int:
    """Return the micro-batches of one run of the schedule."""
    parallel = rank.config.parallel
    most = plan.wave_size(parallel.active_microbatches, parallel.microbatches)
    return most or parallel.microbatches


def _with_all_states(plan: PipelineSchedule, micro_batches: int) -> int:
    """Return the fewest micro-batches in whose run memory takes all values of a longer run.

    Where forward and backward passes alternate, each round repeats the one before, after the first
    ones and up to the last ones.
    """
    if plan.spec.all_forward_first:
        return micro_batches
    step = round_size(plan, micro_batches)
    step = plan.ranks if step == micro_batches else step
    return min(micro_batches, 3 * step + micro_batches % step)


def _estimate_rank(
    rank: RankModel, plan: PipelineSchedule, stages: list[StageMemory], order: list[StagePass]
) -> MemoryEstimate:
    """Estimate a rank with ``stages`` whose passes run in ``order``."""
    parallel, tracker = rank.config.parallel, PeakTracker()
    count, in_flight = parallel.microbatches, _micro_batches_in_flight(rank, plan)
    units = [unit for stage in stages for unit in stage.units]
    ends = {0, stages[-1].number} if stages[0].first and stages[-1].last else set()
    copies = [stages[-1].table_unit] if rank.shape.tied and len(ends) == 2 else []
    persistent = rank.add_states(units, tracker, copies)
    for stage in stages:  # a shorter last run has its own buffers
        tracker.add("handed", stage.receive_buffers(in_flight + count % in_flight))
    batches = rank.config.batch.micro_batches(rank.mesh.data_ranks)
    runs = batches * math.ceil(count / in_flight)
    reduced = partial(rank.gradient_bytes, min(2, runs))
    accumulates = batches * (count // in_flight) > 1  # to the gradients of an earlier run
    if accumulates:
        tracker.add("gradients", sum(map(reduced, units)))
    held = sum(stage.elements for stage in stages)
    reshards = not stage_stays_gathered(held, parallel.live_parameters, plan.spec.splits_backward)
    walk = _PipelineWalk(stages, tracker, reshards)
    last = {number: turn for turn, (_, number, _) in enumerate(order)}
    for turn, (kind, number, _) in enumerate(order):
        walk.run_pass(kind, number)
        if turn == last[number]:
            walk.reduce(number, reduced, accumulates)
    tracker.moment = "in the optimizer update"
    tracker.observe(update=rank.update_bytes(units))
    return tracker.estimate(persistent)


@dataclass(frozen=True)
class PassMemory:
    """Forward or backward pass of one micro-batch through a stage."""

    peak: int
    """Peak bytes, including the saved activations of its micro-batch."""
    at_peak: CategoryBytes
    moment: str
    leaves: CategoryBytes
    """Bytes that remain for this micro-batch afterwards."""


def _pass_memory(tracker: PeakTracker, leaves: CategoryBytes) -> PassMemory:
    return PassMemory(tracker.peak, tracker.at_peak, tracker.moment_of_peak, leaves)


class StageMemory:
    """Parameters and passes of one pipeline stage."""

    def __init__(self, rank: RankModel, number: int, blocks: range, stages: int):
        self.rank, self.number, self.blocks = rank, number, blocks
        self.first, self.last = number == 0, number == stages - 1
        shape, sizes, tensor = rank.shape, rank.sizes, rank.mesh.tensor
        root = embedding_of(shape, tensor) if self.first else ()
        root += head_of(rank.family, shape, tensor) if self.last else ()
        roots = (ParameterUnit(root, rank.mesh.sharing),) if root else ()
        self.units = (*roots, *rank.block * len(blocks))
        received = not self.first and tensor == 1  # the input is in a receive buffer
        self.activations = rank.activations(len(blocks), 0 if received else sizes.embedded)
        self.table_unit = ParameterUnit((table_of(shape, tensor),), rank.mesh.sharing)
        self.table = self.table_unit.elements * rank.item
        self.elements = sum(unit.elements for unit in self.units)

    @property
    def gathered(self) -> int:
        """Bytes of all gathered parameters."""
        return sum(unit.padded for unit in self.units) * self.rank.item

    @property
    def _block_gathered(self) -> int:
        return sum(unit.padded for unit in self.rank.block) * self.rank.item

    @property
    def offloads(self) -> bool:
        """True if activations are in host memory; `_PipelineWalk` counts those on the device."""
        return self.activations.policy.resident is not None

    def receive_buffers(self, micro_batches: int) -> int:
        """Bytes of the receive buffers, one per micro-batch and direction."""
        buffers = micro_batches if self.rank.behaviour.receives_ahead else 1
        return buffers * self.rank.sizes.hidden * (2 - self.first - self.last)

    def forward(self, reshards: bool, gathered: bool) -> PassMemory:
        """Forward pass; ``gathered``: the whole stage is gathered before."""
        tracker, activations, n = PeakTracker(), self.activations, len(self.blocks)
        block, root = self._block_gathered, self.gathered - n * self._block_gathered
        if reshards:
            tracker.add("gathered", self.gathered if gathered else root)
        for number in range(1, n + 1):
            tracker.moment = f"in the forward pass: {self._name(number)}"
            if reshards and not gathered:
                tracker.add("gathered", block)
            tracker.observe(working=activations.forward(number))
            if not self.offloads:
                tracker.add("kept", activations.saved_bytes(number))
            if reshards:
                tracker.add("gathered", -block)
        if reshards:
            tracker.add("gathered", -root)
        if self.last:
            tracker.moment = "in the forward pass: the loss"
            tracker.observe(logits=self.rank.head.forward_peak(saving=True))
            tracker.add("logits", self.rank.head.kept_bytes)
        else:
            tracker.add("handed", self.rank.sizes.hidden)
        return _pass_memory(tracker, dict(tracker.now))

    def backward(self, saved: CategoryBytes, gathers: bool, accumulates: bool) -> PassMemory:
        """Backward pass; ``accumulates``: to gradients that are counted elsewhere."""
        tracker, rank = PeakTracker(), self.rank
        tracker.update(saved)
        if self.last:
            tracker.moment = "in the backward pass: the loss"
            tracker.add("logits", -rank.head.kept_bytes)
            tracker.observe(logits=rank.head.backward_peak())
            tracker.add("working", self.table)
        block = sum(unit.elements for unit in rank.block)
        for number in range(len(self.blocks), 0, -1):
            tracker.moment = f"in the backward pass: {self._name(number)}"
            buffer = self._gather(tracker, number) if gathers else 0
            tracker.observe(working=self.activations.backward(number), communication=buffer)
            if not self.offloads:
                tracker.add("kept", -self.activations.saved_bytes(number))
            if not accumulates:
                tracker.add("gradients", block * rank.behaviour.reduced_bytes)
        return _pass_memory(tracker, {})

    def backward_inputs(self, saved: CategoryBytes, gathers: bool) -> PassMemory:
        """Gradients of inputs only: the inputs of weight gradients stay allocated."""
        tracker, rank, trace = PeakTracker(), self.rank, self.rank.block_trace
        tracker.update(saved)
        if self.last:
            tracker.moment = "in the backward pass: the loss"
            head = rank.head
            tracker.observe(logits=head.backward_peak() - head.kept_bytes)
            tracker.add("kept", head.delayed_bytes)
        for number in range(len(self.blocks), 0, -1):
            tracker.moment = f"in the backward pass: {self._name(number)}"
            buffer = self._gather(tracker, number) if gathers else 0
            tracker.add("kept", trace.delayed_bytes)
            if self.activations.group_size(number) and not self.offloads:
                tracker.add("kept", trace.kept_bytes)
            working = trace.backward_peak() - trace.kept_bytes - trace.delayed_bytes
            tracker.observe(working=max(0, working), communication=buffer)
        del tracker.now["gathered"]
        return _pass_memory(tracker, dict(tracker.now))

    def backward_weights(self, saved: CategoryBytes, accumulates: bool) -> PassMemory:
        """Gradients of all weights, in compute precision, then accumulated."""
        tracker = PeakTracker()
        tracker.update(saved)
        tracker.moment = "in the backward pass: gradients of weights"
        item = self.rank.item if accumulates else self.rank.behaviour.reduced_bytes
        tracker.observe(gradients=self.elements * item)
        return _pass_memory(tracker, {})

    def _gather(self, tracker: PeakTracker, number: int) -> int:
        """Gather block ``number`` in backward; return the buffer bytes of the next one."""
        tracker.add("gathered", self._block_gathered)
        return self._block_gathered if number > 1 else 0

    def _name(self, number: int) -> str:
        return f"block {self.blocks.start + number} of {self.rank.shape.layers}"


class _PipelineWalk:
    """Walks through a rank's step pass by pass.

    ``tracker`` holds the allocations outside the current pass.
    """

    def __init__(self, stages: list[StageMemory], tracker: PeakTracker, reshards: bool):
        """``reshards``: gathered parameters are freed after every forward pass."""
        self.stages, self.tracker = {stage.number: stage for stage in stages}, tracker
        self.reshards = reshards
        self.gathered: set[int] = set()  # stages
        self.accumulated: set[int] = set()  # stages that have gradients
        self.in_flight: Counter[int] = Counter()  # micro-batches by stage, not yet backward
        self.prefetched: Counter[int] = Counter()  # activation bytes copied back early, by stage
        self.passes: dict[tuple, PassMemory] = {}

    def run_pass(self, kind: str, number: int) -> None:
        """Run one pass of one micro-batch; offloaded activations in transfer count, too (see
        `activation.offload`)."""
        stage, in_transfer = self.stages[number], self._in_transfer(kind, number)
        self.tracker.now["kept"] += in_transfer
        self._run_pass(kind, stage)
        self.tracker.now["kept"] -= in_transfer
        self.in_flight[number] += {FORWARD: 1, INPUTS: 0}.get(kind, -1)
        if stage.offloads and kind != FORWARD:
            self._prefetch_activations(stage)

    def _in_transfer(self, kind: str, number: int) -> int:
        """Activation bytes on the device: of other blocks in forward, of all blocks in backward."""
        stage = self.stages[number]
        most = stage.activations.policy.resident
        if most is None:
            return 0
        blocks = len(stage.blocks)
        others = blocks * self.in_flight[number]
        if kind == FORWARD:
            return stage.activations.window(min(most - 1, others + blocks - 1))
        self.tracker.now["kept"] -= self.prefetched.pop(number, 0)
        return stage.activations.window(min(most, others))

    def _prefetch_activations(self, stage: StageMemory) -> None:
        """Copy back blocks of the next micro-batch while others run forward."""
        most = stage.activations.policy.resident or 1
        blocks = min(most - 1, len(stage.blocks) * self.in_flight[stage.number])
        self.prefetched[stage.number] = stage.activations.window(blocks)
        self.tracker.now["kept"] += self.prefetched[stage.number]

    def _run_pass(self, kind: str, stage: StageMemory) -> None:
        number, tracker = stage.number, self.tracker
        if kind == FORWARD:
            gathered = number in self.gathered
            if not gathered and not self.reshards:
                self._mark_gathered(stage)
            if gathered and self.reshards:  # counted, and freed, by the pass
                self.gathered.remove(number)
                tracker.now["gathered"] -= stage.gathered
            run = partial(stage.forward, self.reshards, gathered)
            tracker.update(self._observe_pass(kind, stage, gathered, run).leaves)
        elif kind != INPUTS:
            split = kind == WEIGHTS and not stage.first
            self._backward(kind, stage, self.saved(stage, INPUTS if split else FORWARD))
        elif not stage.first:  # the inputs of the first stage have no gradients
            saved = self.saved(stage, FORWARD)
            tracker.update(saved, -1)
            gathers = self.reshards and number not in self.gathered
            run = partial(stage.backward_inputs, saved, gathers)
            tracker.update(self._observe_pass(kind, stage, gathers, run).leaves)
            self._mark_gathered(stage)

    def saved(self, stage: StageMemory, kind: str) -> CategoryBytes:
        """Return the bytes that a micro-batch's last pass of ``kind`` has left."""
        found = (self.passes.get((kind, stage.number, variant)) for variant in (True, False))
        return next(each.leaves for each in found if each)

    def _backward(self, kind: str, stage: StageMemory, saved: CategoryBytes) -> None:
        """Run the last pass of a micro-batch, which accumulates its gradients."""
        tracker, accumulates = self.tracker, stage.number in self.accumulated
        tracker.update(saved, -1)
        gathers = self.reshards and stage.number not in self.gathered
        if kind == WEIGHTS and not stage.first:
            run = partial(stage.backward_weights, saved, accumulates)
        else:
            run = partial(stage.backward, saved, gathers, accumulates)
        self._observe_pass(kind, stage, (gathers, accumulates), run)
        if not accumulates:
            self.accumulated.add(stage.number)
            tracker.now["gradients"] += stage.elements * stage.rank.behaviour.reduced_bytes
        self._mark_gathered(stage)

    def _mark_gathered(self, stage: StageMemory) -> None:
        if stage.number not in self.gathered:
            self.gathered.add(stage.number)
            self.tracker.now["gathered"] += stage.gathered

    def _observe_pass(
        self, kind: str, stage: StageMemory, variant: object, run: Callable[[], PassMemory]
    ) -> PassMemory:
        """Check for a peak in a pass, which is computed once per ``variant``."""
        key = kind, stage.number, variant
        if key not in self.passes:
            self.passes[key] = run()
        done, tracker = self.passes[key], self.tracker
        if sum(tracker.now.values()) + done.peak > tracker.peak:
            tracker.moment = done.moment
            tracker.observe(**done.at_peak)
        return done

    def reduce(
        self, number: int, reduced: Callable[[ParameterUnit], int], accumulates: bool
    ) -> None:
        """Free a stage's parameters and reduce its gradients unit by unit after its last pass."""
        stage, tracker, before = self.stages[number], self.tracker, 0
        item = stage.rank.behaviour.reduced_bytes
        tracker.moment = "in the reduction of gradients"
        for unit in stage.units:
            tracker.now["gathered"] -= unit.padded * stage.rank.item
            tracker.now["communication"] -= before
            before = unit.padded * item
            tracker.observe(communication=before, gradients=reduced(unit))
            tracker.now["communication"] += before
            kept = 0 if accumulates else reduced(unit)
            tracker.now["gradients"] -= unit.elements * item - kept
        tracker.now["communication"] -= before
