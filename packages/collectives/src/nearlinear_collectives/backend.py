"""The backend ``nearlinear`` of torch.distributed, registered when torch is imported."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import engine_library as engine
from .build import BuildError, glue_library
from .fallback import FallbackBackends, log_once_per_node
from .group import EngineGroup

log = logging.getLogger("nearlinear_collectives")

NAME = "nearlinear"


def register() -> None:
    """Register the backend, so that ``init_process_group("nearlinear")`` finds it."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, create_backend, extended_api=True, devices=["cpu", "cuda"]
        )
    if torchcomms_is_active():
        log.warning(
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS is set and torchcomms is installed: torch looks for "
            "the backend %s there and ignores this package. Unset the variable to use it",
            NAME,
        )


def torchcomms_is_active() -> bool:
    """Return True if torch takes all backends from torchcomms and never calls a plugin."""
    switch = os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0").lower()
    return switch not in ("", "0", "false") and importlib.util.find_spec("torchcomms") is not None


def create_backend(options: Any, pg_options: Any = None) -> Any:
    """Create the process group of one rank; called by c10d.

    Args:
        options: c10d's ``_DistributedBackendOptions``: store, rank, size and timeout.
        pg_options: Ignored; the backend has no options of its own.
    """
    rank, size = options.group_rank, options.group_size
    timeout = options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    group = EngineGroup(
        options.store,
        rank,
        size,
        timeout=timeout,
        name=options.group_id or "default",
        global_ranks=list(options.global_ranks_in_group) or None,
    )
    try:
        fallbacks = FallbackBackends(options.store, rank, size, timeout)
        native, reason = find_glue()
        if native is None:
            from .process_group import EngineProcessGroup

            if reason:
                log_once_per_node(
                    "calls go through Python, which adds some tens of microseconds, because the "
                    f"torch glue is missing: {reason}. Run python -m nearlinear_collectives.build "
                    "for details",
                    rank,
                )
            return EngineProcessGroup(rank, size, group, fallbacks)
        return native.Backend(rank, size, group.release(), fallbacks.make)
    except BaseException:
        group.close()
        raise


@functools.cache
def find_glue() -> tuple[Any | None, str]:
    """Load the compiled glue.

    Returns:
        (module, "") or (None, reason); the reason is empty if Python was requested.
    """
    requested = os.environ.get("NEARLINEAR_COLLECTIVES_GLUE", "")
    if requested == "python":
        return None, ""
    try:
        return load_glue(), ""
    except (BuildError, ImportError) as error:
        if requested == "compiled":
            raise
        return None, str(error).splitlines()[0]


def load_glue() -> Any:
    """Compile the glue if necessary and import it."""
    engine.library()  # the glue resolves its symbols when it is loaded
    path = str(glue_library())
    loader = importlib.machinery.ExtensionFileLoader("nearlinear_glue", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
