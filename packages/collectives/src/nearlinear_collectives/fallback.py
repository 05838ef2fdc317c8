"""Fallback backends: gloo for operations the engine lacks on CPU tensors, NCCL for CUDA tensors.

Gloo is created together with the group, because its constructor involves all ranks and a message
of sparse tensors only two. With lazy connections it costs a millisecond and no socket. NCCL is
created by the first call on a CUDA tensor.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

log = logging.getLogger("nearlinear_collectives")

_logged_lines: set[str] = set()
_gloo_backends: weakref.WeakSet = weakref.WeakSet()


def _leak_gloo_in_child() -> None:
    """Keep gloo alive in a forked child: its destructor would join threads of the parent."""
    for gloo in _gloo_backends:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))


os.register_at_fork(after_in_child=_leak_gloo_in_child)


def log_once_per_node(line: str, rank: int) -> None:
    """Log a warning on the first rank of the node only, and once for all groups."""
    first = line not in _logged_lines
    _logged_lines.add(line)
    is_first_rank = os.environ.get("LOCAL_RANK", str(rank)) == "0"
    log.log(logging.WARNING if first and is_first_rank else logging.DEBUG, line)


class FallbackBackends:
    """Create the fallback backends of one group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.gloo: Any = None
        self.gloo_error = ""
        if size == 1:
            return  # no rendezvous with other ranks: created on first use
        try:
            self.gloo = self.make_gloo()
        except Exception as error:
            self.gloo_error = str(error)

    def make(self, device: str) -> Any:
        """Return the backend for ``device`` ("cpu" or "cuda"), and log that it is used."""
        if device == "cpu":
            log_once_per_node(
                "operations that nearlinear does not implement (of sparse tensors, products of "
                "complex numbers) use gloo",
                self.rank,
            )
            if self.gloo is None and not self.gloo_error:
                self.gloo = self.make_gloo()
            if self.gloo is None:
                raise RuntimeError(
                    f"this operation needs gloo, which could not be created: {self.gloo_error}. "
                    "Run python -m nearlinear_collectives.doctor"
                )
            return self.gloo
        if device == "cuda":
            log_once_per_node("CUDA tensors use NCCL", self.rank)
            return self.make_nccl()
        raise RuntimeError(
            f"the nearlinear backend has no fallback for {device} tensors (only for cpu and cuda). "
            f'Name one, as in init_process_group("cpu:nearlinear,{device}:...")'
        )

    def make_gloo(self) -> Any:
        backend: Any = dist.ProcessGroupGloo
        options = backend._Options()
        options._timeout = self.timeout
        options._devices = [backend.create_default_device(lazy_init=True)]
        gloo = backend(self._sub_store("gloo"), self.rank, self.size, options)
        _gloo_backends.add(gloo)
        return gloo

    def make_nccl(self) -> Any:
        if not dist.is_nccl_available():
            raise RuntimeError(
                "CUDA tensors need NCCL, which this torch was built without. Install a CUDA build "
                "of torch, or move the tensors to the CPU"
            )
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        use_copy_engines(options)
        return dist.ProcessGroupNCCL(self._sub_store("nccl"), self.rank, self.size, options)

    def _sub_store(self, prefix: str) -> Any:
        return dist.PrefixStore(prefix, self.store)  # pyright: ignore[reportPrivateImportUsage] public


def use_copy_engines(options: Any) -> None:
    """Let NCCL gather on copy engines instead of SMs, unless NCCL_CTA_POLICY is set.

    NCCL 2.28 and newer do so for tensors in symmetric memory (FSDP2's set_symm_mem_for_comm); other
    tensors are unaffected. Older builds of torch do not have the policy.
    """
    policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
    config = getattr(options, "config", None)
    if policy is None or config is None or not hasattr(config, "cta_policy"):
        return
    if "NCCL_CTA_POLICY" not in os.environ:
        config.cta_policy = policy
