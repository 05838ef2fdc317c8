"""A plan as text, for a terminal."""

import math

from ..columns import table
from ..watch.draw import duration, short
from . import trust
from .answer import GIB, Plan
from .step import BUBBLE, COMPUTE


def text(plan: Plan) -> str:
    """The whole answer."""
    parts = [
        _title(plan),
        _streams(plan),
        str(plan.room),
        _rates(plan),
        f"what binds: {plan.binding}",
        trust.words(plan.work, plan.cluster),
    ]
    return "\n\n".join(parts)


def _title(plan: Plan) -> str:
    work, mesh = plan.work, plan.work.mesh
    layout = ", ".join(
        f"{axis} {getattr(mesh, axis)}"
        for axis in ("shard", "replicate", "tensor", "context", "expert", "pipeline")
        if getattr(mesh, axis) > 1
    )
    cluster = plan.cluster
    return (
        f"{plan.config.model.name}: {work.shape.parameters / 1e9:.2f} billion parameters in "
        f"{work.shape.layers} blocks; {work.passes} x {work.micro_batch} x {work.sequence} tokens "
        f"per data rank and step\n{cluster.nodes} x {cluster.node.name}, {cluster.world} "
        f"{cluster.gpu.name}: {layout or 'one rank'}"
    )


def _streams(plan: Plan) -> str:
    step = plan.step
    rows = [("one step", "seconds", "exposed")]
    for kind, busy in step.busy.items():
        waits = busy if kind == COMPUTE else step.exposed.get(kind, 0.0)
        rows.append((kind, f"{busy:.3f}", f"{waits:.3f}"))
    if BUBBLE in step.exposed:
        rows.append(("a stage waits", "", f"{step.exposed[BUBBLE]:.3f}"))
    rows.append(("together", "", f"{plan.seconds:.3f}"))
    return "\n".join(table(rows))


def _rates(plan: Plan) -> str:
    memory, has = plan.memory / GIB, plan.cluster.gpu.memory_gib
    usd = "price not known" if math.isnan(plan.usd) else f"{plan.usd:,.0f} USD"
    when = f" on demand ({plan.priced})" if plan.priced else ""
    tokens = plan.steps * plan.work.step_tokens
    return "\n".join(
        [
            f"{plan.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, "
            f"{short(plan.tokens_per_second_per_gpu * plan.cluster.world)} in all; "
            f"{plan.model_tflops_per_gpu:.0f} model TFLOPS per GPU, MFU {plan.mfu:.1%}",
            f"{short(tokens)} tokens: {plan.steps:,} steps, "
            f"{duration(plan.days * 86400)}, {usd}{when}",
            f"memory: {'roughly ' * bool(plan.room.rough)}{memory:.1f} of {has:.1f} GiB per GPU",
        ]
    )
