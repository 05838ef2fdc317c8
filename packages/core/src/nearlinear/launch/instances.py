"""Machines that jobs run on: their GPUs, and their network interfaces with EFA.

Source: what EC2's DescribeInstanceTypes says of them, as recorded in moto 5.2.5 (tests hold this
table against it); of the P3 below 24xlarge, no longer listed there, EC2's page on that type,
2026-11. Left out of what SageMaker trains on, on purpose: P2, whose GPUs no current CUDA supports;
P6e-GB200, rented by the rack; Trainium, which nearlinear has not been run on.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Instance:
    """One machine."""

    accelerators: int
    efa: int
    """network interfaces with EFA, at most; 0: none"""


# GPUs and interfaces by size, of families whose smaller sizes are cut from one machine alike.
_G5_G6 = {
    **{f"{size}xlarge": Instance(1, 0) for size in ("", 2, 4)},
    **{f"{size}xlarge": Instance(1, 1) for size in (8, 16)},
    **{f"{size}xlarge": Instance(4, 1) for size in (12, 24)},
    "48xlarge": Instance(8, 1),
}
_G7 = {
    **{f"{size}xlarge": Instance(1, 0) for size in (2, 4)},
    "8xlarge": Instance(1, 1),
    "12xlarge": Instance(2, 1),
}
_FAMILIES = {
    "p3": {"2xlarge": Instance(1, 0), "8xlarge": Instance(4, 0), "16xlarge": Instance(8, 0)},
    "p3dn": {"24xlarge": Instance(8, 1)},
    "p4d": {"24xlarge": Instance(8, 4)},
    "p4de": {"24xlarge": Instance(8, 4)},
    "p5": {"4xlarge": Instance(1, 1), "48xlarge": Instance(8, 32)},
    "p5e": {"48xlarge": Instance(8, 32)},
    "p5en": {"48xlarge": Instance(8, 16)},
    "p6-b200": {"48xlarge": Instance(8, 8)},
    "p6-b300": {"48xlarge": Instance(8, 16)},
    "g4dn": {
        **{f"{size}xlarge": Instance(1, 0) for size in ("", 2, 4)},
        **{f"{size}xlarge": Instance(1, 1) for size in (8, 16)},
        "12xlarge": Instance(4, 1),
        "metal": Instance(8, 1),
    },
    "g5": _G5_G6,
    "g6": _G5_G6,
    "g6e": _G5_G6 | {"24xlarge": Instance(4, 2), "48xlarge": Instance(8, 4)},
    "g7": _G7 | {"24xlarge": Instance(4, 1), "48xlarge": Instance(8, 2)},
    "g7e": _G7 | {"24xlarge": Instance(4, 2), "48xlarge": Instance(8, 4)},
}
KNOWN = {f"{name}.{size}": it for name, sizes in _FAMILIES.items() for size, it in sizes.items()}


def known(instance_type: str) -> Instance | None:
    """Of ``p4d.24xlarge`` or SageMaker's ``ml.p4d.24xlarge``; None: not one with a record here."""
    return KNOWN.get(instance_type.removeprefix("ml."))
