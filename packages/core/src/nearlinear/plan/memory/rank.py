"""What a rank has of a config, whatever part of the model it holds: sizes, units, states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...errors import ConfigError
from ...memory.states import AVERAGES, VALUE
from ...mesh import Mesh
from ...parallel.activations import strategy
from ...train.config import TrainConfig
from ..shape import Shape
from .activations import Activations, Kept
from .blocks import block, head
from .ledger import Ledger
from .listing import Listing
from .sizes import Sizes
from .units import Unit, block_of, buffer_bytes

ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}
COUNT = 4  # bytes of a parameter's count of steps, which AdamW keeps


@dataclass(frozen=True)
class Rank:
    """A rank of ``mesh``."""

    config: TrainConfig
    mesh: Mesh
    shape: Shape
    family: str

    @property
    def item(self) -> int:
        """Bytes of a number in blocks."""
        return ITEM[self.config.parallel.precision]

    @cached_property
    def sizes(self) -> Sizes:
        """Of one micro-batch; a pipeline cuts a batch into several."""
        sequences, mesh = self.config.batch.micro_batch_size, self.mesh
        if mesh.pipeline > 1:
            sequences //= self.config.parallel.microbatches
        tokens = sequences * math.ceil(self.config.sequence_length / mesh.context)
        at_once = self.config.parallel.cp_comm_type == "all_gather"
        parts = mesh.tensor, self.item, mesh.expert, mesh.context
        return Sizes(self.shape, tokens, *parts, at_once=at_once)

    @cached_property
    def block(self) -> tuple[Unit, ...]:
        return block_of(self.family, self.shape, self.mesh)

    @cached_property
    def calls(self) -> Listing:
        """Of a block."""
        return block(self.family, self.sizes)

    @cached_property
    def head(self) -> Listing:
        return head(self.family, self.sizes)

    def enter_states(
        self, units: Sequence[Unit], ledger: Ledger, copies: Sequence[Unit] = ()
    ) -> int:
        """Enter what is there between steps; its bytes. ``copies``: of ``units``, not updated."""
        parallel = self.config.parallel
        elements = sum(unit.shard for unit in units)
        slices = self.mesh.replicate if parallel.shard_optimizer_state else 1
        updated = sum(unit.slice(slices) for unit in units)
        updated -= sum(unit.slice(slices) for unit in copies)
        count = (sum(len(unit.parameters) for unit in units) - len(copies)) * COUNT
        averages = math.ceil(updated * AVERAGES[self.config.optimizer.kind]) + count
        if parallel.offload_optimizer:
            elements = averages = 0
        buffers = buffer_bytes(self.family, self.shape)
        ledger.add("parameters", elements * VALUE + buffers)
        ledger.add("optimizer", averages)
        return sum(ledger.now.values())

    def gradient_bytes(self, micro_batches: int, unit: Unit) -> int:
        """Of ``unit``, reduced: in host memory, or a slice, where the config says so."""
        parallel = self.config.parallel
        if parallel.offload_optimizer:
            return 0
        if parallel.shard_optimizer_state and micro_batches == 1:
            return unit.slice(self.mesh.replicate) * VALUE
        return unit.shard * VALUE

    def update_bytes(self, units: Sequence[Unit]) -> int:
        """Temporaries of AdamW: none in one kernel, else a copy or two of what it works on."""
        largest = max(
            math.ceil(dims[0] / unit.ranks) * math.prod(dims[1:])
            for unit in units
            for dims in unit.parameters
        )
        everything = sum(unit.shard for unit in units)
        ways = {"foreach": everything, "for_loop": 2 * largest}
        return VALUE * ways.get(self.config.optimizer.implementation, 0)

    def activations(self, blocks: int, first: int) -> Activations:
        """Of ``blocks`` blocks in a row; ``first``: bytes of what enters them."""
        return Activations(self.calls, self._kept(blocks), self.sizes.hidden, first)

    @property
    def _resident(self) -> int:
        """Blocks whose activations are on the device; PyTorch's own offload waits for each copy."""
        parallel = self.config.parallel
        return 1 + parallel.activation_loading_horizon * parallel.sm_activation_offloading

    def _kept(self, blocks: int) -> Kept:
        """As the table [activations] has it."""
        asked, calls = self.config.activations, self.calls
        resident = self._resident if asked.offload else None
        if not asked.checkpoint:
            return Kept(resident=resident)
        plan = strategy.parse(asked.checkpoint)
        if plan.budget is not None:  # `parallel.activations.budget`, of equal blocks
            saves = calls.kept_bytes - self.sizes.hidden
            over = blocks * calls.kept_bytes - plan.budget
            until = max(0, math.ceil(over / saves))
            if until > blocks:
                raise ConfigError(
                    f"activations.checkpoint = {asked.checkpoint!r}: with every block recomputed a "
                    f"micro-batch still saves {blocks * self.sizes.hidden:,} bytes: raise it"
                )
            return Kept(again=1, until=until, resident=resident)
        products = sum(value.bytes for value in calls.products) if plan.selective else 0
        return Kept(products, plan.together or blocks, resident=resident)
