"""What a config needs of a GPU's memory, in closed form: see `estimate`."""

from .estimate import estimate, vocabulary_of
from .report import MemoryPlan, Unknown

__all__ = ["MemoryPlan", "Unknown", "estimate", "vocabulary_of"]
