"""``DistributedDataParallel`` of SMDDP before 1.4."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import parallel


class DistributedDataParallel(parallel.DistributedDataParallel):
    """PyTorch's class; ``device_ids`` is left out for a module on the CPU."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int] | None = None,
        output_device: int | None = None,
        **kwargs: Any,
    ):
        if all(parameter.device.type == "cpu" for parameter in module.parameters()):
            device_ids = output_device = None
        super().__init__(module, device_ids, output_device, **kwargs)
