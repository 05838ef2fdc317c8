"""What one block costs on each stream, forward and backward: the pieces a step is made of."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from ..backends import IN_HOST_MEMORY
from .compute import Compute
from .groups import Group, group
from .hardware import Cluster
from .links import links_of
from .parameters import Parameters
from .stages import Stages
from .workload import Workload

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Piece:
    """A stretch of computation, and what tensor or expert ranks say to each other after it."""

    compute: float
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    """beside this computation: keys and values round the ring"""
    at_once: float = 0.0
    """before or after it: keys and values of all context ranks, or their gradients"""

    @property
    def seconds(self) -> float:
        """With everything that its ranks wait for."""
        computing = max(self.compute, self.context) + self.at_once
        return computing + self.tensor + self.expert


class Passes:
    """The durations of ``work`` on ``cluster``, in seconds."""

    def __init__(self, work: Workload, cluster: Cluster, fitted: Parameters):
        self.work, self.fitted, self.cluster = work, fitted, cluster
        self.compute = Compute(work, cluster.gpu, fitted)
        self.links = links_of(cluster.node, fitted, work)
        mesh = work.mesh
        self.sharing: Group = group(mesh, "shard", "context")
        self.replicas: Group = group(mesh, "replicate")
        self.tensor: Group = group(mesh, "tensor")
        self.expert_sharing: Group = group(mesh, "expert_sharing")
        self.stages: Stages = work.cut

    @property
    def layers(self) -> float:
        """Blocks of a rank; of a pipeline's, the one that has the most."""
        return self.stages.most_blocks

    @cached_property
    def block(self) -> float:
        """Parameters of a block on the ranks that share one copy of it."""
        shape, mesh = self.work.shape, self.work.mesh
        return (shape.attention_matrices + shape.router) / mesh.tensor + self.experts

    @cached_property
    def experts(self) -> float:
        """Of them, those of experts, which fewer ranks share where experts are divided."""
        shape, mesh = self.work.shape, self.work.mesh
        return shape.experts * shape.feed_forward_matrices / mesh.expert / mesh.tensor

    @cached_property
    def root(self) -> float:
        """Parameters of the embeddings and the head."""
        return self.work.shape.root_parameters / self.work.mesh.tensor

    @cached_property
    def ends(self) -> tuple[float, float]:
        """Parameters of a pipeline's two ends, beside blocks."""
        first, last = self.work.shape.ends
        return first / self.work.mesh.tensor, last / self.work.mesh.tensor

    @cached_property
    def held(self) -> float:
        """Parameters of a rank before it shares them; of a pipeline's, that with the most."""
        if self.work.mesh.pipeline == 1:
            return self.layers * self.block + self.root
        return self.stages.most_parameters(self.block, self.ends)

    @cached_property
    def slower(self) -> float:
        """What computation is lengthened by: the slowest rank, and collectives beside it."""
        ranks = self.work.mesh.world
        waiting = self.fitted.straggler * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0
        return (1 + waiting) * (1 + self._lost)

    @cached_property
    def _lost(self) -> float:
        """Of computation, what it takes longer for the collectives between it or beside it."""
        work, links = self.work, self.links
        if not self.sharded:
            return 0.0
        parts = self.compute
        computing = parts.forward.total + parts.again.total + parts.backward.total
        kept = work.kept_blocks / self.layers if work.resharded else 1.0
        times = 2.0 * (1 - kept) + (kept / work.passes if work.stays_gathered else 0.0)
        joins = 1 / work.passes if work.two_hop else 1.0
        if not work.prefetch:
            lost = links.lost_in_turn(self.sharing, computing, times + 1)
            lost += links.lost_in_turn(self.replicas, 0.0, joins)
            return (lost + self._copied(times)) / computing
        gathering = times * self.gather_block
        moving = gathering + self.reduce_block
        lost = links.lost_beside(self.sharing, gathering, times, work.direct)
        lost += links.lost_beside(self.sharing, self.reduce_block, 1)
        if links.second_hop_borrows:
            moving += joins * self.join_block
            lost += links.lost_beside(self.replicas, joins * self.join_block, joins)
        busiest = max(moving, computing)
        return lost / busiest + self._copied(times) / computing

    def _copied(self, times: float) -> float:
        """Parameters are copied from what was gathered, gradients to new memory that is reduced.

        Counted where new memory costs. What nearlinear reduces lies in memory that it keeps.
        """
        work, parts = self.work, self.compute
        if not self.fitted.fresh_seconds:
            return 0.0
        new = 0.0 if work.backend == IN_HOST_MEMORY else self.block * work.reduce_bytes
        copied = 2 * times * self.block * work.gather_bytes  # read and written
        return parts.new(new) + copied / parts.memory

    @property
    def sharded(self) -> bool:
        return self.sharing.ranks > 1

    @cached_property
    def gather_block(self) -> float:
        return self._of_block(self.gather)

    @cached_property
    def gather_back(self) -> float:
        """Of a block's gathers on the way back, those between computing again and backward, too."""
        more = 1 - 1 / self.work.together if self.work.gathered_again else 0.0
        return self.gather_block * (1 + more)

    @cached_property
    def reduce_block(self) -> float:
        return self._of_block(self.reduce)

    @cached_property
    def join_block(self) -> float:
        return self._of_block(self.join)

    def _of_block(self, move) -> float:
        """Divided experts go by themselves, among the ranks that share them."""
        if self.work.mesh.expert == 1:
            return move(self.block)
        return move(self.block - self.experts) + move(self.experts, self.expert_sharing)

    def gather(self, parameters: float, sharing: Group | None = None) -> float:
        """Seconds until ranks have all ``parameters`` that they share."""
        work, ranks = self.work, sharing or self.sharing
        most = work.message or parameters
        messages = math.ceil(parameters / most)
        size = parameters / messages * work.gather_bytes
        wire = messages * self.links.gather(size, ranks, work.direct, work.hierarchical)
        return wire + self._from_host(parameters / ranks.ranks)

    def reduce(self, parameters: float, sharing: Group | None = None) -> float:
        """Reduce-scatter in the shard group."""
        ranks = sharing or self.sharing
        wire = self.links.scatter(parameters * self.work.reduce_bytes, ranks)
        return wire + self._from_host(parameters / ranks.ranks)

    def join(self, parameters: float, sharing: Group | None = None) -> float:
        """Second hop: all-reduce of a rank's shard over the replicas."""
        shard = parameters / (sharing or self.sharing).ranks
        return self.links.reduce(shard * self.work.reduce_bytes, self.replicas)

    def _from_host(self, shard: float) -> float:
        """An offloaded optimizer's values come in float32, and its gradients go."""
        return shard * FLOAT / self.links.host if self.work.offload_optimizer else 0.0

    @cached_property
    def tie(self) -> float:
        """Both ends of a pipeline add up their gradients of a table that they share."""
        plan = self.stages.plan
        apart = plan.rank_of(0) != plan.rank_of(plan.stages - 1)
        if not (apart and self.work.shape.tied):
            return 0.0
        line = group(self.work.mesh, "pipeline")
        two = replace(line, ranks=2, nodes=min(2, line.nodes))
        return self.links.reduce(self.ends[1] / self.sharing.ranks * self.work.reduce_bytes, two)

    @cached_property
    def forward(self) -> list[Piece]:
        parts, slower = self.compute.forward, self.slower
        return [
            Piece(parts.attention * slower, self.exchange, **self._keys(1.0)),
            Piece(parts.feed_forward * slower, self.exchange, 2 * self.dispatch),
        ]

    @cached_property
    def again(self) -> list[Piece]:
        """What backward computes again, before it begins."""
        work, parts, slower = self.work, self.compute.again, self.slower
        if not parts.total:
            return []
        whole = work.recompute == "block"
        talk = self.exchange * work.recomputed_blocks if whole else 0.0
        asked = self.dispatch * work.recomputed_blocks if whole else 0.0
        keys = {} if work.recompute == "alternate" else self._keys(work.recomputed_blocks)
        # of a gather before a product and a scatter after it, stopping early spares the scatter
        spared = talk * (0.5 if work.sequence_parallel else 1.0) / work.together
        after = talk - spared if work.stops_early else talk
        return [
            Piece(parts.attention * slower, talk, **keys),
            Piece(parts.feed_forward * slower, after, 2 * asked),
        ]

    @cached_property
    def backward(self) -> list[Piece]:
        parts, slower = self.compute.backward, self.slower
        second, first = (
            max(0.0, self.exchange - weights) if self.work.beside_weights else self.exchange
            for weights in self.compute.input_weights
        )
        return [
            Piece(parts.feed_forward * slower, first, 2 * self.dispatch),
            Piece(parts.attention * slower, second, **self._gradients_of_keys),
        ]

    def _keys(self, share: float) -> dict[str, float]:
        """Of a `Piece`: a ``share`` of what brings other context ranks' keys and values."""
        way = "at_once" if self.work.context_at_once else "context"
        return {way: share * self._to_context(self.compute.bytes)}

    @property
    def _gradients_of_keys(self) -> dict[str, float]:
        """In float32; round the ring keys and values go again, before them."""
        if self.work.context_at_once:
            return {"at_once": self._to_context(FLOAT)}
        return {"context": self._to_context(self.compute.bytes) + self._to_context(FLOAT)}

    @cached_property
    def weights(self) -> float:
        """Of a block's backward pass, what nobody waits for: gradients of weights."""
        return self.compute.weights * self.slower

    @cached_property
    def head_weights(self) -> float:
        return self.compute.head_weights * self.slower

    @cached_property
    def head(self) -> tuple[float, float]:
        first, second = self.compute.head
        return first * self.slower, second * self.slower

    @cached_property
    def update(self) -> float:
        """The optimizer's, of what a rank holds.

        In host memory it goes at the rate of the link to it: a node's memory, divided by its GPUs,
        is about as fast.
        """
        divided = self.layers * self.experts if self.work.mesh.expert > 1 else 0.0
        mine = (self.held - divided) / self.sharing.ranks + divided / self.expert_sharing.ranks
        mine /= self.work.updaters
        if self.work.offload_optimizer:
            return mine * self.work.optimizer_bytes / self.links.host
        return self.compute.optimizer(mine)

    @cached_property
    def hidden(self) -> float:
        """Bytes of the hidden states of one pass."""
        return self.work.tokens * self.work.shape.width * self.compute.bytes

    @cached_property
    def exchange(self) -> float:
        """Tensor ranks add up a product's parts: an all-reduce, or a gather and a scatter."""
        seconds = self.links.reduce(self.hidden, self.tensor)
        return seconds / self.tensor.ranks if self.work.overlapped_tensor else seconds

    @cached_property
    def dispatch(self) -> float:
        """Tokens go to their experts, or come back."""
        rows = self.hidden * self.work.shape.experts_per_token
        return self.links.exchange(rows, group(self.work.mesh, "expert"))

    def _to_context(self, width: int) -> float:
        """A key and a value of every token, in numbers of ``width`` bytes, to all context ranks; or
        as many from them."""
        mesh = self.work.mesh
        if mesh.context == 1:
            return 0.0
        size = 2 * self.work.tokens * self.compute.kv_width * width * mesh.context
        return self.links.gather(size, group(mesh, "context"))

    @cached_property
    def handing_on(self) -> float:
        """Hidden states go to the next stage."""
        if self.work.mesh.pipeline == 1:
            return 0.0
        across = group(self.work.mesh, "pipeline").nodes > 1
        if not self.work.split_sends:
            return self.links.send(self.hidden, across)
        together = (
            0.0 if self.work.sequence_parallel else self.links.gather(self.hidden, self.tensor)
        )
        return self.links.send(self.hidden / self.tensor.ranks, across) + together

    @cached_property
    def copy(self) -> float:
        """What a block keeps for its backward pass goes to host memory, or comes back."""
        return self.work.offloaded / self.links.host
