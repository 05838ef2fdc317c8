"""Apply the parallelism and activation techniques of a config to a model, in execution order."""

from __future__ import annotations

from torch import nn

from ..activation.api import checkpoint_activations, offload_activations
from ..config.moe import MoEConfig
from ..config.train import TrainConfig
from ..fsdp.compile import compile_blocks
from ..fsdp.float8 import convert_to_fp8
from ..fsdp.model_state import find_blocks
from ..fsdp.shard import shard
from ..pipeline_parallel.api import Pipelined, pipeline
from ..transforms import transform


def parallelize(model: nn.Module, config: TrainConfig) -> tuple[nn.Module, list[nn.Module]]:
    """Return this rank's part of ``model``, and the blocks in it.

    The order is: tensor, context and expert parallelism, fp8, compilation, pipeline stages,
    sharding, activation checkpointing, activation offloading.
    """
    model = transform(model, None if config.moe == MoEConfig() else config.moe)
    if config.parallel.fp8:
        model = convert_to_fp8(model)
    if config.train.compile_blocks:
        model = compile_blocks(model)
    if config.parallel.pipeline_parallel_degree > 1:
        model = shard(pipeline(model))
        assert isinstance(model, Pipelined)
        blocks = model.blocks()
    else:
        blocks = find_blocks(model)
        model = shard(model, blocks=blocks)
    if config.activations.checkpoint:
        checkpoint_activations(model, config.activations.checkpoint)
    if config.activations.offload:
        offload_activations(model)
    return model, blocks
