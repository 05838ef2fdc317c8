"""``save``, ``async_save`` and ``maybe_finalize_async_calls`` of SMP v2.

A sharded state dict is saved by `nearlinear.save`, so that any other layout can load it. A local
one is a file per rank, written without communication.
"""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..... import _torch
from .....checkpoint.async_writer import PendingSave
from .....checkpoint.save import save as save_checkpoint
from .....errors import CheckpointError
from .state_dict_utils import Parts, PlainValues, folder_of, note_arguments

LOCAL_FILE = "local.pt"
"""File of a local state dict in its folder."""

_thread = threading.local()


class AsyncCallsQueue:
    """Accepted by `async_save`; pending saves are kept per rank in any case."""


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: Any = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    coordinator_rank: int = 0,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Save ``state_dict`` and return when it is complete; see `async_save`."""
    note_arguments(
        s3_region,
        planner=planner,
        coordinator_rank=coordinator_rank,
        s3client_config=s3client_config,
    )
    _start(state_dict, checkpoint_id, storage_writer).wait()


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: Any = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: Any = None,
    coordinator_rank: int = 0,
    queue: Any = None,
    sharded_strategy: Any = None,
    wait_error_handling: bool = True,
    force_check_all_plans: bool = True,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Copy ``state_dict`` to host memory, and write it while training continues.

    A collective call of all ranks, unless the state dict is local. Plain values are those of rank
    0. ``process_group``, ``coordinator_rank``, ``queue``, ``sharded_strategy`` and the two checks
    have no effect: every shard is written once, and errors are reported on all ranks.

    Args:
        state_dict: ``model.state_dict()`` of a sharded or local type, the state of the optimizer,
            and plain values, each under a name.
        checkpoint_id: A folder shared by all ranks, or an ``s3://`` address. If ranks name
            different folders, that of rank 0 is used.
        storage_writer: Object whose ``path`` is used without ``checkpoint_id``.

    Raises CheckpointError.
    """
    note_arguments(
        s3_region,
        planner=planner,
        coordinator_rank=coordinator_rank,
        queue=queue,
        sharded_strategy=sharded_strategy,
        s3client_config=s3client_config,
    )
    pending = _start(state_dict, checkpoint_id, storage_writer)
    number = getattr(_thread, "started", 0) + 1
    _thread.started = number
    _pending().append((number, pending))


def maybe_finalize_async_calls(blocking: bool = True, process_group: Any = None) -> list[int]:
    """Return the numbers of the `async_save` calls, from 1, that are complete since the last call.

    With ``blocking`` all of them are. Raises CheckpointError if a save has failed.
    """
    finished = []
    while _pending() and (blocking or _pending()[0][1].done):
        number, pending = _pending().popleft()
        pending.wait()
        finished.append(number)
    return finished


def _pending() -> deque[tuple[int, PendingSave]]:
    """Return this rank's saves in progress; ranks may be threads."""
    if not hasattr(_thread, "pending"):
        _thread.pending = deque()
    return _thread.pending


def _start(state_dict: Mapping[str, Any], checkpoint_id: Any, writer: Any) -> PendingSave:
    parts = Parts(state_dict)
    if parts.is_local:
        return _save_local(state_dict, folder_of(checkpoint_id, writer, local=True))
    if parts.model is None or parts.module is None:
        raise CheckpointError(
            "the state dict has no sharded model: take it under FSDP.state_dict_type(model, "
            "StateDictType.SHARDED_STATE_DICT), or write a full state dict with torch.save"
        )
    optimizer = None if parts.optimizer is None else parts.optimizer.optimizer
    values = PlainValues(parts.values)
    folder = folder_of(checkpoint_id, writer)
    return save_checkpoint(folder.path_or_url, parts.module, optimizer, plain_values=values)


def _save_local(state_dict: Mapping[str, Any], folder: Any) -> PendingSave:
    """Write this rank's tensors to a file of its own, on a thread."""

    def own_copy(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.detach().cpu().clone()

    plain = {k: dict(v) if isinstance(v, dict) else v for k, v in state_dict.items()}
    copied = _torch.map_tensors(own_copy, plain)

    def write(pending: PendingSave) -> None:
        try:
            memory = io.BytesIO()
            torch.save(copied, memory)
            folder.mkdir()
            (folder / LOCAL_FILE).put(memory.getvalue())
        except Exception as error:  # `PendingSave.wait` raises it on the rank's own thread
            pending.error = f"{folder} cannot be written: {error}"

    return PendingSave(folder, write)
