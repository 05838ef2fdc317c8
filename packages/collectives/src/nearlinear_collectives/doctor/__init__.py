"""What is accelerated on this machine, what falls back, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nearlinear_collectives.doctor.report import Report


def doctor() -> Report:
    """Try everything the backend needs, here and now; ``print()`` the result, or read its findings.

    Takes a few seconds, and compiles what is missing on first use. The command is
    ``python -m nearlinear_collectives.doctor``.
    """
    from nearlinear_collectives.doctor.report import examine

    return examine()
