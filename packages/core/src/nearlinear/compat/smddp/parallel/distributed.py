"""The same class under its longer module name."""

from . import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
