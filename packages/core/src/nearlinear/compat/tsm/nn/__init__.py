"""Modules of SMP v2."""

from . import attn, huggingface

__all__ = ["attn", "huggingface"]
