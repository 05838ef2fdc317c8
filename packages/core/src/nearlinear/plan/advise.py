"""The ordered checklist of SMP's best practices, walked on a model and a cluster, with numbers.

Source: AWS, "SageMaker Distributed Model Parallel Best Practices" (large instances, sharding,
activation checkpointing, tensor and pipeline parallelism, offloading), and the rule of one node
more for every three billion parameters ("Train gigantic models with near-linear scaling", 2022).
Each item is tried by the planner: what it would change of the step's time and of memory.
"""

import dataclasses
import math
from dataclasses import dataclass

from ..errors import ConfigError
from ..train.config import TrainConfig
from .answer import GIB, Plan
from .search import Layout, tried

PER_NODE = 3e9  # parameters of the rule


@dataclass(frozen=True)
class Advice:
    """One item of the list."""

    topic: str
    words: str


def advise(plan: Plan) -> list[Advice]:
    """What the list says of ``plan``, in its order."""
    return [
        Advice("large GPUs", _instance(plan)),
        Advice("sharding", _sharding(plan)),
        Advice("activation checkpointing", _checkpointing(plan)),
        Advice("tensor parallelism", _tensor(plan)),
        Advice("pipeline parallelism", _pipeline(plan)),
        Advice("offloading activations", _offloading(plan)),
        Advice("what binds", plan.binding),
    ]


def text(found: list[Advice]) -> str:
    """The list, numbered."""
    return "\n".join(
        f"{number}. {each.topic}: {each.words}" for number, each in enumerate(found, start=1)
    )


def rule(plan: Plan) -> int:
    """Ranks that the rule has share the model states: whole nodes, a power of two of them."""
    nodes = 2 ** math.ceil(math.log2(max(1.0, plan.work.shape.parameters / PER_NODE)))
    return min(nodes * plan.cluster.node.gpus, plan.cluster.world)


def smallest_that_fits(plan: Plan) -> Layout | None:
    """The fewest ranks sharing the model states with which everything else stays and fits."""
    parallel = plan.config.parallel
    data = plan.work.mesh.sharing * plan.work.mesh.replicate
    for degree in (d for d in range(1, data + 1) if data % d == 0):
        changed = dataclasses.replace(parallel, hybrid_shard_degree=degree)
        found = _tried(dataclasses.replace(plan.config, parallel=changed), plan)
        if found and found.memory <= plan.cluster.gpu.memory_gib * GIB:
            return found
    return None


def _instance(plan: Plan) -> str:
    gpu = plan.cluster.gpu
    room = "it fits" if plan.fits else "it does not fit"
    return (
        f"{gpu.name} on {plan.cluster.node.name}, {plan.cluster.node.network_gbps:.0f} Gbit/s per "
        f"node: {plan.memory / GIB:.1f} of {gpu.memory_gib:.0f} GiB per GPU are needed, {room}"
    )


def _sharding(plan: Plan) -> str:
    has, wanted = plan.work.mesh.sharing, rule(plan)
    head = f"{has} ranks share the model states; a node for every 3 billion parameters is {wanted}"
    least = smallest_that_fits(plan)
    if least is None:
        return f"{head}; none fits with the rest as it is"
    degree = least.config.parallel.hybrid_shard_degree
    verdict = "as the rule has it"
    if degree < wanted:
        verdict = "the rule is cautious here"
    elif degree > wanted:
        verdict = "the rule is too bold here"
    return f"{head}; {degree} fit already, with {_change(plan, least)}: {verdict}"


def _checkpointing(plan: Plan) -> str:
    kept = plan.config.activations
    other = "" if kept.checkpoint else "each"
    changed = dataclasses.replace(kept, checkpoint=other, offload=kept.offload and bool(other))
    found = _tried(dataclasses.replace(plan.config, activations=changed), plan)
    now = f"checkpoint = {kept.checkpoint!r}; {other!r} gives"
    return f"{now} {_change(plan, found)}{_room(plan, found)}"


def _tensor(plan: Plan) -> str:
    degree, gpus = plan.work.mesh.tensor, plan.cluster.node.gpus
    if degree > gpus or degree & (degree - 1):
        return f"degree {degree}: take a power of two of at most the {gpus} GPUs of a node"
    other = degree // 2 if degree > 1 else 2
    return f"degree {degree}; {other} gives {_with(plan, tensor_parallel_degree=other)}"


def _pipeline(plan: Plan) -> str:
    degree = plan.work.mesh.pipeline
    if degree == 1:
        return "none; sharding comes first, and a pipeline where its messages hold a step up"
    bubble = plan.step.exposed.get("bubble", 0.0) / plan.seconds
    return (
        f"{degree} stages, {plan.work.passes} micro-batches: {bubble:.0%} of a step is bubble; "
        f"half as many stages give {_with(plan, pipeline_parallel_degree=degree // 2)}"
    )


def _offloading(plan: Plan) -> str:
    kept = plan.config.activations
    if not kept.offload and not kept.checkpoint:
        return "off; it goes together with activation checkpointing"
    changed = dataclasses.replace(kept, offload=not kept.offload)
    found = _tried(dataclasses.replace(plan.config, activations=changed), plan)
    now, other = ("on", "off") if kept.offload else ("off", "on")
    return f"{now}; {other} gives {_change(plan, found)}{_room(plan, found)}"


def _with(plan: Plan, **parallel) -> str:
    changed = dataclasses.replace(plan.config.parallel, hybrid_shard_degree=0, **parallel)
    found = _tried(dataclasses.replace(plan.config, parallel=changed), plan)
    return f"{_change(plan, found)}{_room(plan, found)}" if found else "what cannot be laid out"


def _tried(config: TrainConfig, plan: Plan) -> Layout | None:
    try:
        return tried(config, plan.cluster, like=plan)
    except ConfigError:
        return None


def _change(plan: Plan, found: Layout) -> str:
    """Of tokens per second and of memory."""
    tokens = batch_tokens(found.config, plan)
    rate = (tokens / found.seconds) / (plan.work.step_tokens / plan.seconds) - 1
    more = (found.memory - plan.memory) / GIB
    return f"{rate:+.1%} tokens/s and {more:+.1f} GiB per GPU"


def batch_tokens(config: TrainConfig, plan: Plan) -> int:
    """Of a step of ``config`` on the plan's cluster."""
    from .search import batch_of

    return batch_of(config, plan.cluster) * config.sequence_length


def _room(plan: Plan, found: Layout) -> str:
    fits = found.memory <= plan.cluster.gpu.memory_gib * GIB
    return "" if fits else ", which does not fit"
