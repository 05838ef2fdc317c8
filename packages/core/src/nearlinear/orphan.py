"""End a child process when its parent dies, however the parent died (Linux; elsewhere nothing)."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when process ``parent`` ends. Call in the child, early.

    ``parent`` is the id the parent told the child: if it is dead already, this process ends now.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)
