"""What `measure` found, as a table and as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .savings import Parts, Saving

NAMES = {
    "parameters": "parameters, as sharded",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations saved by the blocks",
    "logits": "saved after the last block: logits, loss",
    "gathered": "gathered parameters",
    "communication": "buffers of communication (computed)",
    "other": "other",
}
"""The parts of a rank's memory, in order; ``other`` where the device tells of its peak."""

MIB = 2**20


@dataclass(frozen=True)
class Report:
    """The memory of one rank in one step, bytes by part; and the most of any rank."""

    mine: Parts
    most: Parts
    savings: list[Saving]

    @property
    def total(self) -> int:
        return sum(self.mine.values())

    def as_dict(self) -> dict:
        """For JSON, and for `nearlinear.plots.memory`."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        width = max(map(len, NAMES.values()))
        lines = [f"{'memory of a step, MiB':{width}}  {'this rank':>9}  {'most':>9}"]
        for part, name in NAMES.items():
            if part in self.mine:
                lines.append(_row(name, width, self.mine[part], self.most[part]))
        lines.append(_row("together", width, self.total, self.most["total"]))
        if self.savings:
            lines.append("what a knob alone would save of it, estimated:")
        for saving in self.savings:
            share = saving.bytes / self.total
            lines.append(_row(saving.knob, width, saving.bytes) + f"  {share:>9.0%}")
        return "\n".join(lines)


def _row(name: str, width: int, *sizes: int) -> str:
    return "  ".join([f"{name:{width}}", *(f"{size / MIB:9.1f}" for size in sizes)])
