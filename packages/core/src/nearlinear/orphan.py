"""End a child process when its parent dies, however the parent died (Linux; elsewhere nothing)."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(sig: int = signal.SIGTERM) -> None:
    """Have the kernel send this process ``sig`` when its parent ends. Call in the child, early."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:  # the parent ended in between
        os.kill(os.getpid(), sig)
