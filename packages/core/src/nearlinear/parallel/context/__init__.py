"""Context parallelism: every sequence is split among the ranks of a group."""

from .model import apply

__all__ = ["apply"]
