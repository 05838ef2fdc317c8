"""`nl.init`: join the ranks of this job, read the config, and remember both for this rank.

Under torchrun, and so SageMaker (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` in the environment), it
joins those ranks; inside `nl.spmd.run` it uses the ranks that are there; any other Python process
becomes a job of one rank. One runtime per process, or per thread where ranks are threads.
"""

import os
import socket
import threading
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import backends, leaving
from . import config as wish
from .config import Config
from .errors import ConfigError, NearlinearError
from .mesh import Mesh
from .spmd.threads import BACKEND as THREADS


@dataclass
class Runtime:
    """What this rank knows of the job."""

    config: Config
    mesh: Mesh
    rank: int
    device: torch.device
    _device_mesh: DeviceMesh | None = None
    _expert_mesh: DeviceMesh | None = None
    _groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    lanes: object = None  # `parallel.overlap.Lanes`, once a model uses them

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as torch's, made on first use: a collective call."""
        if self._device_mesh is None:
            self._device_mesh = self.mesh.device_mesh(self.device.type)
        return self._device_mesh

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The mesh of experts' states as torch's, made on first use: a collective call."""
        if self._expert_mesh is None:
            self._expert_mesh = self.mesh.expert_mesh(self.device.type)
        return self._expert_mesh

    def group(self, axis: str) -> dist.ProcessGroup:
        """This rank's process group on ``axis``, or of `mesh.JOINT`, made on first use.

        A collective call of the group's ranks. For what is not FSDP2's: its groups are in
        `device_mesh`, and collectives of one group must come in one order on all ranks.
        """
        if axis not in self._groups:
            ranks = self.mesh.group(axis, self.rank)
            self._groups[axis] = dist.new_group(ranks, use_local_synchronization=True)
        return self._groups[axis]


_of_thread = threading.local()
_of_process: Runtime | None = None


def init(config=None, *, ranks_per_node: int | None = None) -> Mesh:
    """Join the job and lay out its ranks as ``config`` asks; returns the `Mesh`.

    ``config`` is a dict, a path to a ``.json``/``.toml`` file, a `Config` or None; the launcher's
    ``SM_HP_MP_PARAMETERS`` wins over it, key by key. ``ranks_per_node`` defaults to
    ``LOCAL_WORLD_SIZE``. May be called again with another config. Raises ConfigError.
    """
    global _of_process
    config = wish.load(config)
    device = _device()
    if not dist.is_initialized():
        _join(backends.for_device(config.communication_backend, device.type))
    local = wish.whole_number("LOCAL_WORLD_SIZE", 0) if ranks_per_node is None else ranks_per_node
    mesh = Mesh.from_config(config, dist.get_world_size(), local)
    runtime = Runtime(config, mesh, dist.get_rank(), device)
    if ranks_are_threads():
        _of_thread.runtime = runtime
    else:
        _of_process = runtime
    return mesh


def current() -> Runtime:
    """The runtime of this rank; NearlinearError before `init`."""
    runtime = _known()
    if runtime is None:
        raise NearlinearError("nearlinear is not initialised on this rank: call nl.init() first")
    return runtime


def is_initialized() -> bool:
    """Whether `init` was called on this rank."""
    return _known() is not None


def current_mesh() -> Mesh:
    """The mesh of this rank's job; NearlinearError before `init`."""
    return current().mesh


def data_place() -> tuple[int, int]:
    """(data rank, data ranks) of this rank: which slice of every batch it reads.

    (0, 1) where there is no job, before `init` in a single process. NearlinearError before `init`
    among several ranks, which would otherwise all read the same.
    """
    if not is_initialized() and not (dist.is_initialized() and dist.get_world_size() > 1):
        return 0, 1
    now = current()
    return now.mesh.data_rank(now.rank), now.mesh.data_ranks


def first_of_node() -> bool:
    """Whether this rank is the one of its node that does what nodes do once."""
    return wish.whole_number("LOCAL_RANK", current().rank) == 0


def host() -> str:
    """The name of this machine, as logs call it."""
    return os.environ.get("SM_CURRENT_HOST") or socket.gethostname()


def shutdown() -> None:
    """Leave the job in step with the other ranks; without it torchrun reports a crash at exit."""
    try:
        if dist.is_initialized():
            leaving.finish()
    finally:
        _leave()


def _leave() -> None:
    global _of_process
    if ranks_are_threads():
        _of_thread.runtime = None  # the group is spmd.run's to end
        return
    if dist.is_initialized():
        if _of_process is not None and _of_process.lanes is not None:
            _of_process.lanes.finish()
        dist.barrier()
        dist.destroy_process_group()
    _of_process = None


def ranks_are_threads() -> bool:
    """Whether they are of this process, see `nearlinear.spmd.run`."""
    return dist.is_initialized() and dist.get_backend() == THREADS


def _known() -> Runtime | None:
    return getattr(_of_thread, "runtime", None) if ranks_are_threads() else _of_process


def _device() -> torch.device:
    """This rank's accelerator, or the CPU. Ranks that are threads stay on the CPU."""
    if ranks_are_threads() or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, count = wish.whole_number("LOCAL_RANK", 0), torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(
            f"LOCAL_RANK = {local_rank} but this machine shows {count} GPUs: start at most {count} "
            "ranks per node, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _join(backend: str) -> None:
    backend = backends.known_to_torch(backend)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set but {missing[0]} is not: start the ranks with torchrun, "
            "or unset RANK to run as one rank"
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        wish.whole_number(name)
    dist.init_process_group(backend)
