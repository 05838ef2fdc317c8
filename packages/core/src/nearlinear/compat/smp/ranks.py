"""Ranks, sizes and groups of SMP v1, barriers, and objects sent between ranks.

``mp`` are the ranks that hold one copy of the model (pipeline x tensor), ``dp`` all ranks of one
pipeline stage, ``rdp`` the ranks that hold the same part of the model, which read different data.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
import torch.distributed as dist

from ...config import parallel
from ...distributed import runtime as runtimes
from ...distributed.objects import broadcast_object, receive
from ...distributed.objects import send as send_object
from ...distributed.runtime import Runtime


class CommGroup(enum.Enum):
    """Group of ranks."""

    WORLD = "world"
    MP_GROUP = "model"
    DP_GROUP = "stage"
    TP_GROUP = "tensor"
    PP_GROUP = "pipeline"
    RDP_GROUP = "data"


class RankType(enum.Enum):
    """Kind of rank by which another rank is named."""

    WORLD_RANK = "world"
    MP_RANK = "model"
    DP_RANK = "stage"
    TP_RANK = "tensor"
    PP_RANK = "pipeline"
    RDP_RANK = "data"


WORLD, MP_GROUP, DP_GROUP = CommGroup.WORLD, CommGroup.MP_GROUP, CommGroup.DP_GROUP
TP_GROUP, PP_GROUP, RDP_GROUP = CommGroup.TP_GROUP, CommGroup.PP_GROUP, CommGroup.RDP_GROUP
WORLD_RANK, MP_RANK, DP_RANK = RankType.WORLD_RANK, RankType.MP_RANK, RankType.DP_RANK
TP_RANK, PP_RANK, RDP_RANK = RankType.TP_RANK, RankType.PP_RANK, RankType.RDP_RANK


def ranks_of(axis: str, runtime: Runtime | None = None) -> list[int]:
    """Return the global ranks of this rank's group on ``axis``, in order."""
    runtime = runtime or runtimes.current()
    if axis == "world":
        return list(range(runtime.mesh.world))
    return sorted(runtime.mesh.group(axis, runtime.rank))


def process_group(axis: str, runtime: Runtime | None = None) -> dist.ProcessGroup:
    """Return the process group of `ranks_of`."""
    runtime = runtime or runtimes.current()
    if axis == "world" or len(ranks_of(axis, runtime)) == runtime.mesh.world:
        group = dist.group.WORLD
        assert group is not None
        return group
    return runtime.group(axis)


def create_groups(runtime: Runtime) -> None:
    """Create all process groups. A collective call.

    Scripts ask for groups on some ranks only, when their creation would wait for the others.
    """
    for group in CommGroup:
        process_group(group.value, runtime)


def _rank(axis: str) -> int:
    return ranks_of(axis).index(runtimes.current().rank)


def rank() -> int:
    """Return the rank among all ranks."""
    return runtimes.current().rank


def size() -> int:
    """Return the number of ranks."""
    return runtimes.current().mesh.world


def local_rank() -> int:
    """Return the rank on this node."""
    return parallel.whole_number("LOCAL_RANK", rank())


def local_size() -> int:
    """Return the number of ranks on this node."""
    return parallel.whole_number("LOCAL_WORLD_SIZE", size())


def tp_rank() -> int:
    """Return the rank among the ranks that split the matrices of layers."""
    return _rank("tensor")


def tp_size() -> int:
    """Return the number of ranks that split the matrices of layers."""
    return len(ranks_of("tensor"))


def pp_rank() -> int:
    """Return the rank among the pipeline's ranks."""
    return _rank("pipeline")


def pp_size() -> int:
    """Return the number of ranks of the pipeline."""
    return len(ranks_of("pipeline"))


def rdp_rank() -> int:
    """Return the rank among the ranks with the same part of the model and different data."""
    return _rank("data")


def rdp_size() -> int:
    """Return the number of ranks with the same part of the model and different data."""
    return len(ranks_of("data"))


def mp_rank() -> int:
    """Return the rank among the ranks that hold one copy of the model."""
    return _rank("model")


def mp_size() -> int:
    """Return the number of ranks that hold one copy of the model."""
    return len(ranks_of("model"))


def dp_rank() -> int:
    """Return the rank among the ranks of one pipeline stage."""
    return _rank("stage")


def dp_size() -> int:
    """Return the number of ranks of one pipeline stage."""
    return len(ranks_of("stage"))


def get_world_process_group() -> dist.ProcessGroup:
    """Return the process group of all ranks."""
    return process_group("world")


def get_tp_process_group() -> dist.ProcessGroup:
    """Return the process group of `get_tp_group`."""
    return process_group("tensor")


def get_pp_process_group() -> dist.ProcessGroup:
    """Return the process group of `get_pp_group`."""
    return process_group("pipeline")


def get_rdp_process_group() -> dist.ProcessGroup:
    """Return the process group of `get_rdp_group`."""
    return process_group("data")


def get_mp_process_group() -> dist.ProcessGroup:
    """Return the process group of `get_mp_group`."""
    return process_group("model")


def get_dp_process_group() -> dist.ProcessGroup:
    """Return the process group of `get_dp_group`."""
    return process_group("stage")


def get_tp_group() -> list[int]:
    """Return the ranks that split the matrices of layers with this one."""
    return ranks_of("tensor")


def get_pp_group() -> list[int]:
    """Return the ranks of this rank's pipeline."""
    return ranks_of("pipeline")


def get_rdp_group() -> list[int]:
    """Return the ranks with the same part of the model and different data."""
    return ranks_of("data")


def get_mp_group() -> list[int]:
    """Return the ranks that hold one copy of the model with this one."""
    return ranks_of("model")


def get_dp_group() -> list[int]:
    """Return the ranks of this rank's pipeline stage."""
    return ranks_of("stage")


def barrier(group: CommGroup = WORLD) -> None:
    """Wait for the ranks of ``group``."""
    dist.barrier(group=process_group(group.value))


def dp_barrier() -> None:
    """Wait for the ranks of this rank's pipeline stage."""
    barrier(DP_GROUP)


def mp_barrier() -> None:
    """Wait for the ranks that hold one copy of the model with this one."""
    barrier(MP_GROUP)


def broadcast(obj: Any, group: CommGroup = WORLD) -> None:
    """Send ``obj`` to the other ranks of ``group``, which call ``recv_from``.

    Objects consist of tensors, numbers and strings in dicts, lists and tuples; nothing is pickled.

    Raises:
        NearlinearError: ``obj`` contains an object of another type.
    """
    for other in ranks_of(group.value):
        if other != rank():
            _send(obj, other)


def send(obj: Any, dest_rank: int, rank_type: RankType = WORLD_RANK) -> None:
    """Send ``obj`` to rank ``dest_rank`` of kind ``rank_type``, which calls `recv_from`."""
    _send(obj, ranks_of(rank_type.value)[dest_rank])


def recv_from(src_rank: int, rank_type: RankType = WORLD_RANK) -> Any:
    """Return the object sent by rank ``src_rank`` of kind ``rank_type``."""
    source = ranks_of(rank_type.value)[src_rank]

    def transfer(tensor: torch.Tensor) -> None:
        dist.recv(tensor, source)

    return receive(transfer, runtimes.current().device, "an object")


def allgather(obj: Any, group: CommGroup = WORLD) -> list[Any]:
    """Return the objects of all ranks of ``group``, in rank order. A collective call."""
    runtime, found = runtimes.current(), process_group(group.value)
    return [
        broadcast_object(obj, source, found, runtime.device) for source in ranks_of(group.value)
    ]


def _send(obj: Any, destination: int) -> None:
    send_object(
        obj, lambda tensor: dist.send(tensor, destination), runtimes.current().device, "an object"
    )
