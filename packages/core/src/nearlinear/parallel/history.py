"""How a parameter without memory came by its values, so that it can be given them later.

Source: deferred initialisation as in torchdistX. While a model is being built, what is done in
place to a parameter on the meta device is written down, random numbers with the state of the
generator; done again to real memory it gives the very same values. For that the numbers are drawn
and thrown away when they are written down: what comes after must find the generator as it would.
Where that takes too long every parameter gets a seed of its own instead.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from .._torch import TorchDispatchMode, instead_of_truncated_normal
from ..errors import ConfigError
from ..spmd.ranks import one_at_a_time

SMALL = 1 << 16
"""elements of a parameter whose values are kept if it had some before it was one (norms, biases)"""

OVERWRITES = {"normal_", "uniform_", "fill_", "zero_", "copy_", "exponential_", "random_"}
"""what leaves nothing of the values before"""


@dataclass(frozen=True)
class Deed:
    """One thing that was done to a parameter, or to a part of it."""

    function: Callable
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    arguments: tuple
    keywords: dict
    generator: torch.Tensor | None
    """state of the CPU's generator before, if it is to be as it was"""

    def repeat(self, memory: torch.Tensor) -> None:
        """Do it to ``memory``, flat."""
        if self.generator is not None:
            torch.set_rng_state(self.generator)
        part = memory.as_strided(self.size, self.stride, self.offset)
        self.function(part, *self.arguments, **self.keywords)


@dataclass
class History:
    """All that was done to one parameter, from the last time that it was overwritten whole."""

    elements: int
    dtype: torch.dtype
    seed: int
    """of its random numbers, where deeds do not know their generator"""
    deeds: list[Deed] = field(default_factory=list)
    lost: str = ""
    """what was done that cannot be done again"""

    def values(self, name: str, like: nn.Parameter, shape: tuple[int, ...]) -> torch.Tensor:
        """The values of parameter ``name``, on the CPU. Raises ConfigError."""
        if self.lost or not self.deeds:
            raise ConfigError(
                f"{name} {self.lost or 'was never filled in place'}, which nl.delayed_init cannot "
                "repeat: fill it in place after it became a parameter, as torch.nn.init does, or "
                "build the model outside nl.delayed_init()"
            )
        memory = torch.empty(self.elements, dtype=self.dtype, device="cpu")
        with torch.no_grad(), one_at_a_time(seed=self.seed):
            for deed in self.deeds:
                deed.repeat(memory)
        return memory.view(shape).to(like.dtype)  # a model may have been cast since


class Nothing:
    """Takes the place of a `History` whose values something else will bring."""

    def values(self, name: str, like: nn.Parameter, shape: tuple[int, ...]) -> torch.Tensor:
        """Zeros."""
        return torch.zeros(shape, dtype=like.dtype, device="cpu")


class Recorder(TorchDispatchMode):
    """Writes down what is done in place to the parameters that it was shown."""

    def __init__(self, seed: int | None):
        """``seed``: give each parameter one that follows from it and their order; None: draw."""
        super().__init__()
        self.seed = seed
        self._shown: dict[int, tuple[torch.Tensor, History]] = {}  # kept alive: keys are addresses

    def show(self, values: torch.Tensor, meta: nn.Parameter) -> None:
        """``meta`` takes the place of ``values``."""
        own = zlib.crc32(f"{self.seed} {len(self._shown)}".encode())
        history = History(values.numel(), values.dtype, own)
        if values.numel() <= SMALL or values.dim() < 2:
            kept = values.detach().clone(memory_format=torch.contiguous_format)
            self._add(history, torch.ops.aten.copy_.default, "copy_", False, kept, (kept,), {})
        meta._nearlinear_history = history
        self._shown[_key(meta)] = meta.detach(), history

    def __enter__(self):
        self._truncated = instead_of_truncated_normal(self._draw_truncated)
        self._truncated.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._truncated.__exit__(*error)

    def _draw_truncated(self, draw, tensor, *arguments, **keywords):
        """It looks at what it draws: one deed, which on the meta device does nothing."""
        if not (tensor.is_meta and self.did(draw, "normal_", True, tensor, arguments, keywords)):
            draw(tensor, *arguments, **keywords)
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        target, name = kwargs.get("out"), func.overloadpacket.__name__
        random = torch.Tag.nondeterministic_seeded in func.tags
        if isinstance(target, torch.Tensor) and target.is_meta:
            rest = {key: value for key, value in kwargs.items() if key != "out"}
            self.did(functools.partial(_into, func), "copy_", random, target, args, rest)
        elif name.endswith("_") and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            self.did(func, name, random, args[0], args[1:], kwargs)
        return func(*args, **kwargs)

    def did(self, function, name: str, random: bool, target, arguments, keywords) -> bool:
        """Write down what was done to ``target``, if that is of a parameter that was shown."""
        _, history = self._shown.get(_key(target), (None, None))
        if history is not None:
            self._add(history, function, name, random, target, arguments, keywords)
        return history is not None

    def _add(self, history, function, name, random, target, arguments, keywords) -> None:
        everything = [*arguments, *keywords.values()]
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in everything):
            history.lost = f"was given values that had no memory either ({name})"
            return
        state = None
        if self.seed is None and random:
            state = torch.get_rng_state()
            function(_like(target), *arguments, **keywords)  # for the generator's sake
        whole = target.numel() == history.elements
        if whole and name in OVERWRITES:
            history.deeds.clear()
            history.lost = ""
        deed = Deed(
            function, tuple(target.shape), target.stride(), target.storage_offset(),
            arguments, keywords, state,
        )  # fmt: skip
        history.deeds.append(deed)


def _into(function, target: torch.Tensor, *arguments, **keywords) -> torch.Tensor:
    return function(*arguments, out=target, **keywords)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _like(target: torch.Tensor) -> torch.Tensor:
    """As large as ``target``, and as it lies in memory: what is drawn depends on that."""
    return torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="cpu")
