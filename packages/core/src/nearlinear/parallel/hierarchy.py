"""Shard groups that span nodes: who fetches from where, and for which units two stages pay.

A rank's shard enters another node once either way; in two stages it does so through the rank at the
same place there, all places at once, and the rest is exchanged inside the node. What that gains
depends on the links, so ``hierarchical_all_gather = "auto"`` measures each size once, when a model
is sharded, and all ranks take the slowest rank's word.
"""

import logging
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..c10d_names import all_gather
from ..mesh import Mesh

log = logging.getLogger(__name__)

ROUNDS = 3


@dataclass(frozen=True)
class Hierarchy:
    """A shard group cut by nodes: ``across`` holds the ranks at one place of every node, ``inside``
    those of this node. Ranks of the shard group are node by node, ``width`` on each."""

    across: dist.ProcessGroup
    inside: dist.ProcessGroup
    width: int

    def gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """All-gather ``input`` (E,) of every rank into ``output`` (ranks * E,).

        The input may lie in the output. Both stages write where the result belongs, so nothing is
        shuffled afterwards.
        """
        parts = output.view(-1, self.width, input.numel())  # (nodes, places on a node, elements)
        place = self.inside.rank()
        dist.all_gather(list(parts[:, place]), input, group=self.across)
        for node in parts:
            all_gather(node.view(-1), node[place], group=self.inside)


def cut(mesh: Mesh, rank: int, axis: str = "sharing") -> tuple[list[int], list[int]] | None:
    """The ranks ``across`` nodes and ``inside`` this node of ``rank``'s group of ``axis``.

    None where two stages make no sense: one node, one rank per node, or nodes that hold different
    numbers of the group's ranks.
    """
    ranks = mesh.group(axis, rank)
    nodes: dict[int, list[int]] = {}
    for member in ranks:
        nodes.setdefault(mesh.node(member), []).append(member)
    widths = {len(members) for members in nodes.values()}
    if len(nodes) < 2 or len(widths) > 1 or widths == {1}:
        return None
    mine = nodes[mesh.node(rank)]
    place = mine.index(rank)
    return [members[place] for members in nodes.values()], mine


def worth_it(
    hierarchy: Hierarchy,
    shards: dist.ProcessGroup,
    memory,
    sizes: list[tuple[int, torch.dtype]],
    device: torch.device,
) -> list[bool]:
    """For each of ``sizes``, what a rank sends: whether gathering in two stages is faster.

    A collective call; the answer is the same on every rank of the job.
    """
    times = {}
    for elements, dtype in dict.fromkeys(sizes):
        output = memory.allocate((elements * shards.size(),), dtype=dtype, device=device)
        mine = output.view(-1, elements)[shards.rank()].zero_()
        ways = (
            lambda output=output, mine=mine: all_gather(output, mine, group=shards),
            lambda output=output, mine=mine: hierarchy.gather(output, mine),
        )
        found = torch.tensor(_alternately(ways, device), dtype=torch.float64, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        times[elements, dtype] = found.tolist()
    for (elements, dtype), (flat, staged) in times.items():
        log.info(
            "all-gather of %.1f MiB: %.1f ms in one stage, %.1f ms across nodes first",
            elements * shards.size() * dtype.itemsize / 2**20,
            flat * 1e3,
            staged * 1e3,
        )
    return [times[size][1] < times[size][0] for size in sizes]


def _alternately(ways, device: torch.device) -> list[float]:
    """Median seconds of each way, after one round to warm up."""
    seconds = [[] for _ in ways]
    for _ in range(1 + ROUNDS):
        for way, taken in zip(ways, seconds, strict=True):
            dist.barrier()
            begin = time.perf_counter()
            way()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken[1:]) for taken in seconds]
