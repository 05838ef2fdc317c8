"""Register the c10d backend ``"smddp"``; importing this module does it, as with SMDDP.

::

    from nearlinear.compat.smddp import torch_smddp

    torch.distributed.init_process_group("smddp")
"""

from __future__ import annotations

import importlib.util
import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...config.parallel import HOST_MEMORY_BACKEND
from ...distributed.collectives import BACKEND_ALIASES

log = logging.getLogger(__name__)

NAME = "smddp"

VARIABLES = {
    "SMDATAPARALLEL_OPTIMIZE_SDP": "all collectives are accelerated together",
    "SMDATAPARALLEL_LMC_ENABLE": "the backend chooses its algorithms",
    "SMDATAPARALLEL_USE_SINGLENODE": "the launcher's ranks are used",
    "SMDATAPARALLEL_USE_HOMOGENEOUS": "the launcher's ranks are used",
    "SMDATAPARALLEL_SERVER_ADDR": "there are no servers",
    "SMDATAPARALLEL_SERVER_PORT": "there are no servers",
    "SMDATAPARALLEL_LOCAL_RANK": "LOCAL_RANK of the launcher is used",
    "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "buffers are allocated by need",
    "SMDDP_AG_SORT_BUFFER_SIZE_BYTES": "buffers are allocated by need",
}
"""SMDDP's environment variables, which are accepted, and the reason why each has no effect."""


def register() -> str:
    """Register the backend once; return the name of the backend that it stands for."""
    if NAME in BACKEND_ALIASES:
        return BACKEND_ALIASES[NAME]
    if torch.cuda.is_available():
        create, device, stands_for = _create_nccl, "cuda", "nccl"
    elif importlib.util.find_spec("nearlinear_collectives") is not None:
        create, device, stands_for = _create_host_memory, "cpu", HOST_MEMORY_BACKEND
    else:
        create, device, stands_for = _create_gloo, "cpu", "gloo"
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=[device])
    BACKEND_ALIASES[NAME] = stands_for
    log.info("the backend smddp stands for %s", stands_for)
    for name in sorted(VARIABLES.keys() & os.environ.keys()):
        log.info("%s has no effect here: %s", name, VARIABLES[name])
    return stands_for


def _create_host_memory(options: Any, pg_options: Any = None) -> Any:
    """Create the group of nearlinear-collectives."""
    from nearlinear_collectives.backend import create_backend

    return create_backend(options, pg_options)


def _create_gloo(options: Any, pg_options: Any = None) -> Any:
    rank, size = options.group_rank, options.group_size
    return dist.ProcessGroupGloo(options.store, rank, size, timeout=_timeout(options))


def _create_nccl(options: Any, pg_options: Any = None) -> Any:
    settings = pg_options or dist.ProcessGroupNCCL.Options()
    settings._timeout = _timeout(options)
    return dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, settings)


def _timeout(options: Any) -> timedelta:
    given = options.timeout
    return given if isinstance(given, timedelta) else timedelta(seconds=float(given))


register()
