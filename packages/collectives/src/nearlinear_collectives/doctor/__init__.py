"""Diagnosis of this machine: accelerated features, fallbacks, and the reasons for them."""

from __future__ import annotations

import platform

from .finding import Finding, Report

__all__ = ["Finding", "Report", "doctor"]


def doctor() -> Report:
    """Check everything the backend needs on this machine.

    Takes a few seconds, and compiles missing libraries on first use. The command line is ``python
    -m nearlinear_collectives.doctor``.

    Returns:
        A report to print or to index by the name of a finding, such as ``doctor()["engine"]``.
    """
    import torch

    from ..version import __version__
    from . import host, network

    title = (
        f"nearlinear_collectives {__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.release()} "
        f"{platform.machine()}"
    )
    return Report(title, (*host.check_host(), *network.check_network()))
