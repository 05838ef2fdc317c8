"""Result of a plan: step time by stream, rates, days, cost, memory, and the bottleneck."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..config.train import TrainConfig
from ..output import format_duration, format_rate, format_table
from .cluster import Cluster
from .fitted_constants import FittedConstants
from .memory import MemoryEstimate
from .memory.report import GIB
from .published.runs import held_out_runs, published_runs
from .similar_runs import SHARE, SimilarRuns, similar_runs
from .timeline import (
    ALL_GATHER,
    ALL_REDUCE,
    BUBBLE,
    COMPUTE,
    CONTEXT,
    EXPERT,
    OFFLOAD,
    PIPELINE,
    REDUCE_SCATTER,
    TENSOR,
    UPDATE,
    StepTime,
)
from .workload import Workload

SECONDS_PER_DAY = 86400
BOTTLENECK_SHARE = 0.1  # share of a step from which exposed time counts as the bottleneck
REMEDIES = {
    ALL_GATHER: "raise batch.micro_batch_size, or lower hybrid_shard_degree if memory allows",
    REDUCE_SCATTER: "raise batch.micro_batch_size, or lower hybrid_shard_degree if memory allows",
    ALL_REDUCE: "raise batch.accumulation: replicas reduce once per step",
    TENSOR: "lower tensor_parallel_degree, and keep it within a node",
    CONTEXT: "lower context_parallel_degree",
    EXPERT: "lower expert_parallel_degree, and keep it within a node",
    PIPELINE: "raise batch.micro_batch_size, or lower pipeline_parallel_degree",
    BUBBLE: "raise parallel.microbatches, or lower pipeline_parallel_degree",
    OFFLOAD: "switch activations.offload off, or raise activation_loading_horizon",
    UPDATE: "raise batch.accumulation, or hybrid_shard_degree",
}
"""Advice for each kind of exposed time."""


@dataclass(frozen=True)
class PlanResult:
    """Predicted time, memory and cost of a config on a cluster."""

    config: TrainConfig
    cluster: Cluster
    work: Workload
    step: StepTime
    memory_estimate: MemoryEstimate
    """Peak memory of the GPU that needs the most."""
    tokens: float = 0.0
    """Tokens to train on; 0 means those of the config's steps."""
    usd_per_hour: float = 0.0
    """Price of a node; 0 means unknown."""

    @property
    def constants(self) -> FittedConstants:
        """Constants of the time model used for this result."""
        return self.step.blocks.constants

    @property
    def memory(self) -> float:
        """Bytes of memory of the GPU that needs the most."""
        return self.memory_estimate.total

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return self.step.seconds

    @cached_property
    def similar_runs(self) -> SimilarRuns:
        """Errors of the published runs most like this one."""
        return similar_runs(self.work, self.cluster)

    @property
    def likely_seconds(self) -> tuple[float, float]:
        """Range of seconds per step that holds most published runs like this one."""
        like = self.similar_runs
        return like.low * self.seconds, like.high * self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.work.step_tokens / self.seconds / self.cluster.world

    @property
    def model_tflops_per_gpu(self) -> float:
        """Model TFLOPS, without recomputation."""
        return self.work.model_flops / self.seconds / self.cluster.world / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPS utilization, relative to the peak of the blocks' precision."""
        return self.model_tflops_per_gpu * 1e12 / self.cluster.gpu.peak(self.work.precision)

    @property
    def steps(self) -> int:
        """Steps to train on all tokens."""
        steps = self.tokens / self.work.step_tokens if self.tokens else self.config.train.steps
        return math.ceil(steps)

    @property
    def days(self) -> float:
        return self.steps * self.seconds / SECONDS_PER_DAY

    @property
    def usd(self) -> float:
        """Cost of all steps; NaN if the price is unknown."""
        if not self.usd_per_hour:
            return math.nan
        return self.days * 24 * self.cluster.nodes * self.usd_per_hour

    @property
    def usd_per_billion_tokens(self) -> float:
        """Cost per billion tokens; NaN if the price is unknown."""
        per_hour = self.cluster.nodes * self.usd_per_hour or math.nan
        return per_hour / 3600 * self.seconds / self.work.step_tokens * 1e9

    @property
    def priced(self) -> str:
        """Date and region of the table's price; empty if the user gave a price."""
        node = self.cluster.node
        return node.priced if self.usd_per_hour == node.usd_per_hour else ""

    @property
    def fits(self) -> bool:
        """True if the peak memory fits on the GPU."""
        return self.memory <= self.cluster.gpu.memory_gib * GIB

    @cached_property
    def bottleneck(self) -> str:
        """Resource that limits this run, with a remedy."""
        has = self.cluster.gpu.memory_gib
        if not self.fits:
            over = self.memory / GIB - has
            return (
                f"memory: {self.memory / GIB:.1f} GiB per GPU are required, {over:.1f} more than "
                f"the {has:.1f} of a {self.cluster.gpu.name}"
            )
        exposed = {kind: value for kind, value in self.step.exposed.items() if value > 0}
        worst = max(exposed, key=exposed.__getitem__, default=None)
        if worst and exposed[worst] > BOTTLENECK_SHARE * self.seconds:
            name = "the pipeline bubble" if worst == BUBBLE else worst
            share = exposed[worst] / self.seconds
            return f"{name}: {share:.0%} of a step is exposed; {REMEDIES[worst]}"
        blocks = self.step.blocks
        recompute = sum(segment.compute for segment in blocks.recompute)
        share = recompute * blocks.layers * self.work.micro_batches / self.seconds
        more = f", of which {share:.0%} is recomputation" if share > 0.05 else ""
        computing = self.step.busy[COMPUTE] / self.seconds
        return f"compute: {computing:.0%} of a step{more}"

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers by name, in seconds, bytes and USD."""
        return {
            "cluster": f"{self.cluster.node.name}:{self.cluster.nodes}",
            "gpus": self.cluster.world,
            "step_seconds": self.seconds,
            "likely_step_seconds": self.likely_seconds,
            "busy_seconds": self.step.busy,
            "exposed_seconds": self.step.exposed,
            "tokens_per_step": self.work.step_tokens,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "mfu": self.mfu,
            "memory_bytes": self.memory,
            "memory": self.memory_estimate.as_dict(),
            "fits": self.fits,
            "steps": self.steps,
            "days": self.days,
            "usd": None if math.isnan(self.usd) else self.usd,
            "usd_per_billion_tokens": (
                None if math.isnan(self.usd) else self.usd_per_billion_tokens
            ),
            "priced": self.priced,
            "binding": self.bottleneck,
        }

    def __str__(self) -> str:
        return "\n\n".join(
            [
                self._title(),
                self._streams(),
                str(self.memory_estimate),
                self._rates(),
                f"bottleneck: {self.bottleneck}",
                confidence(self),
            ]
        )

    def figure(self, ax: Any = None) -> Any:
        """Draw the timeline of a step on matplotlib axes."""
        from ..plots import step_streams

        return step_streams(self.step, ax)

    def _title(self) -> str:
        work, mesh, cluster = self.work, self.work.mesh, self.cluster
        layout = ", ".join(
            f"{axis} {getattr(mesh, axis)}"
            for axis in ("shard", "replicate", "tensor", "context", "expert", "pipeline")
            if getattr(mesh, axis) > 1
        )
        return (
            f"{self.config.model.name}: {work.shape.parameters / 1e9:.2f} billion parameters in "
            f"{work.shape.layers} blocks; {work.micro_batches} x {work.micro_batch} x "
            f"{work.sequence} tokens per data rank and step\n{cluster.nodes} x "
            f"{cluster.node.name}, {cluster.world} {cluster.gpu.name}: {layout or 'one rank'}"
        )

    def _streams(self) -> str:
        rows = [("one step", "seconds", "exposed")]
        for kind, busy in self.step.busy.items():
            exposed = busy if kind == COMPUTE else self.step.exposed.get(kind, 0.0)
            rows.append((kind, f"{busy:.3f}", f"{exposed:.3f}"))
        if BUBBLE in self.step.exposed:
            rows.append(("pipeline bubble", "", f"{self.step.exposed[BUBBLE]:.3f}"))
        rows.append(("total", "", f"{self.seconds:.3f}"))
        return "\n".join(format_table(rows))

    def _rates(self) -> str:
        has = self.cluster.gpu.memory_gib
        usd = "price unknown" if math.isnan(self.usd) else f"{self.usd:,.0f} USD"
        when = f" on demand ({self.priced})" if self.priced else ""
        rate, tokens = self.tokens_per_second_per_gpu, self.steps * self.work.step_tokens
        roughly = "roughly " if self.memory_estimate.rough else ""
        return (
            f"{rate:,.0f} tokens/s per GPU, {format_rate(rate * self.cluster.world)} in total; "
            f"{self.model_tflops_per_gpu:.0f} model TFLOPS per GPU, MFU {self.mfu:.1%}\n"
            f"{format_rate(tokens)} tokens: {self.steps:,} steps, "
            f"{format_duration(self.days * SECONDS_PER_DAY)}, {usd}{when}\n"
            f"memory: {roughly}{self.memory / GIB:.1f} of {has:.1f} GiB per GPU"
        )


def confidence(result: PlanResult) -> str:
    """Describe the error of the time model, and the features that no published run has."""
    like, (low, high) = result.similar_runs, result.likely_seconds
    features = ", ".join(like.features) or "any kind"
    lines = [
        f"likely between {low:.3g} and {high:.3g} s per step: of {like.count} published runs like "
        f"it ({features}), each predicted without its source, {SHARE:.0%} took {like.low:.2f} to "
        f"{like.high:.2f} times the predicted time. Details: nearlinear plan --validate"
    ]
    lines += [f"extrapolated: {each}" for each in extrapolations(result.work, result.cluster)]
    return "\n".join(lines)


def extrapolations(work: Workload, cluster: Cluster) -> list[str]:
    """Return the features of ``work`` and ``cluster`` that no published run has."""
    runs = [*published_runs(), *held_out_runs()]
    found = []
    kind = cluster.gpu.model
    if kind not in {run.cluster.gpu.model for run in runs}:
        found.append(f"no published run is on {kind}")
    if _parallel_axes(work) not in {_parallel_axes(run.work) for run in runs}:
        axes = ", ".join(sorted(_parallel_axes(work))) or "a single rank"
        found.append(f"no published run combines {axes}")
    most = max(run.cluster.world for run in runs)
    if cluster.world > most:
        found.append(f"the largest published run has {most:,} GPUs")
    for feature, used in (
        ("offloads activations", work.offload),
        ("recomputes groups of blocks", work.recompute_group > 1),
        ("updates in host memory", work.offload_optimizer),
        ("delays weight gradients (zero bubble)", work.stage_layout.plan.spec.splits_backward),
        ("gathers in 8 bits", work.gather_bytes < 2),
        ("computes in float32 (parallel.bf16 = true is faster)", work.precision == "fp32"),
    ):  # fmt: skip
        if used:
            found.append(f"no published run {feature}")
    return found


def _parallel_axes(work: Workload) -> frozenset[str]:
    """Axes with several ranks; all sharding of model states counts as one axis."""
    axes = ("tensor", "context", "pipeline", "expert", "replicate")
    several = {axis for axis in axes if getattr(work.mesh, axis) > 1}
    return frozenset(several | ({"shard"} if work.mesh.sharing > 1 else set()))
