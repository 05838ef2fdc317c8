"""The checklist: what each item asks of a plan, which choices there are, and what it goes by."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..answer import GIB, Plan
from ..step import BUBBLE
from .trial import Trial, shape_of

PER_NODE = 3e9  # parameters of the rule


@dataclass(frozen=True)
class Item:
    """One of the list."""

    topic: str
    keys: tuple[str, ...]
    """of the config, that a choice sets"""
    choice: str
    """the name of it in `trial.Shape`; empty where there is nothing to set"""
    values: Callable[[Plan, Trial], Iterator]
    """to try, in the order of how little they ask for"""
    note: Callable[[Plan, Trial], str]
    """what it goes by, with the plan's numbers"""

    def value(self, plan: Plan):
        return getattr(shape_of(plan.config, plan.cluster), self.choice)


def rule(plan: Plan) -> int:
    """Ranks that the rule has share the model states: whole nodes, a power of two of them."""
    nodes = 2 ** math.ceil(math.log2(max(1.0, plan.work.shape.parameters / PER_NODE)))
    return min(nodes * plan.cluster.node.gpus, plan.cluster.world)


def _machine(plan: Plan, trial: Trial) -> str:
    node, gpu = plan.cluster.node, plan.cluster.gpu
    need = f"{plan.memory / GIB:.1f} of {gpu.memory_gib:.0f} GiB per GPU are needed"
    return f"{gpu.name}, {node.network_gbps:.3g} Gbit/s per node; {need}"


def _sharing(plan: Plan, trial: Trial) -> str:
    return f"a node for every 3 billion parameters would be {rule(plan)}"


def _sharings(plan: Plan, trial: Trial) -> Iterator[int]:
    data = plan.work.mesh.sharing * plan.work.mesh.replicate
    yield from (n for n in range(1, data + 1) if data % n == 0 and n % plan.work.mesh.context == 0)


def _checkpoint(plan: Plan, trial: Trial) -> str:
    return "trades a forward pass for memory"


def _checkpoints(plan: Plan, trial: Trial) -> Iterator[str]:
    yield from ("", "selective", "each", "group_2")


def _batch(plan: Plan, trial: Trial) -> str:
    passes = plan.work.passes
    return f"{passes} of them per step and rank; where memory ends it is the first to go down"


def _tensors(plan: Plan, trial: Trial) -> Iterator[int]:
    heads, most = plan.work.shape.heads, plan.cluster.node.gpus
    kv_heads = plan.work.shape.kv_heads or heads
    degree = 1
    while degree <= most:
        if heads % degree == 0 and kv_heads % degree == 0:
            yield degree
        degree *= 2


def _tensor(plan: Plan, trial: Trial) -> str:
    return f"a power of two, of the {plan.cluster.node.gpus} GPUs of a node at most"


def _pipelines(plan: Plan, trial: Trial) -> Iterator[int]:
    layers, degree = plan.work.shape.layers, 1
    while degree <= min(16, plan.cluster.nodes):
        if layers % degree == 0:
            yield degree
        degree *= 2


def _pipeline(plan: Plan, trial: Trial) -> str:
    if plan.work.mesh.pipeline == 1:
        return "across nodes, with tensor ranks inside them; after everything above"
    bubble = plan.step.exposed.get(BUBBLE, 0.0) / plan.seconds
    return f"{plan.work.passes} micro-batches leave {bubble:.0%} of a step as bubble"


def _offloads(plan: Plan, trial: Trial) -> Iterator[bool]:
    yield False
    if plan.config.activations.checkpoint:
        yield True


def _offload(plan: Plan, trial: Trial) -> str:
    if not plan.config.activations.checkpoint:
        return "goes together with activation checkpointing, which is off"
    return "what checkpoints keep goes to host memory and comes back beside computation"


def _none(plan: Plan, trial: Trial) -> Iterator:
    yield from ()


MACHINE = Item("large GPUs", (), "", _none, _machine)
ITEMS = (
    MACHINE,
    Item("sharding", ("parallel.hybrid_shard_degree",), "sharing", _sharings, _sharing),
    Item(
        "activation checkpointing",
        ("activations.checkpoint",),
        "checkpoint",
        _checkpoints,
        _checkpoint,
    ),
    Item(
        "micro-batch",
        ("batch.micro_batch_size", "batch.accumulation"),
        "micro_batch",
        lambda plan, trial: trial.micro_batches(plan),
        _batch,
    ),
    Item("tensor parallelism", ("parallel.tensor_parallel_degree",), "tensor", _tensors, _tensor),
    Item(
        "pipeline across nodes",
        ("parallel.pipeline_parallel_degree", "parallel.microbatches"),
        "pipeline",
        _pipelines,
        _pipeline,
    ),
    Item("offloading activations", ("activations.offload",), "offload", _offloads, _offload),
)
