"""Live bytes of activations, counted from operator results instead of autograd."""

import weakref

import torch

from nearlinear import _torch


class LiveStorages(_torch.TorchDispatchMode):
    """Count storages created while gradients are recorded, until they are freed.

    This covers forward passes and recomputation, but not backward passes, in which gradients are
    not recorded. Storages of uint8 also count, because offloaded activations return as bytes.
    ``peak`` is the maximum between two operators.
    """

    def __init__(self):
        super().__init__()
        self.peak = self._now = 0
        self._known: dict[int, tuple[weakref.ref, int]] = {}
        self._freed: list[int] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self._add((args, kwargs), counted=False)  # existed before
        self.peak = max(self.peak, self._now)
        output = operator(*args, **(kwargs or {}))
        self._add(output, counted=True)
        return output

    def _add(self, tree, counted: bool) -> None:
        while self._freed:
            self._now -= self._known.pop(self._freed.pop())[1]
        for tensor in _torch.tensors_in(tree):
            storage = tensor.untyped_storage()
            identity = storage._cdata
            if identity in self._known:
                continue
            recorded = torch.is_grad_enabled() or tensor.dtype is torch.uint8
            size = storage.nbytes() if counted and recorded else 0
            self._known[identity] = weakref.ref(storage, self._at_the_end_of(identity)), size
            self._now += size

    def _at_the_end_of(self, identity: int):
        freed = self._freed
        return lambda reference: freed.append(identity)
