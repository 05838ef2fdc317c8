"""Search for the fastest layout of a config that fits in memory, with the same global batch.

`search` tries every layout that divides the ranks; a larger micro-batch means fewer of them.
`explain` compares each setting of a config with its alternatives, in the order of a checklist;
`suggest_fit` finds the cheapest change that makes a config fit. All three evaluate configs with
`evaluate`, so their numbers are those of `api.plan`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..config.parallel import ParallelConfig
from ..config.train import TrainConfig
from ..errors import ConfigError
from ..output import format_table
from .block_time import BlockTimes
from .cluster import Cluster
from .fitted_constants import constants_for
from .memory import estimate, least_total, vocabulary_of
from .memory.report import GIB
from .model_shape import model_shape
from .result import PlanResult
from .step_time import least_seconds, step_time_of
from .workload import Workload, workload_from_config

MAX_MICRO_BATCH = 64  # sequences
TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8, 16)
CONTEXT = (1, 2, 4, 8)
SCHEDULES = {
    ("interleaved_1f1b", 2): 1 / 2,
    ("interleaved_1f1b", 4): 1 / 4,
    ("zbv_zero_bubble", 0): 1 / 10,
}
"""Schedules of pipelines that are tried beside the config's own, with their stages per rank. The
values are the least shares of 1F1B's bubble that they may have."""
LONG = 16384  # tokens per sequence from which context parallelism is tried


class ActivationSettings(NamedTuple):
    """Checkpointing and offloading of activations."""

    checkpoint: str
    offload: bool = False
    horizon: int = 0
    """``activation_loading_horizon``; 0 leaves it unchanged."""


ACTIVATION_SETTINGS = (
    ActivationSettings(""),
    ActivationSettings("selective"),
    ActivationSettings("each"),
    ActivationSettings("each", True, 4),
    ActivationSettings("each", True, 2),
    ActivationSettings("each", True, 1),
)
"""Tried in this order: the fastest first, the least memory last."""


@dataclass(frozen=True)
class ParallelDegrees:
    """Division of the ranks of a cluster."""

    sharing: int
    """Ranks that share one copy of the model states."""
    tensor: int
    context: int
    pipeline: int
    expert: int


@dataclass(frozen=True)
class Candidate:
    """A config and its predicted time and memory."""

    config: TrainConfig
    seconds: float
    """Seconds per step; NaN if it was not computed."""
    memory: float
    """Bytes per GPU."""

    @property
    def changes(self) -> dict[str, Any]:
        """Values of all keys that a search sets."""
        parallel, batch = self.config.parallel, self.config.batch
        return {
            "parallel.hybrid_shard_degree": parallel.hybrid_shard_degree,
            "parallel.tensor_parallel_degree": parallel.tensor_parallel_degree,
            "parallel.context_parallel_degree": parallel.context_parallel_degree,
            "parallel.pipeline_parallel_degree": parallel.pipeline_parallel_degree,
            "parallel.expert_parallel_degree": parallel.expert_parallel_degree,
            "parallel.microbatches": parallel.microbatches,
            "parallel.pipeline": parallel.pipeline,
            "parallel.virtual_pipeline_degree": parallel.virtual_pipeline_degree,
            "batch.micro_batch_size": batch.micro_batch_size,
            "batch.accumulation": batch.accumulation,
            "batch.sequences": batch.sequences,
            "activations.checkpoint": self.config.activations.checkpoint,
            "activations.offload": self.config.activations.offload,
            "parallel.activation_loading_horizon": parallel.activation_loading_horizon,
        }


def search(
    config: TrainConfig, cluster: Cluster, most: int = 10, reference: PlanResult | None = None
) -> list[Candidate]:
    """Return the ``most`` fastest layouts that fit, fastest first.

    Layouts whose model states alone do not fit are left out. The others are visited in order of a
    lower bound of their step time, which is computed when the bound is the least of all. Memory
    takes longest, and is estimated in order of step time until enough layouts fit.

    Args:
        config: Model and global batch to keep.
        cluster: Cluster to divide.
        most: Number of layouts to return.
        reference: A plan whose vocabulary and constants also apply here.

    Raises ConfigError if no layout fits.
    """
    has = cluster.gpu.memory_gib * GIB
    fitting, _ = _fitting_layouts(_Layouts(config, cluster, reference, has), most)
    if not fitting:
        _, least = _fitting_layouts(_Layouts(config, cluster, reference, math.inf), most)
        smallest = f"; the smallest needs {least / GIB:.1f} GiB per GPU" if least < math.inf else ""
        raise ConfigError(
            f"no layout of this model and batch fits in the {cluster.gpu.memory_gib:.1f} GiB of a "
            f"{cluster.gpu.name}{smallest}. Use more nodes, or a smaller batch."
        )
    return sorted(fitting, key=lambda each: (each.seconds, each.memory))


def _fitting_layouts(layouts: _Layouts, most: int) -> tuple[list[Candidate], float]:
    """Return the fastest layouts, and the bytes of the smallest one that does not fit."""
    fitting: dict[tuple[ParallelDegrees, int], Candidate] = {}
    too_large: dict[tuple, int] = {}  # smallest micro-batch that does not fit
    least, cluster = math.inf, layouts.cluster
    for layout, seconds in layouts.fastest_first():
        batch = layout.degrees, layout.size
        activations = layout.degrees, layout.activations, layout.schedule
        if batch in fitting or layout.size >= too_large.get(activations, math.inf):
            continue
        memory = _memory(layout.config, cluster, layouts.reference, layouts.most_memory)
        if memory <= cluster.gpu.memory_gib * GIB:
            fitting[batch] = Candidate(layout.config, seconds, memory)
        else:
            too_large[activations] = layout.size
            least = min(least, memory)
        if len(fitting) == most:
            break
    return [*fitting.values()], least


def first_layout(config: TrainConfig, cluster: Cluster) -> TrainConfig | None:
    """Return ``config`` with any layout that divides its global batch, or None without one."""
    sequences = global_batch(config, cluster)
    for degrees in parallel_degrees(config, cluster):
        for size, micro_batches in _batches(degrees, sequences, cluster):
            layout = with_layout(config, degrees, size, micro_batches, ACTIVATION_SETTINGS[0])
            with contextlib.suppress(ConfigError):
                _workload(layout, cluster, None)
                return layout
    return None


def evaluate(
    config: TrainConfig,
    cluster: Cluster,
    most: float = math.inf,
    reference: PlanResult | None = None,
) -> Candidate:
    """Predict memory of ``config`` and, if that is at most ``most`` bytes, its step time.

    ``reference``: a plan whose vocabulary and constants also apply here. Raises ConfigError for
    configs that the trainer rejects.
    """
    blocks = _block_times(config, cluster, reference)
    memory = _memory(config, cluster, reference)
    seconds = step_time_of(blocks).seconds if memory <= most else math.nan
    return Candidate(config, seconds, memory)


def _block_times(config: TrainConfig, cluster: Cluster, reference: PlanResult | None) -> BlockTimes:
    constants = reference.constants if reference else constants_for(cluster.node)
    return BlockTimes(_workload(config, cluster, reference), cluster, constants)


@dataclass(frozen=True)
class _Layout:
    degrees: ParallelDegrees
    size: int
    """Sequences per micro-batch."""
    micro_batches: int
    """Micro-batches per step and data rank."""
    setting: int
    """Index of the activation setting."""
    config: TrainConfig
    schedule: tuple[str, int] | None = None
    """Schedule of a pipeline and its stages per rank; None: as in the config."""

    @property
    def activations(self) -> ActivationSettings:
        return ACTIVATION_SETTINGS[self.setting]


@dataclass
class _Waiting:
    """A layout in the queue of `fastest_first`, by its step time or a lower bound of it."""

    layout: _Layout
    blocks: BlockTimes | None = None
    """Times of its blocks, while only a bound is known."""
    schedule: tuple[str, int] | None = None
    """Schedule to give to the layout, while only a bound is known."""


@dataclass(frozen=True)
class _Layouts:
    """Layouts of a config that the trainer accepts."""

    config: TrainConfig
    cluster: Cluster
    reference: PlanResult | None
    """A plan whose vocabulary and constants also apply here."""
    most_memory: float
    """Bytes; degrees whose model states need more are passed over, and the memory of layouts is
    known exactly up to this."""

    def blocks(self, layout: _Layout) -> BlockTimes:
        """Return the times of a layout's blocks. Raises ConfigError if it is not accepted."""
        return _block_times(layout.config, self.cluster, self.reference)

    def with_most_memory(self) -> Iterator[tuple[_Layout, BlockTimes]]:
        """Yield a layout of all degrees and micro-batches, with the first setting that it takes."""
        vocabulary = _vocabulary(self.config, self.reference)
        sequences = global_batch(self.config, self.cluster)
        for degrees in parallel_degrees(self.config, self.cluster):
            batches = [*_batches(degrees, sequences, self.cluster)]
            if not batches:
                continue
            with contextlib.suppress(ConfigError):  # then another batch may be valid
                first = with_layout(self.config, degrees, *batches[0], ACTIVATION_SETTINGS[0])
                if least_total(first, self.cluster.world, vocabulary) > self.most_memory:
                    continue
            for size, micro_batches in batches:
                yield from self._from_setting(0, degrees, size, micro_batches)

    def with_less_memory(self, layout: _Layout) -> Iterator[tuple[_Layout, BlockTimes]]:
        """Yield the layout with the next activation setting, if there is one."""
        batch = layout.degrees, layout.size, layout.micro_batches
        return self._from_setting(layout.setting + 1, *batch)

    def _from_setting(
        self, first: int, degrees: ParallelDegrees, size: int, micro_batches: int
    ) -> Iterator[tuple[_Layout, BlockTimes]]:
        """Yield the layout with the first accepted activation setting from number ``first`` on."""
        for number in range(first, len(ACTIVATION_SETTINGS)):
            with contextlib.suppress(ConfigError):
                config = with_layout(
                    self.config, degrees, size, micro_batches, ACTIVATION_SETTINGS[number]
                )
                layout = _Layout(degrees, size, micro_batches, number, config)
                yield layout, self.blocks(layout)
                return

    def fastest_first(self) -> Iterator[tuple[_Layout, float]]:
        """Yield layouts with their step times, fastest first, also with other schedules.

        Each activation setting is slower than the one before, which the queue has first.
        """
        order = itertools.count()  # of layouts with equal times
        queue: list[tuple[float, int, _Waiting]] = []

        def wait(seconds: float, waiting: _Waiting) -> None:
            heapq.heappush(queue, (seconds, next(order), waiting))

        for layout, blocks in self.with_most_memory():
            wait(least_seconds(blocks), _Waiting(layout, blocks))
        while queue:
            seconds, _, waiting = heapq.heappop(queue)
            layout = waiting.layout
            if waiting.blocks is not None:
                exact = step_time_of(waiting.blocks).seconds
                wait(exact, _Waiting(layout))
                for schedule, bubble in SCHEDULES.items() if layout.degrees.pipeline > 1 else ():
                    bound = seconds + bubble * (exact - seconds)
                    wait(bound, _Waiting(layout, schedule=schedule))
                for other, blocks in self.with_less_memory(layout):
                    wait(least_seconds(blocks), _Waiting(other, blocks))
            elif waiting.schedule is not None:
                with contextlib.suppress(ConfigError):
                    layout = _with_schedule(layout, waiting.schedule)
                    wait(step_time_of(self.blocks(layout)).seconds, _Waiting(layout))
            else:
                yield layout, seconds


def _with_schedule(layout: _Layout, schedule: tuple[str, int]) -> _Layout:
    name, stages = schedule
    parallel = dataclasses.replace(
        layout.config.parallel, pipeline=name, virtual_pipeline_degree=stages
    )
    config = dataclasses.replace(layout.config, parallel=parallel)
    return dataclasses.replace(layout, config=config, schedule=schedule)


def _workload(config: TrainConfig, cluster: Cluster, reference: PlanResult | None) -> Workload:
    """Return the workload. Raises ConfigError for configs that the trainer rejects."""
    words = _vocabulary(config, reference)
    return workload_from_config(config, cluster.world, cluster.node.gpus, words, cluster.gpu.is_cpu)


def _memory(
    config: TrainConfig, cluster: Cluster, reference: PlanResult | None, most: float = math.inf
) -> float:
    words = _vocabulary(config, reference)
    return estimate(config, cluster.world, vocabulary=words, most=most).total


def _vocabulary(config: TrainConfig, reference: PlanResult | None) -> int:
    return reference.work.shape.vocabulary if reference else vocabulary_of(config)


def parallel_degrees(config: TrainConfig, cluster: Cluster) -> Iterator[ParallelDegrees]:
    """Yield the divisions of the ranks of ``cluster`` to try."""
    shape = model_shape(config.model)
    contexts = CONTEXT if config.sequence_length >= LONG else (1,)
    experts = [d for d in range(1, shape.experts + 1) if shape.experts % d == 0]
    for tensor in TENSOR:
        for pipeline in PIPELINE:
            if tensor > cluster.node.gpus or cluster.world % (tensor * pipeline):
                continue
            data = cluster.world // (tensor * pipeline)
            for context in contexts:
                for sharing in _shard_degrees(data, context):
                    for expert in experts:
                        if sharing % expert == 0:
                            yield ParallelDegrees(sharing, tensor, context, pipeline, expert)


def global_batch(config: TrainConfig, cluster: Cluster) -> int:
    """Return the sequences per step over all ranks."""
    batch = config.batch
    if batch.sequences:
        return batch.sequences
    degrees = config.parallel.widest.degrees(cluster.world)
    readers = degrees["replicate"] * degrees["shard"]
    return batch.micro_batch_size * batch.accumulation * readers


def _shard_degrees(data: int, context: int) -> list[int]:
    """Return the shard degrees to try: powers of two, and all data ranks."""
    found = {2**power for power in range(data.bit_length()) if data % 2**power == 0} | {data}
    return sorted(degree for degree in found if degree % context == 0)


def _batches(
    degrees: ParallelDegrees, sequences: int, cluster: Cluster
) -> Iterator[tuple[int, int]]:
    """Yield micro-batch size and number of micro-batches per data rank, smallest size first."""
    readers = cluster.world // (degrees.tensor * degrees.pipeline * degrees.context)
    for size in micro_batch_sizes(sequences, readers):
        count = sequences // (readers * size)
        if degrees.pipeline == 1 or count >= degrees.pipeline:
            yield size, count


def micro_batch_sizes(sequences: int, readers: int) -> list[int]:
    """Return the sizes that divide each reader's share of ``sequences``, smallest first."""
    mine, rest = divmod(sequences, readers)
    return [] if rest else [n for n in range(1, min(mine, MAX_MICRO_BATCH) + 1) if mine % n == 0]


def with_layout(
    config: TrainConfig,
    degrees: ParallelDegrees,
    size: int,
    micro_batches: int,
    activations: ActivationSettings,
) -> TrainConfig:
    """Return ``config`` with another layout.

    Args:
        config: The config to change.
        degrees: Division of the ranks.
        size: Sequences per micro-batch.
        micro_batches: Micro-batches per step and data rank.
        activations: Checkpointing and offloading.
    """
    pipelined = degrees.pipeline > 1
    horizon = activations.horizon or config.parallel.activation_loading_horizon
    parallel = dataclasses.replace(
        config.parallel,
        hybrid_shard_degree=degrees.sharing,
        tensor_parallel_degree=degrees.tensor,
        context_parallel_degree=degrees.context,
        pipeline_parallel_degree=degrees.pipeline,
        expert_parallel_degree=degrees.expert,
        microbatches=micro_batches if pipelined else 1,
        activation_loading_horizon=horizon,
    )
    batch = dataclasses.replace(
        config.batch,
        micro_batch_size=size * micro_batches if pipelined else size,
        accumulation=1 if pipelined else micro_batches,
        sequences=0,
    )
    kept = dataclasses.replace(
        config.activations, checkpoint=activations.checkpoint, offload=activations.offload
    )
    return dataclasses.replace(config, parallel=parallel, batch=batch, activations=kept)


@dataclass(frozen=True)
class LayoutSettings:
    """Layout of a config, as compared setting by setting in `explain`."""

    sharing: int
    tensor: int
    context: int
    pipeline: int
    micro_batch: int
    """Sequences per micro-batch."""
    checkpoint: str
    offload: bool

    @classmethod
    def of(cls, config: TrainConfig, cluster: Cluster) -> LayoutSettings:
        parallel = config.parallel
        degrees = parallel.degrees(cluster.world)
        parts = parallel.microbatches if parallel.pipeline_parallel_degree > 1 else 1
        return cls(
            degrees["shard"] * degrees["context"],
            degrees["tensor"],
            degrees["context"],
            degrees["pipeline"],
            config.batch.micro_batch_size // parts,
            config.activations.checkpoint,
            config.activations.offload,
        )

    def apply(self, config: TrainConfig, cluster: Cluster) -> TrainConfig | None:
        """Return ``config`` with these settings and its own batch; None if they do not divide it.

        Tensor and pipeline ranks are taken from the data ranks, which then read more micro-batches.
        """
        sequences = global_batch(config, cluster)
        model = self.tensor * self.pipeline
        if cluster.world % model:
            return None
        data = cluster.world // model
        sharing = min(self.sharing, data)
        readers = data // self.context
        count = sequences // (readers * self.micro_batch) if readers else 0
        if not count or count * readers * self.micro_batch != sequences:
            return None
        if data % sharing or sharing % self.context:
            return None
        if self.pipeline > 1 and count < self.pipeline:
            return None
        degrees = ParallelDegrees(
            sharing,
            self.tensor,
            self.context,
            self.pipeline,
            config.parallel.expert_parallel_degree,
        )
        activations = ActivationSettings(self.checkpoint, self.offload)
        found = with_layout(config, degrees, self.micro_batch, count, activations)
        if config.batch.sequences and self.pipeline == 1:  # keep a fixed batch fixed
            batch = dataclasses.replace(
                found.batch, accumulation=1, sequences=config.batch.sequences
            )
            found = dataclasses.replace(found, batch=batch)
        return found


def _schedule_name(parallel: ParallelConfig) -> str:
    """Return the name of a pipeline's schedule, with its stages per rank if they are set."""
    stages = parallel.virtual_pipeline_degree
    return f"{parallel.pipeline} x {stages}" if stages else parallel.pipeline


def format_candidates(found: list[Candidate], cluster: Cluster) -> str:
    """Format layouts as a table."""
    names = ("shard", "tensor", "context", "pipeline", "expert", "micro-batch", "micro-batches",
             "schedule", "checkpoint", "offload")  # fmt: skip
    rows: list[tuple[str, ...]] = [("seconds per step", *names, "GiB per GPU")]
    for each in found:
        parallel, batch = each.config.parallel, each.config.batch
        pipelined = parallel.pipeline_parallel_degree > 1
        count = parallel.microbatches if pipelined else batch.accumulation
        horizon = f"horizon {parallel.activation_loading_horizon}"
        rows.append(
            (
                f"{each.seconds:.2f}",
                str(parallel.hybrid_shard_degree),
                str(parallel.tensor_parallel_degree),
                str(parallel.context_parallel_degree),
                str(parallel.pipeline_parallel_degree),
                str(parallel.expert_parallel_degree),
                str(batch.micro_batch_size // (count if pipelined else 1)),
                str(count),
                _schedule_name(parallel) if pipelined else "none",
                each.config.activations.checkpoint or "none",
                horizon if each.config.activations.offload else "no",
                f"{each.memory / GIB:.1f}",
            )
        )
    head = f"fastest layouts of the same batch that fit on {cluster.nodes} x {cluster.node.name}:"
    return "\n".join([head, *format_table(rows)])
