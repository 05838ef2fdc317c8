"""Memory of one GPU in a training step, in closed form: see `estimate`."""

from .estimate import estimate, least_total, vocabulary_of
from .report import MemoryEstimate
from .sharing import with_fewest_sharing

__all__ = ["MemoryEstimate", "estimate", "least_total", "vocabulary_of", "with_fewest_sharing"]
