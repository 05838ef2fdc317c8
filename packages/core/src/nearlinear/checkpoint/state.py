"""What of a run is state: its tensors by name, and its values that JSON can carry."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import CheckpointError
from ..parallel import slices
from ..parallel.layout import Cut, cuts_of, whole_shape
from .pieces import Piece, blocks

MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"
_WRAPPED = "_checkpoint_wrapped_module."  # in names, where activations are checkpointed


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """The name of every parameter; tied ones have their first."""
    return {parameter: plain(name) for name, parameter in model.named_parameters()}


def updated_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """The names of what an optimizer has for the parameters: themselves, or their slices."""
    return {slices.of(parameter): name for parameter, name in parameter_names(model).items()}


def plain(name: str) -> str:
    """A parameter's name without what wrappers have put into it."""
    return name.replace(_WRAPPED, "")


@dataclass(frozen=True)
class Part:
    """What a rank has of a tensor of the run."""

    tensor: torch.Tensor
    cuts: tuple[Cut, ...] = ()
    """how it was cut out of the model's, before it was sharded"""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return whole_shape(self.tensor, self.cuts)


def held(model: nn.Module) -> dict[str, list[Piece]]:
    """The blocks of every parameter that this rank has, by the parameter's name."""
    return {
        name: sorted(blocks(parameter.data, cuts_of(parameter)))
        for parameter, name in parameter_names(model).items()
    }


def of_model(model: nn.Module) -> Iterator[tuple[str, Part]]:
    """`parts_of` by their names in a checkpoint."""
    return ((f"{MODEL}/{name}", part) for name, part in parts_of(model).items())


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Parameters, each once, and the buffers that a model keeps."""
    found = {
        name: Part(parameter.data, cuts_of(parameter))
        for parameter, name in parameter_names(model).items()
    }
    # A tied parameter's other names are in the state dict, too.
    known = {plain(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    kept = {plain(name) for name in model.state_dict()} - known
    for name, buffer in model.named_buffers():
        if plain(name) in kept:
            found[plain(name)] = Part(buffer)
    return found


def of_optimizer(optimizer, model: nn.Module) -> Iterator[tuple[str, Part]]:
    """The tensors that an optimizer keeps for each parameter of ``model``."""
    if type(optimizer).__module__.startswith("torchao."):
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps codes of blocks of its shards, which other layouts "
            "cut otherwise: save the model alone, or train with torch.optim.AdamW"
        )
    names = updated_names(model)
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key} as a {type(value).__name__}: only "
                    "optimizers whose state is tensors can be saved"
                )
            cuts = cuts_of(parameter) if value.shape == parameter.shape else ()
            if value.dim() and cuts_of(parameter) and not cuts:
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps {key} of {_name(parameter, names)} in "
                    "another shape than the parameter's, which tensor and expert ranks have cut: "
                    "save with tensor_parallel_degree = 1, or use AdamW"
                )
            yield f"{OPTIMIZER}/{_name(parameter, names)}/{key}", Part(value, cuts)


def settings(optimizer, model: nn.Module) -> dict:
    """What an optimizer is and its parameter groups, by parameters' names, as JSON can carry it."""
    names = updated_names(model)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [_name(parameter, names) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"kind": type(optimizer).__name__, "groups": groups}


def joined(settings: list[dict]) -> dict:
    """The settings of an optimizer whose parameters are on several ranks: of all of them."""
    first, *others = settings
    for other in others:
        for group, more in zip(first["groups"], other["groups"], strict=True):
            known = set(group["params"])
            group["params"] += [name for name in more["params"] if name not in known]
    return first


def make_room(optimizer, model: nn.Module, saved: dict) -> None:
    """Give ``optimizer`` the tensors that a checkpoint has for it, still without their values.

    ``saved``: shape and dtype of each, by name, as `index.Tensor`.
    """
    names = {name: parameter for parameter, name in updated_names(model).items()}
    there = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    optimizer.state.clear()
    for full, entry in saved.items():
        room, _, rest = full.partition("/")
        if room != OPTIMIZER:
            continue
        name, _, key = rest.rpartition("/")
        if name not in names:
            continue  # `load` says what does not fit
        parameter, dtype = names[name], getattr(torch, entry.dtype)
        known = there.get(parameter, {}).get(key)
        if _is_like(known, parameter, entry.shape, dtype):
            value = known
        elif whole_shape(parameter, cuts_of(parameter)) == entry.shape:
            value = torch.zeros_like(parameter.data, dtype=dtype)
        else:  # a count of steps, on the CPU unless the optimizer is fused
            device = parameter.device if _on_device(optimizer) else "cpu"
            value = torch.zeros(entry.shape, dtype=dtype, device=device)
        optimizer.state[parameter][key] = value


def _is_like(known, parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether ``known`` is a state of ``parameter`` that can take a saved one's values."""
    if not isinstance(known, torch.Tensor) or known.dtype != dtype:
        return False
    cuts = cuts_of(parameter) if known.shape == parameter.shape else ()
    return whole_shape(known, cuts) == shape


def restore_settings(optimizer, model: nn.Module, saved: dict, elsewhere: Set[str]) -> None:
    """Set learning rates and the like as `settings` found them. Raises CheckpointError.

    How updates are computed is no state of a run, and stays. ``elsewhere``: parameters that other
    ranks have.
    """
    here = settings(optimizer, model)
    if here["kind"] != saved["kind"]:
        raise CheckpointError(
            f"the state of {saved['kind']} was saved, which {here['kind']} cannot use: go on with "
            "the optimizer of the saved run, or load the model alone"
        )
    mine = [set(group["params"]) for group in here["groups"]]
    theirs = [set(group["params"]) for group in saved["groups"]]
    if len(mine) != len(theirs) or any(
        a - b or b - a - elsewhere for a, b in zip(mine, theirs, strict=True)
    ):
        raise CheckpointError("the optimizer groups its parameters otherwise than the saved one")
    for group, was in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: _like(group.get(key), value) for key, value in was.items()
                      if key not in ("params", "fused", "foreach")})  # fmt: skip


def random_state(rank: int, device: torch.device) -> dict[str, Part]:
    """This rank's random generators, by name."""
    found = {f"{RANDOM}/cpu/{rank}": Part(torch.get_rng_state())}
    if device.type == "cuda":
        found[f"{RANDOM}/cuda/{rank}"] = Part(torch.cuda.get_rng_state(device))
    return found


def restore_random_state(values: dict[str, Part], device: torch.device) -> None:
    """Set the generators that `random_state` named."""
    for name, value in values.items():
        if name.split("/")[1] == "cuda":
            torch.cuda.set_rng_state(value.tensor.cpu(), device)
        else:
            torch.set_rng_state(value.tensor.cpu())


def _on_device(optimizer) -> bool:
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _like(now, value):
    """``value`` from JSON as what it was: tuples come back as lists."""
    return tuple(value) if isinstance(now, tuple) else value


def _name(parameter: nn.Parameter, names: dict[nn.Parameter, str]) -> str:
    if parameter not in names:
        raise CheckpointError(
            "the optimizer has a parameter that the model has not: build it from the sharded "
            "model's parameters()"
        )
    return names[parameter]
