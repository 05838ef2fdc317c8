"""A sharded model whose training loop belongs to another program.

The loop calls the model and ``backward`` itself. `HostedModel` turns each of its forward passes
into a micro-batch of `accumulation`, and asks the host which one is the last of a step.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.weak import WeakIdKeyDictionary

from ..checkpoint.load import load
from ..checkpoint.save import save
from ..config import parallel
from ..config.parallel import ParallelConfig
from ..distributed import runtime
from ..errors import CheckpointError, ConfigError
from ..fsdp.accumulate import AccumulationStep, accumulation
from ..fsdp.call_interception import forward_arguments
from ..fsdp.clip_grad import clip_grad_norm_
from ..fsdp.deferred_init import broadcast_initial_values
from ..fsdp.model_state import local_tensor, model_state, optimizer_parameter, parameter_state
from ..fsdp.optimizer_state import shard_optimizer
from ..fsdp.shard import shard

FOLDER = "nearlinear"
"""Folder of the sharded state in or beside a host's checkpoint; `nearlinear.load` reads it."""

Sharding = ParallelConfig | dict[str, Any] | str | os.PathLike[str] | None
"""Config of `nearlinear.init`."""


def join(sharding: Sharding, host: str, precision: str = "no") -> None:
    """Join the job with ``sharding`` and the precision of the host's settings.

    Args:
        sharding: Config of `nearlinear.init`.
        host: Name of the host for errors.
        precision: The host's ``"no"``, ``"bf16"`` or ``"fp16"``.

    Raises ConfigError for parallel degrees whose ranks read the same batches, as the loaders of
    hosts give every rank batches of its own.
    """
    config = parallel.load(sharding)
    for axis in ("pipeline", "tensor", "context", "expert"):
        key = f"{axis}_parallel_degree"
        if getattr(config, key) > 1:
            raise ConfigError(
                f"{key} = {getattr(config, key)} inside {host}: only 1 is allowed there, since "
                f"{host} gives every rank its own batches and knows whole parameters only; use "
                "nl.accumulate or nearlinear.Trainer for this layout"
            )
    if precision not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"{host} asks for precision {precision!r}: allowed are no, bf16 and fp16; for float8 "
            "use fp8 = true with nearlinear.Trainer"
        )
    if precision != "no":
        config = dataclasses.replace(config, **{precision: True})
    runtime.init(config)


class HostedModel:
    """A sharded model and its optimizer steps, driven by a host.

    Args:
        model: Model to shard, in place. Rank 0's values are used on all ranks, as in DDP.
        is_last: Returns True if the coming micro-batch ends a step.
        two_hop: As in `accumulate`.
    """

    def __init__(self, model: nn.Module, is_last: Callable[[], bool], two_hop: bool = True):
        self.model, self.is_last, self.two_hop = model, is_last, two_hop
        self.batch: Any = None
        """The coming micro-batch, if the host knows it; default: the model's arguments."""
        self.completed: AccumulationStep | None = None
        """The last step whose gradients are complete."""
        self._step: AccumulationStep | None = None
        self._open = False
        self._new_parameters = WeakIdKeyDictionary()
        """Sharded parameters by those they replace."""
        if model_state(model).runtime is None:
            self._shard()
        self._hook = model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)

    def _shard(self) -> None:
        model, before = self.model, dict(self.model.named_parameters())
        if not any(parameter.is_meta for parameter in before.values()):
            broadcast_initial_values(model, runtime.current())
        shard(model)
        for name, parameter in model.named_parameters():
            self._new_parameters[before[name]] = parameter

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``optimizer``, built before or after sharding, update the sharded parameters.

        Raises ConfigError if it has stepped already, or has other parameters.
        """
        replaced = 0
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                if parameter in self._new_parameters:
                    group["params"][i] = self._new_parameters[parameter]
                    replaced += 1
                elif parameter_state(parameter).model is not model_state(self.model):
                    raise ConfigError(
                        "the optimizer has a parameter that is not one of the prepared model's: "
                        "prepare the model with or before its optimizer, built from "
                        "model.parameters()"
                    )
        if replaced and optimizer.state:
            raise ConfigError(
                "the optimizer has stepped before the model was sharded, and its state is not: "
                "prepare both before the first step"
            )
        held = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if any(optimizer_parameter(parameter) is not parameter for parameter in held):
            shard_optimizer(optimizer, self.model)

    def _begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook: begin a micro-batch, unless this call is not for training."""
        if self._open or not (model.training and torch.is_grad_enabled()):
            return
        if self._step is None:
            self._step = accumulation(model, two_hop=self.two_hop)
        batch, self.batch = self.batch, None
        if batch is None:
            batch = forward_arguments(model, args, kwargs)
        self._step.begin_micro_batch(batch, last=self.is_last())
        self._open = True

    def backward(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        """Run the backward pass of ``loss``: ``factor`` times the mean over its targets."""
        step = self._step
        if step is None or not self._open:
            loss.backward()
            return
        try:
            step.backward(loss if factor == 1.0 else loss / factor)
            step.end_micro_batch()
        except BaseException:
            self.abandon()
            raise
        self._open = False
        if step.ended:
            self.completed, self._step = step, None

    def abandon(self) -> None:
        """Drop an unfinished step."""
        if self._step is not None:
            self._step.leave()
        self._step, self._open, self.batch = None, False, None

    def release(self) -> None:
        """Leave the model, which stays sharded, to another `HostedModel`."""
        self.abandon()
        self._hook.remove()

    @property
    def unfinished(self) -> bool:
        """True between the first micro-batch of a step and the end of its last."""
        return self._step is not None

    @property
    def overflowed(self) -> bool:
        """True if the last step's gradients were dropped, see `loss_scaler`."""
        scaler = model_state(self.model).loss_scaler
        return scaler is not None and scaler.overflow

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients to ``max_norm`` and return their norm before."""
        if float(norm_type) != 2.0:
            raise ConfigError(
                f"norm_type = {norm_type} for gradient clipping: only 2 is allowed, the norm over "
                "the shards of all ranks"
            )
        return torch.tensor(clip_grad_norm_(self.model, max_norm))

    @torch.no_grad()
    def clip_grad_value(self, limit: float) -> None:
        """Clamp each element of the gradients to [-limit, limit]."""
        for parameter in map(optimizer_parameter, self.model.parameters()):
            if parameter.grad is not None:
                local_tensor(parameter.grad).clamp_(-limit, limit)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the whole state dict on rank 0, in host memory; {} on others. Collective."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=options)

    def save(
        self,
        folder: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | None,
        step: int = 0,
    ) -> None:
        """Write model and optimizer into ``folder``, for `load` at any layout."""
        config: Any = getattr(self.model, "config", None)
        if hasattr(config, "dtype"):  # save_pretrained sets it, on the rank that writes
            config.dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        save(folder, self.model, optimizer, step=step, wait=True)

    def load(
        self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Load the state of `save`. Raises CheckpointError."""
        if not os.path.isdir(folder):
            raise CheckpointError(
                f"there is no folder {folder}: the checkpoint was not saved with optimizer state "
                "by this integration; load the weights alone before sharding"
            )
        load(folder, self.model, optimizer)
