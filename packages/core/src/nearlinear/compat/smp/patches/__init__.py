"""Replacements of PyTorch's functions, in v1's places."""

from . import checkpoint as checkpoint
