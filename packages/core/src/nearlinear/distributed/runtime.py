"""`nl.init`: join the ranks of this job, read the config, and keep both for this rank.

Under torchrun, and therefore on SageMaker (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` in the
environment), `init` joins those ranks. Inside `nl.spmd.run` it uses the existing ranks. Any other
Python process becomes a job of one rank. There is one runtime per process, or per thread if ranks
are threads. Collectives run on torch's backends, or on nearlinear-collectives in host memory.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..config import parallel
from ..config.parallel import HOST_MEMORY_BACKEND, ParallelConfig
from ..errors import ConfigError, NearlinearError
from . import process_exit, rendezvous
from .collectives import backend_of
from .mesh import AXES, AXIS_GROUPS, Mesh
from .thread_backend import BACKEND as THREAD_BACKEND


def register_backend(backend: str) -> str:
    """Register ``backend`` with torch.distributed if it is nearlinear-collectives; return it.

    Raises:
        ConfigError: nearlinear-collectives is not installed or cannot be loaded.
    """
    if HOST_MEMORY_BACKEND in backend:
        try:
            importlib.import_module("nearlinear_collectives")
        except ImportError as error:
            raise ConfigError(
                f"communication_backend = {backend!r} needs the package nearlinear-collectives "
                f"({error}). Install it with pip install nearlinear-collectives, or set "
                "communication_backend = 'gloo'."
            ) from None
    return backend


def backend_for_device(setting: str, device_type: str) -> str:
    """Resolve the config key ``communication_backend`` for ranks on ``device_type``.

    Raises:
        ConfigError: This torch has no such backend, or the backend does not serve the device.
    """
    if setting == "auto":
        return "nccl" if device_type == "cuda" else "gloo"
    if setting == HOST_MEMORY_BACKEND:
        return f"cpu:{HOST_MEMORY_BACKEND},cuda:nccl" if device_type == "cuda" else setting
    if ":" in setting:  # a backend for each device
        return setting

    def serves(name: str) -> bool:
        devices = dist.Backend.backend_capability.get(name, ())
        return device_type in devices and dist.is_backend_available(name)

    if not serves(setting):
        allowed = ["auto", HOST_MEMORY_BACKEND, *filter(serves, ("gloo", "nccl", "mpi", "ucc"))]
        raise ConfigError(
            f"communication_backend = {setting!r} does not serve ranks on {device_type!r} devices "
            f"in this build of PyTorch. Allowed here: {', '.join(allowed)}."
        )
    return setting


class CommThreadSet(Protocol):
    """Communication threads of a rank, see `fsdp.overlap`."""

    def finish(self) -> None:
        """Wait for the submitted communication and stop the threads."""


@dataclass
class Runtime:
    """The job as seen by one rank."""

    config: ParallelConfig
    mesh: Mesh
    rank: int
    device: torch.device
    _device_mesh: DeviceMesh | None = None
    _expert_mesh: DeviceMesh | None = None
    _groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    comm_threads: CommThreadSet | None = None
    """Communication threads, once a model uses them."""
    replica: int = 0
    """Index of this job among the replicas that are coupled jobs, see `nearlinear.elastic`."""
    replicas: int = 1
    """Number of those replicas."""
    compat: object | None = None
    """State of another library's interface on this rank, see `nearlinear.compat`."""

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh, config: ParallelConfig) -> Runtime:
        """Return the runtime of a ``DeviceMesh`` ("shard",) or ("replicate", "shard").

        Raises ConfigError for other dims, and for settings that need the mesh of `init`.
        """
        mesh = Mesh.from_device_mesh(device_mesh, parallel.whole_number("LOCAL_WORLD_SIZE", 0))
        for key in (
            "pipeline_parallel_degree",
            "tensor_parallel_degree",
            "context_parallel_degree",
            "expert_parallel_degree",
        ):
            if getattr(config, key) > 1:
                raise ConfigError(
                    f"{key} = {getattr(config, key)} with nl.shard(mesh=...): only 1 is allowed "
                    "there; call nl.init with this config and leave mesh out"
                )
        if config.hybrid_shard_degree not in (0, "auto", mesh.shard):
            raise ConfigError(
                f"hybrid_shard_degree = {config.hybrid_shard_degree}, but the mesh has "
                f"{mesh.shard} shards: leave hybrid_shard_degree out of nl.shard(mesh=...)"
            )
        device = torch.device(device_mesh.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return cls(config, mesh, dist.get_rank(), device, device_mesh)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over all ranks of the mesh, in place."""
        if self.mesh.world == dist.get_world_size():
            dist.all_reduce(tensor)
            return
        for dim in range(self.device_mesh.ndim):
            dist.all_reduce(tensor, group=self.device_mesh.get_group(dim))

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as a torch `DeviceMesh`, created on first use by a collective call."""
        if self._device_mesh is None:
            self._device_mesh = self.mesh.device_mesh(self.device.type)
        return self._device_mesh

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The mesh of expert states as a torch `DeviceMesh`, created by a collective call."""
        if self._expert_mesh is None:
            self._expert_mesh = self.mesh.expert_mesh(self.device.type)
        return self._expert_mesh

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's process group on ``axis`` or in one of `mesh.AXIS_GROUPS`.

        Created on first use by a collective call of the group's ranks. FSDP2 has groups of its own
        in `device_mesh`; collectives of one group must be issued in the same order on all ranks.
        """
        if axis not in self._groups:
            ranks = self.mesh.group(axis, self.rank)
            group = dist.new_group(ranks, use_local_synchronization=True)
            self._groups[axis] = cast(dist.ProcessGroup, group)  # this rank is a member
        return self._groups[axis]


_of_thread = threading.local()
_of_process: Runtime | None = None


def init(
    config: ParallelConfig | dict[str, Any] | str | os.PathLike[str] | None = None,
    *,
    ranks_per_node: int | None = None,
) -> Mesh:
    """Join the job and lay out its ranks.

    Example::

        mesh = nl.init({"hybrid_shard_degree": 8, "bf16": True})

    Args:
        config: A dict, a path to a ``.json`` or ``.toml`` file, a `ParallelConfig` or None. Keys in
            the launcher's ``SM_HP_MP_PARAMETERS`` take precedence.
        ranks_per_node: Defaults to ``LOCAL_WORLD_SIZE``.

    Returns:
        The mesh of the job. May be called again with another config.

    Raises:
        ConfigError: A key or value is invalid, or does not fit the number of ranks.
    """
    return join(parallel.load(config), ranks_per_node)


def join(settings: ParallelConfig, ranks_per_node: int | None = None) -> Mesh:
    """Join the job like `init`, with final ``settings``, and return its mesh."""
    global _of_process
    device = _device()
    if not dist.is_initialized():
        _join(backend_for_device(settings.communication_backend, device.type))
    if ranks_per_node is None:
        ranks_per_node = parallel.whole_number("LOCAL_WORLD_SIZE", 0)
    mesh = Mesh.from_config(settings, dist.get_world_size(), ranks_per_node)
    runtime = Runtime(settings, mesh, dist.get_rank(), device)
    if ranks_are_threads():
        _of_thread.runtime = runtime
    else:
        _of_process = runtime
    return mesh


def current() -> Runtime:
    """Return the runtime of this rank. Raises NearlinearError before `init`."""
    runtime = _known()
    if runtime is None:
        raise NearlinearError("nearlinear is not initialized on this rank. Call nl.init() first.")
    return runtime


def current_or_none() -> Runtime | None:
    """Return the runtime of this rank, or None before `init`."""
    return _known()


def collective_device() -> torch.device:
    """Return the device for this rank's tensors in collectives of the default process group."""
    now = _known()
    if now is not None:
        return now.device
    if backend_of() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def world_size() -> int:
    """Return the number of ranks of the job, before `init` too."""
    return (
        dist.get_world_size() if dist.is_initialized() else parallel.whole_number("WORLD_SIZE", 1)
    )


def is_initialized() -> bool:
    """Return whether `init` was called on this rank."""
    return _known() is not None


def current_mesh() -> Mesh:
    """Return the mesh of this rank's job. Raises NearlinearError before `init`."""
    return current().mesh


def process_group(axis: str) -> dist.ProcessGroup:
    """Return this rank's process group on a mesh axis. A collective call of the group's ranks.

    Example::

        dist.all_reduce(loss, group=nl.process_group("shard"))

    Args:
        axis: One of pipeline, replicate, shard, context and tensor, or a group across axes:
            sharing, expert, expert_sharing, data, model, stage, see `mesh.AXIS_GROUPS`.

    Raises:
        ConfigError: There is no such axis.
        NearlinearError: `init` was not called.
    """
    allowed = (*AXES, *AXIS_GROUPS)
    if axis not in allowed:
        raise ConfigError(
            f"process_group({axis!r}): there is no such mesh axis; allowed are {', '.join(allowed)}"
        )
    return current().group(axis)


def data_place(replica: int | None = None) -> tuple[int, int]:
    """Return (data rank, number of data ranks) of this rank: its slice of every batch.

    With ``replica``, return those of the same rank in another of the coupled jobs.

    Returns (0, 1) in a single process before `init`. Among several ranks it raises NearlinearError
    before `init`, since all ranks would read the same data.
    """
    if not is_initialized() and not (dist.is_initialized() and dist.get_world_size() > 1):
        return 0, 1
    now, ranks = current(), current().mesh.data_ranks
    replica = now.replica if replica is None else replica
    return replica * ranks + now.mesh.data_rank(now.rank), now.replicas * ranks


def place_replica(replica: int, replicas: int) -> None:
    """Make this job the ``replica``-th of ``replicas`` coupled jobs, which read different data."""
    now = current()
    now.replica, now.replicas = replica, replicas


def first_of_node() -> bool:
    """Return whether this rank does the work that each node does once."""
    return parallel.whole_number("LOCAL_RANK", dist.get_rank()) == 0


def host() -> str:
    """Return the name of this machine for log lines."""
    return os.environ.get("SM_CURRENT_HOST") or socket.gethostname()


def shutdown() -> None:
    """Leave the job in step with the other ranks.

    Example::

        nl.init()
        ...
        nl.shutdown()
    """
    try:
        if dist.is_initialized():
            process_exit.run_callbacks()
    finally:
        _leave()


def _leave() -> None:
    global _of_process
    if ranks_are_threads():
        _of_thread.runtime = None  # spmd.run destroys the process group
        return
    if dist.is_initialized():
        if _of_process is not None and _of_process.comm_threads is not None:
            _of_process.comm_threads.finish()
        dist.barrier()
        dist.destroy_process_group()
    _of_process = None


def ranks_are_threads() -> bool:
    """Return whether the ranks are threads of this process, see `nearlinear.spmd.run`."""
    return dist.is_initialized() and dist.get_backend() == THREAD_BACKEND


def _known() -> Runtime | None:
    return getattr(_of_thread, "runtime", None) if ranks_are_threads() else _of_process


def _device() -> torch.device:
    """Select this rank's accelerator, or the CPU. Ranks that are threads stay on the CPU.

    Replicas that one launcher starts on a machine have GPUs from NEARLINEAR_FIRST_GPU on, and share
    them if there are fewer.
    """
    if ranks_are_threads() or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, count = parallel.whole_number("LOCAL_RANK", 0), torch.cuda.device_count()
    first = parallel.whole_number("NEARLINEAR_FIRST_GPU", 0) % count
    if first + local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK = {local_rank}, but this machine has {count} visible GPUs. Start at most "
            f"{count} ranks per node, or set CUDA_VISIBLE_DEVICES= to run on the CPU."
        )
    device = torch.device("cuda", first + local_rank)
    torch.cuda.set_device(device)
    return device


def _join(backend_name: str) -> None:
    backend_name = register_backend(backend_name)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        os.environ.update(rendezvous.loopback_variables())
        dist.init_process_group(backend_name, store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set but {missing[0]} is not. Start the ranks with torchrun, "
            "or unset RANK to run as one rank."
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        parallel.whole_number(name)
    rendezvous.connect_ranks(backend_name)
