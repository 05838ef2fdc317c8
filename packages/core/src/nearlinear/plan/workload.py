"""What a step consists of: a shape, a layout, a batch, and how the software goes about it.

`from_config` reads the very config that the trainer takes. Published runs of other libraries are
workloads too, so there are settings here that nearlinear's config does not have.
"""

from dataclasses import dataclass
from typing import Literal

from ..config import Config
from ..errors import ConfigError
from ..mesh import PLACED, Mesh
from ..parallel.activations import strategy
from ..train.config import TrainConfig
from . import shape
from .shape import Shape

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
    schedule: Literal["simple", "1f1b"] = "1f1b"
    """of a pipeline"""
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
    """read and written per parameter of a rank's shard: value, gradient (twice, for its norm),
    averages, and the copy in 16 bits"""

    @property
    def tokens(self) -> int:
        """Of one forward pass, on each rank."""
        return self.micro_batch * self.sequence // self.mesh.context

    @property
    def step_tokens(self) -> int:
        """Of one step, over all ranks."""
        return self.micro_batch * self.sequence * self.passes * self.mesh.data_ranks

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
    """The ranks that differ on ``axes``, which must be neighbours in the mesh's order."""
    order = [axis for letter in mesh.placement for axis in PLACED[letter]]
    last = max(order.index(axis) for axis in axes)
    stride = 1
    for axis in order[last + 1 :]:
        stride *= getattr(mesh, axis)
    ranks = 1
    for axis in axes:
        ranks *= getattr(mesh, axis)
    node = mesh.ranks_per_node or mesh.world
    on_node = max(1, min(ranks, node // stride))
    nodes = -(-ranks // on_node)
    return Group(ranks, nodes, max(1, min(node, mesh.world) // on_node))


def from_config(config: TrainConfig, world: int, ranks_per_node: int, vocabulary=0) -> Workload:
    """The step that ``config`` asks for on ``world`` ranks. Raises ConfigError."""
    parallel = config.parallel
    mesh = Mesh.from_config(parallel, world, ranks_per_node)
    size, passes = config.batch.micro_batch_size, config.batch.micro_batches(mesh.data_ranks)
    if mesh.pipeline > 1:
        size, passes = size // parallel.microbatches, passes * parallel.microbatches
    if config.sequence_length % mesh.context:
        raise ConfigError(
            f"data.sequence_length = {config.sequence_length} does not divide by "
            f"context_parallel_degree = {mesh.context}"
        )
    found = shape.of_model(config.model, vocabulary)
    return Workload(
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
        resharded=_resharded(parallel, found, mesh),
        two_hop=config.train.two_hop,
        stays_gathered=True,
        prefetch=parallel.prefetch_depth if parallel.overlap_communication else 0,
        overlapped_reduce=parallel.overlap_communication,
        hierarchical=parallel.hierarchical_all_gather == "on",
        split_sends=mesh.tensor > 1,
        schedule="simple" if parallel.pipeline in ("simple", "looped_bfs") else "1f1b",
        virtual=_virtual(parallel),
        offload=config.activations.offload,
        horizon=parallel.activation_loading_horizon,
        backend=parallel.communication_backend,
    )


def _recompute(asked: str) -> Recompute:
    """A budget keeps what it can: between nothing and everything; counted as everything."""
    if not asked:
        return "none"
    return "elementwise" if strategy.parse(asked).selective else "block"


def _resharded(parallel: Config, found: Shape, mesh: Mesh) -> bool:
    """Whether a rank's part of the model is more than may stay gathered."""
    held = found.parameters / (mesh.tensor * mesh.pipeline)
    return mesh.pipeline == 1 and held > parallel.sdp_max_live_parameters


def _gather_bytes(parallel: Config) -> float:
    width = 4.0 if parallel.precision == "fp32" else 2.0
    return {"same": width, "bf16": min(width, 2.0), "fp8": 1.0}[parallel.gather_dtype]


def _virtual(parallel: Config) -> int:
    several = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble",
               "dualpipev")  # fmt: skip
    return parallel.virtual_pipeline_degree or (2 if parallel.pipeline in several else 1)
