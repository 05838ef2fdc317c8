"""A copy of tensors in host memory, so that training can change them while they are written."""

from __future__ import annotations

import torch


class Snapshot:
    """Host memory that is used again from save to save: fresh pages cost more than the copy."""

    def __init__(self):
        self._memory: dict[str, torch.Tensor] = {}

    def of(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of ``tensors`` on the CPU, contiguous, each by its name.

        Good until the next call. On CUDA they are pinned, and copied one after the other without
        waiting for each.
        """
        known, self._memory = self._memory, {}
        for name, tensor in tensors.items():
            there = known.get(name)
            if there is None or there.shape != tensor.shape or there.dtype != tensor.dtype:
                pinned = tensor.device.type == "cuda"
                there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._memory[name] = there.copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values()}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return dict(self._memory)
