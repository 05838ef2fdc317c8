"""From a whole model to what this rank trains of it, by all the techniques that a config names."""

from __future__ import annotations

from torch import nn

from ..moe import MoEConfig
from ..parallel.activations.door import checkpoint_activations, offload_activations
from ..parallel.blocks import find_blocks
from ..parallel.compile import compile_blocks
from ..parallel.fp8 import convert_to_fp8
from ..parallel.pipeline.door import pipeline
from ..parallel.shard import shard
from ..parallel.transform import transform
from .config import TrainConfig


def split(model: nn.Module, config: TrainConfig) -> tuple[nn.Module, list[nn.Module]]:
    """``model`` as the config asks, split, cut into stages and sharded, with activations kept,
    recomputed or offloaded; its blocks on this rank."""
    model = transform(model, None if config.moe == MoEConfig() else config.moe)
    if config.parallel.fp8:
        model = convert_to_fp8(model)
    if config.train.compile_blocks:
        model = compile_blocks(model)
    if config.parallel.pipeline_parallel_degree > 1:
        model = shard(pipeline(model))
        blocks = model.blocks()
    else:
        blocks = find_blocks(model)
        model = shard(model, blocks=blocks)
    if config.activations.checkpoint:
        checkpoint_activations(model, config.activations.checkpoint)
    if config.activations.offload:
        offload_activations(model)
    return model, blocks
