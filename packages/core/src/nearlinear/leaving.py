"""What a rank finishes before it leaves its job, on whatever way it leaves in order."""

from __future__ import annotations

import json
import os
import time
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


def leave_error(message: str) -> bool:
    """In a rank: hand the one-line reason of its end to what started it; whether that listens."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return False
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message, "timestamp": str(int(time.time()))}, file)
    return True
