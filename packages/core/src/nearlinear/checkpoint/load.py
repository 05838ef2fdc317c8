"""Read a checkpoint into a model and an optimizer of any layout: each rank the blocks it holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .. import runtime
from ..errors import CheckpointError
from ..parallel import loss_scale
from . import index, saving, state
from .agree import everyone, some, together
from .pieces import Piece, blocks

_HASHING = 2  # files at a time


def load(folder, model, optimizer=None, loader=None, scheduler=None, **others) -> int:
    """Put the state in ``folder`` into what is given, in place; the step it is of.

    ``others``: as `save` was given them, with a ``load_state_dict(state)``. The layout may be
    another than the one that saved. Random generators go on where they were if there are as many
    ranks. Raises CheckpointError on all ranks where one cannot read, before the first value has
    been changed wherever that can be told from the index. A collective call.
    """
    saving.finish()
    elsewhere = _on_other_stages(model)
    with together():
        others |= {"loader": loader, "scheduler": scheduler}
        found = _load(Path(folder), model, optimizer, others, elsewhere)
    return found.step


def _on_other_stages(model) -> set[str]:
    """Names of parameters and buffers that only other stages of a pipeline have."""
    if runtime.current().mesh.pipeline == 1:
        return set()
    mine = list(state.parts_of(model))
    return {name for names in everyone(mine) for name in names} - set(mine)


def _load(folder: Path, model, optimizer, others: dict, elsewhere: set[str]) -> index.Index:
    now, found = runtime.current(), index.read(folder)
    if why := index.missing(folder, found):
        raise CheckpointError(f"{folder} is not whole: {why}; go back to the checkpoint before it")
    wanted = dict(state.of_model(model))
    _compare(folder, wanted, found, state.MODEL, elsewhere)
    if optimizer is not None:
        saved = _value(folder, found, "optimizer")
        state.restore_settings(optimizer, model, saved, elsewhere)
        state.make_room(optimizer, model, found.tensors)
        kept = dict(state.of_optimizer(optimizer, model))
        _compare(folder, kept, found, state.OPTIMIZER, elsewhere)
        wanted |= kept
    for name, part in others.items():
        if part is not None:
            part.load_state_dict(_value(folder, found, name))
    scaler = loss_scale.of(model)
    if scaler is not None and "loss_scaler" in found.values:  # else saved in another precision
        scaler.load_state_dict(found.values["loss_scaler"])
    random = state.random_state(now.rank, now.device)
    again = found.world == now.mesh.world and random.keys() <= found.tensors.keys()
    if again:
        wanted |= random
    _fill(folder, found, wanted)
    if again:
        state.restore_random_state(random, now.device)
    return found


def _value(folder: Path, found: index.Index, name: str):
    if name not in found.values:
        raise CheckpointError(f"{folder} was saved without {name}: load it without, too")
    return found.values[name]


def _compare(folder: Path, wanted: dict, found: index.Index, room: str, elsewhere: set) -> None:
    """Raise CheckpointError unless the checkpoint holds these very tensors, and ``elsewhere``'s."""
    saved = {
        name: entry
        for name, entry in found.tensors.items()
        if name.startswith(f"{room}/") and _parameter(name) not in elsewhere
    }
    faults = [f"has no {name}" for name in wanted.keys() - saved.keys()]
    faults += [f"has {name}, which is not here" for name in saved.keys() - wanted.keys()]
    for name in wanted.keys() & saved.keys():
        here, there = wanted[name].shape, saved[name].shape
        if here != there:
            faults.append(f"has {name} of {list(there)} instead of {list(here)}")
    if faults:
        raise CheckpointError(
            f"{folder} is of another model or optimizer: it {some(faults)}; "
            "use the config that saved it, or another folder"
        )


def _parameter(name: str) -> str:
    """What a tensor is of: ``model/P`` and ``optimizer/P/exp_avg`` are of ``P``."""
    room, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if room == state.OPTIMIZER else rest


def _fill(folder: Path, found: index.Index, wanted: dict[str, state.Part]) -> None:
    """Copy the blocks this rank holds into ``wanted``; its files are hashed in the meantime."""
    needed: dict[str, list[tuple]] = {}
    for name, part in wanted.items():
        mine = blocks(part.tensor, part.cuts)
        for file, pieces in found.tensors[name].pieces.items():
            for number, saved in enumerate(pieces):
                for piece, values in mine.items():
                    if saved.overlap(piece) is not None:
                        copy = (index.key(name, number), saved, piece, values)
                        needed.setdefault(file, []).append(copy)
    with ThreadPoolExecutor(_HASHING) as pool:
        checks = {file: pool.submit(index.check_content, folder, file, found.files[file])
                  for file in sorted(needed)}  # fmt: skip
        for file, check in checks.items():
            try:
                with safe_open(folder / file, "pt") as values, torch.no_grad():
                    for copy in needed[file]:
                        _copy(values, *copy)
            except (OSError, SafetensorError) as error:
                check.result()  # raises, if this is because the file has changed
                raise CheckpointError(f"{folder / file} cannot be read: {error}") from None
        for check in checks.values():
            check.result()


def _copy(file, key: str, saved: Piece, mine: Piece, values: torch.Tensor) -> None:
    """Into ``values``, this rank's block ``mine``, what the block ``saved`` of a file has of it."""
    common = saved.overlap(mine)
    if common == saved:
        block = file.get_tensor(key)
    else:
        block = file.get_slice(key)[common.inside(saved)]
    values[common.inside(mine)].copy_(block)
