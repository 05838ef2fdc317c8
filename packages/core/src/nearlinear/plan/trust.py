"""How far a plan can be trusted: the model's error, and what no published run is like."""

from . import parameters, published
from .hardware import Cluster
from .workload import Workload

AXES = ("tensor", "context", "pipeline", "expert", "replicate")


def words(work: Workload, cluster: Cluster) -> str:
    """For a reader of a plan."""
    never, fitted = parameters.errors("held_out"), parameters.errors()
    lines = [
        f"error of such times: for {never['runs']:.0f} published runs that no fit has seen (MPT on "
        f"H100) median {never['median']:.1%}, 90th percentile {never['ninetieth']:.1%}; for the "
        f"{fitted['runs']:.0f} of the fit {fitted['median']:.1%} and {fitted['ninetieth']:.1%}; "
        "more by nearlinear plan --validate"
    ]
    lines += [f"beyond what is published: {each}" for each in unlike(work, cluster)]
    return "\n".join(lines)


def unlike(work: Workload, cluster: Cluster) -> list[str]:
    """What no published run of the tables has in common with this one."""
    runs = [*published.runs(), *published.held_out()]
    found = []
    kind = _kind(cluster)
    if kind not in {_kind(run.cluster) for run in runs}:
        found.append(f"no run here is on {kind}")
    if _axes(work) not in {_axes(run.work) for run in runs}:
        several = ", ".join(sorted(_axes(work))) or "a single rank"
        found.append(f"no run here is laid out over {several} at once")
    most = max(run.cluster.world for run in runs)
    if cluster.world > most:
        found.append(f"the largest run here has {most:,} GPUs")
    for name, asked in (
        ("offloads activations", work.offload),
        ("recomputes groups of blocks", work.together > 1),
        ("updates in host memory", work.offload_optimizer),
        ("puts off gradients of weights (zero bubble)", work.cut.plan.schedule.apart),
        ("gathers in 8 bits", work.gather_bytes < 2),
        ("computes in float32", work.precision == "fp32"),
    ):  # fmt: skip
        if asked:
            found.append(f"no run here {name}")
    return found


def _kind(cluster: Cluster) -> str:
    """``H100`` of ``H100-80GB``."""
    return cluster.gpu.name.split("-")[0]


def _axes(work: Workload) -> frozenset[str]:
    """Those with several ranks; sharing the model states counts as one."""
    several = {axis for axis in AXES if getattr(work.mesh, axis) > 1}
    return frozenset(several | ({"shard"} if work.mesh.sharing > 1 else set()))
