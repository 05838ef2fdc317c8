"""A training step without memory and without other ranks, to see what it would need: `measure`."""

from .step import measure

__all__ = ["measure"]
