"""What a function under `nearlinear.step` returned, of every micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class StepOutput:
    """One returned value, once per micro-batch, in ``outputs``."""

    def __init__(self, outputs: list):
        self.outputs = outputs

    def reduce_mean(self):
        """The mean over micro-batches, each counted alike, however many targets it has."""
        return self.reduce_sum() / len(self.outputs)

    def reduce_sum(self):
        return sum(self.outputs[1:], self.outputs[0])

    def concat(self) -> torch.Tensor:
        """Tensors behind one another along dim 0, as the whole batch's."""
        return torch.cat(self.outputs)

    def stack(self) -> torch.Tensor:
        """Tensors of one shape, along a new dim 0: (micro-batches, ...)."""
        return torch.stack(self.outputs)

    def detach(self) -> StepOutput:
        return StepOutput([_detached(value) for value in self.outputs])

    def __repr__(self) -> str:
        return f"StepOutput({self.outputs!r})"


def gathered(results: list, detach: bool = True):
    """What the micro-batches returned, with a `StepOutput` for every value in it.

    Dicts, lists and tuples are kept; model outputs become dicts.
    """
    first = results[0]
    if isinstance(first, Mapping):
        return {key: gathered([each[key] for each in results], detach) for key in first}
    if isinstance(first, list | tuple):
        parts = [gathered(list(each), detach) for each in zip(*results, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return StepOutput([_detached(value) if detach else value for value in results])


def _detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value
