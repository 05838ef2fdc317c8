"""Backends under test: ``gloo``, ``nearlinear``, or ``label=backend``, one process group each.

All groups span the same ranks in the same processes. The default group is a control group over
gloo: it aligns the ranks and collects their times, and is idle while a block is timed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ci.benchmarks.collectives.options import UsageError
from nearlinear_collectives import build

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Contender:
    """A labelled process group of one backend."""

    label: str
    backend: str
    group: dist.ProcessGroup

    @property
    def cpu_backend(self) -> Any:
        """The backend object of CPU tensors; its allocators are missing from torch's stubs."""
        return self.group._get_backend(CPU)

    @property
    def has_pool(self) -> bool:
        """True if the backend allocates tensors that its collectives handle faster."""
        try:
            return self.cpu_backend.supports_tensor_alloc(CPU)
        except RuntimeError:  # a process group written in Python has no backend objects
            return False

    @property
    def has_shared_outputs(self) -> bool:
        """True if the backend gathers into memory that exists once per node."""
        return self.has_pool and hasattr(self.cpu_backend, "allocate_shared")

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate as FSDP2 does when told to take memory from the process group."""
        if self.has_pool:
            return self.cpu_backend.allocate_tensor(count, dtype=dtype, device=CPU)
        return torch.empty(count, dtype=dtype)

    def allocate_gathered(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate an all-gather output as ``nearlinear_collectives.AllGather`` does for FSDP2."""
        if self.has_shared_outputs:
            return self.cpu_backend.allocate_shared(count, dtype)
        return self.allocate(count, dtype)


def parse_backends(words: Iterable[str]) -> list[tuple[str, str]]:
    """Split ``[LABEL=]NAME`` words into (label, backend) pairs with distinct labels."""
    pairs = []
    for word in words:
        label, equals, backend = word.partition("=")
        pairs.append((label, backend.lower() if equals else label.lower()))
    labels = [label for label, _ in pairs]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(
                f"--backends: {label!r} appears twice; to measure a backend against itself "
                f"give it two labels: a={label} b={label}"
            )
    return pairs


def import_plugins(modules: Iterable[str]) -> None:
    """Import packages that register backends."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(f"--import {module}: {error}") from None


def check_backends(pairs: list[tuple[str, str]]) -> None:
    """Raise UsageError for a backend that is unknown, not built in, or without CPU tensors."""
    known = dist.Backend.backend_capability
    on_cpu = [n for n in sorted(known) if "cpu" in known[n] and n != "fake" and _is_built_in(n)]
    usable = f"usable here: {', '.join(on_cpu)}"
    for _, backend in pairs:
        if backend not in known:
            raise UsageError(
                f"unknown backend {backend!r}; {usable}. If a package provides the backend, "
                "import it with --import PACKAGE"
            )
        if "cpu" not in known[backend]:
            raise UsageError(
                f"{backend} has no CPU tensors, and this benchmark uses CPU tensors; {usable}"
            )
        if not _is_built_in(backend):
            raise UsageError(f"this build of torch does not contain {backend}; {usable}")


def _is_built_in(backend: str) -> bool:
    return getattr(dist, f"is_{backend}_available", lambda: True)()


def compile_backends(pairs: list[tuple[str, str]]) -> None:
    """Compile nearlinear's libraries before ranks start, so that no rank waits in a group."""
    if any(backend == "nearlinear" for _, backend in pairs):
        with contextlib.suppress(build.BuildError):  # the backend falls back and logs the reason
            build.engine_library()
            build.glue_library()


def make_contenders(pairs: list[tuple[str, str]]) -> list[Contender]:
    """Create one process group per backend, over all ranks."""
    contenders = []
    for label, backend in pairs:
        group = dist.new_group(backend=backend)
        assert isinstance(group, dist.ProcessGroup)  # a group of all ranks includes this rank
        contenders.append(Contender(label, backend, group))
    return contenders
