"""Read a checkpoint into a model and an optimizer of any layout: each rank the blocks it holds."""

from __future__ import annotations

import torch
from safetensors import SafetensorError

from .. import runtime, storage
from ..errors import CheckpointError
from ..parallel import loss_scale
from ..storage import Place
from ..storage.threads import side_by_side
from . import index, reading, saving, state
from .agree import everyone, some, together
from .pieces import Piece, blocks

_AT_ONCE = 2  # files, each hashed while it is copied from
_MUCH = 0.1  # of a file: who reads more of it checks it, too


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
        found = _load(storage.at(folder), model, optimizer, others, elsewhere)
    return found.step


def _on_other_stages(model) -> set[str]:
    """Names of parameters and buffers that only other stages of a pipeline have."""
    if runtime.current().mesh.pipeline == 1:
        return set()
    mine = list(state.parts_of(model))
    return {name for names in everyone(mine) for name in names} - set(mine)


def _load(folder: Place, model, optimizer, others: dict, elsewhere: set[str]) -> index.Index:
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


def _value(folder: Place, found: index.Index, name: str):
    if name not in found.values:
        raise CheckpointError(f"{folder} was saved without {name}: load it without, too")
    return found.values[name]


def _compare(folder: Place, wanted: dict, found: index.Index, room: str, elsewhere: set) -> None:
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


def _fill(folder: Place, found: index.Index, wanted: dict[str, state.Part]) -> None:
    """Copy the blocks this rank holds into ``wanted``.

    A file is hashed by the ranks that read much of it, and every file by one of them in turn, whose
    word is everybody's (`together`): many read a few numbers of a file, and none should read it all
    for those.
    """
    needed: dict[str, dict[str, list[Copy]]] = {}
    for name, part in wanted.items():
        mine = blocks(part.tensor, part.cuts)
        for file, pieces in found.tensors[name].pieces.items():
            for number, saved in enumerate(pieces):
                for piece, values in mine.items():
                    if saved.overlap(piece) is not None:
                        of_file = needed.setdefault(file, {})
                        copies = of_file.setdefault(index.key(name, number), [])
                        copies.append((saved, piece, values))

    now = runtime.current()
    checked = {
        file for file, copies in needed.items() if _bytes(copies) > _MUCH * found.files[file].bytes
    }
    checked.update(sorted(found.files)[now.rank :: now.mesh.world])  # for all

    def read(file: str) -> None:
        copies = needed.get(file, {})
        if file in checked:
            _read(folder / file, found.files[file], copies)
        else:
            _read_some(folder / file, found.files[file], copies)

    for _ in side_by_side(read, sorted(needed.keys() | checked), _AT_ONCE):
        pass


Copy = tuple[Piece, Piece, torch.Tensor]
"""A block of a file, the one of this rank that it has some of, and the memory of that."""


def _read_some(path: Place, file: index.File, needed: dict[str, list[Copy]]) -> None:
    """Make these copies from blocks of a file, by their keys. Raises CheckpointError."""
    try:
        with reading.opened(path) as values, torch.no_grad():
            for key, copies in needed.items():
                for copy in copies:
                    _copy(values, key, *copy)
    except (OSError, SafetensorError) as error:
        index.check_content(path, file)  # raises, if it is because the file has changed
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _read(path: Place, file: index.File, needed: dict[str, list[Copy]]) -> None:
    """`_read_some`, and check all of the file."""
    fault = None
    try:
        passing = reading.Streamed(path)
        with passing.tensors() as values, torch.no_grad():
            there = [key for key in values.keys() if key in needed]  # noqa: SIM118 - not a dict
            if len(there) < len(needed):
                raise SafetensorError(f"{min(needed.keys() - set(there))} is not in it")
            for key in there:
                if not _straight(values, key, needed[key]):
                    for copy in needed[key]:
                        _copy(values, key, *copy)
    except SafetensorError as error:
        fault = error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror or error}): mend that, or go back to the "
            "checkpoint before it"
        ) from None
    index.check_content(path, file, passing.looks)  # raises, if it is because the file has changed
    if fault is not None:
        raise CheckpointError(f"{path} cannot be read: {fault}")


def _bytes(copies: dict[str, list[Copy]]) -> int:
    """Of what they fill."""
    return sum(
        values[saved.overlap(mine).inside(mine)].nbytes
        for of_key in copies.values()
        for saved, mine, values in of_key
    )


def _straight(file: reading.Passing, key: str, copies: list[Copy]) -> bool:
    """Read a block to the only place where all of it belongs, if that can be; whether it was."""
    (saved, mine, values), *others = copies
    whole = saved.overlap(mine) == saved
    return whole and not others and file.put(key, values[saved.inside(mine)])


def _copy(file, key: str, saved: Piece, mine: Piece, values: torch.Tensor) -> None:
    """Into ``values``, this rank's block ``mine``, what the block ``saved`` of a file has of it."""
    common = saved.overlap(mine)
    if common == saved:
        block = file.get_tensor(key)
    else:
        block = file.get_slice(key)[common.inside(saved)]
    values[common.inside(mine)].copy_(block)
