"""Dry run of a training step on fake tensors, without other ranks: see `measure`.

The dry run executes the trainer's own code, and is the reference for the closed form in
`planner.memory`.
"""

from .step import measure

__all__ = ["measure"]
