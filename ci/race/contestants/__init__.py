"""Who races. A contestant is built once per rank and then asked for steps, in turn with others.

``build(name, plan)`` gives an object with ``step(batches) -> float``: one optimizer step over this
rank's micro-batches, and the mean of their losses on this rank.
"""

from __future__ import annotations

import importlib
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
    requires: str = ""  # a release that may need an environment of its own


def _ours(title: str, **options) -> Entry:
    return Entry("ours", title, options)


def _zero(title: str, backend: str = "gloo", **options) -> Entry:
    return Entry("zero", title, options, backend, requires="deepspeed==0.19.8")


def _fsdp(title: str, **options) -> Entry:
    return Entry("fsdp", title, options)


ENTRIES = {
    "compute": Entry(
        "fsdp", "compute only, no communication", {"kind": "compute"}, trains_together=False
    ),
    "zero3": _zero("DeepSpeed ZeRO-3 (gloo)"),
    "zero3_default": _zero("DeepSpeed ZeRO-3 (gloo), its default thresholds", scaled=False),
    "zero3_nl": _zero("DeepSpeed ZeRO-3 (nearlinear)", backend="nearlinear"),
    "mics": Entry("mics", "DeepSpeed MiCS (gloo)", {}, requires="deepspeed==0.19.6"),
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


def build(name: str, plan: Plan):
    entry = ENTRIES[name]
    module = importlib.import_module(f"{__name__}.{entry.module}")
    return module.build(plan, **entry.options)
