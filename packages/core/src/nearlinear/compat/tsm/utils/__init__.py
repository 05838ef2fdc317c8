"""Utilities of SMP v2."""

from . import module_utils

__all__ = ["module_utils"]
