"""Build a model without its values; give them to it later, each rank its own part of them.

No rank ever holds the whole model: under `delayed_init` parameters are created on the meta device
(buffers stay real), and `nearlinear.shard` fills a block, keeps this rank's shard of it and goes on
to the next. The values are those of the model built without delay under the same seed, whatever the
layout: see `history`.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .. import runtime
from ..errors import ConfigError, NearlinearError
from ..spmd.ranks import one_at_a_time
from . import layout
from .history import Nothing, Recorder

_building = threading.local()


@contextmanager
def delayed_init(
    seed: int | None = None, *, as_without: bool = True, values: bool = True
) -> Iterator[None]:
    """Create parameters without memory inside the block; `nearlinear.shard` fills them later.

    ``seed``: of the model's random numbers (default: the config's ``random_seed``; before `init`,
    the generator as it is). The values are those the model has without delay after
    ``torch.manual_seed(seed)``; for that all numbers are drawn here too, on every rank. With
    ``as_without=False`` that time is saved: other values follow from the seed, the same on any
    number of ranks. With ``values=False`` `shard` leaves zeros, in no time: for what
    `nearlinear.import_hf` or `nearlinear.load` fills. The generator is left as it was. Ranks that
    are threads enter one at a time.
    """
    if seed is None and runtime.is_initialized():
        seed = runtime.current().config.random_seed
    recorder = Recorder(None if as_without and values else seed or 0)

    def without_values(module, name, parameter):
        if parameter is None or parameter.is_meta:
            return None
        meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        if values:
            recorder.show(parameter, meta)
        else:
            meta._nearlinear_history = Nothing()
        return meta

    with one_at_a_time(seed=seed):
        handle = register_module_parameter_registration_hook(without_values)
        before, _building.now = getattr(_building, "now", False), True
        try:
            with recorder:
                yield
        finally:
            _building.now = before
            handle.remove()


def require_built(call: str) -> None:
    """Raise NearlinearError inside the block of `delayed_init`, where models are only built."""
    if getattr(_building, "now", False):
        raise NearlinearError(
            f"{call} stands inside nl.delayed_init: build the model there, and call {call} after it"
        )


def materialise(model: nn.Module, unit: nn.Module, device: torch.device) -> None:
    """Give real, initialised values to the parameters of ``unit``, a part of ``model``.

    Parameters tied elsewhere in ``model`` stay tied. Of what `transform` has cut this rank gets its
    part; the whole is there for a moment, on the CPU, one parameter at a time. Raises ConfigError.
    """
    cut = layout.of(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    inside = [parameter for parameter in unit.parameters() if parameter.is_meta]
    new = {}
    for parameter in inside:
        name, history = names[parameter], getattr(parameter, "_nearlinear_history", None)
        if history is None:
            raise ConfigError(
                f"{name} is on the meta device, and nobody knows its values: build the model "
                "inside nl.delayed_init()"
            )
        shape = layout.whole_shape(parameter, cut.cuts.get(name, ()))
        values = history.values(name, parameter, shape)
        part = cut.take(name, values).to(device)
        new[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter in new:
                module._parameters[key] = new[parameter]
