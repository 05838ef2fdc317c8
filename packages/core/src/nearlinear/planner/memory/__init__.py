"""Memory of one GPU in a training step, in closed form: see `estimate`."""

from .estimate import estimate, vocabulary_of
from .report import MemoryEstimate

__all__ = ["MemoryEstimate", "estimate", "vocabulary_of"]
