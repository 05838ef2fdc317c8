"""Deferred initialization: build a model without values and fill in each rank's part later.

No rank ever holds the whole model. Under `deferred_init` parameters are created on the meta device,
and in-place operations on them are recorded, as in torchdistX. `nearlinear.shard` replays them for
one block at a time and keeps this rank's shard. Buffers stay real. The values equal those of the
model built directly under the same seed, on any layout: random operations are recorded with the
state of the generator. Recording draws the numbers and discards them, so that the generator
advances as it would; where that takes too long, each parameter gets a seed of its own instead.
Tensors computed from parameters, or on their device, have no memory either. They are recorded, too,
and computed again where a parameter was filled from them.

With `broadcast_initial_values` the values come from rank 0 instead: one rank reads a pretrained
model, and the others never hold more of it than one parameter beside their shards.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from .._torch import (
    TorchDispatchMode,
    instead_of_initializers,
    map_instances,
    map_tensors,
)
from ..distributed import runtime as runtimes
from ..distributed.consensus import all_gather_ints
from ..distributed.runtime import Runtime
from ..errors import ConfigError, NearlinearError
from ..spmd import one_at_a_time
from .model_state import full_shape, model_state, parameter_state

_SMALL = 1 << 16
"""Elements up to which values that a parameter had before its registration are kept."""

_OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "copy_", "exponential_", "random_"}
"""Operations after which no earlier value remains."""


@dataclass(frozen=True)
class RecordedOp:
    """In-place operation on a parameter or a view of it."""

    function: Callable
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    arguments: tuple
    keywords: dict
    generator: torch.Tensor | None
    """State of the CPU generator before the operation, if it is to be restored."""

    def replay(self, memory: torch.Tensor) -> None:
        """Run the operation on the flat ``memory`` of the parameter."""
        if self.generator is not None:
            torch.set_rng_state(self.generator)
        part = memory.as_strided(self.size, self.stride, self.offset)
        arguments, keywords = _computed((self.arguments, self.keywords))
        self.function(part, *arguments, **keywords)


@dataclass(frozen=True)
class Creation:
    """Operation that returned a new tensor without memory."""

    function: Callable
    arguments: tuple
    keywords: dict
    generator: torch.Tensor | None
    """State of the CPU generator before the operation, if it is to be restored."""

    def replay(self) -> torch.Tensor:
        """Return the tensor on the CPU."""
        if self.generator is not None:
            torch.set_rng_state(self.generator)
        arguments, keywords = _computed((self.arguments, self.keywords))
        return self.function(*arguments, **keywords)


@dataclass(frozen=True)
class LazyTensor:
    """Tensor without memory as it was when an operation read it."""

    history: InitHistory
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def compute(self) -> torch.Tensor:
        """Return its values on the CPU."""
        return self.history.replay().as_strided(self.size, self.stride, self.offset)


def _computed(tree: Any) -> Any:
    return map_instances(LazyTensor, LazyTensor.compute, tree)


@dataclass
class InitHistory:
    """Operations on one tensor since it was last overwritten completely."""

    elements: int
    dtype: torch.dtype
    seed: int
    """Seed of the parameter's random numbers, for operations without a generator state."""
    ops: list[RecordedOp] = field(default_factory=list)
    lost: str = ""
    """Reason why the values cannot be reproduced; empty if they can."""
    creation: Creation | None = None
    """Operation that returned the tensor; None for parameters."""

    @property
    def has_values(self) -> bool:
        return not self.lost and bool(self.ops or self.creation)

    def replay(self) -> torch.Tensor:
        """Return the values on the CPU, in memory of their own."""
        if self.creation is None:
            memory = torch.empty(self.elements, dtype=self.dtype, device="cpu")
        else:
            memory = self.creation.replay()
        for op in self.ops:
            op.replay(memory)
        return memory

    def values(self, name: str, like: nn.Parameter, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the values of parameter ``name`` on the CPU. Raises ConfigError."""
        if not self.has_values:
            raise ConfigError(
                f"{name} {self.lost or 'was never filled in place'}, which nl.deferred_init cannot "
                "repeat: fill it in place after it became a parameter, as torch.nn.init does, or "
                "build the model outside nl.deferred_init()"
            )
        with torch.no_grad(), one_at_a_time(seed=self.seed):
            memory = self.replay()
        return memory.view(shape).to(like.dtype)  # the model may have been cast since


class NoInit:
    """Placeholder for values that will be loaded."""

    def values(self, name: str, like: nn.Parameter, shape: tuple[int, ...]) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(shape, dtype=like.dtype, device="cpu")


@dataclass
class Rank0Values:
    """Values that rank 0 holds and broadcasts when the parameter is materialized."""

    source: torch.Tensor | None
    """The values, on rank 0."""
    device: torch.device

    def values(self, name: str, like: nn.Parameter, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the values on every rank. A collective call."""
        if self.source is None:
            values = torch.empty(shape, dtype=like.dtype, device=self.device)
        else:
            values, self.source = self.source.to(self.device).contiguous(), None
        dist.broadcast(values, src=0)
        return values


class InitRecorder(TorchDispatchMode):
    """Records in-place operations on the parameters passed to `add_parameter`.

    Args:
        seed: Derive a seed for each parameter from this one; None: draw the random numbers.
    """

    def __init__(self, seed: int | None):
        super().__init__()
        self.seed = seed
        # The values keep the tensors alive, because the keys are addresses.
        self._histories: dict[int, tuple[torch.Tensor, InitHistory]] = {}
        self._parameters = 0

    def add_parameter(self, values: torch.Tensor, meta: nn.Parameter) -> None:
        """Record operations on ``meta``, which replaces ``values``."""
        own_seed = zlib.crc32(f"{self.seed} {self._parameters}".encode())
        self._parameters += 1
        history = InitHistory(values.numel(), values.dtype, own_seed)
        if values.numel() <= _SMALL or values.dim() < 2:
            kept = values.detach().clone(memory_format=torch.contiguous_format)
            self._append(history, torch.ops.aten.copy_.default, "copy_", False, kept, (kept,), {})
        parameter_state(meta).initial_values = history
        self._histories[_key(meta)] = meta.detach(), history

    def __enter__(self):
        self._others = ExitStack()
        self._others.enter_context(instead_of_initializers(self._initialize))
        self._others.enter_context(_ValuesOfConstants())
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._others.__exit__(*error)

    def _initialize(self, draw, tensor, *arguments, **keywords):
        """Record a function that depends on the numbers it draws as one operation."""
        if not (tensor.is_meta and self.record(draw, "normal_", True, tensor, arguments, keywords)):
            draw(tensor, *arguments, **keywords)
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        target, name = kwargs.get("out"), func.overloadpacket.__name__
        random = torch.Tag.nondeterministic_seeded in func.tags
        if isinstance(target, torch.Tensor) and target.is_meta:
            rest = {key: value for key, value in kwargs.items() if key != "out"}
            self.record(functools.partial(_write_to, func), "copy_", random, target, args, rest)
        elif name.endswith("_") and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            self.record(func, name, random, args[0], args[1:], kwargs)
        else:
            return self._create(func, random, args, kwargs)
        return func(*args, **kwargs)

    def _create(self, func, random: bool, args: tuple, kwargs: dict):
        """Run an operation, and record its result if that is a new tensor without memory."""
        state = torch.get_rng_state() if random else None
        result = func(*args, **kwargs)
        if not (isinstance(result, torch.Tensor) and result.is_meta):
            return result
        if _key(result) in self._histories:  # a view
            return result
        history = InitHistory(result.numel(), result.dtype, seed=0)
        self._histories[_key(result)] = result.detach(), history
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        (lazy, keywords), history.lost = self._lazy((args, kwargs), func.overloadpacket.__name__)
        if not history.lost:
            draws = self.seed is None and random
            if draws:
                real = _empty_for((args, kwargs))
                func(*real[0], **real[1])  # advances the generator
            history.creation = Creation(func, lazy, keywords, state if draws else None)
        return result

    def _lazy(self, tree: Any, name: str) -> tuple[Any, str]:
        """Replace tensors without memory in ``tree``; or return the reason why that fails."""
        lost = ""

        def replace(tensor: torch.Tensor):
            nonlocal lost
            if not tensor.is_meta:  # may be changed later
                return tensor.clone() if tensor.numel() <= _SMALL else tensor
            _, history = self._histories.get(_key(tensor), (None, None))
            if history is None or not history.has_values:
                lost = f"was computed from another tensor without values ({name})"
                return tensor
            then = dataclasses.replace(history, ops=list(history.ops))
            offset = int(tensor.storage_offset())
            return LazyTensor(then, tuple(tensor.shape), tensor.stride(), offset)

        return map_tensors(replace, tree), lost

    def record(self, function, name: str, random: bool, target, arguments, keywords) -> bool:
        """Record an operation on ``target``; return False if it belongs to no known parameter."""
        _, history = self._histories.get(_key(target), (None, None))
        if history is not None:
            self._append(history, function, name, random, target, arguments, keywords)
        return history is not None

    def _append(
        self, history: InitHistory, function, name: str, random: bool, target, arguments, keywords
    ) -> None:
        state = None
        if self.seed is None and random:
            state = torch.get_rng_state()
            real = _empty_for((arguments, keywords))
            function(_empty_like(target), *real[0], **real[1])  # advances the generator
        (arguments, keywords), lost = self._lazy((arguments, keywords), name)
        if lost:
            history.lost = lost
            return
        if target.numel() == history.elements and name in _OVERWRITES:
            history.ops.clear()
            history.lost = ""
        op = RecordedOp(
            function, tuple(target.shape), target.stride(), target.storage_offset(),
            arguments, keywords, state,
        )  # fmt: skip
        history.ops.append(op)


_SET_DATA = vars(torch.Tensor.__mro__[1])["data"].__set__
"""Setter of ``Tensor.data``."""


def _is_constant(target: torch.Tensor, values: torch.Tensor) -> bool:
    """Return True if ``target.data = values`` sets other values, and neither shape nor dtype."""
    same = target.shape == values.shape and target.dtype == values.dtype
    return target.is_meta and same and not (values.is_meta and _key(target) == _key(values))


class _ValuesOfConstants(TorchFunctionMode):
    """Turns constants into copies, which the recorder sees.

    They are ``torch.tensor(values, device="meta")``, and values set as ``parameter.data``.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.tensor and device is not None and torch.device(device).type == "meta":
            return func(*args, **kwargs | {"device": "cpu"}).to("meta")
        if func == _SET_DATA and _is_constant(*args):
            with torch.no_grad():
                return args[0].copy_(args[1])
        return func(*args, **kwargs)


def _write_to(function, target: torch.Tensor, *arguments, **keywords) -> torch.Tensor:
    return function(*arguments, out=target, **keywords)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _empty_for(tree: Any) -> Any:
    """Replace tensors without memory in ``tree`` by empty ones."""
    return map_tensors(lambda tensor: _empty_like(tensor) if tensor.is_meta else tensor, tree)


def _empty_like(target: torch.Tensor) -> torch.Tensor:
    """Return memory of the shape and strides of ``target``, on which random numbers depend."""
    return torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="cpu")


_thread = threading.local()


@contextmanager
def deferred_init(
    seed: int | None = None, *, as_without: bool = True, values: bool = True
) -> Iterator[None]:
    """Create parameters without memory inside the block; `nearlinear.shard` fills them later.

    ::

        with nl.deferred_init():
            model = AutoModelForCausalLM.from_config(config)
        model = nl.shard(model)

    The generator's state is restored at the end. Ranks that are threads enter one at a time.

    Args:
        seed: Seed of the model's random numbers; default: the config's ``random_seed``, or before
            `init` the generator as it is.
        as_without: Give the values of the model built directly after ``torch.manual_seed(seed)``.
            All random numbers are then drawn here too, on every rank. False saves that time: other
            values follow from the seed, equal on any number of ranks.
        values: False: `shard` fills in zeros at no cost, for models that `nearlinear.import_hf` or
            `nearlinear.load` will fill.
    """
    if seed is None and runtimes.is_initialized():
        seed = runtimes.current().config.random_seed
    with record_init(seed, as_without=as_without, values=values):
        yield


@contextmanager
def record_init(
    seed: int | None, *, as_without: bool = True, values: bool = True
) -> Iterator[None]:
    """Defer like `deferred_init`; without ``seed`` random numbers follow from the generator."""
    recorder = InitRecorder(None if as_without and values else seed or 0)

    def without_values(module, name, parameter):
        if parameter is None or parameter.is_meta:
            return None
        memoryless = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta"
        )
        meta = nn.Parameter(memoryless, requires_grad=parameter.requires_grad)
        if values:
            recorder.add_parameter(parameter, meta)
        else:
            parameter_state(meta).initial_values = NoInit()
        return meta

    with one_at_a_time(seed=seed):
        handle = register_module_parameter_registration_hook(
            without_values  # pyright: ignore[reportArgumentType] torch uses the result
        )
        before, _thread.building = getattr(_thread, "building", False), True
        try:
            with recorder:
                yield
        finally:
            _thread.building = before
            handle.remove()


def require_built(call: str) -> None:
    """Raise NearlinearError for a ``call`` inside the block of `deferred_init`."""
    if getattr(_thread, "building", False):
        raise NearlinearError(
            f"{call} was called inside nl.deferred_init: build the model there, and call {call} "
            "after the block"
        )


def materialize(model: nn.Module, unit: nn.Module, device: torch.device) -> None:
    """Give initialized values to the parameters of ``unit``, a part of ``model``.

    Parameters tied elsewhere in ``model`` stay tied. Parameters that `transform` has split get this
    rank's part; the full values exist briefly on the CPU, one parameter at a time. Raises
    ConfigError.
    """
    for name, buffer in unit.named_buffers():
        if buffer.is_meta:
            raise ConfigError(
                f"the buffer {name} of {type(unit).__name__} is made from a parameter, which has "
                "no values yet: build the model without nl.deferred_init()"
            )
    layout = model_state(model).layout
    names = {parameter: name for name, parameter in model.named_parameters()}
    new = {}
    for parameter in [parameter for parameter in unit.parameters() if parameter.is_meta]:
        name, source = names[parameter], parameter_state(parameter).initial_values
        if source is None:
            raise ConfigError(
                f"{name} is on the meta device, and its values are unknown: build the model inside "
                "nl.deferred_init()"
            )
        shape = full_shape(parameter, layout.splits.get(name, ()))
        values = source.values(name, parameter, shape)
        part = layout.take(name, values).to(device)
        new[parameter] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter in new:
                module._parameters[key] = new[parameter]


def broadcast_initial_values(model: nn.Module, runtime: Runtime) -> None:
    """Replace the values of ``model`` by those of rank 0, which `materialize` broadcasts.

    Buffers are broadcast now. A collective call; all ranks must have built the same model. Raises
    ConfigError on all of them.
    """
    if runtime.mesh.pipeline > 1:
        raise ConfigError(
            "load_state_dict_from_rank0 = True with pipeline_parallel_degree > 1: the stages "
            "materialize different parameters; save the model with nl.save on one rank and "
            "nl.load it here"
        )
    _check_same_model(model, runtime)
    new = {}
    for parameter in model.parameters():
        meta = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        source = parameter.detach() if runtime.rank == 0 else None
        parameter_state(meta).initial_values = Rank0Values(source, runtime.device)
        new[parameter] = meta
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = new[parameter]
    for buffer in model.buffers():
        values = buffer.to(runtime.device).contiguous()
        dist.broadcast(values, src=0)
        buffer.copy_(values)


def _check_same_model(model: nn.Module, runtime: Runtime) -> None:
    """Raise ConfigError on all ranks unless rank 0 has values and all ranks have one model."""
    empty = any(parameter.is_meta for parameter in model.parameters())
    described: list[tuple] = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in model.named_parameters()
    ]
    described += [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()]
    checksum = zlib.crc32(repr(described).encode())
    sums, empties = zip(*all_gather_ints([checksum, empty], runtime.device), strict=True)
    if empties[0]:
        raise ConfigError(
            "load_state_dict_from_rank0 = True, but the model has no values on rank 0: build it "
            "there outside nl.deferred_init()"
        )
    others = [rank for rank, found in enumerate(sums) if found != sums[0]]
    if others:
        raise ConfigError(
            f"load_state_dict_from_rank0 = True, but the model of rank {others[0]} differs from "
            "rank 0's in names, shapes, dtypes or frozen parameters: build the same model on all "
            "ranks"
        )
