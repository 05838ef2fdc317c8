"""The systems that can be compared, and the ladders that attribute a speed-up to its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import traffic
from .config import CompareConfig


@dataclass(frozen=True)
class System:
    """A training library with its options."""

    library: str
    """Key of `training.ADAPTERS`."""
    title: str
    """Label in tables and figures."""
    options: dict
    """Arguments of the adapter."""
    default_backend: str = "gloo"
    """Backend of the default process group."""
    trains_together: bool = True
    """False if ranks train separately, so that the loss may differ from other systems."""
    requires: str = ""
    """Pinned requirement that may need an environment of its own."""
    traffic: Callable[[CompareConfig], traffic.Traffic] | None = None
    """Collectives of a step; None without communication."""
    differs: Callable[[CompareConfig], bool] = lambda config: True
    """Whether the cluster lets the system differ from a simpler one."""


def _several_groups(config: CompareConfig) -> bool:
    return config.shard < config.world


def _several_ranks_per_node(config: CompareConfig) -> bool:
    return config.ranks_per_node > 1


def _nearlinear(title: str, counts=traffic.all_once, backend: str = "gloo", **options) -> System:
    return System("nearlinear", title, options, backend, traffic=counts)


def _zero(
    title: str, counts=traffic.zero3, backend: str = "gloo", differs=System.differs, **options
) -> System:
    """Describe one of DeepSpeed's ZeRO stages."""
    requires = "deepspeed==0.19.8"
    return System("zero3", title, options, backend, True, requires, counts, differs)


def _fsdp(title: str, counts=traffic.full_shard, differs=System.differs, **options) -> System:
    return System("fsdp", title, options, traffic=counts, differs=differs)


def _on_both(
    name: str, describe: Callable[..., System], title: str, *counts, **options
) -> dict[str, System]:
    """Describe a system on gloo and, under ``name`` with the suffix ``_nl``, on nearlinear."""
    return {
        name: describe(f"{title} (gloo)", *counts, **options),
        f"{name}_nl": describe(f"{title} (nearlinear)", *counts, backend="nearlinear", **options),
    }


# nearlinear's MiCS with every optional part disabled; the ladders enable them one by one.
MINIMAL = {
    "overlap_communication": False,
    "hierarchical_all_gather": "off",
    "prefetch_depth": 0,
    "sdp_max_live_parameters": 0,
    "free_blocks": True,
}
HIERARCHICAL = {**MINIMAL, "hierarchical_all_gather": "on"}
OVERLAPPED = {"hierarchical_all_gather": "on", "sdp_max_live_parameters": 0}
FLAT = {**OVERLAPPED, "hierarchical_all_gather": "off"}
ON_NEARLINEAR = {"communication_backend": "nearlinear"}
EACH_MICRO_BATCH = {"gradient_reduction": "micro_batch"}
ONCE = {"kept": True, "once": True}

SYSTEMS = {
    "compute": System(
        "fsdp", "compute only, no communication", {"kind": "compute"}, trains_together=False
    ),
    "zero3": _zero("DeepSpeed ZeRO-3 (gloo)"),
    "zero3_default": _zero(
        "DeepSpeed ZeRO-3 (gloo), its default thresholds", traffic.zero3_default, scaled=False
    ),
    "zero3_nl": _zero("DeepSpeed ZeRO-3 (nearlinear)", backend="nearlinear"),
    **_on_both("zero1", _zero, "DeepSpeed ZeRO-1", traffic.all_once_full, stage=1),
    **_on_both("zero2", _zero, "DeepSpeed ZeRO-2", traffic.zero2, stage=2),
    **_on_both("ddp", _fsdp, "DDP, no_sync", traffic.replicated, kind="ddp", once=True),
    **_on_both(
        "ddp_zero",
        _fsdp,
        "DDP, no_sync, ZeroRedundancyOptimizer",
        traffic.all_once_full,
        kind="ddp",
        once=True,
        sharded_optimizer=True,
    ),
    "mics": System(
        "mics",
        "DeepSpeed MiCS (gloo)",
        {},
        requires="deepspeed==0.19.6",
        traffic=traffic.mics,
        differs=_several_groups,
    ),
    "hpz": _zero(
        "DeepSpeed ZeRO-3, hpZ (gloo)",
        traffic.zero3_default,
        differs=_several_ranks_per_node,
        node_copies=True,
    ),
    **_on_both("fsdp1", _fsdp, "FSDP1, full shard", kind="fsdp1"),
    **_on_both(
        "fsdp1_once",
        _fsdp,
        "FSDP1, full shard, kept, one reduction",
        traffic.all_once_full,
        kind="fsdp1",
        **ONCE,
    ),
    **_on_both("fsdp2", _fsdp, "FSDP2, full shard", kind="full"),
    **_on_both("fsdp2_ahead", _fsdp, "FSDP2, full shard, prefetch", kind="full", prefetch=True),
    **_on_both(
        "hybrid", _fsdp, "FSDP2, hybrid", traffic.hybrid, differs=_several_groups, kind="hybrid"
    ),
    **_on_both(
        "fsdp2_once",
        _fsdp,
        "FSDP2, full shard, kept, one reduction",
        traffic.all_once_full,
        kind="full",
        **ONCE,
    ),
    **_on_both(
        "fsdp2_once_ahead",
        _fsdp,
        "FSDP2, full shard, kept, one reduction, prefetch",
        traffic.all_once_full,
        kind="full",
        prefetch=True,
        **ONCE,
    ),
    **_on_both(
        "hybrid_once",
        _fsdp,
        "FSDP2, hybrid, kept, one reduction",
        traffic.all_once,
        differs=_several_groups,
        kind="hybrid",
        **ONCE,
    ),
    "two_hop": _nearlinear("two-hop (gloo)", traffic.two_hop, **MINIMAL),
    "staged": _nearlinear("two-hop, hierarchy (gloo)", traffic.two_hop, **HIERARCHICAL),
    "flat": _nearlinear("two-hop, overlap (gloo)", traffic.least_memory, **FLAT),
    "overlapped": _nearlinear(
        "two-hop, hierarchy, overlap (gloo)", traffic.least_memory, **OVERLAPPED
    ),
    "ours": _nearlinear("nearlinear MiCS (gloo)", traffic.gather_once, **EACH_MICRO_BATCH),
    "ours_once": _nearlinear("nearlinear, one reduction (gloo)"),
    "ours_whole": _nearlinear(
        "nearlinear, whole replicas (gloo)", traffic.replicated, hybrid_shard_degree=1
    ),
    "two_hop_nl": _nearlinear("two-hop (nearlinear)", traffic.two_hop, "nearlinear", **MINIMAL),
    "ours_nl_lean": _nearlinear(
        "nearlinear MiCS (nearlinear), least memory",
        traffic.least_memory,
        sdp_max_live_parameters=0,
        sdp_reduce_bucket_size=0,
        **ON_NEARLINEAR,
    ),
    "ours_nl_once": _nearlinear("nearlinear, one reduction (nearlinear)", **ON_NEARLINEAR),
    "ours_nl_whole": _nearlinear(
        "nearlinear, whole replicas (nearlinear)",
        traffic.replicated,
        hybrid_shard_degree=1,
        **ON_NEARLINEAR,
    ),
    "ours_nl_sliced": _nearlinear(
        "nearlinear, whole replicas, sharded optimizer (nearlinear)",
        traffic.all_once_full,
        hybrid_shard_degree=1,
        shard_optimizer_state=True,
        **ON_NEARLINEAR,
    ),
    "ours_nl_full": _nearlinear(
        "nearlinear, full shard (nearlinear)",
        traffic.all_once_full,
        hybrid_shard_degree=0,
        **ON_NEARLINEAR,
    ),
    "ours_nl_full_lean": _nearlinear(
        "nearlinear, full shard (nearlinear), least memory",
        traffic.least_memory_full,
        hybrid_shard_degree=0,
        sdp_max_live_parameters=0,
        sdp_reduce_bucket_size=0,
        **ON_NEARLINEAR,
    ),
    "ours_nl_full_budget": _nearlinear(
        "nearlinear, full shard (nearlinear), budget of 1.25 P",
        traffic.all_once_full,
        hybrid_shard_degree=0,
        budget=1.25,
        **ON_NEARLINEAR,
    ),
    "ours_nl": _nearlinear(
        "nearlinear MiCS (nearlinear)", traffic.gather_once, **EACH_MICRO_BATCH, **ON_NEARLINEAR
    ),
}
LADDERS = {
    "the backend last": {
        "fsdp2": "FSDP2 full shard on gloo",
        "hybrid": "+ shard groups",
        "two_hop": "+ two-hop",
        "staged": "+ hierarchy",
        "overlapped": "+ overlap, with reduce-scatter by exchange",
        "ours": "+ tuning: units that fit stay gathered",
        "ours_nl": "+ the nearlinear backend",
    },
    "the backend first": {
        "fsdp2": "FSDP2 full shard on gloo",
        "fsdp2_nl": "+ the nearlinear backend, and with it hierarchy",
        "hybrid_nl": "+ shard groups",
        "two_hop_nl": "+ two-hop",
        "ours_nl_lean": "+ overlap",
        "ours_nl": "+ tuning: units that fit stay gathered",
    },
}
"""Each system adds one part to the one before it."""
