"""Who does what the engine does not: gloo for CPU tensors, NCCL for CUDA tensors.

Gloo is made with the group, for point-to-point calls involve two ranks only and its constructor
all of them; with lazy connections that costs a millisecond and no socket. NCCL is made by the
first call on a CUDA tensor.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch.distributed as dist

log = logging.getLogger("nearlinear_collectives")

told: set[str] = set()


class Fallbacks:
    def __init__(self, store, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.gloo, self.why_no_gloo = None, ""
        if size == 1:
            return  # nobody has to be met: made on first use
        try:
            self.gloo = self.make_gloo()
        except Exception as error:
            self.why_no_gloo = str(error)

    def make(self, device: str):
        """The backend for ``device`` ("cpu", "cuda"); told once per group."""
        if device == "cpu":
            self.say("what nearlinear does not do itself (point to point, gather, scatter, "
                     "all-to-all, reduce) goes to gloo")
            if self.gloo is None and not self.why_no_gloo:
                self.gloo = self.make_gloo()
            if self.gloo is None:
                raise RuntimeError("this operation needs gloo, which could not be set up: "
                                   f"{self.why_no_gloo}")
            return self.gloo
        if device == "cuda":
            self.say("CUDA tensors go to NCCL")
            return self.make_nccl()
        raise RuntimeError(f"the nearlinear backend has no fallback for {device} tensors: name one, "
                           f'as in init_process_group("cpu:nearlinear,{device}:...")')

    def say(self, line: str) -> None:
        """One line per job, not one per rank and group."""
        first = line not in told
        told.add(line)
        log.log(logging.WARNING if first and self.rank == 0 else logging.DEBUG, line)

    def make_gloo(self):
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self.timeout
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
        store = dist.PrefixStore("gloo", self.store)
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def make_nccl(self):
        if not dist.is_nccl_available():
            raise RuntimeError("CUDA tensors need NCCL, which this torch was built without")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        store = dist.PrefixStore("nccl", self.store)
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)
