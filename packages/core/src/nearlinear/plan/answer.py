"""What a config comes to on a cluster: time by stream, rates, days and cost, and what binds it.

``nl.plan("run.toml", "p4d.24xlarge:32", tokens=300e9)``; no cluster is needed, and no model is
built.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import ConfigError
from ..schema import coerce
from ..train import config as train_config
from ..train.config import TrainConfig
from . import parameters, workload
from .hardware import Cluster, parse_cluster
from .memory import MemoryPlan, estimate, vocabulary_of
from .memory.report import GIB
from .parameters import Parameters
from .step import (
    BUBBLE,
    COMPUTE,
    CONTEXT,
    EXPERT,
    GATHER,
    JOIN,
    OFFLOAD,
    PIPELINE,
    SCATTER,
    TENSOR,
    UPDATE,
    Step,
    step,
)
from .workload import Workload

DAY = 86400
MATTERS = 0.1  # of a step: waiting that is worth a word
TURN = {
    GATHER: "raise batch.micro_batch_size, or lower hybrid_shard_degree if memory allows",
    SCATTER: "raise batch.micro_batch_size, or lower hybrid_shard_degree if memory allows",
    JOIN: "raise batch.accumulation: replicas reduce once per step",
    TENSOR: "lower tensor_parallel_degree, and keep it within a node",
    CONTEXT: "lower context_parallel_degree",
    EXPERT: "lower expert_parallel_degree, and keep it within a node",
    PIPELINE: "raise batch.micro_batch_size, or lower pipeline_parallel_degree",
    BUBBLE: "raise parallel.microbatches, or lower pipeline_parallel_degree",
    OFFLOAD: "switch activations.offload off, or raise activation_loading_horizon",
    UPDATE: "raise batch.accumulation, or hybrid_shard_degree",
}
"""What to do about what a step waits for."""


@dataclass(frozen=True)
class Plan:
    """The answer."""

    config: TrainConfig
    cluster: Cluster
    work: Workload
    step: Step
    room: MemoryPlan
    """what the GPU that needs the most has at the worst moment"""
    tokens: float = 0.0
    """to train on; 0 = what the config's steps read"""
    usd_per_hour: float = 0.0
    """of a node; 0 = not known"""

    @property
    def fitted(self) -> Parameters:
        """What the answer stands on."""
        return self.step.parts.fitted

    @property
    def memory(self) -> float:
        """Bytes that the GPU with the most needs."""
        return self.room.total

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.work.step_tokens / self.seconds / self.cluster.world

    @property
    def model_tflops_per_gpu(self) -> float:
        """Model FLOPS, without what is computed again."""
        return self.work.model_flops / self.seconds / self.cluster.world / 1e12

    @property
    def mfu(self) -> float:
        """Of the peak of what blocks compute in."""
        return self.model_tflops_per_gpu * 1e12 / self.cluster.gpu.peak(self.work.precision)

    @property
    def steps(self) -> float:
        whole = self.tokens / self.work.step_tokens if self.tokens else self.config.train.steps
        return math.ceil(whole)

    @property
    def days(self) -> float:
        return self.steps * self.seconds / DAY

    @property
    def usd(self) -> float:
        """NaN where no price is known."""
        if not self.usd_per_hour:
            return math.nan
        return self.days * 24 * self.cluster.nodes * self.usd_per_hour

    @property
    def usd_per_billion_tokens(self) -> float:
        """NaN where no price is known."""
        per_hour = self.cluster.nodes * self.usd_per_hour or math.nan
        return per_hour / 3600 * self.seconds / self.work.step_tokens * 1e9

    @property
    def priced(self) -> str:
        """When and where a node had the price that is counted with; "" = it was given."""
        node = self.cluster.node
        return node.priced if self.usd_per_hour == node.usd_per_hour else ""

    @property
    def fits(self) -> bool:
        return self.memory <= self.cluster.gpu.memory_gib * GIB

    @cached_property
    def binding(self) -> str:
        """What limits this run, in a sentence."""
        has = self.cluster.gpu.memory_gib
        if not self.fits:
            over = self.memory / GIB - has
            return (
                f"memory: it needs {self.memory / GIB:.1f} GiB per GPU, {over:.1f} more than the "
                f"{has:.1f} of a {self.cluster.gpu.name}"
            )
        waits = {kind: value for kind, value in self.step.exposed.items() if value > 0}
        worst = max(waits, key=waits.__getitem__, default=None)
        if worst and waits[worst] > MATTERS * self.seconds:
            what = "a pipeline's bubble" if worst == BUBBLE else worst
            share = waits[worst] / self.seconds
            return f"{what}: a step waits for it {share:.0%} of its time; {TURN[worst]}"
        again = sum(piece.compute for piece in self.step.parts.again)
        share = again * self.step.parts.layers * self.work.passes / self.seconds
        more = f", {share:.0%} of it to compute again what was not kept" if share > 0.05 else ""
        computing = self.step.busy[COMPUTE] / self.seconds
        return f"computation: {computing:.0%} of a step{more}"

    def as_dict(self) -> dict:
        """Numbers by name, in seconds, bytes and USD."""
        return {
            "cluster": f"{self.cluster.node.name}:{self.cluster.nodes}",
            "gpus": self.cluster.world,
            "step_seconds": self.seconds,
            "busy_seconds": self.step.busy,
            "exposed_seconds": self.step.exposed,
            "tokens_per_step": self.work.step_tokens,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "mfu": self.mfu,
            "memory_bytes": self.memory,
            "memory": self.room.as_dict(),
            "fits": self.fits,
            "steps": self.steps,
            "days": self.days,
            "usd": None if math.isnan(self.usd) else self.usd,
            "usd_per_billion_tokens": (
                None if math.isnan(self.usd) else self.usd_per_billion_tokens
            ),
            "priced": self.priced,
            "binding": self.binding,
        }

    def __str__(self) -> str:
        from .report import text

        return text(self)

    def figure(self, ax=None):
        """The timeline of a step, on matplotlib axes."""
        from ..plots import step_streams

        return step_streams(self.step, ax)


def plan(
    config: TrainConfig | dict | str | Path | None,
    cluster: Cluster | str = "",
    *,
    tokens: float = 0.0,
    vocabulary: int = 0,
    straggler: float | None = None,
    usd_per_hour: float | None = None,
    settings: tuple[str, ...] = (),
) -> Plan:
    """What ``config`` comes to on ``cluster`` (``"p4d.24xlarge:32"``), without either.

    ``cluster``: also ``"machine.toml:2"``, by ``nearlinear tune --machine``; default: the config's
    ``plan.cluster``.
    ``tokens``: to train on, for days and cost. ``vocabulary``: ids, where data are not here and the
    family's own are not meant. ``straggler``: standard deviation of a rank's time over its mean.
    ``usd_per_hour``: of a node, above 0. ``settings``: changes of the config, as in
    ``"parallel.bf16=true"``. Raises ConfigError.
    """
    if not 0 <= coerce(tokens, float, "tokens") < math.inf:
        raise ConfigError(f"tokens = {tokens}: must be a number, 0 or more")
    if coerce(vocabulary, int, "vocabulary") < 0:
        raise ConfigError(f"vocabulary = {vocabulary}: must be 0 (what the data say) or more")
    price = coerce(usd_per_hour, float | None, "price per hour")
    if price is not None and not 0 < price < math.inf:
        raise ConfigError(f"price per hour = {usd_per_hour}: must be a number above 0")
    if settings and isinstance(config, TrainConfig):
        raise ConfigError(
            "settings change what is read from a file or a dict: give that, or a TrainConfig that "
            "has them"
        )
    asked = config if isinstance(config, TrainConfig) else train_config.load(config, settings)
    place = cluster if isinstance(cluster, Cluster) else _place(cluster, asked)
    fitted = parameters.on(place.node)
    if coerce(straggler, float | None, "straggler") is not None:
        if not 0 <= straggler < 1:
            raise ConfigError(f"straggler = {straggler}: must be 0 or more, and below 1")
        fitted = dataclasses.replace(fitted, straggler=straggler)
    ids = vocabulary or vocabulary_of(asked)
    work = workload.from_config(asked, place.world, place.node.gpus, ids, place.gpu.is_cpu)
    place.gpu.peak(work.precision)  # raises where the GPU has not the precision
    done = step(work, place, fitted)
    price = place.node.usd_per_hour if price is None else price
    room = estimate(asked, place.world, vocabulary=ids)
    return Plan(asked, place, work, done, room, tokens, price)


def _place(text: str, asked: TrainConfig) -> Cluster:
    text = coerce(text, str, "cluster") or asked.plan.cluster
    if not text:
        raise ConfigError(
            "--cluster is missing: name the machines, as in --cluster p4d.24xlarge:32, or as "
            "plan.cluster in the config"
        )
    return parse_cluster(text, asked.plan.machine)
