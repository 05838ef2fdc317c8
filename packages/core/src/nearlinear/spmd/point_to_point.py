"""Messages between ranks that are threads, which torch's threaded process group does not carry.

A send copies the tensor and is done; a receive takes the oldest message of its sender and tag, in
the order in which receives were posted, as process groups do. Waiting ends when a rank has failed.
"""

import sys
import threading
from collections import deque

import torch

_POLL = 0.05  # seconds between looks at whether another rank failed


class Transfer:
    """What a send or receive returns: ``wait()`` until it is done."""

    def __init__(self, tensor: torch.Tensor | None, ending):
        self.tensor, self.ending = tensor, ending
        self.done = threading.Event()

    def deliver(self, message: torch.Tensor) -> None:
        with torch.no_grad():
            self.tensor.detach().copy_(message)
        self.done.set()

    def wait(self, timeout=None) -> bool:
        while not self.done.wait(_POLL):
            if self.ending():
                sys.exit("another rank failed")
        return True

    def is_completed(self) -> bool:
        return self.done.is_set()


class Mail:
    """All messages of one run; ``ending()`` says whether a rank has failed."""

    def __init__(self, ending):
        self.ending = ending
        self.lock = threading.Lock()
        self.sent: dict[tuple, deque[torch.Tensor]] = {}
        self.awaited: dict[tuple, deque[Transfer]] = {}

    def send(self, channel: tuple, tensor: torch.Tensor) -> Transfer:
        """``channel``: (group, sender, receiver, tag)."""
        message = tensor.detach().clone()
        with self.lock:
            receivers = self.awaited.setdefault(channel, deque())
            if receivers:
                receivers.popleft().deliver(message)
            else:
                self.sent.setdefault(channel, deque()).append(message)
        transfer = Transfer(None, self.ending)
        transfer.done.set()
        return transfer

    def receive(self, channel: tuple, tensor: torch.Tensor) -> Transfer:
        transfer = Transfer(tensor, self.ending)
        with self.lock:
            messages = self.sent.setdefault(channel, deque())
            if messages:
                transfer.deliver(messages.popleft())
            else:
                self.awaited.setdefault(channel, deque()).append(transfer)
        return transfer

    def clear(self) -> None:
        with self.lock:
            self.sent.clear()
            self.awaited.clear()
