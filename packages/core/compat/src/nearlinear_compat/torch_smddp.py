"""Registers the backend name ``smddp`` with torch.distributed.

``init_process_group("smddp")`` then uses NCCL for CUDA tensors. Without a GPU it uses
nearlinear-collectives, or gloo where that is not installed.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

NAME = "smddp"


def _create(options: Any, backend_options: Any) -> Any:
    """Create the backend of a process group, for ``dist.Backend.register_backend``."""
    store, rank, size = options.store, options.group_rank, options.group_size
    if torch.cuda.is_available():
        settings = backend_options or dist.ProcessGroupNCCL.Options()
        settings._timeout = options.timeout
        return dist.ProcessGroupNCCL(store, rank, size, settings)
    try:
        from nearlinear_collectives.backend import create_backend
    except ImportError as error:
        log.warning("smddp: %s. Using gloo; pip install nearlinear-collectives is faster.", error)
        return dist.ProcessGroupGloo(store, rank, size, options.timeout)
    return create_backend(options, backend_options)


if not hasattr(dist.Backend, NAME.upper()):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=[device])
