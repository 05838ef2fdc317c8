"""One optimizer step as tasks on streams, and how long it takes.

Without a pipeline: a visit to every block forward and backward, with its parameters gathered ahead
and its gradients reduced behind it. A collective's stream is its communicator: gathers and
reductions of a shard group share one, as FSDP2 has it, and what crosses the network shares the
network. Passes after the second are alike, so no more than three are laid out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from .hardware import Cluster
from .parameters import Parameters
from .passes import Passes, Piece
from .streams import Task, Timeline
from .workload import Workload

COMPUTE, GATHER, SCATTER, JOIN = "compute", "all-gather", "reduce-scatter", "second hop"
TENSOR, CONTEXT, EXPERT, PIPELINE = "tensor", "context", "expert", "pipeline"
OFFLOAD, UPDATE, BUBBLE = "offload", "optimizer", "bubble"
LAID_OUT = 3  # passes


@dataclass(frozen=True)
class Step:
    """A step's time, and where it goes."""

    seconds: float
    draw: Callable[[], Timeline]
    laid_out: int
    """passes"""
    work: Workload
    parts: Passes
    middle: tuple[int, int] = (0, 0)
    """first and last task, exclusive, of the pass that those not laid out are like"""

    @cached_property
    def timeline(self) -> Timeline:
        """Of as many passes as were laid out."""
        return self.draw()

    @cached_property
    def busy(self) -> dict[str, float]:
        """Seconds of every kind of task, of a whole step; of a pipeline's slowest stage."""
        return self._accounts[0]

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Of them, those without computation beside them; ``bubble``: what a stage waits."""
        return self._accounts[1]

    @cached_property
    def _accounts(self) -> tuple[dict[str, float], dict[str, float]]:
        if self.work.mesh.pipeline > 1:
            from .pipelines import accounts

            return accounts(self)
        found = _busy_and_exposed(self.timeline)
        left_out = self.work.passes - self.laid_out
        if left_out <= 0:
            return found
        one = _busy_and_exposed(Timeline(self.timeline.tasks[slice(*self.middle)]))
        return tuple(
            {kind: value + left_out * more.get(kind, 0.0) for kind, value in each.items()}
            for each, more in zip(found, one, strict=True)
        )


def _busy_and_exposed(timeline: Timeline) -> tuple[dict[str, float], dict[str, float]]:
    return timeline.busy(), timeline.exposed(COMPUTE, (TENSOR, EXPERT))


def step(work: Workload, cluster: Cluster, fitted: Parameters) -> Step:
    """How one step of ``work`` goes on ``cluster``."""
    return step_of(Passes(work, cluster, fitted))


def step_of(parts: Passes) -> Step:
    """`step`, where its pieces are there already."""
    if parts.work.mesh.pipeline > 1:
        from .pipelines import pipelined

        return pipelined(parts.work, parts)
    return _unstaged(parts.work, parts)


def _unstaged(work: Workload, parts: Passes) -> Step:
    laid = min(work.passes, LAID_OUT)
    ends, marks, timeline = [], [0], Timeline()
    last: Task | None = None
    for index in range(laid):
        last = _pass(timeline, work, parts, last, final=index == laid - 1, first=not index)
        ends.append(last.end)
        marks.append(len(timeline.tasks))
    timeline.add(UPDATE, parts.update, [last])
    # The last pass laid out is the step's last one; those left out are like the one before it.
    more = (work.passes - laid) * (ends[1] - ends[0]) if laid > 1 else 0.0
    middle = marks[1], marks[min(2, laid)]
    return Step(timeline.end + more, lambda: timeline, laid, work, parts, middle)


def _pass(timeline, work: Workload, parts: Passes, before, final: bool, first: bool) -> Task:
    """Forward and backward of one micro-batch; its last task of computation."""
    stays = work.stays_gathered and not first
    layers = parts.work.shape.layers
    visits = [*range(layers), *reversed(range(layers))]
    network = parts.sharing.nodes > 1
    lane = "network" if network else "links"
    copies: dict[int, Task] = {}
    done: list[Task | None] = [before] * (work.prefetch + 1)  # visits, with what came before
    gathered: list[Task | None] = [None] * len(visits)
    root = None
    if parts.sharded and not stays:
        root = timeline.add(GATHER, parts.gather(parts.root), [before], lane)

    def gather(visit: int) -> None:
        if visit >= len(visits) or not parts.sharded:
            return
        whole = not work.resharded or visits[visit] < work.kept_blocks
        kept = visit == layers or (visit > layers and whole) or (stays and (visit == 0 or whole))
        if not kept:
            after = [done[-1 - work.prefetch]] if work.prefetch else [done[-1]]
            label = f"block {visits[visit]}"
            took = parts.gather_block if visit < layers else parts.gather_back
            gathered[visit] = timeline.add(GATHER, took, after, lane, label)

    for visit in range(work.prefetch):
        gather(visit)
    last: Task | None = before
    for visit, block in enumerate(visits):
        gather(visit + work.prefetch)
        waits = [gathered[visit], root]
        if visit == layers:
            last = timeline.add(COMPUTE, sum(parts.head), [last], label="head")
        if visit < layers:
            last = _run(timeline, parts.forward, [last, *waits], f"forward {block}")
            if parts.copy and work.copies_in_line:
                last = timeline.add(OFFLOAD, parts.copy, [last])
            elif parts.copy:
                copies[block] = timeline.add(OFFLOAD, parts.copy, [last], lane="copies out")
        else:
            if parts.copy and work.copies_in_line:
                last = timeline.add(OFFLOAD, parts.copy, [last, *waits])
            elif parts.copy and block < layers - 1:
                ahead = done[-1 - min(work.horizon, visit - layers + 1)]
                waits.append(timeline.add(OFFLOAD, parts.copy, [copies[block], ahead], "copies in"))
            last = _run(timeline, parts.again, [last, *waits], f"again {block}")
            last = _run(timeline, parts.backward, [last, *waits], f"backward {block}")
            took = parts.reduce_block, parts.join_block
            reduced = _reduce(timeline, parts, took, last, lane, final, f"block {block}")
            if reduced is not None and not work.overlapped_reduce:
                last = reduced
        done.append(last)
    took = parts.reduce(parts.root), parts.join(parts.root)
    reduced = _reduce(timeline, parts, took, last, lane, final, "root")
    return timeline.add(COMPUTE, 0.0, [last, reduced])


def _run(timeline, pieces: list[Piece], after: list, label: str) -> Task:
    """Pieces one after the other, each with its communication."""
    last = None
    for piece in pieces:
        waits = after if last is None else [last]
        beside = None
        if piece.context:
            beside = timeline.add(CONTEXT, piece.context, waits, label=label)
        last = timeline.add(COMPUTE, piece.compute, waits, label=label)
        if beside is not None and beside.end > last.end:
            last = timeline.add(COMPUTE, 0.0, [beside])
        for kind, seconds in (
            (CONTEXT, piece.at_once),
            (EXPERT, piece.expert),
            (TENSOR, piece.tensor),
        ):
            if seconds:
                last = timeline.add(kind, seconds, [last], label=label)
    return last if last is not None else after[0]


def _reduce(timeline, parts: Passes, took, after: Task, lane, final: bool, label: str):
    """Gradients to the ranks that keep them, then, once per step, over the replicas.

    ``took``: seconds of the two.
    """
    last = None
    if parts.sharded:
        last = timeline.add(SCATTER, took[0], [after], lane, label)
    joins = final or not parts.work.two_hop
    if parts.replicas.ranks > 1 and joins:
        where = "network" if parts.replicas.nodes > 1 else "links"
        last = timeline.add(JOIN, took[1], [last or after], where, label)
    return last
