"""Functions that allocate parameters and move buffers of a module."""

from __future__ import annotations

import torch
from torch import nn


def empty_module_params(
    module: nn.Module, device: torch.device | str | None = None, recurse: bool = False
) -> nn.Module:
    """Replace the parameters of ``module`` by uninitialized ones on ``device``; return it.

    ``recurse``: include the children. Buffers stay.
    """
    for part in module.modules() if recurse else (module,):
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device=device)
                part._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
    return module


def move_buffers_to_device(
    module: nn.Module, device: torch.device | str, recurse: bool = False
) -> nn.Module:
    """Move the buffers of ``module`` to ``device``, those on the meta device without values."""
    for part in module.modules() if recurse else (module,):
        for name, buffer in part._buffers.items():
            if buffer is not None:
                empty = torch.empty_like(buffer, device=device)
                part._buffers[name] = empty if buffer.is_meta else buffer.to(device)
    return module
