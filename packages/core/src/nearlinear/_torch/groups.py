"""Process groups whose ranks are threads, and torch's registry of groups."""

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed import distributed_c10d


def thread_group_base() -> tuple[type, Callable[[], None], Callable[[], None], Callable[[], bool]]:
    """Return the process group class whose ranks are threads, and functions to manage it.

    Returns (group class, install(), uninstall(), ending()). ``ending()`` returns whether a rank
    failed. Checked on torch 2.8.0 and 2.13.0.
    """
    from torch._C._distributed_c10d import (
        _set_thread_isolation_mode,  # pyright: ignore[reportAttributeAccessIssue] not in the stub
    )
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    def install() -> None:
        _set_thread_isolation_mode(True)
        threaded._install_threaded_pg()

    def uninstall() -> None:
        threaded._uninstall_threaded_pg()
        if threaded._ctx_manager is not None:  # older releases leave autograd single-threaded
            threaded._ctx_manager.__exit__(None, None, None)
            threaded._ctx_manager = None
        _set_thread_isolation_mode(False)

    group = threaded.ProcessLocalGroup
    return group, install, uninstall, group._terminate.is_set


def job_store() -> dist.Store:
    """Return the store through which this job's ranks found each other. 2.8.0, 2.13.0."""
    return distributed_c10d._get_default_store()


def name_of_group(group: dist.ProcessGroup) -> str:
    """Return torch's name of the process group ``group``. 2.8.0, 2.13.0."""
    return distributed_c10d._world.pg_names[group]
