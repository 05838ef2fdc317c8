"""AdamW with decoupled weight decay on matrices only, and warm-up followed by cosine decay.

Sources: Loshchilov and Hutter 2019 (decoupled decay), GPT-3 (Brown et al. 2020, appendix B) for
the schedule's shape.
"""

import math

import torch
from torch import nn

from .config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW in two groups: parameters of two or more dimensions decay, biases and norms do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    on_gpu = any(p.device.type == "cuda" for p in parameters)
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=on_gpu
    )


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of optimizer step ``step`` (from 1) of ``steps``."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)
