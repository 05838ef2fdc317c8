"""torchtitan's trainer with nearlinear's sharding and two-hop synchronization.

::

    from nearlinear.integrations.torchtitan import parallelize

    spec = dataclasses.replace(spec, parallelize_fn=parallelize)  # torchtitan's ModelSpec

torchtitan divides each loss by the number of tokens of the whole step, so gradients are summed over
all ranks and micro-batches, and not averaged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ..errors import ConfigError
from ..fsdp.accumulate import set_replica_reduction
from ..fsdp.deferred_init import NoInit
from ..fsdp.model_state import parameter_state
from ..fsdp.shard import shard


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Shard ``model`` over torchtitan's data-parallel mesh, for ``ModelSpec.parallelize_fn``.

    Activation checkpointing and compilation are torchtitan's. Replicas are synchronized in the last
    micro-batch of a step. Arguments are those of torchtitan's own functions.

    Raises ConfigError for settings that are not supported.
    """
    _check(parallel_dims, training, parallelism)
    if getattr(model, "enable_weight_tying", False):
        raise ConfigError(
            "a model with tied embeddings inside torchtitan: its losses in chunks need a head of "
            "its own unit; use nearlinear.Trainer for this model"
        )
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        from torchtitan.distributed.compile import (  # pyright: ignore[reportMissingImports]
            apply_compile,
        )

        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    mesh = _mesh(parallel_dims)
    _expect_values(model, mesh.device_type)
    layers: Any = model.layers
    mixed = training.mixed_precision_param == "bfloat16"
    # torchtitan's losses in chunks call the head after the model
    units = [*layers.values(), model.lm_head]
    shard(model, mesh=mesh, config={"bf16": mixed}, blocks=units)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    ranks = parallel_dims.dp_replicate * parallel_dims.dp_shard
    per_pass = training.local_batch_size * ranks
    micro_batches = max(1, training.global_batch_size // per_pass)
    model.register_forward_pre_hook(_TwoHop(micro_batches))
    return model


def _mesh(parallel_dims: Any) -> DeviceMesh:
    """Return torchtitan's data-parallel mesh with the names that `shard` knows."""
    replicas = parallel_dims.dp_replicate > 1
    mesh = parallel_dims.get_mesh(["dp_replicate", "fsdp"] if replicas else ["fsdp"])
    names = ("replicate", "shard") if replicas else ("shard",)
    return DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names)


def _expect_values(model: nn.Module, device: str) -> None:
    """Let `shard` leave memory on the meta device to torchtitan, which initializes it later."""
    for parameter in model.parameters():
        if parameter.is_meta:
            parameter_state(parameter).initial_values = NoInit()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=device))


def _check(parallel_dims: Any, training: Any, parallelism: Any) -> None:
    for name in ("tp", "cp", "pp", "ep"):
        if getattr(parallel_dims, name) > 1:
            raise ConfigError(
                f"{name} = {getattr(parallel_dims, name)} with nearlinear inside torchtitan: only "
                "1 is allowed there; use nearlinear.Trainer for this layout"
            )
    if parallel_dims.dp_shard == 1:
        raise ConfigError(
            "parallelism.data_parallel_shard_degree = 1: torchtitan's own DDP does this; give at "
            "least 2, or -1 for all ranks"
        )
    if parallelism.spmd_backend != "partial_dtensor":
        raise ConfigError(
            f"parallelism.spmd_backend = {parallelism.spmd_backend!r}: parameters are divided by "
            "data-parallel ranks only; set it to 'partial_dtensor'"
        )
    if training.enable_cpu_offload:
        raise ConfigError("training.enable_cpu_offload with nearlinear: leave it out")
    if training.dtype != "float32":
        raise ConfigError(
            f"training.dtype = {training.dtype!r}: master weights are float32; set "
            "training.mixed_precision_param to compute in bfloat16"
        )


class _TwoHop:
    """Forward pre-hook: count micro-batches, and all-reduce across replicas in the last."""

    def __init__(self, micro_batches: int):
        self.micro_batches, self.position = micro_batches, 0

    def __call__(self, model: nn.Module, args: tuple) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        self.position = self.position % self.micro_batches + 1
        set_replica_reduction(model, self.position == self.micro_batches)
