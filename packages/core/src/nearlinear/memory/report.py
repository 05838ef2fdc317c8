"""Memory of a measured step, as a table and as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

PARTS = {
    "parameters": "parameters, sharded",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations saved by the blocks",
    "logits": "saved after the last block: logits, loss",
    "gathered": "gathered parameters",
    "communication": "communication buffers (computed)",
    "other": "other",
}
"""Parts of a rank's memory, in display order; ``other`` only where the device reports its peak."""

MIB = 2**20


@dataclass(frozen=True)
class MemoryReport:
    """Memory of one rank in one step, in bytes by part."""

    mine: dict[str, int]
    """Bytes on this rank."""
    most: dict[str, int]
    """Most bytes on any rank."""

    @property
    def total(self) -> int:
        return sum(self.mine.values())

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON and for `nearlinear.plots.memory`."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        width = max(map(len, PARTS.values()))
        lines = [f"{'memory of a step, MiB':{width}}  {'this rank':>9}  {'maximum':>9}"]
        for part, name in PARTS.items():
            if part in self.mine:
                lines.append(_row(name, width, self.mine[part], self.most[part]))
        lines.append(_row("total", width, self.total, self.most["total"]))
        return "\n".join(lines)


def _row(name: str, width: int, *sizes: int) -> str:
    return "  ".join([f"{name:{width}}", *(f"{size / MIB:9.1f}" for size in sizes)])
