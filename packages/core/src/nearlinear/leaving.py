"""What a rank finishes before it leaves its job, on whatever way it leaves in order."""

from __future__ import annotations

from collections.abc import Callable

_finishing: list[Callable[[], None]] = []


def before_leaving(finish: Callable[[], None]) -> Callable[[], None]:
    """Have ``finish()`` called on every rank that is about to leave a job, in step with others."""
    _finishing.append(finish)
    return finish


def finish() -> None:
    """Call what there is to call."""
    for each in _finishing:
        each()
