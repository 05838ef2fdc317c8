"""Time of one block on each stream, forward and backward: the building blocks of a step."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from ..config.parallel import HOST_MEMORY_BACKEND
from .cluster import Cluster
from .compute_time import ComputeTimes
from .fitted_constants import FittedConstants
from .network_time import DataSheetNetwork, MeasuredNetwork, RankGroup, network_for, rank_group
from .workload import StageLayout, Workload

FLOAT = 4  # bytes


@dataclass(frozen=True)
class ComputeSegment:
    """A stretch of compute and the communication of tensor, expert and context ranks around it.

    All values are in seconds.
    """

    compute: float
    tensor: float = 0.0
    expert: float = 0.0
    overlapped_context: float = 0.0
    """Keys and values on the ring, concurrent with the compute."""
    exposed_context: float = 0.0
    """All-gather of keys and values, or reduce-scatter of their gradients."""

    @property
    def seconds(self) -> float:
        """Compute plus exposed communication."""
        computing = max(self.compute, self.overlapped_context) + self.exposed_context
        return computing + self.tensor + self.expert


class BlockTimes:
    """Durations of ``work`` on ``cluster``, in seconds."""

    def __init__(self, work: Workload, cluster: Cluster, constants: FittedConstants):
        self.work: Workload = work
        self.constants: FittedConstants = constants
        self.cluster: Cluster = cluster
        self.compute: ComputeTimes = ComputeTimes(work, cluster.gpu, constants)
        self.network: DataSheetNetwork | MeasuredNetwork = network_for(
            cluster.node, constants, work
        )
        mesh = work.mesh
        self.tensor_group: RankGroup = rank_group(mesh, "tensor")
        self.expert_replica_group: RankGroup = rank_group(mesh, "replicate")
        if work.shares_states:
            self.shard_group: RankGroup = rank_group(mesh, "shard", "context")
            self.replica_group: RankGroup = self.expert_replica_group
            self.expert_shard_group: RankGroup = rank_group(mesh, "expert_sharing")
        else:
            self.shard_group = self.expert_shard_group = RankGroup(1, 1, 1)
            self.replica_group = rank_group(mesh, "replicate", "shard", "context")
        self.stages: StageLayout = work.stage_layout

    @property
    def layers(self) -> float:
        """Blocks per rank; in a pipeline, of the rank with the most."""
        return self.stages.most_blocks

    @cached_property
    def block_parameters(self) -> float:
        """Parameters of a block before sharding."""
        shape, mesh = self.work.shape, self.work.mesh
        own = shape.attention_matrices + shape.shared_matrices + shape.router
        return own / mesh.tensor + self.expert_parameters

    @cached_property
    def expert_parameters(self) -> float:
        """Expert parameters of a block; with expert parallelism, fewer ranks share them."""
        shape, mesh = self.work.shape, self.work.mesh
        return shape.experts * shape.feed_forward_matrices / mesh.expert / mesh.tensor

    @cached_property
    def root_parameters(self) -> float:
        """Parameters of the embeddings and the head."""
        return self.work.shape.root_parameters / self.work.mesh.tensor

    @cached_property
    def end_parameters(self) -> tuple[float, float]:
        """Parameters of a pipeline's first and last stage, without blocks."""
        first, last = self.work.shape.ends
        return first / self.work.mesh.tensor, last / self.work.mesh.tensor

    @cached_property
    def rank_parameters(self) -> float:
        """Parameters of a rank before sharding; in a pipeline, of the rank with the most."""
        if self.work.mesh.pipeline == 1:
            return self.layers * self.block_parameters + self.root_parameters
        return self.stages.most_parameters(self.block_parameters, self.end_parameters)

    @cached_property
    def slowdown(self) -> float:
        """Factor on compute time: the slowest rank, and interference by collectives."""
        ranks = self.work.mesh.world
        waiting = self.constants.straggler * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0
        return (1 + waiting) * (1 + self._contention)

    @cached_property
    def _contention(self) -> float:
        """Fractional compute slowdown caused by concurrent or interleaved collectives."""
        work, network = self.work, self.network
        if not self.sharded:
            return 0.0
        compute = self.compute
        computing = compute.forward.total + compute.recompute.total + compute.backward.total
        resident = work.resident_blocks / self.layers if work.reshard_after_forward else 1.0
        gathers = 2.0 * (1 - resident)
        gathers += resident / work.micro_batches if work.gathered_across_micro_batches else 0.0
        all_reduces = 1 / work.micro_batches if work.two_hop else 1.0
        once = work.reduced_once_blocks / self.layers
        reductions = 1 - once + once / work.micro_batches
        if not work.prefetch:
            lost = network.interleaved_cost(self.shard_group, computing, gathers + reductions)
            lost += network.interleaved_cost(self.replica_group, 0.0, all_reduces)
            return (lost + self._copies(gathers)) / computing
        gathering = gathers * self.block_all_gather
        reducing = reductions * self.block_reduce_scatter
        moving = gathering + reducing
        lost = network.concurrent_cost(self.shard_group, gathering, gathers, work.direct_all_gather)
        lost += network.concurrent_cost(self.shard_group, reducing, reductions)
        if network.all_reduce_slows_compute:
            seconds = all_reduces * self.block_all_reduce
            moving += seconds
            lost += network.concurrent_cost(self.replica_group, seconds, all_reduces)
        busiest = max(moving, computing)
        return lost / busiest + self._copies(gathers) / computing

    def _copies(self, gathers: float) -> float:
        """Seconds to copy gathered parameters out, and gradients into new memory for reduction.

        Counted only where first writes to memory are slow (CPU). The nearlinear backend reduces in
        memory that it reuses.
        """
        work, compute = self.work, self.compute
        if not self.constants.fresh_seconds:
            return 0.0
        reused = work.backend == HOST_MEMORY_BACKEND
        new = 0.0 if reused else self.block_parameters * work.reduce_bytes
        copied = 2 * gathers * self.block_parameters * work.gather_bytes  # read and written
        return compute.first_write(new) + copied / compute.memory_rate

    @property
    def sharded(self) -> bool:
        return self.shard_group.ranks > 1

    @cached_property
    def block_all_gather(self) -> float:
        return self._of_block(self.all_gather)

    @cached_property
    def block_backward_all_gather(self) -> float:
        """All-gathers of a block in backward, including a second one after recomputation."""
        more = 1 - 1 / self.work.recompute_group if self.work.regathers_group else 0.0
        return self.block_all_gather * (1 + more)

    @cached_property
    def block_reduce_scatter(self) -> float:
        return self._of_block(self.reduce_scatter)

    @cached_property
    def block_all_reduce(self) -> float:
        return self._of_block(self.all_reduce)

    def _of_block(self, collective: Callable[..., float]) -> float:
        """Time a collective of a block; expert-parallel experts use their own shard group."""
        if self.work.mesh.expert == 1:
            return collective(self.block_parameters)
        dense = self.block_parameters - self.expert_parameters
        return collective(dense) + collective(self.expert_parameters, self.expert_shard_group)

    def all_gather(self, parameters: float, group: RankGroup | None = None) -> float:
        """All-gather of ``parameters`` in the shard group."""
        work, ranks = self.work, group or self.shard_group
        most = work.max_message or parameters
        messages = math.ceil(parameters / most)
        size = parameters / messages * work.gather_bytes
        wire = messages * self.network.all_gather(
            size, ranks, work.direct_all_gather, work.hierarchical
        )
        return wire + self._host_copy(parameters / ranks.ranks)

    def reduce_scatter(self, parameters: float, group: RankGroup | None = None) -> float:
        """Reduce-scatter of the gradients of ``parameters`` in the shard group."""
        ranks = group or self.shard_group
        wire = self.network.reduce_scatter(parameters * self.work.reduce_bytes, ranks)
        return wire + self._host_copy(parameters / ranks.ranks)

    def all_reduce(self, parameters: float, group: RankGroup | None = None) -> float:
        """Second hop: all-reduce of a rank's gradient shard over the replicas.

        ``group``: ranks that share the parameters of experts.
        """
        replicas = self.expert_replica_group if group else self.replica_group
        shard = parameters / (group or self.shard_group).ranks
        return self.network.all_reduce(shard * self.work.reduce_bytes, replicas)

    def _host_copy(self, shard: float) -> float:
        """Copy float32 values or gradients between device and host for an offloaded optimizer."""
        return shard * FLOAT / self.network.host if self.work.offload_optimizer else 0.0

    @cached_property
    def tied_all_reduce(self) -> float:
        """All-reduce of a tied embedding's gradients between the two ends of a pipeline."""
        plan = self.stages.plan
        apart = plan.rank_of(0) != plan.rank_of(plan.stages - 1)
        if not (apart and self.work.shape.tied):
            return 0.0
        line = rank_group(self.work.mesh, "pipeline")
        two = replace(line, ranks=2, nodes=min(2, line.nodes))
        shard = self.end_parameters[1] / self.shard_group.ranks
        return self.network.all_reduce(shard * self.work.reduce_bytes, two)

    @cached_property
    def forward(self) -> list[ComputeSegment]:
        compute, slowdown = self.compute.forward, self.slowdown
        return [
            ComputeSegment(
                compute.attention * slowdown, self.tensor_all_reduce, **self._keys_values(1.0)
            ),
            ComputeSegment(
                compute.feed_forward * slowdown, self.tensor_all_reduce, 2 * self.expert_all_to_all
            ),
        ]

    @cached_property
    def recompute(self) -> list[ComputeSegment]:
        """Recomputation of a block before its backward pass."""
        work, compute, slowdown = self.work, self.compute.recompute, self.slowdown
        if not compute.total:
            return []
        whole = work.recompute == "block"
        tensor = self.tensor_all_reduce * work.recomputed_share if whole else 0.0
        expert = self.expert_all_to_all * work.recomputed_share if whole else 0.0
        alternate = work.recompute == "alternate"
        keys_values = {} if alternate else self._keys_values(work.recomputed_share)
        # an early stop spares the reduce-scatter after the last product, not the all-gather before
        spared = tensor * (0.5 if work.sequence_parallel else 1.0) / work.recompute_group
        last = tensor - spared if work.early_stop else tensor
        return [
            ComputeSegment(compute.attention * slowdown, tensor, **keys_values),
            ComputeSegment(compute.feed_forward * slowdown, last, 2 * expert),
        ]

    @cached_property
    def backward(self) -> list[ComputeSegment]:
        compute, slowdown = self.compute.backward, self.slowdown
        second, first = (
            max(0.0, self.tensor_all_reduce - weights)
            if self.work.async_tensor_all_reduce
            else self.tensor_all_reduce
            for weights in self.compute.input_weight_gradients
        )
        return [
            ComputeSegment(compute.feed_forward * slowdown, first, 2 * self.expert_all_to_all),
            ComputeSegment(compute.attention * slowdown, second, **self._keys_values_backward),
        ]

    def _keys_values(self, share: float) -> dict[str, float]:
        """Communication of a ``share`` of keys and values, as fields of `ComputeSegment`."""
        field = "exposed_context" if self.work.context_all_gather else "overlapped_context"
        return {field: share * self._context_seconds(self.compute.bytes)}

    @property
    def _keys_values_backward(self) -> dict[str, float]:
        """Communication of key and value gradients, in float32; a ring repeats keys and values."""
        if self.work.context_all_gather:
            return {"exposed_context": self._context_seconds(FLOAT)}
        again = self._context_seconds(self.compute.bytes)
        return {"overlapped_context": again + self._context_seconds(FLOAT)}

    @cached_property
    def weight_gradients(self) -> float:
        """Weight gradients of a block, which no other stage waits for."""
        return self.compute.weight_gradients * self.slowdown

    @cached_property
    def head_weight_gradients(self) -> float:
        return self.compute.head_weight_gradients * self.slowdown

    @cached_property
    def head(self) -> tuple[float, float]:
        """Forward and backward of the embedding, head and loss."""
        forward, backward = self.compute.head
        return forward * self.slowdown, backward * self.slowdown

    @cached_property
    def optimizer_update(self) -> float:
        """Optimizer update of a rank's shard.

        An update in host memory runs at the rate of the host link: the host memory bandwidth of a
        node, divided by its GPUs, is about the same.
        """
        divided = self.layers * self.expert_parameters if self.work.mesh.expert > 1 else 0.0
        shard = (self.rank_parameters - divided) / self.shard_group.ranks
        shard += divided / self.expert_shard_group.ranks
        shard /= self.work.update_replicas
        if self.work.offload_optimizer:
            return shard * self.work.optimizer_bytes / self.network.host
        return self.compute.optimizer_update(shard)

    @cached_property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden states of one micro-batch."""
        return self.work.tokens * self.work.shape.width * self.compute.bytes

    @cached_property
    def tensor_all_reduce(self) -> float:
        """All-reduce of partial sums over tensor ranks, or an all-gather and a reduce-scatter."""
        seconds = self.network.all_reduce(self.hidden_bytes, self.tensor_group)
        return seconds / self.tensor_group.ranks if self.work.async_tensor_parallel else seconds

    @cached_property
    def expert_all_to_all(self) -> float:
        """All-to-all that dispatches tokens to their experts, or combines the results."""
        work, group = self.work, rank_group(self.work.mesh, "expert")
        copies: float = work.shape.experts_per_token
        places = group.nodes if group.nodes > 1 else group.ranks
        if work.dispatch == "random" and places > 1:
            copies = places * (1 - (1 - 1 / places) ** copies) / work.mesh.tensor
        elif work.dispatch == "adjacent":
            copies = max(1.0, copies * places / work.shape.experts) / work.mesh.tensor
        return self.network.all_to_all(self.hidden_bytes * copies, group)

    def _context_seconds(self, item_bytes: int) -> float:
        """Move keys and values, or their gradients, of all tokens among the context ranks."""
        mesh = self.work.mesh
        if mesh.context == 1:
            return 0.0
        size = 2 * self.work.tokens * self.compute.kv_width * item_bytes * mesh.context
        return self.network.all_gather(size, rank_group(mesh, "context"))

    @cached_property
    def stage_send(self) -> float:
        """Send of the hidden states of one micro-batch to the next stage."""
        if self.work.mesh.pipeline == 1:
            return 0.0
        across = rank_group(self.work.mesh, "pipeline").nodes > 1
        if not self.work.split_sends:
            return self.network.send(self.hidden_bytes, across)
        together = 0.0
        if not self.work.sequence_parallel:
            together = self.network.all_gather(self.hidden_bytes, self.tensor_group)
        return self.network.send(self.hidden_bytes / self.tensor_group.ranks, across) + together

    @cached_property
    def offload_copy(self) -> float:
        """Copy of a block's saved activations to host memory, or back."""
        return self.work.offloaded_bytes / self.network.host
