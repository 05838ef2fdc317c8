"""The backend ``nearlinear`` of torch.distributed: registered on import of the package."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import os
from datetime import timedelta

import torch.distributed as dist

from nearlinear_collectives import engine_library as engine
from nearlinear_collectives.build import BuildError, glue_library
from nearlinear_collectives.fallback import Fallbacks, say
from nearlinear_collectives.group import Group

log = logging.getLogger("nearlinear_collectives")

NAME = "nearlinear"


def register() -> None:
    """Make ``init_process_group("nearlinear")`` known to torch."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    if torchcomms_takes_over():
        log.warning(
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS is set and torchcomms is installed: torch will "
            "look for the backend %s there, not here. Unset the variable to use it",
            NAME,
        )


def torchcomms_takes_over() -> bool:
    """With this switch torch looks all backends up in torchcomms and never asks a plugin."""
    switch = os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0").lower()
    return switch not in ("", "0", "false") and importlib.util.find_spec("torchcomms") is not None


def create(options, pg_options=None):
    """c10d's constructor: ``options`` hold the store, this rank's place and the timeout."""
    rank, size = options.group_rank, options.group_size
    timeout = options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    group = Group(
        options.store,
        rank,
        size,
        timeout=timeout,
        name=options.group_id or "default",
        global_ranks=list(options.global_ranks_in_group) or None,
    )
    try:
        fallbacks = Fallbacks(options.store, rank, size, timeout)
        native, why = glue()
        if native is None:
            from nearlinear_collectives.process_group import EngineProcessGroup

            if why:
                say(
                    "calls go through Python, some tens of microseconds slower, for the torch glue "
                    f"is missing: {why} (python -m nearlinear_collectives.build tells all)",
                    rank,
                )
            return EngineProcessGroup(rank, size, group, fallbacks)
        return native.Backend(rank, size, group.release(), fallbacks.make)
    except BaseException:
        group.close()
        raise


@functools.cache
def glue():
    """(the compiled glue, "") or (``None``, why the pure-Python process group has to do)."""
    wanted = os.environ.get("NEARLINEAR_COLLECTIVES_GLUE", "")
    if wanted == "python":
        return None, ""
    try:
        return load_glue(), ""
    except (BuildError, ImportError) as error:
        if wanted == "compiled":
            raise
        return None, str(error).splitlines()[0]


def load_glue():
    engine.library()  # its symbols must be there before the glue is loaded
    path = str(glue_library())
    loader = importlib.machinery.ExtensionFileLoader("nearlinear_glue", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module
