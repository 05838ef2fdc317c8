"""The memory of a pipeline's ranks: stages, micro-batches in flight, what waits for a step's end.

A rank does its stages' work in the order of its schedule (`orders`). FSDP2 keeps a stage's
parameters gathered from its first backward pass on, and adds gradients up, whole and in float32,
until all micro-batches are through: only then are they shared out. Every micro-batch has a place of
its own for the hidden states, and for the gradients of them, that it receives.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from functools import cache, partial

from ...parallel.kept import stays_gathered
from ...parallel.pipeline import partition
from ...parallel.pipeline.schedules import Plan, plan_for
from ..orders import FORWARD, INPUTS, WEIGHTS, Work, orders
from .ledger import Bytes, Ledger
from .rank import Rank
from .report import NAMES, MemoryPlan, reserve
from .stage import Pass, Stage
from .step import REDUCED
from .units import Dims, Unit, embedding_of, head_of

APART = (
    "{} cuts backward passes in two, and what stays between them is known to a twentieth, with "
    "activation checkpointing to a third; with offloading it is more than is counted"
)


def pipelined(rank: Rank) -> MemoryPlan:
    """Of the pipeline rank that needs the most. Raises ConfigError."""
    asked = rank.config.parallel
    plan = plan_for(
        asked.pipeline, rank.mesh.pipeline, asked.virtual_pipeline_degree, asked.microbatches
    )
    cut = stages_of(rank, plan)
    stages = [Stage(rank, number, blocks, len(cut)) for number, blocks in enumerate(cut)]
    work = orders(plan, _wave(rank, plan))
    found = [
        _of_rank(rank, plan, [stages[number] for number in plan.stages_of(place)], work[place])
        for place in range(plan.ranks)
    ]
    place = max(range(plan.ranks), key=lambda each: found[each].total)
    rough = APART.format(plan.name) if plan.schedule.apart else ""
    return dataclasses.replace(found[place], pipeline_rank=place, rough=rough)


def stages_of(rank: Rank, plan: Plan) -> tuple[range, ...]:
    """The blocks of every stage, as `parallel.pipeline` cuts them. Raises ConfigError."""
    asked, layers = rank.config.parallel, rank.shape.layers
    if not asked.auto_partition:
        return tuple(partition.by_hand({}, layers, plan.stages, asked.default_partition))
    shape, tensor = rank.shape, rank.mesh.tensor
    met = shape.experts_per_token / shape.experts
    block = [dims for unit in rank.block for dims in unit.parameters]
    costs = partition.Costs(
        _cost(embedding_of(shape, tensor), 0.0, 0.0),
        (_cost(block, 1.0, met),) * layers,
        _cost(head_of(rank.family, shape, tensor), 1.0, met),
    )
    return _split(costs, plan.stages, partition.memory_weight(asked))


@cache
def _split(costs: partition.Costs, stages: int, memory_weight: float) -> tuple[range, ...]:
    """A search asks for the same one often."""
    return tuple(partition.split(costs, stages, memory_weight))


def _cost(parameters, of_matrices: float, of_experts: float) -> partition.Cost:
    """Shares of matrices, and of stacked ones, are multiplied with."""

    def time(dims: Dims) -> float:
        share = of_experts if len(dims) > 2 else of_matrices if len(dims) == 2 else 0.0
        return 2 * math.prod(dims) * share

    count = sum(map(math.prod, parameters))
    return partition.Cost(count, sum(map(time, parameters)), float(count))


def _wave(rank: Rank, plan: Plan) -> int:
    """Micro-batches that a schedule is given at once."""
    asked = rank.config.parallel
    return plan.in_flight(asked.active_microbatches, asked.microbatches) or asked.microbatches


def _of_rank(rank: Rank, plan: Plan, stages: list[Stage], work: list[Work]) -> MemoryPlan:
    """Of a rank with ``stages``, which does ``work``."""
    count, wave, ledger = rank.config.parallel.microbatches, _wave(rank, plan), Ledger()
    units = [unit for stage in stages for unit in stage.units]
    ends = {0, stages[-1].number} if stages[0].first and stages[-1].last else set()
    copies = [stages[-1].table_unit] if rank.shape.tied and len(ends) == 2 else []
    persistent = rank.enter_states(units, ledger, copies)
    for stage in stages:
        ledger.add("handed", stage.places(wave + count % wave))  # what is left has a schedule too
    batches = rank.config.batch.micro_batches(rank.mesh.data_ranks)
    reduced = partial(rank.gradient_bytes, min(2, batches * math.ceil(count / wave)))
    added = batches * (count // wave) > 1  # to what an earlier wave, as large, has left
    if added:
        ledger.add("gradients", sum(map(reduced, units)))
    live = rank.config.parallel.sdp_max_live_parameters
    held = sum(stage.elements for stage in stages)
    frees = not stays_gathered(held, live, plan.schedule.apart)
    walk = _Walk(stages, ledger, frees)
    last = {number: turn for turn, (_, number, _) in enumerate(work)}
    for turn, (kind, number, _) in enumerate(work):
        walk.go(kind, number)
        if turn == last[number]:
            walk.reduce(number, reduced, added)
    ledger.moment = "in the update of the parameters"
    ledger.look(update=rank.update_bytes(units))
    parts = dict.fromkeys(NAMES, 0) | ledger.at_peak
    return MemoryPlan(parts, persistent, ledger.moment_of_peak, reserve(ledger.peak))


class _Walk:
    """A rank's step, pass by pass: ``ledger`` has what is there beside the pass at hand."""

    def __init__(self, stages: list[Stage], ledger: Ledger, frees: bool):
        """``frees``: what is gathered, after every forward pass."""
        self.stages, self.ledger = {stage.number: stage for stage in stages}, ledger
        self.frees = frees
        self.whole: set[int] = set()  # stages that are gathered
        self.summed: set[int] = set()  # stages that have gradients
        self.flight: Counter[int] = Counter()  # micro-batches of a stage that are to come back
        self.ahead: Counter[int] = Counter()  # bytes of those that have, before their time
        self.passes: dict[tuple, Pass] = {}

    def go(self, kind: str, number: int) -> None:
        """One pass of one micro-batch, and of activations that are in host memory those that are
        on their way: see `parallel.activations.offload`."""
        stage, there = self.stages[number], self._on_the_way(kind, number)
        self.ledger.now["kept"] += there
        self._go(kind, stage)
        self.ledger.now["kept"] -= there
        self.flight[number] += {FORWARD: 1, INPUTS: 0}.get(kind, -1)
        if stage.moves and kind != FORWARD:
            self._come_ahead(stage)

    def _on_the_way(self, kind: str, number: int) -> int:
        """Bytes there of other blocks than the one at hand, forwards; backwards with its own."""
        stage = self.stages[number]
        if not stage.moves:
            return 0
        most, blocks = stage.activations.kept.resident, len(stage.blocks)
        others = blocks * self.flight[number]
        if kind == FORWARD:
            return stage.activations.window(min(most - 1, others + blocks - 1))
        self.ledger.now["kept"] -= self.ahead.pop(number, 0)
        return stage.activations.window(min(most, others))

    def _come_ahead(self, stage: Stage) -> None:
        """Blocks of the next micro-batch to come back do so while others go forward."""
        blocks = min(
            stage.activations.kept.resident - 1, len(stage.blocks) * self.flight[stage.number]
        )
        self.ahead[stage.number] = stage.activations.window(blocks)
        self.ledger.now["kept"] += self.ahead[stage.number]

    def _go(self, kind: str, stage: Stage) -> None:
        number, ledger = stage.number, self.ledger
        if kind == FORWARD:
            whole = number in self.whole
            if not whole and not self.frees:
                self._gathered(stage)
            if whole and self.frees:  # the pass counts them, and frees them
                self.whole.remove(number)
                ledger.now["gathered"] -= stage.gathered
            done = self._pass(kind, stage, whole, partial(stage.forward, self.frees, whole))
            ledger.enter(done.leaves)
        elif kind != INPUTS:
            apart = kind == WEIGHTS and not stage.first
            self._backward(kind, stage, self.left(stage, INPUTS if apart else FORWARD))
        elif not stage.first:  # the first one has no inputs to give gradients of
            left = self.left(stage, FORWARD)
            ledger.enter(left, -1)
            gathers = self.frees and number not in self.whole
            run = partial(stage.backward_of_inputs, left, gathers)
            done = self._pass(kind, stage, gathers, run)
            ledger.enter(done.leaves)
            self._gathered(stage)

    def left(self, stage: Stage, kind: str) -> Bytes:
        """What a micro-batch's last pass through ``stage`` has left."""
        found = (self.passes.get((kind, stage.number, variant)) for variant in (True, False))
        return next(each.leaves for each in found if each)

    def _backward(self, kind: str, stage: Stage, left: Bytes) -> None:
        """The last pass of a micro-batch: its gradients are added to the others'."""
        ledger, adds = self.ledger, stage.number in self.summed
        ledger.enter(left, -1)
        gathers = self.frees and stage.number not in self.whole
        if kind == WEIGHTS and not stage.first:
            run = partial(stage.backward_of_weights, left, adds)
        else:
            run = partial(stage.backward, left, gathers, adds)
        self._pass(kind, stage, (gathers, adds), run)
        if not adds:
            self.summed.add(stage.number)
            ledger.now["gradients"] += stage.elements * REDUCED
        self._gathered(stage)

    def _gathered(self, stage: Stage) -> None:
        """From now on ``stage`` is there as a whole."""
        if stage.number not in self.whole:
            self.whole.add(stage.number)
            self.ledger.now["gathered"] += stage.gathered

    def _pass(self, kind: str, stage: Stage, variant: object, run: Callable[[], Pass]) -> Pass:
        """One pass, worked out once for all that are alike."""
        key = kind, stage.number, variant
        if key not in self.passes:
            self.passes[key] = run()
        done, ledger = self.passes[key], self.ledger
        if sum(ledger.now.values()) + done.peak > ledger.peak:
            ledger.moment = done.moment
            ledger.look(**done.at_peak)
        return done

    def reduce(self, number: int, reduced: Callable[[Unit], int], added: bool) -> None:
        """A stage's gradients to the ranks that update them, after its last pass, unit by unit;
        what is gathered goes first."""
        stage, ledger, before = self.stages[number], self.ledger, 0
        ledger.moment = "in the reduction of gradients"
        for unit in stage.units:
            ledger.now["gathered"] -= unit.padded * stage.rank.item
            ledger.now["communication"] -= before
            before = unit.padded * REDUCED
            ledger.look(communication=before, gradients=reduced(unit))
            ledger.now["communication"] += before
            ledger.now["gradients"] -= unit.elements * REDUCED - (0 if added else reduced(unit))
        ledger.now["communication"] -= before
