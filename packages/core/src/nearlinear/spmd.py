"""Run a function on N ranks of this machine and collect the result of each rank.

`run` starts the ranks as threads of this process (real FSDP2 and real collectives, within seconds,
in a notebook cell) or, with ``processes=True``, as processes over gloo, as on a cluster. Threads
share one random generator and one address space: build models inside ``with one_at_a_time():`` or
with `nearlinear.deferred_init`, which takes the same lock.
"""

from .distributed.local_ranks import one_at_a_time, run
from .errors import RankError

__all__ = ["RankError", "one_at_a_time", "run"]
