"""``load`` of SMP v2: read a checkpoint into a state dict, and so into the model it belongs to."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from ..... import _torch, storage
from .....checkpoint import index
from .....checkpoint.load import load as load_checkpoint
from .....checkpoint.load import read_optimizer_state
from .....errors import CheckpointError
from .....fsdp.model_state import local_tensor
from .....storage import StoragePath
from ...state_dicts import ModelStateDict, refreshed
from .state_dict_saver import LOCAL_FILE, maybe_finalize_async_calls
from .state_dict_utils import Parts, PlainValues, folder_of, note_arguments


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: Any = None,
    storage_reader: Any = None,
    planner: Any = None,
    process_group: Any = None,
    check_keys_matched: bool = True,
    coordinator_rank: int = 0,
    s3_region: str | None = None,
    s3client_config: Any = None,
) -> None:
    """Load a checkpoint in place: tensors of the model, its optimizer, and plain values.

    A sharded checkpoint may come from any layout, or from ``torch.distributed.checkpoint``. A
    collective call of all ranks, unless the state dict is local.

    Args:
        state_dict: As for `state_dict_saver.save`. Its entries are replaced by the saved values.
        checkpoint_id: Folder or ``s3://`` address. If ranks name different folders, that of rank 0
            is used.
        storage_reader: Object whose ``path`` is used without ``checkpoint_id``.
        check_keys_matched: Raise CheckpointError for saved plain values that ``state_dict`` lacks.
    """
    note_arguments(s3_region, coordinator_rank=coordinator_rank, s3client_config=s3client_config)
    maybe_finalize_async_calls()
    parts = Parts(state_dict)
    if parts.is_local:
        assert parts.model is not None
        _load_local(state_dict, parts, folder_of(checkpoint_id, storage_reader, local=True))
        return
    folder = folder_of(checkpoint_id, storage_reader)
    if index.NAME not in folder.file_sizes() and not storage.is_remote(str(folder)):
        dcp.load(  # a checkpoint that torch wrote
            state_dict,
            checkpoint_id=str(folder),
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
        )
        return
    if parts.module is None:
        raise CheckpointError(
            "the state dict has no sharded model: take it under FSDP.state_dict_type(model, "
            "StateDictType.SHARDED_STATE_DICT)"
        )
    optimizer = None if parts.optimizer is None else parts.optimizer.optimizer
    values = PlainValues({})
    load_checkpoint(folder.path_or_url, parts.module, optimizer, plain_values=values)
    if parts.optimizer is not None:
        refreshed(parts.optimizer)
    _take(state_dict, parts.values, values.values, check_keys_matched, folder)


def _take(
    state_dict: dict[str, Any],
    wanted: Mapping[str, Any],
    saved: Mapping[str, Any],
    check: bool,
    folder: StoragePath,
) -> None:
    """Put the saved plain values into ``state_dict``. Raises CheckpointError."""
    missing, unused = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or (check and unused):
        raise CheckpointError(
            f"{folder} lacks the values {missing}, and has {unused}, which the state dict lacks: "
            "load into the names that were saved, or pass check_keys_matched=False"
        )
    state_dict.update({key: saved[key] for key in wanted})


def _load_local(state_dict: dict[str, Any], parts: Parts, folder: StoragePath) -> None:
    if LOCAL_FILE not in folder.file_sizes():
        raise CheckpointError(
            f"{folder} has no local state dict: this rank needs the folder that a rank of the same "
            "tensor, expert and shard rank saved"
        )
    saved = torch.load(
        io.BytesIO(b"".join((folder / LOCAL_FILE).stream())), map_location="cpu", weights_only=True
    )
    assert parts.model is not None
    if not state_dict.keys() <= saved.keys():
        raise CheckpointError(f"{folder} lacks {sorted(state_dict.keys() - saved.keys())}")
    for key, value in state_dict.items():
        if value is not parts.model:
            like_parameters = _Layouts(parts.model.model)
            state_dict[key] = _torch.map_tensors(like_parameters.divide, saved[key])
            continue
        for name, tensor in parts.model.items():
            found = saved[key].get(name)
            if found is None or found.shape != tensor.shape:
                raise CheckpointError(
                    f"{folder} has {name} in another shape: a local state dict is loaded at the "
                    "shard degree that saved it; use a sharded one to change it"
                )
            with torch.no_grad():
                tensor.copy_(found)


class _Layouts:
    """Divides tensors like the parameters of a model that have the same local shape."""

    def __init__(self, model: nn.Module):
        self.by_shape: dict[torch.Size, list[DTensor]] = {}
        for parameter in model.parameters():
            if isinstance(parameter.data, DTensor):
                local = local_tensor(parameter.data)
                self.by_shape.setdefault(local.shape, []).append(parameter.data)

    def divide(self, local: torch.Tensor) -> torch.Tensor:
        """Return ``local`` as a DTensor if parameters have its shape. Raises CheckpointError."""
        alike = self.by_shape.get(local.shape, []) if local.dim() else []
        if not alike:
            return local
        like = alike[0]
        if any(other.shape != like.shape for other in alike):
            raise CheckpointError(
                f"parameters of different shapes have parts of shape {list(local.shape)}: use a "
                "sharded state dict"
            )
        return DTensor.from_local(
            local.to(like.device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


def load_optimizer_state(
    original: Callable,
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    storage_reader: Any,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Read an optimizer's state of a DCP checkpoint for ``load_sharded_optimizer_state_dict``.

    The state of a parameter is divided as the parameter in ``model_state_dict`` is.
    """
    if isinstance(model_state_dict, ModelStateDict):
        found = _read_optimizer(model_state_dict.model, storage_reader)
        if found is not None:
            return {optimizer_key: found}
    if not any(isinstance(value, DTensor) for value in model_state_dict.values()):
        return original(model_state_dict, optimizer_key, storage_reader, planner)
    metadata = storage_reader.read_metadata()
    wanted: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        path = metadata.planner_data[name]
        if path[0] != optimizer_key:
            continue
        if not hasattr(entry, "size"):
            wanted[name] = "<bytes>"
            continue
        like = model_state_dict.get(path[2]) if len(path) > 2 else None
        dtype = entry.properties.dtype
        if isinstance(like, torch.Tensor) and like.shape == entry.size:
            wanted[name] = torch.zeros_like(like, dtype=dtype)
        else:
            wanted[name] = torch.zeros(entry.size, dtype=dtype)
    dcp.load(wanted, storage_reader=storage_reader, process_group=process_group, planner=planner)
    result: dict[str, Any] = {}
    for name, value in wanted.items():
        _put(result, metadata.planner_data[name], value)
    return result


def _put(tree: Any, path: Sequence[Any], value: Any) -> None:
    """Set ``value`` at ``path`` of nested dicts and lists; numbers in a path are list places."""
    for key, following in zip(path, [*path[1:], None], strict=True):
        last = following is None
        new = value if last else [] if isinstance(following, int) else {}
        if isinstance(tree, list):
            tree += [None] * (key + 1 - len(tree))
            if last or tree[key] is None:
                tree[key] = new
        elif last or key not in tree:
            tree[key] = new
        tree = tree[key]


def _read_optimizer(model: nn.Module, storage_reader: Any) -> dict[str, Any] | None:
    """Return the optimizer's state in a checkpoint of `save`, by parameter names.

    None if the folder of ``storage_reader`` is no such checkpoint. A collective call.
    """
    folder = folder_of(None, storage_reader)
    if index.NAME not in folder.file_sizes():
        return None
    return read_optimizer_state(folder, model)
