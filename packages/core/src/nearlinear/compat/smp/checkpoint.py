"""SMP v1's checkpoints: objects per rank, and the state of model and optimizer of a run.

Partial checkpoints are nearlinear's (`nearlinear.save`): ranks write their shards, and any layout
can load them. Full ones are one file with whole tensors. Only values that ``torch.load`` reads with
``weights_only=True`` are written, so that loading a file cannot run code.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...checkpoint.load import load as load_checkpoint
from ...checkpoint.save import save as write_checkpoint
from ...distributed.consensus import raise_on_all_ranks
from ...errors import CheckpointError
from . import ranks
from .session import session

log = logging.getLogger(__name__)

_KIND = "smp:kind"
_PLAIN = str | int | float | bool | torch.Tensor | torch.dtype | torch.Size | None


def save(obj: Any, f: str | os.PathLike, partial: bool = True, **unused: Any) -> None:
    """Write ``obj`` by ``torch.save``.

    Example::

        smp.save({"model": model.local_state_dict()}, "model.pt")

    Args:
        obj: Tensors, numbers, strings and configs of transformers in dicts, lists and tuples.
        f: File. A partial one has the ranks that hold this part of the model in its name.
        partial: Write a file per part of the model, for `local_state_dict`. False: one file.
        unused: ``pickle_module``, ``pickle_protocol`` and ``v3`` have no effect.

    Raises:
        CheckpointError: ``obj`` contains an object of another type.
    """
    Path(f).parent.mkdir(parents=True, exist_ok=True)
    torch.save(encode(obj), _file(f, partial))


def load(f: str | os.PathLike, map_location: Any = "cpu", partial: bool = True, **unused: Any):
    """Return the object that `save` wrote.

    Raises:
        CheckpointError: There is no such file, or it contains code.
    """
    return _read(_file(f, partial), map_location)


def _file(f: str | os.PathLike, partial: bool) -> str:
    """Return the file of this rank."""
    if not partial:
        return os.fspath(f)
    now = session().runtime
    shard = now.mesh.state_rank(now.rank) if now.mesh.sharing > 1 else None
    parts = [ranks.pp_rank(), ranks.tp_rank(), *([] if shard is None else [shard])]
    return "_".join([os.fspath(f), *map(str, parts)])


def _read(path: str | os.PathLike, map_location: Any = "cpu") -> Any:
    try:
        found = torch.load(path, map_location=map_location, weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} contains more than tensors, numbers and strings, which could run code when "
            f"loaded, or is damaged ({error}): save it with smp.save"
        ) from error
    return decode(found)


def encode(value: Any) -> Any:
    """Replace objects that ``torch.load(weights_only=True)`` refuses. Raises CheckpointError."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {key: encode(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        items = [encode(each) for each in value]
        return items if isinstance(value, list) else {_KIND: type(value).__name__, "value": items}
    if isinstance(value, argparse.Namespace):
        return {_KIND: "Namespace", "value": encode(vars(value))}
    if isinstance(value, os.PathLike | torch.device):
        return {_KIND: type(value).__name__, "value": str(value)}
    if hasattr(value, "model_type") and hasattr(value, "to_dict"):
        return {_KIND: "config", "model_type": value.model_type, "value": encode(value.to_dict())}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy
        return value.item()
    raise CheckpointError(
        f"a checkpoint cannot contain an object of type {type(value).__name__}: give its "
        "state_dict(), numbers or strings"
    )


def decode(value: Any) -> Any:
    """Undo `encode`."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: decode(each) for key, each in value.items()}
    inner = decode(value["value"])
    if kind == "config":
        from transformers import AutoConfig

        inner.pop("model_type", None)
        return AutoConfig.for_model(value["model_type"], **inner)
    simple: dict[str, Callable] = {
        "tuple": tuple,
        "set": set,
        "Namespace": lambda values: argparse.Namespace(**values),
        "device": torch.device,
    }
    return simple.get(kind, Path)(inner)


def save_checkpoint(
    path: str | os.PathLike,
    tag: str,
    partial: bool = True,
    model: nn.Module | None = None,
    optimizer: Any = None,
    user_content: Any = None,
    translate_if_full: bool = True,
    num_kept_partial_checkpoints: int | None = None,
) -> None:
    """Write the state of the run. A collective call.

    Partial: ``path/{tag}_partial``, of model and optimizer. Full: the file ``path/{tag}``, of
    the model only, with ``path/user_content_{tag}``. ``path/newest`` names the newest one.

    Args:
        path: Folder of the run, shared by all nodes.
        tag: Name of the checkpoint.
        partial: Ranks write their shards, and the optimizer's. False: one file.
        model: The `DistributedModel`; default: that of the script.
        optimizer: The `DistributedOptimizer`; default: that of the script.
        user_content: Values for `resume_from_checkpoint` to return, see `save`.
        translate_if_full: Has no effect: names are Hugging Face's in any case.
        num_kept_partial_checkpoints: Delete all but the newest ones.

    Raises:
        CheckpointError: The state cannot be written.
    """
    found, folder = session(), Path(path)
    found.partition()
    module = found.require_model().module
    optimizer = optimizer if optimizer is not None else found.optimizer
    name, content = f"{tag}_partial" if partial else tag, None
    if partial:
        place = folder / name
        inner = None if optimizer is None else optimizer.optimizer
        write_checkpoint(place, module, inner, wait=True)
        content = place / "user_content.pt"
    else:
        state = found.require_model().state_dict(gather_to_rank0=True)
        content = folder / f"user_content_{tag}"
        with raise_on_all_ranks():
            if found.runtime.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                torch.save({"model": state}, folder / name)
    with raise_on_all_ranks():
        if found.runtime.rank == 0:
            torch.save(encode(user_content), content)
            newest = folder / "newest.tmp"
            newest.write_text(name)
            newest.replace(folder / "newest")
            if partial and num_kept_partial_checkpoints is not None:
                _delete_old(folder, num_kept_partial_checkpoints)


def _delete_old(folder: Path, kept: int) -> None:
    partials = sorted(folder.glob("*_partial"), key=lambda each: each.stat().st_mtime_ns)
    for old in partials[: max(0, len(partials) - max(1, kept))]:
        shutil.rmtree(old)


def resume_from_checkpoint(
    path: str | os.PathLike,
    tag: str | None = None,
    partial: bool = True,
    strict: bool = True,
    load_optimizer: bool = True,
    load_sharded_optimizer_state: bool = True,
    translate_function: Callable[[dict], dict] | None = None,
) -> Any:
    """Load a checkpoint of `save_checkpoint`; return its ``user_content``. A collective call.

    Called after `DistributedModel` and `DistributedOptimizer`. Before the first step, the tensors
    are loaded then. The layout may differ from the one that saved.

    Args:
        path: Folder of the run.
        tag: Name of the checkpoint; default: the newest one of the kind.
        partial: Kind of the checkpoint.
        strict: Names must be equal. Applies to full checkpoints; partial ones must fit.
        load_optimizer: Load the optimizer of a partial checkpoint. A full one has none.
        load_sharded_optimizer_state: False: as ``load_optimizer = False``.
        translate_function: Applied to the state dict of a full checkpoint.

    Raises:
        CheckpointError: There is no such checkpoint, or it does not fit.
    """
    found, folder = session(), Path(path)
    model = found.require_model()
    with raise_on_all_ranks():
        name = _newest(folder, partial) if tag is None else f"{tag}_partial" if partial else tag
        place = folder / name
        if not place.exists():
            raise CheckpointError(f"there is no checkpoint {place}: check path, tag and partial")
        file = place / "user_content.pt" if partial else folder / f"user_content_{name}"
        content = _read(file) if file.exists() else None

    def load_partial() -> None:
        wanted = load_optimizer and load_sharded_optimizer_state and found.optimizer is not None
        inner = found.optimizer.optimizer if wanted and found.optimizer is not None else None
        load_checkpoint(place, model.module, inner)

    def load_full() -> None:
        with raise_on_all_ranks():
            state = _read(place)["model"]
        state = state if translate_function is None else translate_function(state)
        model.load_state_dict(state, strict)

    found.do_when_partitioned(load_partial if partial else load_full)
    return content


def _newest(folder: Path, partial: bool) -> str:
    """Return the name of the newest checkpoint of a kind. Raises CheckpointError."""
    newest = folder / "newest"
    name = newest.read_text().strip() if newest.exists() else ""
    if name and name.endswith("_partial") == partial:
        return name
    pattern, prefix = ("*_partial", "") if partial else ("user_content_*", "user_content_")
    found = sorted(folder.glob(pattern), key=lambda each: each.stat().st_mtime_ns)
    if not found:
        raise CheckpointError(
            f"there is no {'partial' if partial else 'full'} checkpoint in {folder}"
        )
    return found[-1].name.removeprefix(prefix)
