"""What a config needs of a GPU's memory, in closed form: see `estimate`."""

from .report import MemoryPlan

__all__ = ["MemoryPlan"]
