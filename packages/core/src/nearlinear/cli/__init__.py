"""The command line: ``nearlinear`` and ``python -m nearlinear.cli``."""

from .main import build_parser, main

__all__ = ["build_parser", "main"]
