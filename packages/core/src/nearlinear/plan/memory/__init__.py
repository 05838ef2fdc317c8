"""What a config needs of a GPU's memory, in closed form: see `estimate`."""

from .estimate import estimate, vocabulary_of
from .report import MemoryPlan

__all__ = ["MemoryPlan", "estimate", "vocabulary_of"]
