"""The front of `nearlinear.spmd`: choose threads or processes, check what was asked."""

import threading
from contextlib import contextmanager

from ..errors import ConfigError

_model_lock = threading.RLock()


def run(
    fn,
    ranks: int = 4,
    *,
    args=(),
    processes: bool = False,
    backend: str = "gloo",
    timeout: float = 300.0,
) -> list:
    """Call ``fn(rank, *args)`` on every rank at once; return the results in rank order.

    Inside ``fn`` the default process group exists: ``torch.distributed`` and everything in
    nearlinear work as on a cluster. ``timeout`` is in seconds, over the whole call. Raises
    RankError with the first failing rank's own traceback; the other ranks are ended (threads: at
    their next collective).

    With ``processes=True`` the ranks are processes over ``backend``, forks of a fresh one. ``fn``,
    ``args`` and the results are then pickled: a function typed into a notebook needs the package
    ``cloudpickle``.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"ranks = {ranks!r}: expected an integer of at least 1")
    if not callable(fn):
        raise ConfigError(f"spmd.run needs a function of (rank, *args), not {type(fn).__name__}")
    if processes:
        from .processes import run_processes

        return run_processes(fn, ranks, tuple(args), timeout, backend)
    from .threads import run_threads

    return run_threads(fn, ranks, tuple(args), timeout)


@contextmanager
def one_at_a_time(seed: int | None = None):
    """Let one rank in at a time: what draws random numbers in ranks that are threads stands here.

    No collectives inside (`nearlinear.shard` is one): they would wait for ranks that wait outside.
    With ``seed`` the block draws from a generator seeded with it and leaves the outer state as it
    was, so that every rank builds the same model.
    """
    import torch

    with _model_lock:
        if seed is None:
            yield
            return
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(seed)
            yield
