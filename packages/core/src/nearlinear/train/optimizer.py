"""AdamW with decoupled weight decay on matrices only, and warm-up followed by cosine decay.

Sources: Loshchilov and Hutter 2019 (decoupled decay), GPT-3 (Brown et al. 2020, appendix B) for
the schedule's shape.
"""

import math

import torch
from torch import nn

from ..errors import ConfigError
from ..parallel.optimizer_shards import shard_optimizer
from .tables import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW in two groups: parameters of two or more dimensions decay, biases and norms do not.

    Of the sharded ``model``; replicas share its state where the model's config says so. Raises
    ConfigError.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    common = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.kind == "adamw_8bit":
        return shard_optimizer(_in_8_bits(groups, common), model)
    ways = {name: name == config.implementation for name in ("fused", "foreach")}
    return shard_optimizer(torch.optim.AdamW(groups, **common, **ways), model)


def _in_8_bits(groups: list[dict], common: dict) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f'optimizer.kind = "adamw_8bit" needs torchao ({error}): pip install torchao, or set '
            'optimizer.kind = "adamw"'
        ) from None
    return AdamW8bit(groups, **common)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # compiled optimizers read it from memory
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of optimizer step ``step`` (from 1) of ``steps``."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)
