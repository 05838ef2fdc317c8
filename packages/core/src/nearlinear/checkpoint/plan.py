"""Who writes which blocks of a run's state: worked out together, once, and then by each rank alone.

It holds as long as the state's tensors stay where they are, which they do from the first step of an
optimizer on, while their values change.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import runtime
from ..errors import CheckpointError
from ..parallel import loss_scale
from ..storage import Place
from . import about, holdings, index, saving, state
from .agree import everyone
from .index import Index
from .pieces import Piece, writers
from .saving import Saves, Saving, file_of


@dataclass(frozen=True)
class Plan:
    """What a checkpoint is made of. Nothing here needs a collective."""

    saves: Saves
    name: str
    """the same on all ranks, and of no other plan"""
    told: Sequence[dict]
    """what each rank has, see `holdings.told`"""
    chosen: Sequence[dict[str, list[Piece]]]
    """the blocks each rank writes, by name"""
    mine: dict[str, torch.Tensor]
    """the memory of those of this rank, by their keys in its file"""
    steady: frozenset[str]
    """the keys of those that a forward and backward pass leave as they are"""
    values: dict
    """what is no tensor, of model and optimizer"""

    def start(
        self,
        folder: Place,
        step: int,
        values: dict,
        after: Callable,
        instead: dict | None = None,
        changed_by: torch.optim.Optimizer | None = None,
    ) -> Saving:
        """Begin to write the state as it is now, with ``values`` beside it, on every rank.

        ``instead``: memory to write in place of some of ``mine``. ``changed_by``: the optimizer,
        to wait for the copy of what is ``steady``; without it that is copied when this returns. For
        `Saving` and ``after`` see `save.begin`.
        """
        mine = self.mine | {key: (instead or {}).get(key, self.mine[key]) for key in self.mine}

        def made(files: list[index.File | None]) -> Index:
            return self._index(step, files, self.values | values)

        later = self.steady if changed_by is not None else frozenset()
        name = f"{self.name}/{step}"
        return saving.start(self.saves, folder, name, mine, made, after, changed_by, later)

    def _index(self, step: int, files: list[index.File | None], values: dict) -> Index:
        """The same on every rank."""
        world, tensors = len(self.told), {}
        for rank, written in enumerate(self.chosen):
            for name, pieces in written.items():
                entry = self.told[rank][name]
                tensor = index.Tensor(entry["dtype"], tuple(entry["shape"]), {})
                tensors.setdefault(name, tensor).pieces[file_of(rank, world)] = pieces
        there = {file_of(rank, world): file for rank, file in enumerate(files) if file}
        return Index(step, world, tensors, there, values)


def plan(model, optimizer) -> Plan:
    """The plan for the state as it is laid out now. A collective call."""
    now = runtime.current()
    tensors, values = dict(state.of_model(model)), {about.KEY: about.about(model)}
    settings = None
    if optimizer is not None:
        tensors |= state.of_optimizer(optimizer, model)
        settings = values["optimizer"] = state.settings(optimizer, model)
    tensors |= state.random_state(now.rank, now.device)
    here = holdings.blocks_of(tensors)
    stages = now.mesh.pipeline > 1
    mine = [uuid.uuid4().hex, holdings.told(tensors, here), settings if stages else None]
    names, told, of_stages = zip(*everyone(mine), strict=True)
    if settings is not None and stages:
        values["optimizer"] = state.joined(list(of_stages))
    chosen = [_by_name(of_rank) for of_rank in writers([list(holdings.listed(e)) for e in told])]
    parameters = {f"{state.MODEL}/{name}" for name in state.parameter_names(model).values()}
    memory, steady = {}, set()
    for name, pieces in chosen[now.rank].items():
        for number, piece in enumerate(pieces):
            key = index.key(name, number)
            memory[key] = here[name][piece]
            if name in parameters or name.startswith(f"{state.OPTIMIZER}/"):
                steady.add(key)
    return Plan(saving.of_this_rank(), names[0], told, chosen, memory, frozenset(steady), values)


def values_of(model, others: dict) -> dict:
    """What is no tensor, of ``others`` and of the model's loss scaler. Raises CheckpointError."""
    parts = others | {"loss_scaler": loss_scale.of(model)}
    return {
        name: _as_json(name, part.state_dict()) for name, part in parts.items() if part is not None
    }


def _as_json(name: str, values: dict) -> dict:
    """``values`` as they are now, and as the index will have them. Raises CheckpointError."""
    try:
        return json.loads(json.dumps(values))
    except TypeError as error:
        raise CheckpointError(f"{name}.state_dict() has what JSON cannot carry: {error}") from None


def _by_name(chosen: set[tuple[str, Piece]]) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for name, piece in sorted(chosen):
        found.setdefault(name, []).append(piece)
    return found
