"""Process groups: those of ranks that are threads, and what torch knows of the others."""

from torch.distributed import distributed_c10d


def thread_group_base():
    """The process group whose ranks are threads of one process, and how to install and remove it.

    Returns (group class, install(), uninstall(), ending()); the last says whether a rank failed.
    Checked on torch 2.8.0 and 2.13.0.
    """
    from torch._C._distributed_c10d import _set_thread_isolation_mode
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    def install():
        _set_thread_isolation_mode(True)
        threaded._install_threaded_pg()

    def uninstall():
        threaded._uninstall_threaded_pg()
        if threaded._ctx_manager is not None:  # older releases leave autograd single-threaded
            threaded._ctx_manager.__exit__(None, None, None)
            threaded._ctx_manager = None
        _set_thread_isolation_mode(False)

    group = threaded.ProcessLocalGroup
    return group, install, uninstall, group._terminate.is_set


def job_store():
    """The store by which this job's ranks found each other. 2.8.0, 2.13.0."""
    return distributed_c10d._get_default_store()


def name_of_group(group) -> str:
    """By which torch knows the process group ``group``. 2.8.0, 2.13.0."""
    return distributed_c10d._world.pg_names[group]
