"""The contenders: ``gloo``, ``nearlinear``, or ``label=backend``, each its own process group.

All groups span the same ranks in the same processes. A control group over gloo, the default
group, lines the ranks up and collects their times; it does nothing while a block is timed.
"""

import contextlib
import importlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .. import build
from .errors import UsageError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Contender:
    """A backend's group under a label."""

    label: str
    backend: str
    group: dist.ProcessGroup

    @property
    def has_pool(self) -> bool:
        """Whether it allocates tensors that its collectives handle better than others."""
        try:
            return self.group._get_backend(CPU).supports_tensor_alloc(CPU)
        except RuntimeError:  # a process group written in Python has no backend objects
            return False

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory as FSDP2 takes it when told to ask the process group for it."""
        if self.has_pool:
            return self.group._get_backend(CPU).allocate_tensor(count, dtype=dtype, device=CPU)
        return torch.empty(count, dtype=dtype)

    @property
    def shares_outputs(self) -> bool:
        """Whether it gathers into memory that exists once per node."""
        return self.has_pool and hasattr(self.group._get_backend(CPU), "allocate_shared")

    def allocate_gathered(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """An all-gather's output as ``nearlinear_collectives.AllGather`` takes it for FSDP2."""
        if self.shares_outputs:
            return self.group._get_backend(CPU).allocate_shared(count, dtype)
        return self.allocate(count, dtype)


def parse(words: list[str]) -> list[tuple[str, str]]:
    """(label, backend) of each word; labels must differ."""
    pairs = []
    for word in words:
        label, equals, backend = word.partition("=")
        pairs.append((label, backend.lower() if equals else label.lower()))
    labels = [label for label, _ in pairs]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(
                f"--backends: {label!r} stands there twice; to measure a backend against itself "
                f"give it two labels: a={label} b={label}"
            )
    return pairs


def import_plugins(modules: list[str]) -> None:
    """Import packages that register backends."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(f"--import {module}: {error}") from None


def check_known(pairs: list[tuple[str, str]]) -> None:
    """UsageError for a backend this torch does not have, or that has no CPU tensors."""
    known = dist.Backend.backend_capability
    on_cpu = [n for n in sorted(known) if "cpu" in known[n] and n != "fake" and _built_in(n)]
    usable = f"usable here: {', '.join(on_cpu)}"
    for _, backend in pairs:
        if backend not in known:
            raise UsageError(
                f"unknown backend {backend!r}; {usable}. A package that brings a backend "
                "registers it when imported: --import PACKAGE"
            )
        if "cpu" not in known[backend]:
            raise UsageError(f"{backend} has no CPU tensors, which are measured here; {usable}")
        if not _built_in(backend):
            raise UsageError(f"this build of torch does not contain {backend}; {usable}")


def _built_in(backend: str) -> bool:
    return getattr(dist, f"is_{backend}_available", lambda: True)()


def prepare(pairs: list[tuple[str, str]]) -> None:
    """Compile what ``nearlinear`` needs before ranks start: they would wait for it in a group."""
    if any(backend == "nearlinear" for _, backend in pairs):
        with contextlib.suppress(build.BuildError):  # the backend falls back, and says so
            build.engine_library()
            build.glue_library()


def make(pairs: list[tuple[str, str]]) -> list[Contender]:
    """One process group per contender, over all ranks."""
    return [Contender(label, backend, dist.new_group(backend=backend)) for label, backend in pairs]
