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
from ..mesh import PLACED, Mesh
from ..parallel.activations import strategy
from ..parallel.pipeline.partition import memory_weight
from ..parallel.pipeline.schedules import Plan, plan_for
from ..train.config import TrainConfig
from ..train.preflight import check_degrees
from . import shape
from .shape import Shape
from .stages import Stages, split

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
    message: float = 0.0
    """parameters that a collective moves at most; 0 = a block's"""
    resharded: bool = True
    """gathered parameters are freed after the forward pass, and gathered again"""
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
    offload: bool = False
    """activations go to host memory"""
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


@dataclass(frozen=True)
class Group:
    """Where the ranks of a collective stand."""

    ranks: int
    nodes: int
    sharing: int
    """groups of the kind that send over one node's adapters at the same time"""

    @property
    def on_node(self) -> int:
        """Ranks of one node."""
        return -(-self.ranks // self.nodes)


def group(mesh: Mesh, *axes: str) -> Group:
    """The ranks that differ on ``axes``, neighbours in the mesh's order; or on ``expert`` or
    ``expert_sharing``, which are made of shard and context (see `mesh.JOINT`)."""
    order = [axis for letter in mesh.placement for axis in PLACED[letter]]
    of_experts = axes[0] in ("expert", "expert_sharing")
    last = order.index("context") if of_experts else max(order.index(axis) for axis in axes)
    stride = math.prod(getattr(mesh, axis) for axis in order[last + 1 :])
    if axes[0] == "expert_sharing":
        stride *= mesh.expert
    ranks = math.prod(getattr(mesh, axis) for axis in axes)
    node = mesh.ranks_per_node or mesh.world
    on_node = max(1, min(ranks, node // stride))
    nodes = -(-ranks // on_node)
    return Group(ranks, nodes, max(1, min(node, mesh.world) // on_node))


def from_config(config: TrainConfig, world: int, ranks_per_node: int, vocabulary=0) -> Workload:
    """The step that ``config`` asks for on ``world`` ranks.

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
    piped = mesh.pipeline > 1
    beside = parallel.overlap_communication
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
        two_hop=config.train.two_hop,
        stays_gathered=not piped,
        prefetch=parallel.prefetch_depth if beside or piped else 0,
        overlapped_reduce=beside and not piped,  # a schedule reduces when it has ended
        hierarchical=parallel.hierarchical_all_gather == "on" and not piped,
        split_sends=mesh.tensor > 1,
        offload=config.activations.offload,
        horizon=parallel.activation_loading_horizon,
        optimizer_bytes=16.0 + 2 * AVERAGES[config.optimizer.kind],
        offload_optimizer=parallel.offload_optimizer,
        updaters=mesh.replicate if parallel.shard_optimizer_state else 1,
        backend=parallel.communication_backend,
    )
    if piped:
        asked = replace(asked, **_pipeline(config, found, mesh, size, passes))
    return replace(asked, resharded=_resharded(asked, parallel.sdp_max_live_parameters))


def _pipeline(config: TrainConfig, found: Shape, mesh: Mesh, size: int, batches: int) -> dict:
    """What a pipeline makes of ``batches`` of ``size`` sequences. Raises ConfigError."""
    parallel, count = config.parallel, config.parallel.microbatches
    plan = plan_for(parallel.pipeline, mesh.pipeline, parallel.virtual_pipeline_degree, count)
    plan.check(count)
    most = plan.in_flight(parallel.active_microbatches, count) or count
    runs = [min(most, count - begin) for begin in range(0, count, most)]
    return {
        "micro_batch": size // count,
        "passes": batches * count,
        "schedule": plan.name,
        "virtual": plan.per_rank,
        "at_once": tuple(runs * batches),
        "stages": split(found, plan, memory_weight(parallel)) if parallel.auto_partition else (),
    }


def _recompute(asked: str) -> Recompute:
    """A budget keeps what it can: between nothing and everything; counted as everything."""
    if not asked:
        return "none"
    return "elementwise" if strategy.parse(asked).selective else "block"


def _resharded(work: Workload, live: int) -> bool:
    """Whether a rank's part of the model is more than may stay gathered; of a pipeline, the most.

    A schedule that puts off gradients of weights looks for them in what stays gathered.
    """
    found, mesh = work.shape, work.mesh
    if mesh.pipeline == 1:
        return found.parameters / mesh.tensor > live
    ends = tuple(end / mesh.tensor for end in found.ends)
    held = work.cut.most_parameters(found.block_parameters / mesh.tensor, ends)
    return held > live and not work.cut.plan.schedule.apart


def _gather_bytes(parallel: Config) -> float:
    width = 4.0 if parallel.precision == "fp32" else 2.0
    if parallel.pipeline_parallel_degree > 1:
        return width  # a pipeline's stages gather as FSDP2 does
    return {"same": width, "bf16": min(width, 2.0), "fp8": 1.0}[parallel.gather_dtype]
