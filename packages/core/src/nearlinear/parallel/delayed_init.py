"""Build a model without its values; give them one unit at a time, while it is being sharded.

No rank ever holds the whole model: under `delayed_init` parameters are created on the meta device
(buffers stay real), and `nearlinear.shard` initialises a block, keeps this rank's shard of it and
goes on to the next. Values depend on the seed and the module's name alone, so that any number of
ranks and any layout start from the same model.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import ConfigError
from ..spmd.ranks import one_at_a_time
from . import layout


@contextmanager
def delayed_init() -> Iterator[None]:
    """Create parameters without memory inside the block; `nearlinear.shard` fills them later.

    Ranks that are threads enter one at a time.
    """

    def without_values(module, name, parameter):
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    with one_at_a_time():
        handle = register_module_parameter_registration_hook(without_values)
        try:
            yield
        finally:
            handle.remove()


def is_delayed(model: nn.Module) -> bool:
    """Whether ``model`` was built under `delayed_init` and has no values yet."""
    return any(parameter.is_meta for parameter in model.parameters())


def materialise(model: nn.Module, unit: nn.Module, device: torch.device, seed: int) -> None:
    """Give real, initialised values to the parameters of ``unit``, a part of ``model``.

    Hugging Face models initialise through their ``_init_weights``; other modules through their own
    ``reset_parameters``. Parameters tied elsewhere in ``model`` stay tied. What `transform` has cut
    is initialised whole, and of that this rank keeps its part. Raises ConfigError for a module that
    knows no initialisation.
    """
    cut = layout.of(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    wholes = {
        parameter: _like(parameter, cut.whole(names[parameter], tuple(parameter.shape)), device)
        for parameter in unit.parameters()
        if parameter.is_meta
    }
    touched = _exchange(model, wholes)
    initialise = getattr(model, "_init_weights", None) or _reset
    called = {module: name for name, module in model.named_modules()}
    with one_at_a_time(), torch.no_grad():
        for module in _children_first(unit):
            # a parent may refine what its children drew, as GPT-2 does for its projections
            if any(child in touched for child in module.modules()) and not _done(module):
                with one_at_a_time(seed=seed + zlib.crc32(called[module].encode())):
                    initialise(module)
        parts = {
            whole: nn.Parameter(cut.take(names[old], whole), requires_grad=whole.requires_grad)
            for old, whole in wholes.items()
            if names[old] in cut.cuts
        }
    _exchange(model, parts)


def _like(parameter: nn.Parameter, shape: tuple[int, ...], device: torch.device) -> nn.Parameter:
    values = torch.empty(shape, dtype=parameter.dtype, device=device)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _exchange(model: nn.Module, new: dict[nn.Parameter, nn.Parameter]) -> set[nn.Module]:
    """Put new parameters in the places of others, all of them; the modules that have such."""
    touched = set()
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter in new:
                module._parameters[key] = new[parameter]
                touched.add(module)
    return touched


def _done(module: nn.Module) -> bool:
    """Whether ``module`` is a sharded unit already, or holds one."""
    return any(hasattr(child, "_get_fsdp_state") for child in module.modules())


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _reset(module: nn.Module) -> None:
    if not any(True for _ in module.parameters(recurse=False)):
        return
    if not hasattr(module, "reset_parameters"):
        raise ConfigError(
            f"{type(module).__name__} has parameters but no reset_parameters(): give it one, or "
            "build the model outside nl.delayed_init()"
        )
    module.reset_parameters()
