"""Who does what the engine does not: gloo for CPU tensors, NCCL for CUDA tensors.

Gloo is made with the group, for point-to-point calls involve two ranks only and its constructor
all of them; with lazy connections that costs a millisecond and no socket. NCCL is made by the
first call on a CUDA tensor.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from datetime import timedelta

import torch.distributed as dist

log = logging.getLogger("nearlinear_collectives")

told: set[str] = set()
gloos: weakref.WeakSet = weakref.WeakSet()


def keep_for_good() -> None:
    """In a forked child: gloo's destructor would wait for threads that only the parent has."""
    for gloo in gloos:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))


os.register_at_fork(after_in_child=keep_for_good)


def say(line: str, rank: int) -> None:
    """One line per node, not one per rank and group."""
    first = line not in told
    told.add(line)
    speaks = os.environ.get("LOCAL_RANK", str(rank)) == "0"
    log.log(logging.WARNING if first and speaks else logging.DEBUG, line)


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
            say(
                "what nearlinear does not do itself (point to point, gather, scatter, "
                "all-to-all, reduce) goes to gloo",
                self.rank,
            )
            if self.gloo is None and not self.why_no_gloo:
                self.gloo = self.make_gloo()
            if self.gloo is None:
                raise RuntimeError(
                    f"this operation needs gloo, which could not be set up: {self.why_no_gloo}"
                )
            return self.gloo
        if device == "cuda":
            say("CUDA tensors go to NCCL", self.rank)
            return self.make_nccl()
        raise RuntimeError(
            f"the nearlinear backend has no fallback for {device} tensors: name one, "
            f'as in init_process_group("cpu:nearlinear,{device}:...")'
        )

    def make_gloo(self):
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self.timeout
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]
        store = dist.PrefixStore("gloo", self.store)
        gloo = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        gloos.add(gloo)
        return gloo

    def make_nccl(self):
        if not dist.is_nccl_available():
            raise RuntimeError("CUDA tensors need NCCL, which this torch was built without")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        use_copy_engines(options)
        store = dist.PrefixStore("nccl", self.store)
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)


def use_copy_engines(options) -> None:
    """Let NCCL gather without occupying a multiprocessor, where it can; a variable of NCCL rules.

    It can since 2.28 for tensors in symmetric memory (FSDP2's set_symm_mem_for_comm) and does as
    ever for others. Older builds of torch have no such policy.
    """
    policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
    config = getattr(options, "config", None)
    if policy is not None and hasattr(config, "cta_policy") and "NCCL_CTA_POLICY" not in os.environ:
        config.cta_policy = policy
