"""Memory of a config in closed form, in milliseconds.

No model is built and nothing is allocated. Model states are exact. The peak is found by walking
through a step unit by unit, with the operators traced in `block_ops`. The order of all-gathers and
reduce-scatters is that of FSDP2, with prefetching and resident blocks as in `fsdp.prefetch`: an
all-gather holds its buffer until the next unit is gathered (forward) or its parameters are copied
out (backward); a reduce-scatter holds its float32 input until the next one begins. Parameters that
no other rank shares are not copied if the block computes in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...config import train as train_config
from ...config.schema import coerce
from ...config.train import TrainConfig
from ...data.format import Manifest
from ...distributed.mesh import Mesh
from ...errors import DataError
from ...fsdp.prefetch import Retention
from ..model_shape import model_shape
from .block_ops import known_family
from .op_trace import OpTrace
from .pipeline import estimate_pipeline
from .rank import REDUCED_BYTES, ActivationMemory, ParameterUnit, RankModel, table_of
from .report import MemoryEstimate, PeakTracker, reserve_bytes


def estimate(
    config: TrainConfig | dict | str | Path,
    world_size: int,
    *,
    vocabulary: int = 0,
    most: float = math.inf,
) -> MemoryEstimate:
    """Estimate the peak memory of a step, on the GPU that needs the most.

        print(memory.estimate("config.toml", 256))

    Args:
        config: A config, its contents as a dict, or its file.
        world_size: Number of ranks.
        vocabulary: Vocabulary size; 0: see `vocabulary_of`.
        most: Bytes; the first pipeline rank found to need more is the one that is returned.

    Features without a checked model are named in `MemoryEstimate.rough`. Raises ConfigError for an
    invalid config.
    """
    if not isinstance(config, TrainConfig):
        config = train_config.load(config)
    rank = _rank_model(config, world_size, vocabulary)
    found = estimate_rank(rank, most)
    reasons = [found.rough] if found.rough else []
    reasons += [reason for reason, applies in _unchecked_features(config, rank.mesh) if applies]
    if rank.family != config.model.family:
        reasons.append(
            f"{config.model.family} is modelled as {rank.family}, the most similar family"
        )
    if rank.shape.dense_blocks:
        reasons.append(f"{rank.shape.dense_blocks} dense blocks are modelled as mixtures")
    return dataclasses.replace(found, rough="; ".join(reasons))


def least_total(config: TrainConfig, world_size: int, vocabulary: int) -> float:
    """Return a lower bound of the bytes that `estimate` requires, whatever the micro-batches.

    It is the mean over the pipeline ranks of the states and gradients of blocks, with their
    reserve. Raises ConfigError for an invalid config.
    """
    rank = _rank_model(config, world_size, vocabulary)
    units = [*rank.block * rank.shape.layers]
    held = rank.add_states(units, PeakTracker()) + sum(rank.gradient_bytes(1, u) for u in units)
    mean = held // rank.mesh.pipeline
    return mean + reserve_bytes(mean, 0)


def _rank_model(config: TrainConfig, world_size: int, vocabulary: int) -> RankModel:
    mesh = Mesh.from_config(config.parallel, world_size)
    shape = model_shape(config.model, vocabulary or vocabulary_of(config))
    return RankModel(config, mesh, shape, known_family(config.model.family, shape))


def estimate_rank(rank: RankModel, most: float = math.inf) -> MemoryEstimate:
    """Estimate the peak memory of a step of ``rank``; ``most`` as in `estimate`.

    Raises ConfigError.
    """
    return estimate_pipeline(rank, most) if rank.mesh.pipeline > 1 else _estimate_sharded(rank)


def _unchecked_features(config: TrainConfig, mesh: Mesh) -> tuple[tuple[str, bool], ...]:
    """Return features that were not compared with a dry run, or that one showed to be off."""
    selective = config.activations.checkpoint == "selective"
    return (
        ("compiled blocks count as eager ones, although fused operators save less",
         config.train.compile_blocks),
        ("casts to float8 are not counted", config.parallel.fp8),
        ("activations left on the device by offloading follow from the horizon, and were not "
         "measured on a GPU", config.activations.offload),
        ("selective checkpointing over context ranks keeps parts of attention that are not "
         "counted, up to a tenth of the peak", selective and mesh.context > 1),
    )  # fmt: skip


def vocabulary_of(config: TrainConfig) -> int:
    """Return the vocabulary size: from the overrides, the data, or the model family.

    Raises ConfigError if none is known.
    """
    override = config.model.overrides.get("vocab_size")
    if override:
        return coerce(override, int, "model.overrides.vocab_size")
    words = 0
    if config.data.folder:
        try:
            words = Manifest.read(config.data.folder).vocab_size
        except DataError:  # the data is not prepared yet
            words = 0
    return words or model_shape(config.model).vocabulary


def _estimate_sharded(rank: RankModel) -> MemoryEstimate:
    """Estimate a rank that has every block."""
    shape, mesh, root = rank.shape, rank.mesh, rank.root
    model = _ShardedModel(
        root=root,
        block=rank.block,
        blocks=shape.layers,
        tied=shape.tied,
        activations=rank.activations(shape.layers, rank.sizes.embedded),
        head=rank.head,
        table=math.prod(table_of(shape, mesh.tensor)) * rank.item,
    )
    units = [root, *rank.block * shape.layers]
    tracker = PeakTracker()
    micro_batches = min(2, rank.config.batch.micro_batches(mesh.data_ranks))
    persistent = rank.add_states(units, tracker)
    depth = rank.config.parallel.prefetch_depth
    step = _StepWalk(model, depth, rank.retention, tracker, rank.item)
    step.run(micro_batches, partial(rank.gradient_bytes, micro_batches))
    tracker.moment = "in the optimizer update"
    tracker.observe(update=rank.update_bytes(units))
    return tracker.estimate(persistent)


UnitId = tuple[int, int]
"""Number of a block, from 1, and the unit's index in it."""
ROOT: UnitId = (0, 0)


@dataclass(frozen=True)
class _ShardedModel:
    """Model of a rank without a pipeline."""

    root: ParameterUnit
    block: tuple[ParameterUnit, ...]
    """Units of a block: expert-parallel experts have their own."""
    blocks: int
    tied: bool
    activations: ActivationMemory
    head: OpTrace
    table: int
    """Bytes of the word table's gradient before reduction."""


class _StepWalk:
    """Walks through one step and reports every allocation to ``tracker``."""

    def __init__(
        self,
        model: _ShardedModel,
        depth: int,
        retention: Retention,
        tracker: PeakTracker,
        item: int,
    ):
        """``depth``: units gathered ahead; ``item``: bytes of a gathered number."""
        self.model, self.tracker, self.item = model, tracker, item
        self.activations, self.depth = model.activations, depth
        self.resident_blocks, self.last_block = retention.resident_blocks, retention.last_block
        self.unreduced = {number for number, kept in enumerate(retention.unreduced) if kept}
        self.gathered: set[UnitId] = set()
        self.prefetched: set[UnitId] = set()
        self.gather_buffer = self.reduce_buffer = 0  # bytes of the last collective of each kind

    def run(self, micro_batches: int, gradients: Callable[[ParameterUnit], int]) -> None:
        """Walk through all micro-batches; ``gradients``: bytes of a unit's reduced gradients."""
        for number in range(micro_batches):
            self._forward()
            self._backward(number == micro_batches - 1, number > 0, gradients)

    def _units(self, number: int) -> list[UnitId]:
        """Return the units of block ``number``; 0 is the root."""
        return [(number, part) for part in range(len(self.model.block) if number else 1)]

    def _unit(self, unit: UnitId) -> ParameterUnit:
        number, place = unit
        return self.model.block[place] if number else self.model.root

    def _buffer(self, unit: UnitId) -> int:
        parameters = self._unit(unit)
        in_place = parameters.shard == parameters.padded and self.item == REDUCED_BYTES
        return 0 if in_place else parameters.padded * self.item

    def _start_gather(self, unit: UnitId) -> None:
        """Start an all-gather into a buffer."""
        if unit in self.gathered or unit in self.prefetched:
            return
        self.prefetched.add(unit)
        if self.item != REDUCED_BYTES:  # the shard is cast before it is sent
            self.tracker.observe(communication=self._unit(unit).shard * self.item)
        self.tracker.add("communication", self._buffer(unit))

    def _finish_gather(self, unit: UnitId, forward: bool) -> None:
        """Copy the result of an all-gather to the unit's parameters."""
        self._start_gather(unit)
        if unit not in self.prefetched:
            return
        self.prefetched.remove(unit)
        self.gathered.add(unit)
        self.tracker.add("gathered", self._buffer(unit))
        self.tracker.add("communication", -self.gather_buffer)
        self.gather_buffer = self._buffer(unit)
        self.tracker.observe(communication=self._unit(unit).moved * self.item)
        if not forward:
            self._free_gather_buffer()

    def _free_gather_buffer(self) -> None:
        self.tracker.add("communication", -self.gather_buffer)
        self.gather_buffer = 0

    def _reshard(self, unit: UnitId) -> None:
        self.gathered.remove(unit)
        self.tracker.add("gathered", -self._buffer(unit))

    def _prefetch(self, numbers: range, depth: int | None = None) -> None:
        """Gather ahead; in backward FSDP2 always gathers one unit ahead."""
        for number in numbers[: self.depth if depth is None else depth]:
            for unit in self._units(number):
                self._start_gather(unit)

    def _forward(self) -> None:
        model, tracker, n = self.model, self.tracker, self.model.blocks
        tracker.moment = "in the forward pass: the embedding"
        self._finish_gather(ROOT, forward=True)
        self._prefetch(range(1, n + 1))
        for number in range(1, n + 1):
            tracker.moment = f"in the forward pass: block {number} of {n}"
            for unit in self._units(number):
                self._finish_gather(unit, forward=True)
            self._prefetch(range(number + 1, n + 1))
            tracker.observe(working=self.activations.forward(number))
            resident = self.activations.policy.resident
            if not resident or number > n - resident:
                tracker.add("kept", self.activations.saved_bytes(number))
            if number > self.resident_blocks and not (number == n and self.last_block):
                for unit in self._units(number):
                    self._reshard(unit)
        tracker.moment = "in the forward pass: the loss"
        tracker.observe(logits=model.head.forward_peak(saving=True))
        self._free_gather_buffer()

    def _backward(
        self, last: bool, accumulates: bool, gradients: Callable[[ParameterUnit], int]
    ) -> None:
        model, tracker, n = self.model, self.tracker, self.model.blocks
        tracker.moment = "in the backward pass: the loss"
        tracker.observe(model.head.fragment, logits=model.head.backward_peak())
        tracker.add("working", model.table)  # reduced with the root's other gradients
        self._prefetch(range(n, 0, -1), max(1, self.depth))
        stay_gathered = set() if last else {0, 1, *range(2, self.resident_blocks + 1)}
        for number in range(n, 0, -1):
            tracker.moment = f"in the backward pass: block {number} of {n}"
            for unit in reversed(self._units(number)):
                self._finish_gather(unit, forward=False)
            self._prefetch(range(number - 1, 0, -1), max(1, self.depth))
            self._block_backward(number)
            for unit in reversed(self._units(number)):
                self._end_backward(unit, number in stay_gathered, last, accumulates, gradients)
        tracker.moment = "in the backward pass: the embedding"
        tracker.add("working", model.table)
        if model.tied:
            tracker.observe(working=model.table)  # sum of both uses of the table
        tracker.add("working", -tracker.now["working"])
        self._end_backward(ROOT, 0 in stay_gathered, last, accumulates, gradients)
        if last:  # FSDP2 keeps the buffer while gradients are accumulated
            tracker.add("communication", -self.reduce_buffer)
            self.reduce_buffer = 0

    def _block_backward(self, number: int) -> None:
        activations, tracker = self.activations, self.tracker
        tracker.observe(working=activations.backward(number))
        tracker.add("kept", -activations.saved_bytes(number))
        resident = activations.policy.resident
        if resident and number > resident:
            tracker.add("kept", activations.saved_bytes(number - resident))

    def _end_backward(
        self,
        unit: UnitId,
        stays_gathered: bool,
        last: bool,
        accumulates: bool,
        gradients: Callable[[ParameterUnit], int],
    ) -> None:
        """Reduce a unit's gradients at the end of its backward pass, or keep them unreduced."""
        tracker, parameters = self.tracker, self._unit(unit)
        if not stays_gathered:
            self._reshard(unit)
        raw = parameters.elements * self.item + (self.activations.hidden if unit[0] else 0)
        whole = parameters.elements * REDUCED_BYTES
        unreduced = unit[0] in self.unreduced
        if unreduced and not last:
            tracker.observe(working=raw)
            if not accumulates:
                tracker.observe(gradients=whole, working=raw if self.item != REDUCED_BYTES else 0)
                tracker.add("gradients", whole)
            return
        tracker.add("communication", -self.reduce_buffer)
        self.reduce_buffer = parameters.padded * REDUCED_BYTES
        if unreduced and accumulates:
            tracker.observe(working=raw)  # added to the earlier micro-batches, then freed
            raw = 0
        tracker.observe(communication=self.reduce_buffer, working=raw)
        tracker.add("communication", self.reduce_buffer)
        if unreduced and accumulates:
            tracker.add("gradients", gradients(parameters) - whole)
        elif accumulates:
            tracker.observe(gradients=gradients(parameters))
        else:
            tracker.add("gradients", gradients(parameters))
