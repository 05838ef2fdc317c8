"""What one block costs on each stream, forward and backward: the pieces a step is made of."""

import math
from dataclasses import dataclass
from functools import cached_property

from .compute import ACTIVATION, Compute
from .hardware import Cluster
from .links import DIRECT_BORROWS, links_of
from .parameters import Parameters
from .workload import Group, Workload, group


@dataclass(frozen=True)
class Piece:
    """A stretch of computation, and what tensor or expert ranks say to each other after it."""

    compute: float
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    """beside this computation: keys and values round the ring"""


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
        self.layers = work.shape.layers // mesh.pipeline
        """blocks of one stage"""

    @cached_property
    def block(self) -> float:
        """Parameters of a block that a shard group shares."""
        shape, mesh = self.work.shape, self.work.mesh
        experts = shape.experts * shape.feed_forward_matrices / mesh.expert
        return (shape.attention_matrices + experts) / mesh.tensor

    @cached_property
    def root(self) -> float:
        """Parameters of the embeddings and the head; in a pipeline each end holds its own."""
        return self.work.shape.root_parameters / self.work.mesh.tensor

    @cached_property
    def slower(self) -> float:
        """What computation is lengthened by: the slowest rank, and collectives beside it."""
        ranks = self.work.mesh.world
        waiting = self.fitted.straggler * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0
        in_turn = self.sharded and not self.work.prefetch
        beside = self.fitted.turn_share if in_turn else self._borrowed
        return (1 + waiting) * (1 + beside)

    @cached_property
    def _borrowed(self) -> float:
        """A collective's multiprocessors are lost to computation while it runs."""
        work, parts = self.work, self.compute
        computing = parts.forward.total + parts.again.total + parts.backward.total
        gathers = 2.0 if work.resharded else 1.0 / work.passes if work.stays_gathered else 0.0
        moving = self.gather(self.block) * gathers + self.reduce(self.block)
        share = self.fitted.borrowed_share * (DIRECT_BORROWS if work.direct else 1.0)
        overlapped = work.prefetch > 0
        return share * min(1.0, moving / computing) if overlapped and self.sharded else 0.0

    @property
    def sharded(self) -> bool:
        return self.sharing.ranks > 1

    def gather(self, parameters: float) -> float:
        work = self.work
        most = work.message or parameters
        messages = math.ceil(parameters / most)
        size = parameters / messages * work.gather_bytes
        return messages * self.links.gather(size, self.sharing, work.direct, work.hierarchical)

    def reduce(self, parameters: float) -> float:
        """Reduce-scatter in the shard group."""
        return self.links.scatter(parameters * self.work.reduce_bytes, self.sharing)

    def join(self, parameters: float) -> float:
        """Second hop: all-reduce of a rank's shard over the replicas."""
        size = parameters * self.work.reduce_bytes / self.sharing.ranks
        return self.links.reduce(size, self.replicas)

    @cached_property
    def forward(self) -> list[Piece]:
        parts, slower = self.compute.forward, self.slower
        return [
            Piece(parts.attention * slower, self.exchange, context=self.rotation),
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
        rotation = self.rotation if work.recompute in ("block", "attention") else 0.0
        return [
            Piece(parts.attention * slower, talk, context=rotation),
            Piece(parts.feed_forward * slower, 0.0 if work.stops_early else talk, 2 * asked),
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
            Piece(parts.attention * slower, second, context=2 * self.rotation),
        ]

    @cached_property
    def head(self) -> tuple[float, float]:
        first, second = self.compute.head
        return first * self.slower, second * self.slower

    @cached_property
    def update(self) -> float:
        """The optimizer's, of what a rank holds."""
        held = self.layers * self.block + self.root / min(self.work.mesh.pipeline, 2)
        return self.compute.optimizer(held / self.sharing.ranks)

    @cached_property
    def hidden(self) -> float:
        """Bytes of the hidden states of one pass."""
        return self.work.tokens * self.work.shape.width * ACTIVATION

    @cached_property
    def exchange(self) -> float:
        """Tensor ranks add up a product's parts: an all-reduce, or a gather and a scatter."""
        seconds = self.links.reduce(self.hidden, self.tensor)
        return seconds / self.tensor.ranks if self.work.overlapped_tensor else seconds

    @cached_property
    def dispatch(self) -> float:
        """Tokens go to their experts, or come back."""
        mesh, shape = self.work.mesh, self.work.shape
        if mesh.expert == 1:
            return 0.0
        node = max(1, (mesh.ranks_per_node or mesh.world) // mesh.tensor)
        on_node = min(mesh.expert, node)
        nodes = -(-mesh.expert // on_node)
        ranks = Group(mesh.expert, nodes, max(1, node * mesh.tensor // on_node))
        return self.links.gather(self.hidden * shape.experts_per_token, ranks)

    @cached_property
    def rotation(self) -> float:
        """Keys and values of every other context rank pass by."""
        mesh = self.work.mesh
        if mesh.context == 1:
            return 0.0
        size = 2 * self.work.tokens * self.compute.kv_width * ACTIVATION * mesh.context
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
        work = self.work
        if not work.offload:
            return 0.0
        kept = self.hidden if work.recompute == "block" else 17 * self.hidden
        return kept / self.links.host
