"""Who races. A contestant is built once per rank and then asked for steps, in turn with others.

``build(name, plan)`` gives an object with ``step(batches) -> float``: one optimizer step over this
rank's micro-batches, and the mean of their losses on this rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from .. import theory
from ..plan import Plan


@dataclass(frozen=True)
class Entry:
    """A contestant: the module that builds it, with these options, and how it is shown."""

    module: str
    title: str
    options: dict
    default_backend: str = "gloo"  # of the processes it runs in
    trains_together: bool = True
    requires: str = ""  # a release that may need an environment of its own
    traffic: Callable[[Plan], theory.Traffic] | None = None  # what it must send


def _ours(title: str, traffic=theory.kept, backend: str = "gloo", **options) -> Entry:
    return Entry("ours", title, options, backend, traffic=traffic)


def _zero(title: str, traffic=theory.zero, backend: str = "gloo", **options) -> Entry:
    needs = "deepspeed==0.19.8"
    return Entry("zero", title, options, backend, requires=needs, traffic=traffic)


def _fsdp(title: str, traffic=theory.full_shard, **options) -> Entry:
    return Entry("fsdp", title, options, traffic=traffic)


# MiCS by this project with its parts switched off, from which the attribution adds them again.
BARE = {
    "overlap_communication": False,
    "hierarchical_all_gather": "off",
    "prefetch_depth": 0,
    "sdp_max_live_parameters": 0,
    "free_blocks": True,
}
STAGED = {**BARE, "hierarchical_all_gather": "on"}
OVERLAPPED = {"hierarchical_all_gather": "on", "sdp_max_live_parameters": 0}
FLAT = {**OVERLAPPED, "hierarchical_all_gather": "off"}
NEARLINEAR = {"communication_backend": "nearlinear"}

ENTRIES = {
    "compute": Entry(
        "fsdp", "compute only, no communication", {"kind": "compute"}, trains_together=False
    ),
    "zero3": _zero("DeepSpeed ZeRO-3 (gloo)"),
    "zero3_default": _zero(
        "DeepSpeed ZeRO-3 (gloo), its default thresholds", theory.zero_default, scaled=False
    ),
    "zero3_nl": _zero("DeepSpeed ZeRO-3 (nearlinear)", backend="nearlinear"),
    "mics": Entry(
        "mics",
        "DeepSpeed MiCS (gloo)",
        {},
        requires="deepspeed==0.19.6",
        traffic=theory.mics,
    ),
    "fsdp1": _fsdp("FSDP1, full shard (gloo)", kind="fsdp1"),
    "fsdp2": _fsdp("FSDP2, full shard (gloo)", kind="full"),
    "fsdp2_nl": _fsdp("FSDP2, full shard (nearlinear)", kind="full", backend="nearlinear"),
    "hybrid": _fsdp("FSDP2, hybrid (gloo)", theory.hybrid, kind="hybrid"),
    "hybrid_nl": _fsdp(
        "FSDP2, hybrid (nearlinear)", theory.hybrid, kind="hybrid", backend="nearlinear"
    ),
    "two_hop": _ours("two-hop (gloo)", theory.two_hop, **BARE),
    "staged": _ours("two-hop, hierarchy (gloo)", theory.two_hop, **STAGED),
    "flat": _ours("two-hop, overlap (gloo)", theory.lean, **FLAT),
    "overlapped": _ours("two-hop, hierarchy, overlap (gloo)", theory.lean, **OVERLAPPED),
    "ours": _ours("nearlinear MiCS (gloo)"),
    "two_hop_nl": _ours("two-hop (nearlinear)", theory.two_hop, "nearlinear", **BARE),
    "ours_nl_lean": _ours(
        "nearlinear MiCS (nearlinear), least memory",
        theory.lean,
        sdp_max_live_parameters=0,
        sdp_reduce_bucket_size=0,
        **NEARLINEAR,
    ),
    "ours_nl": _ours("nearlinear MiCS (nearlinear)", **NEARLINEAR),
}
# Each adds one thing to the one before it.
LADDERS = {
    "the backend last": {
        "fsdp2": "FSDP2 full shard on gloo",
        "hybrid": "+ shard groups",
        "two_hop": "+ two-hop",
        "staged": "+ hierarchy",
        "overlapped": "+ overlap, with reduce-scatter by exchange",
        "ours": "+ tuning: what fits stays gathered",
        "ours_nl": "+ the nearlinear backend",
    },
    "the backend first": {
        "fsdp2": "FSDP2 full shard on gloo",
        "fsdp2_nl": "+ the nearlinear backend, and with it hierarchy",
        "hybrid_nl": "+ shard groups",
        "two_hop_nl": "+ two-hop",
        "ours_nl_lean": "+ overlap",
        "ours_nl": "+ tuning: what fits stays gathered",
    },
}


def build(name: str, plan: Plan):
    entry = ENTRIES[name]
    module = importlib.import_module(f"{__name__}.{entry.module}")
    return module.build(plan, **entry.options)
