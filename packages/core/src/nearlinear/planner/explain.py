"""Explain the settings of a config: the effect of every alternative, and changes to make it fit.

The checklist and its order follow AWS, "SageMaker Distributed Model Parallel Best Practices" (large
instances, sharding, activation checkpointing, tensor parallelism, pipelines across nodes,
offloading), and the rule of one node per three billion parameters ("Train gigantic models with
near-linear scaling", 2022).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ..config.train import TrainConfig
from ..errors import ConfigError
from . import search
from .api import plan as plan_config
from .cluster import Cluster, find_node, node_names
from .fitted_constants import constants_for
from .memory.report import GIB
from .result import PlanResult
from .search import Candidate, LayoutSettings
from .timeline import BUBBLE

PARAMETERS_PER_NODE = 3e9
WORTH = 0.01  # relative gain in tokens per second from which another value counts as faster

Change = dict[str, Any]
"""Values by dotted key, as in ``{"activations.checkpoint": "each"}``."""


@dataclass(frozen=True)
class ChecklistItem:
    """A setting of the checklist."""

    topic: str
    keys: tuple[str, ...]
    """Config keys of the setting; empty for the machine."""
    field: str
    """Field of `LayoutSettings`."""
    values: Callable[[PlanResult], Iterator]
    """Values to try."""
    note: Callable[[PlanResult], str]
    """Criterion, with the plan's numbers."""


@dataclass(frozen=True)
class Alternative:
    """Effect of another value of a setting."""

    value: Any
    settings: Change
    """Config keys of the alternative."""
    gain: float
    """Relative change of tokens per second."""
    extra_gib: float
    """Additional GiB per GPU."""
    missing_gib: float
    """GiB per GPU that are missing; 0 if it fits."""
    usd_per_billion_tokens: float | None = None
    """Price on another machine; NaN if unknown, None for settings."""

    def __str__(self) -> str:
        missing = ""
        if self.missing_gib:
            missing = f", {self.missing_gib:.1f} GiB more than available"
        price = ""
        if self.usd_per_billion_tokens is not None:
            usd = self.usd_per_billion_tokens
            known = f"{usd:,.0f} USD per billion tokens"
            price = ", price unknown" if math.isnan(usd) else f", {known}"
        return f"{self.gain:+.1%} tokens/s and {self.extra_gib:+.1f} GiB per GPU{missing}{price}"


@dataclass(frozen=True)
class Explanation:
    """Setting of a plan, and its best alternative."""

    topic: str
    keys: tuple[str, ...]
    value: Any
    settings: Change
    """Config keys of the plan's own value."""
    note: str
    best: Alternative | None
    """Best of the other values; None if there are none."""
    better: bool
    """True if the alternative is better than the plan's value."""
    reason: str

    def __str__(self) -> str:
        parts = [f"{self.topic}: {_assignments(self.settings) or self.value}; {self.note}"]
        if self.best is not None:
            name = _assignments(self.best.settings) or self.best.value
            parts.append(f"{name} gives {self.best}")
        verdict = f"a better value: {self.reason}" if self.better else self.reason
        return "; ".join([*parts, verdict])

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def explain(plan: PlanResult) -> list[Explanation]:
    """Compare every setting of ``plan`` with its alternatives, in the order of the checklist.

    The global batch, and everything the plan assumes, stays the same.
    """
    return [_explain_machine(plan), *(_explain_item(item, plan) for item in CHECKLIST)]


def format_explanations(found: list[Explanation], plan: PlanResult) -> str:
    """Format `explain` as a numbered list, with the bottleneck at the end."""
    lines = [f"{number}. {each}" for number, each in enumerate(found, 1)]
    return "\n".join([*lines, f"{len(lines) + 1}. bottleneck: {plan.bottleneck}"])


def three_billion_rule(plan: PlanResult) -> int:
    """Return the shard degree of one node per three billion parameters, as a power of two."""
    nodes = max(1.0, plan.work.shape.parameters / PARAMETERS_PER_NODE)
    return min(2 ** math.ceil(math.log2(nodes)) * plan.cluster.node.gpus, plan.cluster.world)


def with_setting(plan: PlanResult, **fields: Any) -> Candidate | None:
    """Evaluate ``plan`` with other fields of `LayoutSettings`; None if that is not possible."""
    settings = dataclasses.replace(LayoutSettings.of(plan.config, plan.cluster), **fields)
    config = settings.apply(plan.config, plan.cluster)
    try:
        return search.evaluate(config, plan.cluster, reference=plan) if config else None
    except ConfigError:
        return None


def _explain_item(item: ChecklistItem, plan: PlanResult) -> Explanation:
    value = getattr(LayoutSettings.of(plan.config, plan.cluster), item.field)
    found = []
    for other in item.values(plan):
        candidate = with_setting(plan, **{item.field: other}) if other != value else None
        if candidate is not None:
            settings = _settings(item, candidate.config)
            found.append(_alternative(other, settings, candidate, plan))
    current = _settings(item, plan.config)
    known = item.topic, item.keys, value, current, item.note(plan)
    if not found:
        return Explanation(*known, None, False, "no other value is possible")
    best = _best(found)
    return Explanation(*known, best, *_verdict(best, plan))


def _alternative(
    value: Any, settings: Change, candidate: Candidate | PlanResult, plan: PlanResult
) -> Alternative:
    has = plan.cluster.gpu.memory_gib
    if isinstance(candidate, PlanResult):
        has = candidate.cluster.gpu.memory_gib
    missing = max(0.0, candidate.memory / GIB - has)
    gain = plan.seconds / candidate.seconds - 1
    return Alternative(value, settings, gain, (candidate.memory - plan.memory) / GIB, missing)


def _best(found: list[Alternative]) -> Alternative:
    """Return the fastest that fits, of about equals the one with the least memory."""
    fitting = [each for each in found if not each.missing_gib]
    if not fitting:
        return min(found, key=lambda each: each.missing_gib)
    most = max(each.gain for each in fitting)
    close = [each for each in fitting if each.gain >= most - WORTH / 2]
    return min(close, key=lambda each: each.extra_gib)


def _verdict(best: Alternative, plan: PlanResult) -> tuple[bool, str]:
    if not plan.fits:
        if best.missing_gib:
            return False, "no value alone makes it fit"
        return True, "needed to fit"
    if best.missing_gib:
        return False, "every other value needs more memory than available"
    if best.gain >= WORTH:
        return True, "faster"
    return False, "no other value that fits is faster"


def _explain_machine(plan: PlanResult) -> Explanation:
    """Compare with as many other nodes with the same number of GPUs and at least the memory.

    Nodes with a price come before those without.
    """
    cluster, found = plan.cluster, []
    override = plan.constants.straggler
    given = override != constants_for(cluster.node).straggler
    for name in node_names():
        node = find_node(name)
        same = node.gpus == cluster.node.gpus and name != cluster.node.name
        if not same or node.gpu.memory_gib < cluster.gpu.memory_gib:
            continue
        try:
            other = plan_config(
                plan.config,
                Cluster(node, cluster.nodes),
                tokens=plan.tokens,
                vocabulary=plan.work.shape.vocabulary,
                straggler=override if given else None,
            )
        except ConfigError:
            continue
        alternative = _alternative(name, {}, other, plan)
        price = other.usd_per_billion_tokens
        found.append(dataclasses.replace(alternative, usd_per_billion_tokens=price))

    def order(each: Alternative) -> tuple[float, ...]:
        unpriced = math.isnan(each.usd_per_billion_tokens or 0.0)
        return each.missing_gib, unpriced, -each.gain

    best = min(found, key=order, default=None)
    node, gpu = cluster.node, cluster.gpu
    note = (
        f"{gpu.name}, {node.network_gbps:.3g} Gbit/s per node; {plan.memory / GIB:.1f} of "
        f"{gpu.memory_gib:.0f} GiB per GPU are required"
    )
    reason = "it fits here" if plan.fits else "it does not fit here"
    return Explanation("large GPUs", (), node.name, {}, note, best, False, reason)


def _settings(item: ChecklistItem, config: TrainConfig) -> Change:
    """Return the config keys of ``item``.

    A pipeline's micro-batches are parts of ``micro_batch_size``, so their number is shown, too.
    """
    pipelined = config.parallel.pipeline_parallel_degree > 1
    divided = item.field == "micro_batch" and pipelined
    keys = (*item.keys, "parallel.microbatches") if divided else item.keys
    return {key: _get(config, key) for key in keys}


def _get(config: TrainConfig, key: str) -> Any:
    table, _, name = key.partition(".")
    return getattr(getattr(config, table), name)


def _assignments(settings: Change) -> str:
    return " with ".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())


def _shard_degrees(plan: PlanResult) -> Iterator[int]:
    mesh = plan.work.mesh
    data = mesh.sharing * mesh.replicate
    yield from (n for n in range(1, data + 1) if data % n == 0 and n % mesh.context == 0)


def _micro_batches(plan: PlanResult) -> Iterator[int]:
    sequences = search.global_batch(plan.config, plan.cluster)
    yield from search.micro_batch_sizes(sequences, plan.work.mesh.data_ranks)


def _tensor_degrees(plan: PlanResult) -> Iterator[int]:
    heads, most = plan.work.shape.heads, plan.cluster.node.gpus
    kv_heads = plan.work.shape.kv_heads or heads
    degree = 1
    while degree <= most:
        if heads % degree == 0 and kv_heads % degree == 0:
            yield degree
        degree *= 2


def _pipeline_degrees(plan: PlanResult) -> Iterator[int]:
    layers, degree = plan.work.shape.layers, 1
    while degree <= min(16, plan.cluster.nodes):
        if layers % degree == 0:
            yield degree
        degree *= 2


def _pipeline_note(plan: PlanResult) -> str:
    if plan.work.mesh.pipeline == 1:
        return "across nodes, with tensor parallelism inside them; after everything above"
    bubble = plan.step.exposed.get(BUBBLE, 0.0) / plan.seconds
    return f"{plan.work.micro_batches} micro-batches leave a bubble of {bubble:.0%} of a step"


def _offload_values(plan: PlanResult) -> Iterator[bool]:
    yield False
    if plan.config.activations.checkpoint:
        yield True


def _offload_note(plan: PlanResult) -> str:
    if not plan.config.activations.checkpoint:
        return "requires activation checkpointing, which is off"
    return "copies checkpoints to host memory and back, overlapped with compute"


CHECKLIST = (
    ChecklistItem(
        "sharding",
        ("parallel.hybrid_shard_degree",),
        "sharing",
        _shard_degrees,
        lambda plan: f"one node per 3 billion parameters would be {three_billion_rule(plan)}",
    ),
    ChecklistItem(
        "activation checkpointing",
        ("activations.checkpoint",),
        "checkpoint",
        lambda plan: iter(("", "selective", "each", "group_2")),
        lambda plan: "trades a second forward pass for memory",
    ),
    ChecklistItem(
        "micro-batch",
        ("batch.micro_batch_size", "batch.accumulation"),
        "micro_batch",
        _micro_batches,
        lambda plan: f"{plan.work.micro_batches} per step and rank; lower it first to save memory",
    ),
    ChecklistItem(
        "tensor parallelism",
        ("parallel.tensor_parallel_degree",),
        "tensor",
        _tensor_degrees,
        lambda plan: f"a power of two, up to the {plan.cluster.node.gpus} GPUs of a node",
    ),
    ChecklistItem(
        "pipeline across nodes",
        ("parallel.pipeline_parallel_degree", "parallel.microbatches"),
        "pipeline",
        _pipeline_degrees,
        _pipeline_note,
    ),
    ChecklistItem(
        "offloading activations",
        ("activations.offload",),
        "offload",
        _offload_values,
        _offload_note,
    ),
)


def suggest_fit(plan: PlanResult) -> str:
    """Describe the cheapest change of one or two keys that makes ``plan`` fit."""
    single = list(_memory_changes(plan.config, plan.cluster))
    found, least = _cheapest((change for _, change in single), plan)
    if found is None:
        pairs = (one | other for (a, one), (b, other) in combinations(single, 2) if a != b)
        found, least_of_two = _cheapest(pairs, plan)
        least = min(least, least_of_two)
    if found is None:
        missing = least / GIB - plan.cluster.gpu.memory_gib
        return (
            f"no change of one or two keys makes it fit: the least is {least / GIB:.1f} GiB per "
            f"GPU, {missing:.1f} too many. Use more nodes, GPUs with more memory, or tensor or "
            "pipeline parallelism (see --search)."
        )
    change, candidate = found
    return (
        f"cheapest change that makes it fit: {_assignments(change)}; "
        f"{candidate.seconds:.3f} s per step"
    )


def _cheapest(
    changes: Iterable[Change], plan: PlanResult
) -> tuple[tuple[Change, Candidate] | None, float]:
    """Return the fitting change with the shortest step, and the least memory of all changes."""
    has = plan.cluster.gpu.memory_gib * GIB
    found, least = [], plan.memory
    for change in changes:
        try:
            config = _changed(plan.config, change)
            candidate = search.evaluate(config, plan.cluster, has, plan)
        except ConfigError:  # the trainer rejects it
            continue
        least = min(least, candidate.memory)
        if candidate.memory <= has:
            found.append((change, candidate))
    return min(found, key=lambda each: each[1].seconds, default=None), least


def _changed(config: TrainConfig, change: Change) -> TrainConfig:
    """Return ``config`` with ``change``. Raises ConfigError for conflicting keys."""
    tables: dict[str, dict] = {}
    for key, value in change.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    changed = {t: dataclasses.replace(getattr(config, t), **keys) for t, keys in tables.items()}
    return dataclasses.replace(config, **changed)


def _memory_changes(config: TrainConfig, cluster: Cluster) -> Iterator[tuple[str, Change]]:
    """Yield changes that need less memory, each with its kind; two of a kind exclude each other."""
    parallel, checkpoint = config.parallel, config.activations.checkpoint
    for value in {"": ("selective", "each"), "selective": ("each",)}.get(checkpoint, ()):
        yield "checkpoint", {"activations.checkpoint": value}
    if not config.activations.offload:
        yield "offload", {"activations.offload": True}
    for change in _smaller_batches(config, cluster):
        yield "batch", change
    data = cluster.world // (parallel.tensor_parallel_degree * parallel.pipeline_parallel_degree)
    sharing = parallel.sharing or data
    while sharing < data:
        sharing = min(data, 2 * sharing)
        yield "sharding", {"parallel.hybrid_shard_degree": sharing}
    if not parallel.offload_optimizer:
        yield "optimizer", {"parallel.offload_optimizer": True}


def _smaller_batches(config: TrainConfig, cluster: Cluster) -> Iterator[Change]:
    """Yield smaller micro-batches with the same global batch."""
    batch, degrees = config.batch, config.parallel.degrees(cluster.world)
    parts = config.parallel.microbatches if degrees["pipeline"] > 1 else 1
    readers = degrees["replicate"] * degrees["shard"]
    mine = search.global_batch(config, cluster) // readers
    now = batch.micro_batch_size // parts
    for size in search.micro_batch_sizes(mine // parts, 1):
        if size < now:
            change: Change = {"batch.micro_batch_size": size * parts}
            if not batch.sequences:
                change["batch.accumulation"] = mine // (size * parts)
            yield change
    for size in search.micro_batch_sizes(batch.micro_batch_size, 1) if parts > 1 else ():
        if size < now:
            yield {"parallel.microbatches": batch.micro_batch_size // size}
