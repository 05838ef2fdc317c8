"""Tensor parallelism: every layer's matrices split among ranks, and tokens between the layers."""

from .split import apply

__all__ = ["apply"]
