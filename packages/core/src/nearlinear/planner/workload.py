"""Workload of one optimizer step: model shape, layout, batch, and software behaviour.

`workload_from_config` reads the trainer's own config. Published runs of other libraries are
workloads too, so some fields have no counterpart in nearlinear's config.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ..config import activation_strategy
from ..config.parallel import ParallelConfig
from ..config.train import TrainConfig
from ..distributed.mesh import Mesh
from ..errors import ConfigError
from ..fsdp.prefetch import stage_stays_gathered
from ..pipeline_parallel.schedules import PipelineSchedule, find_schedule
from ..train.preflight import check_model_divides
from .memory.block_ops import known_family
from .memory.pipeline import stages_of
from .memory.rank import AVERAGE_BYTES, RankModel
from .model_shape import ModelShape, model_shape

Recompute = Literal["none", "block", "attention", "elementwise", "alternate"]
"""Recomputation in the backward pass: none; whole blocks; softmax and the two products around it
(Korthikanti et al. 2022); everything but products and attention; or that plus every second product
(torchtitan's selective checkpointing)."""

Dispatch = Literal["each", "random", "adjacent"]
"""Copies of a token that travel to its experts: one to each expert; or one to each node with its
experts (in a single node, to each rank) from the tensor rank that holds it (DeepEP). A balanced
router chooses experts at random, or adjacent ones (benchmarks with a fixed choice)."""


@dataclass(frozen=True)
class StageLayout:
    """Blocks of every pipeline stage; a model without a pipeline is a single stage."""

    plan: PipelineSchedule
    blocks: tuple[float, ...]
    """Blocks of every stage; fractional if a published run does not say how it divides them."""

    @cached_property
    def most_blocks(self) -> float:
        """Blocks of the rank with the most."""
        return max(self._by_rank(self.blocks))

    def most_parameters(self, block: float, ends: tuple[float, float]) -> float:
        """Parameters of the rank with the most: ``block`` per block, plus the model's two ends."""
        held = [count * block for count in self.blocks]
        held[0] += ends[0]
        held[-1] += ends[1]
        return max(self._by_rank(held))

    def _by_rank(self, values: Sequence[float]) -> list[float]:
        ranks = range(self.plan.ranks)
        return [sum(values[stage] for stage in self.plan.stages_of(rank)) for rank in ranks]


@dataclass(frozen=True)
class Workload:
    """Work of one optimizer step."""

    shape: ModelShape
    sequence: int
    """Tokens per sequence."""
    micro_batch: int
    """Sequences per micro-batch and data rank."""
    micro_batches: int
    """Micro-batches per step: gradient accumulation, or the micro-batches of a pipeline."""
    mesh: Mesh
    precision: str = "bf16"
    """Compute precision of the blocks."""
    fp8: bool = False
    """True if the linear layers of the blocks compute in float8."""
    fused_casts: bool = False
    """With float8: casts of activations are part of the kernels before them, and cast weights are
    kept for all micro-batches (Transformer Engine)."""
    recompute: Recompute = "none"
    recomputed_share: float = 1.0
    """Share of blocks that are recomputed."""
    recompute_group: int = 1
    """Consecutive blocks that are recomputed as one."""
    regathers_group: bool = False
    """True if all blocks of a group but the last are gathered again for their backward pass."""
    early_stop: bool = True
    """True if recomputation stops early, which spares a block's last product."""
    fused_attention: bool = True
    """True if attention scores are never written to memory."""
    newest_attention: bool = False
    """True if fused attention uses the newest instructions of the GPU (cuDNN on Hopper)."""
    fused_softmax: bool = False
    """Without fused attention: scale, mask and softmax in one kernel (Megatron-LM)."""
    compiled: bool = False
    """True if elementwise operators are fused."""
    sequence_parallel: bool = False
    """True if tensor ranks also split the activations between their products."""
    async_tensor_all_reduce: bool = False
    """True if input gradients are all-reduced concurrently with the weight-gradient products
    (Megatron-LM)."""
    async_tensor_parallel: bool = False
    """True if tensor-parallel communication overlaps its own products."""
    shares_states: bool = True
    """False if the ranks of `Mesh.sharing` hold whole parameters, apart from those of different
    experts, and reduce gradients once per step (Megatron)."""
    dispatch: Dispatch = "each"
    """Copies of a token on the way to its experts."""
    gather_bytes: float = 2.0
    """Bytes per gathered parameter."""
    reduce_bytes: float = 4.0
    """Bytes per reduced gradient."""
    context_all_gather: bool = False
    """True if context ranks all-gather keys and values, instead of passing them round a ring."""
    max_message: float = 0.0
    """Most parameters per collective; 0 means a block's."""
    reshard_after_forward: bool = True
    """True if gathered parameters are freed after forward and gathered again for backward."""
    resident_blocks: int = 0
    """First blocks that are not resharded: see `fsdp.prefetch`."""
    keeps_last_block: bool = True
    """True if the last block stays gathered between forward and backward pass."""
    gathered_across_micro_batches: bool = False
    """True if the root and resident blocks stay gathered between micro-batches: see
    `fsdp.prefetch`."""
    reduced_once_blocks: int = 0
    """First blocks whose gradients are reduced once per step: see `fsdp.prefetch`."""
    reduced_once_root: bool = False
    """True if the root unit is reduced once per step."""
    two_hop: bool = True
    """True if replicas all-reduce once per step."""
    prefetch: int = 1
    """Blocks gathered ahead; 0 means no overlap of all-gathers and compute."""
    overlapped_reduce: bool = True
    """True if gradients are reduced concurrently with the backward pass."""
    reduced_by_stage: bool = False
    """True if replicas reduce a virtual stage after its last micro-batch, concurrently with the
    remaining stages of the rank (Megatron-Core)."""
    direct_all_gather: bool = False
    """True if all-gathers send to all ranks at once over few multiprocessors (SMDDP)."""
    hierarchical: bool = False
    """True if all-gathers go across nodes first, then inside them."""
    schedule: str = "1f1b"
    """Pipeline schedule: one of `pipeline_parallel.schedules.SCHEDULES`."""
    schedule_runs: tuple[int, ...] = ()
    """Micro-batches of each run of the schedule in a step; () means one run of all."""
    stage_blocks: tuple[int, ...] = ()
    """Blocks of every stage; () means an even split."""
    overlapped_sends: bool = True
    """True if stages compute while they send and receive."""
    split_sends: bool = False
    """True if each tensor rank sends a part of the hidden states, which the next stage gathers."""
    virtual_stages: int = 1
    """Stages per pipeline rank."""
    offloaded_bytes: float = 0.0
    """Bytes of activations that a block offloads to host memory."""
    synchronous_copies: bool = False
    """True if compute waits for every offload copy."""
    offload_horizon: int = 2
    """Blocks ahead of backward whose activations are copied back."""
    backend: str = ""
    """Backend of measured collectives; empty means the first one measured."""
    optimizer_bytes: float = 32.0
    """Bytes read and written per parameter of a shard: value, averages, and the gradient, which is
    read twice (for its norm)."""
    offload_optimizer: bool = False
    """True if optimizer states are in host memory and updated there."""
    update_replicas: int = 1
    """Replicas that share an optimizer update."""

    @property
    def kind(self) -> str:
        """Kind of model."""
        return "mixture of experts" if self.shape.experts > 1 else "dense"

    @property
    def offload(self) -> bool:
        """True if activations are offloaded to host memory."""
        return self.offloaded_bytes > 0

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch and rank."""
        return self.micro_batch * self.sequence // self.mesh.context

    @property
    def step_tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.micro_batch * self.sequence * self.micro_batches * self.mesh.data_ranks

    @property
    def runs(self) -> tuple[int, ...]:
        """Micro-batches of each run of the pipeline schedule in a step."""
        return self.schedule_runs or (self.micro_batches,)

    @property
    def stage_layout(self) -> StageLayout:
        """Blocks of the pipeline's stages; a single stage without a pipeline."""
        plan = PipelineSchedule(self.schedule, self.mesh.pipeline, self.virtual_stages)
        even = (self.shape.layers / plan.stages,) * plan.stages
        return StageLayout(plan, self.stage_blocks or even)

    @property
    def model_flops(self) -> float:
        """Model FLOPs per step over all ranks, without recomputation."""
        return self.step_tokens * self.shape.flops_per_token(self.sequence)


def workload_from_config(
    config: TrainConfig, world: int, ranks_per_node: int, vocabulary: int = 0, on_cpu: bool = False
) -> Workload:
    """Return the optimizer step of ``config`` on ``world`` ranks.

    On a CPU, communication overlaps compute only with ``overlap_communication``; on accelerators,
    FSDP2 always gathers one unit ahead (see `fsdp.overlap`).

    Raises ConfigError for configs that the trainer rejects.
    """
    parallel = config.parallel
    parallel.check_possible()
    mesh = Mesh.from_config(parallel, world, ranks_per_node)
    check_model_divides(config, mesh)
    size, batches = config.batch.micro_batch_size, config.batch.micro_batches(mesh.data_ranks)
    if config.sequence_length % mesh.context:
        raise ConfigError(
            f"data.sequence_length = {config.sequence_length} is not divisible by "
            f"context_parallel_degree = {mesh.context}"
        )
    shape = model_shape(config.model, vocabulary)
    rank = RankModel(config, mesh, shape, known_family(config.model.family, shape))
    pipelined = mesh.pipeline > 1
    overlaps = parallel.overlap_communication or not on_cpu
    work = Workload(
        shape=shape,
        sequence=config.sequence_length,
        micro_batch=size,
        micro_batches=batches,
        mesh=mesh,
        precision=parallel.precision,
        fp8=parallel.fp8,
        recompute=_recompute(config.activations.checkpoint),
        compiled=config.train.compile_blocks,
        sequence_parallel=mesh.tensor > 1,
        gather_bytes=_gather_bytes(parallel),
        context_all_gather=parallel.cp_comm_type == "all_gather",
        two_hop=config.train.two_hop,
        gathered_across_micro_batches=not pipelined,
        prefetch=max(not on_cpu, parallel.prefetch_depth) if overlaps or pipelined else 0,
        overlapped_reduce=overlaps and not pipelined,  # a schedule reduces at its end
        hierarchical=parallel.hierarchical_all_gather == "on" and not pipelined,
        split_sends=mesh.tensor > 1,
        synchronous_copies=not parallel.sm_activation_offloading,
        offload_horizon=parallel.activation_loading_horizon,
        optimizer_bytes=16.0 + 2 * AVERAGE_BYTES[config.optimizer.kind],
        offload_optimizer=parallel.offload_optimizer,
        update_replicas=mesh.replicate if parallel.shard_optimizer_state else 1,
        backend=parallel.communication_backend,
    )
    live = parallel.live_parameters
    if pipelined:
        work = replace(work, **_pipeline_fields(rank, size, batches))
        work = replace(work, reshard_after_forward=_reshards_stages(work, live))
        return replace(work, **_activation_fields(rank, math.ceil(work.stage_layout.most_blocks)))
    retention = rank.retention
    resident = retention.resident_blocks
    work = replace(
        work,
        reshard_after_forward=resident < shape.layers,
        resident_blocks=resident,
        keeps_last_block=retention.last_block,
        reduced_once_blocks=sum(retention.unreduced[1:]),
        reduced_once_root=retention.unreduced[0],
    )
    return replace(work, **_activation_fields(rank, shape.layers))


def _activation_fields(rank: RankModel, blocks: int) -> dict[str, Any]:
    """Return recomputation and offload fields for ``blocks`` consecutive blocks."""
    settings, fields = rank.config.activations, {}
    plan = activation_strategy.parse_strategy(settings.checkpoint) if settings.checkpoint else None
    if plan and plan.group_size != 1:
        group = min(plan.group_size or blocks, blocks)
        size = group * sum(unit.elements for unit in rank.block)
        again = size > rank.config.parallel.live_parameters
        fields |= {"recompute_group": group, "regathers_group": again}
    if settings.offload or (plan and plan.budget is not None):
        activations = rank.activations(blocks, rank.sizes.hidden)
        numbers = range(1, blocks + 1)
        if plan and plan.budget is not None:
            recomputed = sum(bool(activations.group_size(number)) for number in numbers)
            fields["recomputed_share"] = recomputed / blocks
        if settings.offload:
            fields["offloaded_bytes"] = sum(map(activations.saved_bytes, numbers)) / blocks
    return fields


def unit_parameters(config: TrainConfig, world: int, vocabulary: int) -> list[int]:
    """Return `RankModel.unit_sizes` of ``config`` on ``world`` ranks."""
    shape = model_shape(config.model, vocabulary)
    family = known_family(config.model.family, shape)
    return RankModel(config, Mesh.from_config(config.parallel, world), shape, family).unit_sizes


def _pipeline_fields(rank: RankModel, size: int, batches: int) -> dict[str, Any]:
    """Return pipeline fields for ``batches`` of ``size`` sequences. Raises ConfigError."""
    parallel, ranks = rank.config.parallel, rank.mesh.pipeline
    count = parallel.microbatches
    plan = find_schedule(parallel.pipeline, ranks, parallel.virtual_pipeline_degree, count)
    plan.check_microbatches(count)
    most = plan.wave_size(parallel.active_microbatches, count) or count
    runs = [min(most, count - begin) for begin in range(0, count, most)]
    return {
        "micro_batch": size // count,
        "micro_batches": batches * count,
        "schedule": plan.name,
        "virtual_stages": plan.stages_per_rank,
        "schedule_runs": tuple(runs * batches),
        "stage_blocks": tuple(len(blocks) for blocks in stages_of(rank, plan)),
    }


def _recompute(checkpoint: str) -> Recompute:
    """Return the recomputation of a ``checkpoint`` setting; a budget also sets its share."""
    if not checkpoint:
        return "none"
    return "elementwise" if activation_strategy.parse_strategy(checkpoint).selective else "block"


def _reshards_stages(work: Workload, live: int) -> bool:
    """Return whether the pipeline rank with the most parameters frees its stages after forward."""
    shape, mesh, layout = work.shape, work.mesh, work.stage_layout
    first, last = shape.ends
    ends = first / mesh.tensor, last / mesh.tensor
    held = layout.most_parameters(shape.block_parameters / mesh.tensor, ends)
    return not stage_stays_gathered(math.ceil(held), live, layout.plan.spec.splits_backward)


def _gather_bytes(parallel: ParallelConfig) -> float:
    width = 4.0 if parallel.precision == "fp32" else 2.0
    if parallel.pipeline_parallel_degree > 1:
        return width  # stages of a pipeline use FSDP2's own all-gather
    return {"same": width, "bf16": min(width, 2.0), "fp8": 1.0}[parallel.gather_dtype]
