"""Who races. A contestant is built once per rank and then asked for steps, in turn with others.

``build(name, plan)`` gives an object with ``step(batches) -> float``: one optimizer step over this
rank's micro-batches, and the mean of their losses on this rank.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from ..plan import Plan


@dataclass(frozen=True)
class Entry:
    """A contestant: the module that builds it, with these options, and how it is shown."""

    module: str
    title: str
    options: dict
    default_backend: str = "gloo"  # of the processes it runs in
    trains_together: bool = True


def _ours(title: str, **options) -> Entry:
    return Entry("ours", title, options)


def _fsdp(title: str, **options) -> Entry:
    return Entry("fsdp", title, options)


ENTRIES = {
    "compute": Entry(
        "fsdp", "compute only, no communication", {"kind": "compute"}, trains_together=False
    ),
    "zero3": Entry("zero", "DeepSpeed ZeRO-3 (gloo)", {}),
    "zero3_nl": Entry("zero", "DeepSpeed ZeRO-3 (nearlinear)", {}, "nearlinear"),
    "fsdp1": _fsdp("FSDP1, full shard (gloo)", kind="fsdp1"),
    "fsdp2": _fsdp("FSDP2, full shard (gloo)", kind="full"),
    "fsdp2_nl": _fsdp("FSDP2, full shard (nearlinear)", kind="full", backend="nearlinear"),
    "hybrid": _fsdp("FSDP2, hybrid (gloo)", kind="hybrid"),
    "hybrid_nl": _fsdp("FSDP2, hybrid (nearlinear)", kind="hybrid", backend="nearlinear"),
    "ours": _ours("nearlinear MiCS (gloo)"),
    "ours_nl": _ours("nearlinear MiCS (nearlinear)", communication_backend="nearlinear"),
    "ours_nl_kept": _ours(
        "nearlinear MiCS (nearlinear), parameters gathered once per step",
        communication_backend="nearlinear",
        sdp_max_live_parameters=10**12,
    ),
}


def missing(name: str) -> str:
    """Why ``name`` cannot race here; empty if it can."""
    if ENTRIES[name].module == "zero" and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    return ""


def build(name: str, plan: Plan):
    entry = ENTRIES[name]
    module = importlib.import_module(f"{__name__}.{entry.module}")
    return module.build(plan, **entry.options)
