"""The memory of a pipeline's ranks: stages, micro-batches in flight, and what waits for a step's end.

A rank does its stages' work in the order of its schedule (`orders`). FSDP2 keeps a stage's
parameters gathered from the first backward pass on, and adds gradients up, whole and in float32,
until all micro-batches are through: only then are they shared out. Every micro-batch has a place of
its own for the hidden states, and the gradients of them, that it receives.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import partial

from ...parallel.kept import stays_gathered
from ...parallel.pipeline import partition
from ...parallel.pipeline.schedules import Plan, plan_for
from ..orders import BACKWARD, FORWARD, INPUTS, orders
from .ledger import Ledger
from .rank import Rank
from .report import NAMES, MemoryPlan, reserve
from .step import REDUCED
from .units import Dims, Unit, embedding_of, head_of, table_of

APART = (
    "schedule {}: how much a backward pass that is cut in two holds between them is bounded, not "
    "counted"
)


def pipelined(rank: Rank) -> MemoryPlan:
    """Of the pipeline rank that needs the most. Raises ConfigError."""
    asked = rank.config.parallel
    plan = plan_for(
        asked.pipeline, rank.mesh.pipeline, asked.virtual_pipeline_degree, asked.microbatches
    )
    cut = stages_of(rank, plan)
    wave = plan.in_flight(asked.active_microbatches, asked.microbatches) or asked.microbatches
    work = orders(plan, wave)
    stages = [Stage(rank, number, blocks, len(cut)) for number, blocks in enumerate(cut)]
    found = [
        _rank(rank, plan, [stages[number] for number in plan.stages_of(place)], work[place], wave)
        for place in range(plan.ranks)
    ]
    place = max(range(plan.ranks), key=lambda each: found[each].total)
    apart = any(kind == INPUTS for kind, _, _ in work[place])
    rough = APART.format(plan.name) if apart else ""
    return dataclasses.replace(found[place], pipeline_rank=place, rough=rough)


def stages_of(rank: Rank, plan: Plan) -> list[range]:
    """The blocks of every stage, as `parallel.pipeline` cuts them."""
    asked, layers = rank.config.parallel, rank.shape.layers
    if not asked.auto_partition:
        return partition.by_hand({}, layers, plan.stages, asked.default_partition)
    shape, tensor = rank.shape, rank.mesh.tensor
    met = shape.experts_per_token / shape.experts
    block = [dims for unit in rank.block for dims in unit.parameters]
    costs = partition.Costs(
        _cost(embedding_of(shape, tensor), 0.0, 0.0),
        (_cost(block, 1.0, met),) * layers,
        _cost(head_of(rank.family, shape, tensor), 1.0, met),
    )
    return partition.split(costs, plan.stages, partition.memory_weight(asked))


def _cost(parameters, share: float, of_experts: float) -> partition.Cost:
    """``share`` of the matrices, and ``of_experts`` of stacked ones, is multiplied with."""

    def time(dims: Dims) -> float:
        part = of_experts if len(dims) > 2 else share * (len(dims) > 1)
        return 2 * math.prod(dims) * part

    count = sum(map(math.prod, parameters))
    return partition.Cost(count, sum(map(time, parameters)), float(count))


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass of one micro-batch through a stage."""

    peak: int
    """the most bytes it has, what its micro-batch has kept among them"""
    at_peak: dict[str, int]
    moment: str
    leaves: dict[str, int]
    """bytes that are there for this micro-batch afterwards"""


class Stage:
    """What one stage has, and does with one micro-batch."""

    def __init__(self, rank: Rank, number: int, blocks: range, stages: int):
        self.rank, self.number, self.blocks = rank, number, blocks
        self.first, self.last = number == 0, number == stages - 1
        shape, sizes, tensor = rank.shape, rank.sizes, rank.mesh.tensor
        root = embedding_of(shape, tensor) if self.first else ()
        root += head_of(rank.family, shape, tensor) if self.last else ()
        roots = (Unit(root, rank.mesh.sharing),) if root else ()
        self.units = (*roots, *rank.block * len(blocks))
        received = not self.first and tensor == 1  # it has a place already
        self.activations = rank.activations(len(blocks), 0 if received else sizes.embedded)
        self.table = math.prod(table_of(shape, tensor)) * rank.item
        self.elements = sum(unit.elements for unit in self.units)

    @property
    def gathered(self) -> int:
        return sum(unit.padded for unit in self.units) * self.rank.item

    def places(self, micro_batches: int) -> int:
        """Bytes of what is received, one place for every micro-batch and direction."""
        return micro_batches * self.rank.sizes.hidden * (2 - self.first - self.last)

    def forward(self, frees: bool, whole: bool) -> Pass:
        """``frees`` blocks after use; ``whole``: all of the stage is gathered before."""
        ledger, activations, n = Ledger(), self.activations, len(self.blocks)
        block = sum(unit.padded for unit in self.rank.block) * self.rank.item
        root = self.gathered - n * block
        if frees:
            ledger.add("gathered", self.gathered if whole else root)
        for number in range(1, n + 1):
            ledger.moment = f"in the forward pass: {self._name(number)}"
            if frees and not whole:
                ledger.add("gathered", block)
            ledger.look(working=activations.forward(number))
            ledger.add("kept", activations.kept_by(number))
            if frees:
                ledger.add("gathered", -block)
        if frees:
            ledger.add("gathered", -root)
        if self.last:
            ledger.moment = "in the forward pass: the loss"
            ledger.look(logits=self.rank.head.forward_peak(saving=True))
            ledger.add("logits", self.rank.head.kept_bytes)
        else:
            ledger.add("handed", self.rank.sizes.hidden)
        return Pass(ledger.peak, ledger.at_peak, ledger.moment_of_peak, dict(ledger.now))

    def backward(self, kept: dict[str, int], frees: bool, adds: bool) -> Pass:
        """``adds``: to gradients of earlier micro-batches, which are counted elsewhere."""
        ledger, rank = Ledger(), self.rank
        for category, size in kept.items():
            ledger.add(category, size)
        if self.last:
            ledger.moment = "in the backward pass: the loss"
            ledger.add("logits", -rank.head.kept_bytes)
            ledger.look(logits=rank.head.backward_peak())
            ledger.add("working", self.table)
        block = sum(unit.elements for unit in rank.block)
        for number in range(len(self.blocks), 0, -1):
            ledger.moment = f"in the backward pass: {self._name(number)}"
            if frees:
                ledger.add("gathered", block * rank.item)
            ledger.look(working=self.activations.backward(number))
            ledger.add("kept", -self.activations.kept_by(number))
            if not adds:
                ledger.add("gradients", block * REDUCED)
        return Pass(ledger.peak, ledger.at_peak, ledger.moment_of_peak, {})

    def _name(self, number: int) -> str:
        return f"block {self.blocks.start + number} of {self.rank.shape.layers}"


class _Walk:
    """A rank's step: what is there beside the pass at hand, and the worst moment so far."""

    def __init__(self, ledger: Ledger):
        self.ledger, self.flying = ledger, Counter()

    def go(self, each: Pass) -> None:
        now, ledger = self.ledger.now, self.ledger
        if sum(now.values()) + each.peak > ledger.peak:
            ledger.moment = each.moment
            ledger.look(**each.at_peak)

    def enter(self, sizes: dict[str, int], sign: int) -> None:
        for category, size in sizes.items():
            self.ledger.now[category] += sign * size


def _rank(rank: Rank, plan: Plan, stages: list[Stage], work, wave: int) -> MemoryPlan:
    """Of a rank with ``stages``, which does ``work`` with ``wave`` micro-batches at once."""
    asked, ledger = rank.config.parallel, Ledger()
    units = [unit for stage in stages for unit in stage.units]
    persistent = rank.enter_states(units, ledger)
    count = asked.microbatches
    for stage in stages:
        rest = count % wave  # a schedule of its own
        ledger.add("handed", stage.places(wave + rest))
    steps = rank.config.batch.micro_batches(rank.mesh.data_ranks) * math.ceil(count / wave)
    reduced = partial(rank.gradient_bytes, min(2, steps))
    if steps > 1:
        ledger.add("gradients", sum(map(reduced, units)))
    frees = not stays_gathered(sum(s.elements for s in stages), asked.sdp_max_live_parameters)
    by_number = {stage.number: stage for stage in stages}
    walk, whole, passes = _Walk(ledger), {}, {}
    if not frees:
        ledger.add("gathered", sum(stage.gathered for stage in stages))
    for kind, number, _ in work:
        stage, been = by_number[number], whole.get(number)
        if kind == FORWARD:
            # gathered by the backward pass before it, which counts it as its own
            if been == "all":
                ledger.now["gathered"] -= stage.gathered * frees
            key = kind, number, been == "all"
            if key not in passes:
                passes[key] = stage.forward(frees, been == "all")
            walk.go(passes[key])
            walk.enter(passes[key].leaves, 1)
            if been:
                whole[number] = "none"
            continue
        there = passes.get((FORWARD, number, False)) or passes[FORWARD, number, True]
        if kind in (BACKWARD, INPUTS):
            if been == "all":
                ledger.now["gathered"] -= stage.gathered * frees
            walk.enter(there.leaves, -1)
            key = kind, number, bool(been)
            if key not in passes:
                passes[key] = stage.backward(there.leaves, frees, adds=bool(been))
            walk.go(passes[key])
            if not been:
                ledger.now["gradients"] += stage.elements * REDUCED
            ledger.now["gathered"] += stage.gathered * frees
            whole[number] = "all"
            if kind == INPUTS:
                walk.enter(there.leaves, 1)  # until the gradients of its weights are there
        else:
            walk.enter(there.leaves, -1)
    _reduce(stages, ledger, rank, reduced, steps > 1)
    ledger.moment = "in the update of the parameters"
    ledger.look(update=rank.update_bytes(units))
    parts = dict.fromkeys(NAMES, 0) | ledger.at_peak
    return MemoryPlan(parts, persistent, ledger.moment_of_peak, reserve(ledger.peak))


def _reduce(stages: list[Stage], ledger: Ledger, rank: Rank, reduced, added: bool) -> None:
    """Gradients to the ranks that update them, unit by unit; what is gathered goes first."""
    ledger.moment, before = "in the reduction of gradients", 0
    for stage in stages:
        for unit in stage.units:
            ledger.now["gathered"] -= unit.padded * rank.item
            ledger.now["communication"] -= before
            before = unit.padded * REDUCED
            ledger.look(communication=before, gradients=reduced(unit))
            ledger.now["communication"] += before
            ledger.now["gradients"] -= unit.elements * REDUCED - (0 if added else reduced(unit))
        ledger.now["communication"] -= before
        before = 0
