"""AdamW with weight decay on matrices only, and a learning rate with warm-up and cosine decay.

Sources: Loshchilov and Hutter 2019 (decoupled weight decay); GPT-3 (Brown et al. 2020, appendix B)
for the shape of the schedule.
"""

import math
from typing import Any

import torch
from torch import nn

from ..config.train import OptimizerConfig
from ..errors import ConfigError
from ..fsdp.optimizer_state import shard_optimizer


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return AdamW for the sharded ``model``, with weight decay on matrices only.

    Parameters of two or more dimensions decay; biases and norms do not. Replicas share the
    optimizer state if the model's config has ``shard_optimizer_state``.

    Raises:
        ConfigError: torchao is not installed and ``optimizer.kind`` is "adamw_8bit".
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    common: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    if config.kind == "adamw_8bit":
        return shard_optimizer(_adamw_8bit(groups, common), model)
    flags: dict[str, Any] = {name: name == config.implementation for name in ("fused", "foreach")}
    return shard_optimizer(torch.optim.AdamW(groups, **common, **flags), model)


def _adamw_8bit(groups: list[dict], common: dict) -> torch.optim.Optimizer:
    try:
        from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports] - optional
    except ImportError as error:
        raise ConfigError(
            f'optimizer.kind = "adamw_8bit" requires torchao ({error}): pip install torchao, or '
            'set optimizer.kind = "adamw"'
        ) from None
    return AdamW8bit(groups, **common)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # compiled optimizers read a tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of optimizer step ``step`` (from 1) of ``steps``."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)
