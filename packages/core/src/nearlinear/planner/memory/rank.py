"""Memory model of one rank: parameter units, sizes, activations and optimizer states.

Units are the groups of parameters that `fsdp.shard` gathers together. Shard sizes are exact:
FSDP2 cuts the first dim of every parameter into one piece per rank and pads the last ones. Of
stacked experts it may cut another dim, see `distributed.mesh.dim_to_shard`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...config import activation_strategy
from ...config.train import TrainConfig
from ...distributed.mesh import Mesh, dim_to_shard, dim_to_slice
from ...errors import ConfigError
from ...fsdp.prefetch import Retention, plan_retention
from ..model_shape import ModelShape
from .block_ops import Loss, MicroBatchSizes, trace_block, trace_head
from .op_trace import OpTrace
from .report import PeakTracker

VALUE_BYTES = 4  # float32 parameter values, also in mixed precision
REDUCED_BYTES = 4  # reduced and accumulated gradients are float32
COUNT_BYTES = 4  # AdamW's step count, per parameter tensor
AVERAGE_BYTES = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256)}
"""Bytes of AdamW's two averages per parameter. The 8-bit averages have a scale per block of 256, as
in torchao (Dettmers et al. 2022)."""

Dims = tuple[int, ...]


@dataclass(frozen=True)
class ParameterUnit:
    """Parameters that are gathered and reduced together."""

    parameters: tuple[Dims, ...]
    """Shapes on this rank, with the sharded dim in front."""
    ranks: int
    """Ranks that share the parameters."""
    moved: int = 0
    """Elements of parameters that are sharded on another than their first dim. FSDP2 copies them
    once more after an all-gather."""

    @cached_property
    def elements(self) -> int:
        return sum(map(math.prod, self.parameters))

    @cached_property
    def shard(self) -> int:
        """Elements of the largest shard."""
        return sum(-(-dims[0] // self.ranks) * math.prod(dims[1:]) for dims in self.parameters)

    @property
    def padded(self) -> int:
        """Elements of all shards, padded to the largest."""
        return self.shard * self.ranks

    def slice(self, replicas: int) -> int:
        """Elements of the largest slice of a shard that one of ``replicas`` updates."""
        elements = 0
        for dims in self.parameters:
            shard = [-(-dims[0] // self.ranks), *dims[1:]]
            at = dim_to_slice(shard, replicas)
            shard[at] = -(-shard[at] // replicas)
            elements += math.prod(shard)
        return elements


def table_of(shape: ModelShape, tensor: int) -> Dims:
    """Return the word table on the first of ``tensor`` ranks, which has the most rows."""
    return math.ceil(shape.vocabulary / tensor), shape.width


def embedding_of(shape: ModelShape, tensor: int) -> tuple[Dims, ...]:
    """Return the parameters before the blocks."""
    positions = ((shape.positions, shape.width),) if shape.positions else ()
    return (table_of(shape, tensor), *positions)


def head_of(family: str, shape: ModelShape, tensor: int) -> tuple[Dims, ...]:
    """Return the parameters after the blocks, including a tied table."""
    return (table_of(shape, tensor), *_norm(family, shape.width))


def root_of(family: str, shape: ModelShape, tensor: int) -> tuple[Dims, ...]:
    """Return all parameters outside the blocks of an undivided model."""
    head = head_of(family, shape, tensor)
    return (*embedding_of(shape, tensor), *(head[1:] if shape.tied else head))


def block_of(family: str, shape: ModelShape, mesh: Mesh) -> tuple[ParameterUnit, ...]:
    """Return the units of a block: expert-parallel experts have their own unit."""
    tensor, width = mesh.tensor, shape.width
    inner, kv, own = (n // tensor for n in (shape.inner, shape.kv_width, shape.attention_width))
    norms = _norm(family, width) * 2
    attention = ((own, width), (kv, width), (kv, width), (width, own))
    if shape.latent is not None:
        products = shape.latent.matrices(width, shape.heads // tensor, shape.head_width)
        attention = tuple((outputs, inputs) for inputs, outputs in products)
    if family == "gpt2":  # Conv1D has its inputs first
        matrices = [(width, 3 * own), (3 * own,), (own, width), (width,)]
        matrices += [(width, inner), (inner,), (inner, width), (width,)]
    elif family == "gpt_neox":
        matrices = [(3 * own, width), (3 * own,), (width, own), (width,)]
        matrices += [(inner, width), (inner,), (width, inner), (width,)]
    elif shape.experts > 1:
        wide = shape.shared_inner // tensor
        shared = ((wide, width), (wide, width), (width, wide)) if wide else ()
        return _moe_block(shape, mesh, (*attention, (shape.experts, width), *shared, *norms))
    else:
        matrices = [*attention, (inner, width), (inner, width), (width, inner)]
    return (ParameterUnit((*matrices, *norms), mesh.sharing),)


def _moe_block(
    shape: ModelShape, mesh: Mesh, others: tuple[Dims, ...]
) -> tuple[ParameterUnit, ...]:
    """Return the units of a block with stacked experts."""
    count, inner = shape.experts // mesh.expert, shape.inner // mesh.tensor
    stacked = ((count, 2 * inner, shape.width), (count, shape.width, inner))
    ranks = mesh.sharing if mesh.expert == 1 else mesh.expert_sharing
    experts = tuple(_sharded_dim_first(dims, ranks) for dims in stacked)
    moved = sum(math.prod(dims) for dims in stacked if dim_to_shard(dims, ranks) > 0)
    if mesh.expert == 1:
        return (ParameterUnit((*others, *experts), ranks, moved),)
    return ParameterUnit(others, mesh.sharing), ParameterUnit(experts, ranks, moved)


def _sharded_dim_first(dims: Dims, ranks: int) -> Dims:
    """Move the dim that `fsdp.shard` shards to the front."""
    at = dim_to_shard(dims, ranks)
    return (dims[at], *dims[:at], *dims[at + 1 :])


def _norm(family: str, width: int) -> tuple[Dims, ...]:
    """Return the weight of a norm and, except for RMS norms, its bias."""
    return ((width,), (width,)) if family in ("gpt2", "gpt_neox") else ((width,),)


def buffer_bytes(family: str, shape: ModelShape) -> int:
    """Return the bytes of buffers: the frequencies of rotary positions, and a copy."""
    if family == "gpt2":
        return 0
    rotated = shape.head_width // 4 if family == "gpt_neox" else shape.head_width
    return 2 * (rotated // 2) * 4


@dataclass(frozen=True)
class PlannedActivations:
    """ActivationMemory that remain between the forward and the backward pass."""

    products: int = 0
    """Bytes of products of a block that are kept although the block is recomputed."""
    group: int = 0
    """Blocks recomputed as one from the input of the first; 0 means no recomputation."""
    until: int | None = None
    """Last block that is recomputed; None means all are."""
    resident: int | None = None
    """Blocks whose activations are on the device at once; None means all."""


@dataclass(frozen=True)
class ActivationMemory:
    """Activation memory of consecutive identical blocks, numbered from 1."""

    trace: OpTrace
    """Operators of a block."""
    policy: PlannedActivations
    hidden: int
    """Bytes of the hidden states between two blocks."""
    first: int
    """Bytes of the input of the first block; 0 if counted elsewhere."""

    def group_size(self, number: int) -> int:
        """Blocks recomputed together with block ``number``; 0 if it is not recomputed."""
        policy = self.policy
        return policy.group if policy.until is None or number <= policy.until else 0

    def window(self, blocks: int) -> int:
        """Most bytes saved by ``blocks`` consecutive blocks."""
        return blocks * max(self.saved_bytes(1), self.saved_bytes(2))

    def saved_bytes(self, number: int) -> int:
        """Bytes that block ``number`` saves for its backward pass."""
        group, given = self.group_size(number), self.first if number == 1 else self.hidden
        if group:
            return self.policy.products + (given if (number - 1) % group == 0 else 0)
        own = self._kept_bytes
        return own - self.hidden + given if self._keeps_input else own

    def forward(self, number: int) -> int:
        """Peak bytes allocated in the forward pass of block ``number``, including saved ones."""
        return self._recomputed_forward if self.group_size(number) else self._forward

    def backward(self, number: int) -> int:
        """Peak bytes of its backward pass in excess of its saved activations."""
        group, peak = self.group_size(number), self.trace.backward_peak()
        if group:
            if not self._keeps_input:
                peak += self.hidden  # input of the recomputation
            waiting = (number - 1) % group  # blocks of its group that are recomputed, too
            peak += waiting * self._kept_bytes
            if self.policy.products:
                peak += self._other_products
        return max(0, peak - self.saved_bytes(number))

    # All blocks have the same operators, which are traced once for all of them.

    @cached_property
    def _kept_bytes(self) -> int:
        return self.trace.kept_bytes

    @cached_property
    def _keeps_input(self) -> bool:
        return self.trace.given in self.trace.kept

    @cached_property
    def _other_products(self) -> int:
        """Bytes of products that the backward pass of a block does not need."""
        kept = self.trace.kept
        return sum(each.bytes for each in self.trace.products if each not in kept)

    @cached_property
    def _forward(self) -> int:
        return self.trace.forward_peak(saving=True)

    @cached_property
    def _recomputed_forward(self) -> int:
        return self.trace.forward_peak(saving=False)


@dataclass(frozen=True)
class Behaviour:
    """Use of memory that differs between libraries; the defaults are nearlinear's."""

    fused: bool = False
    """Elementwise operators are fused, and save nothing but their inputs."""
    loss: Loss = "own"
    regathers: bool = False
    """Tensor ranks gather the input of a product again in its backward pass."""
    alternates: bool = False
    """Selective recomputation keeps every second matrix product (torchtitan)."""
    distributed_optimizer: bool = False
    """Replicas divide master weights and optimizer states, and hold 16-bit parameters whole."""
    reduces_once: bool = False
    """True if no gradient is reduced before the end of a step."""
    state_bytes: int = VALUE_BYTES
    """Bytes of a sharded value and of each of its averages."""
    reduced_bytes: int = REDUCED_BYTES
    """Bytes of a reduced gradient."""
    stage_blocks: tuple[int, ...] = ()
    """Blocks of every pipeline stage; none: as `pipeline_parallel` divides them."""
    receives_ahead: bool = True
    """A pipeline stage has a receive buffer per micro-batch."""


NEARLINEAR = Behaviour()


@dataclass(frozen=True)
class RankModel:
    """Sizes of one rank of ``mesh``, independent of its part of the model."""

    config: TrainConfig
    mesh: Mesh
    shape: ModelShape
    family: str
    behaviour: Behaviour = NEARLINEAR

    @property
    def item(self) -> int:
        """Bytes of a number in blocks."""
        return self.config.parallel.compute_bytes

    @cached_property
    def sizes(self) -> MicroBatchSizes:
        """Sizes of one micro-batch, or of one micro-batch of a pipeline."""
        sequences, mesh = self.config.batch.micro_batch_size, self.mesh
        if mesh.pipeline > 1:
            sequences //= self.config.parallel.microbatches
        return MicroBatchSizes(
            self.shape,
            tokens=sequences * math.ceil(self.config.sequence_length / mesh.context),
            tensor=mesh.tensor,
            item=self.item,
            expert=mesh.expert,
            context=mesh.context,
            context_all_gather=self.config.parallel.cp_comm_type == "all_gather",
            fused=self.behaviour.fused,
            regathers=self.behaviour.regathers,
        )

    @cached_property
    def block(self) -> tuple[ParameterUnit, ...]:
        return block_of(self.family, self.shape, self.mesh)

    @cached_property
    def block_trace(self) -> OpTrace:
        return trace_block(self.family, self.sizes)

    @cached_property
    def head(self) -> OpTrace:
        return trace_head(self.family, self.sizes, self.behaviour.loss)

    @cached_property
    def root(self) -> ParameterUnit:
        """Root unit of a model without a pipeline."""
        return ParameterUnit(root_of(self.family, self.shape, self.mesh.tensor), self.mesh.sharing)

    @property
    def unit_sizes(self) -> list[int]:
        """Parameters of the root unit and of every block, before sharding."""
        block = sum(unit.elements for unit in self.block)
        return [self.root.elements, *[block] * self.shape.layers]

    @cached_property
    def retention(self) -> Retention:
        """Parameters and gradients kept between micro-batches; see `plan_retention`."""
        parallel = self.config.parallel
        if not self.config.train.two_hop:  # every micro-batch reduces everything
            parallel = replace(parallel, gradient_reduction="micro_batch")
        found = plan_retention(self.unit_sizes, parallel, self.mesh.sharing)
        if self.behaviour.reduces_once:
            found = replace(found, unreduced=(True,) * len(found.unreduced))
        return found

    def add_states(
        self,
        units: Sequence[ParameterUnit],
        tracker: PeakTracker,
        copies: Sequence[ParameterUnit] = (),
    ) -> int:
        """Allocate parameters and optimizer states; return their bytes.

        Args:
            units: Parameters of this rank.
            tracker: Receives the allocations.
            copies: Those of ``units`` that this rank does not update.
        """
        parallel = self.config.parallel
        elements = sum(unit.shard for unit in units)
        slices = self.mesh.replicate if parallel.shard_optimizer_state else 1
        if self.behaviour.distributed_optimizer:
            slices = self.mesh.replicate
            elements = math.ceil(elements / slices)  # master weights are divided, too
        updated = sum(unit.slice(slices) for unit in units)
        updated -= sum(unit.slice(slices) for unit in copies)
        counts = (sum(len(unit.parameters) for unit in units) - len(copies)) * COUNT_BYTES
        width = self.behaviour.state_bytes
        average = AVERAGE_BYTES[self.config.optimizer.kind] * width / VALUE_BYTES
        averages = math.ceil(updated * average) + counts
        if parallel.offload_optimizer:
            elements = averages = 0
        buffers = buffer_bytes(self.family, self.shape)
        tracker.add("parameters", elements * width + buffers)
        tracker.add("optimizer", averages)
        return sum(tracker.now.values())

    def gradient_bytes(self, micro_batches: int, unit: ParameterUnit) -> int:
        """Return the bytes of reduced gradients of ``unit`` on the device."""
        parallel = self.config.parallel
        if parallel.offload_optimizer:
            return 0
        if parallel.shard_optimizer_state and micro_batches == 1:
            return unit.slice(self.mesh.replicate) * self.behaviour.reduced_bytes
        return unit.shard * self.behaviour.reduced_bytes

    def update_bytes(self, units: Sequence[ParameterUnit]) -> int:
        """Return the temporaries of AdamW: none if fused, else one or two copies of its input."""
        largest = max(
            math.ceil(dims[0] / unit.ranks) * math.prod(dims[1:])
            for unit in units
            for dims in unit.parameters
        )
        everything = sum(unit.shard for unit in units)
        elements = {"foreach": everything, "for_loop": 2 * largest}
        return VALUE_BYTES * elements.get(self.config.optimizer.implementation, 0)

    def activations(self, blocks: int, first: int) -> ActivationMemory:
        """Return the activations of ``blocks`` blocks; ``first``: bytes of the first input."""
        policy = self._activation_policy(blocks)
        return ActivationMemory(self.block_trace, policy, self.sizes.hidden, first)

    @property
    def _resident(self) -> int:
        """Blocks with activations on the device; PyTorch's own offload waits for each copy."""
        parallel = self.config.parallel
        return 1 + parallel.activation_loading_horizon * parallel.sm_activation_offloading

    def _activation_policy(self, blocks: int) -> PlannedActivations:
        """Return the policy of the config's table [activations]."""
        settings, trace = self.config.activations, self.block_trace
        resident = self._resident if settings.offload else None
        if not settings.checkpoint:
            return PlannedActivations(resident=resident)
        plan = activation_strategy.parse_strategy(settings.checkpoint)
        if plan.budget is not None:  # `activation.memory_budget`, for identical blocks
            saves = trace.kept_bytes - self.sizes.hidden
            over = blocks * trace.kept_bytes - plan.budget
            until = max(0, math.ceil(over / saves))
            if until > blocks:
                raise ConfigError(
                    f"activations.checkpoint = {settings.checkpoint!r} is too small: with every "
                    f"block recomputed, a micro-batch still saves "
                    f"{blocks * self.sizes.hidden:,} bytes. Raise it."
                )
            return PlannedActivations(group=1, until=until, resident=resident)
        products = self._kept_products() if plan.selective else 0
        return PlannedActivations(products, plan.group_size or blocks, resident=resident)

    def _kept_products(self) -> int:
        """Return the bytes of a block's products that selective recomputation keeps."""
        products = [each for each in self.block_trace.operators if each.product]
        if not self.behaviour.alternates:
            return sum(each.output.bytes for each in products)
        matrices = [each for each in products if each.weights]
        dropped = sum(each.output.bytes for each in matrices[1::2])
        scattered = 2 * self.sizes.hidden if self.mesh.tensor > 1 else 0
        return sum(each.output.bytes for each in products) - dropped + scattered
