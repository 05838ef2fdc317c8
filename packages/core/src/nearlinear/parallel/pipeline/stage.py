"""A stage is the model itself, in which the parts of other stages let everything through.

So the model's own forward pass runs on every stage, unchanged, and parameters keep their names.
Hidden states come in as ``inputs_embeds`` and leave as ``logits``, since final norm and head are
not there either. A rank's stages share their modules with the rank's model: what is copied is the
containers around them.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ...errors import NearlinearError
from ...spmd import one_at_a_time
from ..around import around
from ..tensor.rows import Rows
from .calls import in_front
from .parts import Parts

OF_FIRST = ("input_ids", "inputs_embeds", "token_type_ids")
"""Arguments that only the first stage is given; later ones have hidden states."""
OF_LAST = ("labels", "logits_to_keep", "shift_labels")
"""Arguments that only the last stage is given."""


class Skip(nn.Module):
    """A part that another stage holds: hidden states go through."""

    def __init__(self, as_tuple: bool = False, change: Callable | None = None):
        """``change``: what is done to hidden states there by more than the part itself."""
        super().__init__()
        self.as_tuple = as_tuple  # blocks of older transformers return one
        self.change = change

    def forward(self, hidden, *args, **kwargs):
        hidden = hidden if self.change is None else self.change(hidden)
        return (hidden,) if self.as_tuple else hidden


class Zero(nn.Module):
    """An embedding that the first stage has added already."""

    def forward(self, *args, **kwargs):
        return torch.zeros(())


@dataclass
class Work:
    """What a stage computes with, beside what it receives."""

    first: bool
    last: bool
    calls: list[dict] = field(default_factory=list)  # the model's arguments, per micro-batch
    consume: Callable | None = None  # of the last stage: (micro-batch, output) -> what it returns
    at: int = 0  # the micro-batch at hand


class Stage:
    """In front of the model's class: its forward pass, from hidden states to hidden states."""

    def forward(self, *received):
        work = self._nearlinear_work
        output = super().forward(**entering(self, received, work))
        if work.last:
            return work.consume(work.at, around(self).leave(output))
        return leaving(self, output)


def entering(stage: Stage, received: tuple[torch.Tensor, ...], work: Work) -> dict:
    """The model's arguments for micro-batch ``work.at``, with what the stage before handed on."""
    call = around(stage).enter((), dict(work.calls[work.at]))
    shape = _tokens(call)
    without = (() if work.first else OF_FIRST) + (() if work.last else OF_LAST)
    call = {name: value for name, value in call.items() if name not in without}
    if not work.first:
        rows = rows_of(stage)
        if rows is not None:
            rows.see(*shape)
        call["inputs_embeds"] = received[0] if rows is None else rows.back_in_place(received[0])
    return call | {"use_cache": False, "return_dict": True}


def leaving(stage: Stage, output) -> torch.Tensor:
    """What is handed on to the next stage: not a view, which schedules could not detach."""
    rows = rows_of(stage)
    hidden = output.logits if rows is None else rows.mine(output.logits)
    return hidden if hidden._base is None else hidden.clone()


def rows_of(model: nn.Module) -> Rows | None:
    """Of a model that is split over tensor ranks: of hidden states each hands on its own rows."""
    return getattr(model, "_nearlinear_rows", None)


def handed_on(model: nn.Module, call: Mapping) -> tuple[int, ...]:
    """The shape of `leaving`, for the arguments of one micro-batch: (B, S, E).

    S is this context rank's part of the sequence; with tensor ranks it is (1, rows, E).
    """
    shape, rows = _tokens(around(model).enter((), dict(call))), rows_of(model)
    if rows is not None:
        rows.see(*shape)
        shape = (1, rows.each)
    return (*shape, model.config.hidden_size)


def _tokens(call: Mapping) -> tuple[int, int]:
    """(B, S) of a micro-batch."""
    given = call.get("input_ids")
    given = call.get("inputs_embeds") if given is None else given
    if not isinstance(given, torch.Tensor) or given.dim() < 2:
        raise NearlinearError(
            "a pipeline needs input_ids (B, S) or inputs_embeds (B, S, E) among the model's "
            "arguments: give it one of them"
        )
    return tuple(given.shape[:2])


def stage_of(model: nn.Module, parts: Parts, blocks: Iterable[int], count: int) -> nn.Module:
    """The stage of ``model`` that holds ``blocks`` of ``count``; modules are shared, not copied."""
    stage = _shell(model)
    base = stage._modules[parts.base] = _shell(stage._modules[parts.base])
    base._modules[parts.blocks] = _shell(base._modules[parts.blocks])
    blocks = set(blocks)
    leave_out(stage, parts, blocks, count)
    stage.__class__ = in_front(type(model), Stage)
    stage._nearlinear_work = Work(0 in blocks, count - 1 in blocks)
    return stage


def leave_out(model: nn.Module, parts: Parts, blocks: set[int], count: int) -> None:
    """Put what only stages with other blocks hold out of ``model``, in place."""
    base, stack, rows = model._modules[parts.base], parts.list_of(model), rows_of(model)
    if 0 not in blocks:
        words = model.get_input_embeddings()
        for name in parts.first:
            module = base._modules[name]
            added = isinstance(module, nn.Embedding) and module is not words
            base._modules[name] = Zero() if added else Skip()
    for name, block in list(stack._modules.items()):
        if int(name) not in blocks and not isinstance(block, Skip):
            enters = rows.mine if rows is not None and name == "0" else None
            stack._modules[name] = Skip(gives_tuple(type(block)), enters)
    if count - 1 not in blocks:
        for name in parts.last:
            leaves = rows.back_in_place if rows is not None and name == parts.last[0] else None
            base._modules[name] = Skip(change=leaves)
        model._modules[parts.head] = Skip()


def _shell(module: nn.Module) -> nn.Module:
    """A copy with the same children, parameters and buffers, and lists of them of its own."""
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # children, hooks, ..: also those that `copy` shares
            vars(twin)[name] = value.copy()
    return twin


def gives_tuple(block: type[nn.Module]) -> bool:
    """Whether a ``block`` returns hidden states in a tuple, as some did in transformers 4.

    What it returns tells, and what it says where that is neither made there nor a plain name.
    """
    forward = inspect.unwrap(block.forward)
    says = inspect.signature(forward).return_annotation
    with one_at_a_time():  # Python 3.11's parser is not safe among threads
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(forward)))))
    made = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    if not all(isinstance(value, ast.Tuple | ast.Name) for value in returned):
        return "tuple[" in str(says).lower()
    return any(isinstance(value, ast.Tuple) or value.id in made for value in returned)


def passes_through(model: nn.Module, parts: Parts, count: int) -> bool:
    """Whether ``model`` does nothing to hidden states but in its parts.

    Some scale or cap them in between, which every stage would do again.
    """
    bare = _shell(model)
    base = bare._modules[parts.base] = _shell(bare._modules[parts.base])
    base._modules[parts.blocks] = _shell(base._modules[parts.blocks])
    bare._nearlinear_rows = None
    leave_out(bare, parts, set(), count)
    device = next((b.device for b in model.buffers() if not b.is_meta), torch.device("cpu"))
    hidden = torch.linspace(-1, 1, 2 * model.config.hidden_size, device=device).view(1, 2, -1)
    with torch.no_grad():
        forward = type(model).forward
        left = forward(bare, inputs_embeds=hidden, use_cache=False, return_dict=True).logits
    return left.shape == hidden.shape and torch.equal(left, hidden)
