"""SIGTERM as a wish: the step in flight is finished, the run saves itself, and then it ends.

Spot capacity that is taken away, ``nearlinear stop``, Slurm's time limit and Kubernetes' evictions
all begin with SIGTERM and some time to act on it.
"""

from __future__ import annotations

import signal
import threading

from ..errors import NearlinearError


class Interrupted(NearlinearError):
    """The run was told to end, and has saved itself."""

    word = "stopped"
    everywhere = True
    exit_code = 128 + signal.SIGTERM  # as of a process that SIGTERM ends: launchers start it again


class Ending:
    """Whether this process has been told to end; it does not end by itself from `watch` on."""

    def __init__(self):
        self.told = False
        self._before = None

    def watch(self) -> None:
        """Take SIGTERM as a wish. Ranks that are threads leave it to their process."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def leave(self) -> None:
        """Let SIGTERM be what it was."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, number, frame) -> None:
        self.told = True
