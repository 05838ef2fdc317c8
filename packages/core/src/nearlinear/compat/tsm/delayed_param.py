"""Delayed initialization of models that a script has built on the meta device.

The values are those of `nearlinear.deferred_init`: a Hugging Face model is built once more from its
config inside that block, and its recorded initialization moves to the parameters of the script's
model. Other models are initialized module by module, by a function of the script or by
``reset_parameters``. Nothing has memory until ``FullyShardedDataParallel`` shards it, one unit at
a time.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...checkpoint.hf.meta_model import deferred_like
from ...distributed import runtime as runtimes
from ...errors import ConfigError
from ...fsdp.model_state import ModelState, full_shape, model_state, parameter_state
from ...spmd import one_at_a_time

log = logging.getLogger(__name__)

InitModule = Callable[[nn.Module], Any]


class DelayedParamIniter:
    """Initializes the parameters of a meta model while it is sharded.

    ::

        initer = DelayedParamIniter(model)
        with initer.validate_params_and_buffers_inited():
            model = FullyShardedDataParallel(
                model,
                param_init_fn=initer.get_param_init_fn(),
                post_param_init_fn=initer.get_post_param_init_fn(),
            )

    Args:
        model: The model, after ``tsm.transform``.
        init_method_using_config: Fills the parameters and buffers of one module without its
            children. Default: the initialization of the Hugging Face model, or else
            ``reset_parameters``.
        verbose: Log the number of initialized parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        init_method_using_config: InitModule | None = None,
        verbose: bool = False,
    ):
        self.model, self.verbose = model, verbose
        self.expected = sum(parameter.numel() for parameter in model.parameters())
        self.counted = 0
        self._seen: set[int] = set()
        if init_method_using_config is None and not record_initialization(model):
            init_method_using_config = reset_parameters
        self._function = init_method_using_config

    def get_param_init_fn(self) -> InitModule:
        """Return the function for ``FullyShardedDataParallel(param_init_fn=)``."""
        return self._function or _keep_recorded

    def get_post_param_init_fn(self) -> Callable:
        """Return the function for ``FullyShardedDataParallel(post_param_init_fn=)``."""
        return self.count_num_params

    def count_num_params(self, module: nn.Module, *args: Any) -> None:
        """Add the parameters of ``module`` itself to the count of initialized ones."""
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta and id(parameter) not in self._seen:
                self._seen.add(id(parameter))
                self.counted += parameter.numel()

    @contextlib.contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """Check after the block that all parameters and buffers have values.

        Raises AssertionError if the numbers differ or a tensor is on the meta device.
        """
        yield
        if not enabled:
            return
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        empty = [name for name, tensor in named if tensor.is_meta]
        if empty:
            raise AssertionError(f"{', '.join(empty[:3])} still on the meta device")
        if self._seen and self.counted != self.expected:
            raise AssertionError(
                f"{self.counted} parameters are initialized, and the model has {self.expected}"
            )
        if self.verbose:
            log.warning("%d parameters are initialized", self.counted)


def _keep_recorded(module: nn.Module) -> None:
    """Leave ``module`` to its recorded initialization."""


def reset_parameters(module: nn.Module) -> None:
    """Fill ``module`` by its own ``reset_parameters``. Raises ConfigError if it has none."""
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise ConfigError(
            f"{type(module).__name__} has parameters or buffers on the meta device and no "
            "reset_parameters: pass DelayedParamIniter(model, init_method_using_config=...)"
        )
    reset()


def record_initialization(model: nn.Module) -> bool:
    """Record the initialization of a Hugging Face model for its meta tensors.

    Returns False for a model that is not built from a Hugging Face config. Raises ConfigError if
    the model has parameters that its config does not describe.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return True
    twin = deferred_like(model)
    if twin is None:
        return False
    sources, shared = dict(twin.named_parameters(remove_duplicate=False)), model_state(model)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta or parameter_state(parameter).initial_values is not None:
            continue
        source = sources.get(name)
        shape = full_shape(parameter, shared.layout.splits.get(name, ()))
        if source is None or source.shape != shape:
            raise ConfigError(
                f"{name} of shape {list(shape)} is not a parameter of {type(model).__name__}'s "
                "config: pass DelayedParamIniter(model, init_method_using_config=...)"
            )
        parameter_state(parameter).initial_values = parameter_state(source).initial_values
    modules = dict(twin.named_modules())
    for name, module in model.named_modules():
        if name in modules:
            _fill_buffers(module, modules[name])
    return True


def _fill_buffers(module: nn.Module, source: nn.Module) -> None:
    """Replace meta buffers and other meta tensors of ``module`` itself by those of ``source``."""
    for tensors, others in ((module._buffers, source._buffers), (vars(module), vars(source))):
        for name, value in tensors.items():
            other = others.get(name)
            if not (isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)):
                continue
            if value.is_meta and not other.is_meta:
                tensors[name] = other.to(value.dtype) if value.is_floating_point() else other


def allocate_buffers(model: nn.Module, device: torch.device) -> None:
    """Give memory without values to the meta buffers of ``model``."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def initialize_by(model: nn.Module, function: InitModule | None) -> None:
    """Let ``function`` fill the modules whose meta parameters have no recorded values.

    It is called for a copy of each module with parameters of full shapes, when `nl.shard`
    materializes them, with random numbers that follow from the seed and the module's name.
    """
    function = function or reset_parameters
    for name, module in model.named_modules():
        values = _ModuleValues(name, module, function, model_state(model))
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter_state(parameter).initial_values is None:
                parameter_state(parameter).initial_values = values.of(key)
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            _fill_buffers(module, values.filled())


class _ModuleValues:
    """Values of one module's own parameters and buffers by a function of the script."""

    def __init__(self, name: str, module: nn.Module, function: InitModule, state: ModelState):
        self.name, self.module, self.function, self.state = name, module, function, state
        self._results: dict[str, torch.Tensor] = {}

    def of(self, key: str) -> _ParameterValues:
        return _ParameterValues(self, key)

    def filled(self) -> nn.Module:
        """Return a copy of the module on the CPU, filled by the function."""
        module = copy.copy(self.module)
        module._modules = {}
        module._parameters = {}
        module._buffers = {
            key: None if buffer is None else torch.empty_like(buffer, device="cpu")
            for key, buffer in self.module._buffers.items()
        }
        for key, parameter in self.module._parameters.items():
            full_name = f"{self.name}.{key}" if self.name else key
            splits = self.state.layout.splits.get(full_name, ())
            module._parameters[key] = (
                None
                if parameter is None
                else nn.Parameter(
                    torch.empty(full_shape(parameter, splits), dtype=parameter.dtype),
                    requires_grad=parameter.requires_grad,
                )
            )
        seed = zlib.crc32(f"{runtimes.current().config.random_seed} {self.name}".encode())
        with one_at_a_time(seed=seed), torch.no_grad():
            self.function(module)
        return module

    def take(self, key: str) -> torch.Tensor:
        """Return the values of parameter ``key``, filled once for all parameters of the module."""
        if key not in self._results:
            parameters = self.filled()._parameters.items()
            self._results = {k: p.detach().cpu() for k, p in parameters if p is not None}
        return self._results.pop(key)


class _ParameterValues:
    """`InitialValues` of one parameter."""

    def __init__(self, module: _ModuleValues, key: str):
        self.module, self.key = module, key

    def values(self, name: str, like: nn.Parameter, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the full values on the CPU."""
        return self.module.take(self.key).view(shape).to(like.dtype)
