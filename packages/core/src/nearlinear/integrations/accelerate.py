"""An ``accelerate.Accelerator`` whose models are sharded, with two-hop synchronization.

::

    from nearlinear.integrations.accelerate import Accelerator

    accelerator = Accelerator(sharding={"hybrid_shard_degree": 8})

Everything else of the script stays: ``prepare``, ``accumulate``, ``no_sync``, ``backward``,
``clip_grad_norm_``, ``save_state``, ``load_state``, ``gather_for_metrics``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from accelerate import DistributedType
from accelerate.utils import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FP8RecipeKwargs,
    GradScalerKwargs,
)
from torch import nn

from ..distributed import runtime
from ..errors import ConfigError
from ..fsdp.call_interception import arguments_by_name
from .host import FOLDER, HostedModel, Sharding, join

_REFUSED = {
    "deepspeed_plugin": "DeepSpeed would shard the model, too",
    "deepspeed_plugins": "DeepSpeed would shard the model, too",
    "fsdp_plugin": "accelerate's FSDP would shard the model, too; pass its degrees in sharding",
    "megatron_lm_plugin": "Megatron-LM would divide the model, too",
    "torch_tp_plugin": "accelerate's tensor parallelism does not know the shards",
    "parallelism_config": "accelerate's meshes do not know the shards; pass degrees in sharding",
    "dynamo_backend": "accelerate compiles the whole model; call nl.compile_blocks(model)",
}
_REFUSED_VARIABLES = {
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
_REFUSED_HANDLERS = {
    AutocastKwargs: "blocks compute in the dtype of mixed_precision, without autocast",
    GradScalerKwargs: "the loss scale is set by init_scale and scale_window of sharding",
    FP8RecipeKwargs: "float8 is fp8 = true with nearlinear.Trainer",
}


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` with sharded models.

    Args:
        sharding: Config of `nearlinear.init`; default: shard over all ranks.
        args, kwargs: Those of ``accelerate.Accelerator``. ``mixed_precision`` selects the compute
            dtype of the blocks instead of autocast.

    Raises ConfigError for arguments that shard, compile or scale in another way.
    """

    def __init__(self, *args, sharding: Sharding = None, **kwargs):
        _check_arguments(arguments_by_name(accelerate.Accelerator.__init__, (self, *args), kwargs))
        super().__init__(*args, **kwargs)
        allowed = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
        if self.distributed_type not in allowed:
            raise ConfigError(
                f"accelerate runs as {self.distributed_type}: start the script with torchrun, or "
                "accelerate launch with a config for several CPUs or GPUs"
            )
        self.native_amp, self.scaler = False, None
        self.hosted: HostedModel | None = None
        """The trained model, once it is prepared."""
        self._defers_sync = False
        join(sharding, "accelerate", self.state.mixed_precision)
        world = runtime.current_mesh().world
        if world != self.num_processes:
            raise ConfigError(
                f"accelerate runs as {self.num_processes} process of {world}: on CPUs pass "
                "cpu=True to Accelerator or use_cpu=True to TrainingArguments, or set "
                "ACCELERATE_USE_CPU=true"
            )

    def prepare(self, *args, device_placement: list[bool] | None = None) -> Any:
        for each in args:
            if isinstance(each, nn.Module):
                self._host(each)
        for each in args:
            if isinstance(each, torch.optim.Optimizer):
                if self.hosted is None:
                    raise ConfigError(
                        "accelerator.prepare(optimizer) without a model: prepare the model with or "
                        "before its optimizer"
                    )
                if each not in self._optimizers:
                    self.hosted.adopt_optimizer(each)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        self._host(model)
        if model not in self._models:
            self._models.append(model)
        return model

    def _host(self, model: nn.Module) -> None:
        """Shard a model that is trained; move any other to the device."""
        if self.hosted is not None and self.hosted.model is model:
            return
        if not any(parameter.requires_grad for parameter in model.parameters()):
            model.to(self.device)
        elif self.hosted is not None:
            raise ConfigError(
                "accelerator.prepare with two trained models: only one is sharded; make them parts "
                "of one module, or freeze the other with requires_grad_(False) before"
            )
        else:
            two_hop = not self.gradient_state.plugin_kwargs.get("sync_each_batch", False)
            self.hosted = HostedModel(model, self._is_last, two_hop)

    def _is_last(self) -> bool:
        return self.sync_gradients and not self._defers_sync

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        before, self._defers_sync = self._defers_sync, True
        try:
            yield
        finally:
            self._defers_sync = before

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        self._do_sync()
        yield

    @contextmanager
    def join_uneven_inputs(self, joinables, even_batches: bool | None = None) -> Iterator[None]:
        raise ConfigError(
            "accelerator.join_uneven_inputs: ranks gather shards from each other and need equally "
            "many batches; leave even_batches=True, or pad with labels -100"
        )
        yield

    def backward(self, loss: torch.Tensor, **kwargs) -> None:
        if kwargs:
            raise ConfigError(
                f"accelerator.backward({next(iter(kwargs))}=...): a sharded model takes the loss "
                "only"
            )
        if self.hosted is None:
            loss.backward()
            return
        self.hosted.backward(loss)
        for optimizer in self._optimizers:  # schedulers skip the same steps
            optimizer._is_overflow = self.hosted.overflowed

    def clip_grad_norm_(self, parameters, max_norm: float, norm_type: float = 2) -> Any:
        if self.hosted is None or self.hosted.unfinished:
            return None
        return self.hosted.clip_grad_norm(max_norm, norm_type).to(self.device)

    def clip_grad_value_(self, parameters, clip_value: float) -> None:
        if self.hosted is not None and not self.hosted.unfinished:
            self.hosted.clip_grad_value(clip_value)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        if self.hosted is None or self.hosted.model is not model:
            return super().get_state_dict(model, unwrap)
        return self.hosted.full_state_dict()

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs
    ) -> Any:
        optimizers = self._optimizers
        with self._without_sharded_state():
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        if self.hosted is not None:
            self.hosted.save(os.path.join(folder, FOLDER), _only(optimizers))
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict | None = None, **kwargs
    ) -> None:
        folders, optimizers = [], self._optimizers
        hook = self.register_load_state_pre_hook(lambda models, folder: folders.append(folder))
        try:
            with self._without_sharded_state():
                super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            hook.remove()
        if self.hosted is not None:
            self.hosted.load(os.path.join(folders[0], FOLDER), _only(optimizers))

    @contextmanager
    def _without_sharded_state(self) -> Iterator[None]:
        """Hide the model and its optimizer from accelerate's own checkpoint."""
        if self.hosted is None:
            yield
            return
        models, optimizers = self._models, self._optimizers
        self._models = [model for model in models if model is not self.hosted.model]
        self._optimizers = []
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def free_memory(self, *objects) -> Any:
        if self.hosted is not None:
            self.hosted.release()
            self.hosted = None
        return super().free_memory(*objects)


def _only(optimizers: list) -> torch.optim.Optimizer | None:
    """Return the optimizer inside accelerate's wrapper. Raises ConfigError for several."""
    if len(optimizers) > 1:
        raise ConfigError(
            f"a checkpoint with {len(optimizers)} optimizers: only one is saved; give parameters "
            "groups of one optimizer instead"
        )
    return optimizers[0].optimizer if optimizers else None


def _check_arguments(given: dict[str, Any]) -> None:
    """Raise ConfigError for arguments of the Accelerator that would change results."""
    plugin = given.get("dynamo_plugin")
    if plugin is not None and plugin.backend != DynamoBackend.NO:
        given = given | {"dynamo_backend": plugin.backend}
    asked = [key for key in _REFUSED if given.get(key) not in (None, "no", DynamoBackend.NO)]
    for variable, key in _REFUSED_VARIABLES.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise ConfigError(f"{variable} = true beside sharding: {_REFUSED[key]}")
    if asked:
        raise ConfigError(f"Accelerator({asked[0]}=...) beside sharding: {_REFUSED[asked[0]]}")
    for handler in given.get("kwargs_handlers") or ():
        for kind, reason in _REFUSED_HANDLERS.items():
            if isinstance(handler, kind):
                raise ConfigError(f"{kind.__name__} beside sharding: {reason}")
        hook = getattr(handler, "comm_hook", DDPCommunicationHookType.NO)
        if isinstance(handler, DistributedDataParallelKwargs):
            if hook != DDPCommunicationHookType.NO:
                raise ConfigError(
                    f"DDP's comm_hook = {hook} beside sharding: gradients are not reduced by DDP"
                )
