"""Ranks on one machine: run a function on N ranks and get back what each rank returned.

`run` starts the ranks as threads of this process (real FSDP2 and real collectives, in seconds, in
a notebook cell) or, with ``processes=True``, as processes over gloo, which is what a cluster runs.
Threads share one random generator and one memory: build models inside ``with one_at_a_time():``
or with `nearlinear.delayed_init`, which takes the same lock.
"""

from .failures import RankError
from .ranks import one_at_a_time, run

__all__ = ["RankError", "one_at_a_time", "run"]
