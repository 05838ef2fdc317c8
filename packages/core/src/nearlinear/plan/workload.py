"""What a step consists of: a shape, a layout, a batch, and how the software goes about it.

`from_config` reads the very config that the trainer takes. Published runs of other libraries are
workloads too, so there are settings here that nearlinear's config does not have.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from ..config import Config
from ..errors import ConfigError
from ..memory.states import AVERAGES
from ..mesh import Mesh
from ..parallel.activations import strategy
from ..parallel.kept import kept_blocks, stays_gathered
from ..parallel.pipeline.schedules import Plan, plan_for
from ..train.config import TrainConfig
from ..train.preflight import check_degrees
from . import shape
from .memory.blocks import known_as
from .memory.pipeline import stages_of
from .memory.rank import Rank
from .memory.units import Unit, root_of
from .shape import Shape
from .stages import Stages

Recompute = Literal["none", "block", "attention", "elementwise", "alternate"]
"""What the backward pass computes again: nothing; whole blocks; softmax and the two products around
it (Korthikanti et al. 2022); all but products and attention; that and every second product (as
torchtitan's selective checkpointing)."""


@dataclass(frozen=True)
class Workload:
    """One optimizer step."""

    shape: Shape
    sequence: int
    """tokens"""
    micro_batch: int
    """sequences of one forward pass, on each data rank"""
    passes: int
    """forward and backward passes per step; in a pipeline, its micro-batches"""
    mesh: Mesh
    precision: str = "bf16"
    """what blocks compute in"""
    fp8: bool = False
    """the blocks' products in float8"""
    recompute: Recompute = "none"
    recomputed_blocks: float = 1.0
    """the share of blocks that recompute"""
    together: int = 1
    """blocks in a row that are recomputed as one"""
    gathered_again: bool = False
    """of those all but the last are freed after that, and gathered for their backward pass"""
    stops_early: bool = True
    """recomputation ends where backward has what it needs: a block's last product is spared"""
    fused_attention: bool = True
    """scores are never written to memory"""
    fused_softmax: bool = False
    """without fused attention: scale, mask and softmax in one kernel (Megatron-LM)"""
    compiled: bool = False
    """elementwise work is fused"""
    sequence_parallel: bool = False
    """tensor ranks split what is between their products, too"""
    beside_weights: bool = False
    """tensor ranks add up gradients of inputs beside the products for those of weights, as
    Megatron-LM does"""
    overlapped_tensor: bool = False
    """tensor communication goes beside the products it belongs to"""
    gather_bytes: float = 2.0
    """of a gathered parameter"""
    reduce_bytes: float = 4.0
    """of a gradient that is reduced"""
    context_at_once: bool = False
    """context ranks gather keys and values, and compute then; they do not go round beside it"""
    message: float = 0.0
    """parameters that a collective moves at most; 0 = a block's"""
    resharded: bool = True
    """gathered parameters are freed after the forward pass, and gathered again"""
    kept_blocks: int = 0
    """the first blocks, which are not: see `parallel.kept`"""
    stays_gathered: bool = False
    """from one micro-batch to the next, the root and what else may: see `parallel.schedule`"""
    two_hop: bool = True
    """replicas reduce once per step"""
    prefetch: int = 1
    """blocks gathered ahead; 0 = a block waits for its parameters"""
    overlapped_reduce: bool = True
    """gradients are reduced beside the backward pass"""
    direct: bool = False
    """all-gathers send to every rank at once, over few multiprocessors (SMDDP), not round a ring"""
    hierarchical: bool = False
    """gathers go across nodes first, then inside them"""
    schedule: str = "1f1b"
    """of a pipeline: one of `parallel.pipeline.schedules.SCHEDULES`"""
    at_once: tuple[int, ...] = ()
    """micro-batches of each run of the schedule in a step; () = one run of all passes"""
    stages: tuple[int, ...] = ()
    """blocks of every stage; () = equally many"""
    overlapped_sends: bool = True
    """stages send and receive beside their computation"""
    split_sends: bool = False
    """tensor ranks each send a part of what goes to the next stage, which gathers them"""
    virtual: int = 1
    """stages per rank of a pipeline"""
    offloaded: float = 0.0
    """bytes of activations that a block sends to host memory; 0 = they stay"""
    copies_in_line: bool = False
    """computation waits for every copy"""
    horizon: int = 2
    """blocks ahead of backward whose activations come back"""
    backend: str = ""
    """of collectives, where several were measured; empty = whichever was first"""
    optimizer_bytes: float = 32.0
    """read and written per parameter of a rank's shard: value, averages, and the gradient, which is
    read twice (for its norm)"""
    offload_optimizer: bool = False
    """values and averages are in host memory, and updated there"""
    updaters: int = 1
    """replicas that share an update"""

    @property
    def offload(self) -> bool:
        """Activations go to host memory."""
        return self.offloaded > 0

    @property
    def tokens(self) -> int:
        """Of one forward pass, on each rank."""
        return self.micro_batch * self.sequence // self.mesh.context

    @property
    def step_tokens(self) -> int:
        """Of one step, over all ranks."""
        return self.micro_batch * self.sequence * self.passes * self.mesh.data_ranks

    @property
    def fillings(self) -> tuple[int, ...]:
        """Micro-batches of each time in a step that a pipeline fills and drains."""
        return self.at_once or (self.passes,)

    @property
    def cut(self) -> Stages:
        """What a pipeline's ranks hold; the whole model where there is none."""
        plan = Plan(self.schedule, self.mesh.pipeline, self.virtual)
        even = (self.shape.layers / plan.stages,) * plan.stages
        return Stages(plan, self.stages or even)

    @property
    def model_flops(self) -> float:
        """Of one step, over all ranks; what is computed again is not counted."""
        return self.step_tokens * self.shape.flops_per_token(self.sequence)


def from_config(
    config: TrainConfig, world: int, ranks_per_node: int, vocabulary: int = 0, on_cpu: bool = False
) -> Workload:
    """The step that ``config`` asks for on ``world`` ranks.

    ``on_cpu``: there nothing goes beside computation unless ``overlap_communication`` has it so;
    on accelerators FSDP2 gathers one unit ahead whatever it is told: see `parallel.overlap`.
    Raises ConfigError, as the trainer would before it starts.
    """
    parallel = config.parallel
    parallel.check_possible()
    mesh = Mesh.from_config(parallel, world, ranks_per_node)
    check_degrees(config, mesh)
    size, passes = config.batch.micro_batch_size, config.batch.micro_batches(mesh.data_ranks)
    if config.sequence_length % mesh.context:
        raise ConfigError(
            f"data.sequence_length = {config.sequence_length} does not divide by "
            f"context_parallel_degree = {mesh.context}"
        )
    found = shape.of_model(config.model, vocabulary)
    rank = Rank(config, mesh, found, known_as(config.model.family, found))
    piped = mesh.pipeline > 1
    beside = parallel.overlap_communication or not on_cpu
    asked = Workload(
        shape=found,
        sequence=config.sequence_length,
        micro_batch=size,
        passes=passes,
        mesh=mesh,
        precision=parallel.precision,
        fp8=parallel.fp8,
        recompute=_recompute(config.activations.checkpoint),
        compiled=config.train.compile_blocks,
        sequence_parallel=mesh.tensor > 1,
        gather_bytes=_gather_bytes(parallel),
        context_at_once=parallel.cp_comm_type == "all_gather",
        two_hop=config.train.two_hop,
        stays_gathered=not piped,
        prefetch=max(not on_cpu, parallel.prefetch_depth) if beside or piped else 0,
        overlapped_reduce=beside and not piped,  # a schedule reduces when it has ended
        hierarchical=parallel.hierarchical_all_gather == "on" and not piped,
        split_sends=mesh.tensor > 1,
        copies_in_line=not parallel.sm_activation_offloading,
        horizon=parallel.activation_loading_horizon,
        optimizer_bytes=16.0 + 2 * AVERAGES[config.optimizer.kind],
        offload_optimizer=parallel.offload_optimizer,
        updaters=mesh.replicate if parallel.shard_optimizer_state else 1,
        backend=parallel.communication_backend,
    )
    live = parallel.sdp_max_live_parameters
    if piped:
        asked = replace(asked, **_pipeline(rank, size, passes))
        asked = replace(asked, resharded=_resharded(asked, live))
        return replace(asked, **_kept(rank, math.ceil(asked.cut.most_blocks)))
    kept = kept_blocks(_sizes(rank), parallel.prefetch_depth, live)
    asked = replace(asked, resharded=kept < found.layers, kept_blocks=kept)
    return replace(asked, **_kept(rank, found.layers))


def _kept(rank: Rank, blocks: int) -> dict:
    """What is recomputed and what is moved of ``blocks`` blocks in a row, as memory counts them."""
    asked, found = rank.config.activations, {}
    plan = strategy.parse(asked.checkpoint) if asked.checkpoint else None
    if plan and plan.together != 1:
        together = min(plan.together or blocks, blocks)
        size = together * sum(unit.elements for unit in rank.block)
        again = size > rank.config.parallel.sdp_max_live_parameters
        found |= {"together": together, "gathered_again": again}
    if asked.offload or (plan and plan.budget is not None):
        of = rank.activations(blocks, rank.sizes.hidden)
        numbers = range(1, blocks + 1)
        if plan and plan.budget is not None:
            found["recomputed_blocks"] = sum(map(bool, map(of.again, numbers))) / blocks
        if asked.offload:
            found["offloaded"] = sum(map(of.kept_by, numbers)) / blocks
    return found


def _sizes(rank: Rank) -> list[int]:
    """Parameters of the root, then of every block, before ranks share them."""
    mesh, found = rank.mesh, rank.shape
    root = Unit(root_of(rank.family, found, mesh.tensor), mesh.sharing).elements
    return [root, *[sum(unit.elements for unit in rank.block)] * found.layers]


def _pipeline(rank: Rank, size: int, batches: int) -> dict:
    """What a pipeline makes of ``batches`` of ``size`` sequences. Raises ConfigError."""
    parallel, ranks = rank.config.parallel, rank.mesh.pipeline
    count = parallel.microbatches
    plan = plan_for(parallel.pipeline, ranks, parallel.virtual_pipeline_degree, count)
    plan.check(count)
    most = plan.in_flight(parallel.active_microbatches, count) or count
    runs = [min(most, count - begin) for begin in range(0, count, most)]
    return {
        "micro_batch": size // count,
        "passes": batches * count,
        "schedule": plan.name,
        "virtual": plan.per_rank,
        "at_once": tuple(runs * batches),
        "stages": tuple(len(blocks) for blocks in stages_of(rank, plan)),
    }


def _recompute(asked: str) -> Recompute:
    """How; of how many blocks a budget does it, `_kept` says."""
    if not asked:
        return "none"
    return "elementwise" if strategy.parse(asked).selective else "block"


def _resharded(work: Workload, live: int) -> bool:
    """Whether a pipeline's rank frees its stages, of all ranks the one that has the most."""
    found, mesh = work.shape, work.mesh
    ends = tuple(end / mesh.tensor for end in found.ends)
    held = work.cut.most_parameters(found.block_parameters / mesh.tensor, ends)
    return not stays_gathered(held, live, work.cut.plan.schedule.apart)


def _gather_bytes(parallel: Config) -> float:
    width = 4.0 if parallel.precision == "fp32" else 2.0
    if parallel.pipeline_parallel_degree > 1:
        return width  # a pipeline's stages gather as FSDP2 does
    return {"same": width, "bf16": min(width, 2.0), "fp8": 1.0}[parallel.gather_dtype]
