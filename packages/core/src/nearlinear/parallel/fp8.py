"""FP8 training: the matrix products of the blocks in float8, through torchao.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning": e4m3 forward, e5m2 for gradients,
scaled by each tensor's largest value. Only products are in float8; parameters, activations between
layers and everything else are as without, in bfloat16. The head and layers whose sizes 16 does not
divide stay as they are, and of tensor ranks' matrices those that sum over ranks.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import nn

from .. import runtime
from ..errors import ConfigError
from .blocks import find_blocks

CAPABILITY = (8, 9)  # of CUDA devices with float8 matrix products: Ada, Hopper and later
MULTIPLE = 16  # of both sizes of a matrix, for these products


def convert_to_fp8(
    model: nn.Module, *, blocks: list[nn.Module] | None = None, emulate: bool = False
) -> nn.Module:
    """Have the linear layers of ``model``'s blocks multiply in float8, in place; returns the model.

    After `transform` and before `pipeline` and `shard`; ``blocks`` as `shard` takes them.
    ``emulate`` rounds to float8 and multiplies in full, on any device: to see what the rounding
    does. Raises ConfigError without torchao, without a GPU that can, or where nothing can be
    converted.
    """
    _require(runtime.current().device, emulate)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)  # tokens need not divide
    converted = 0
    for block in find_blocks(model) if blocks is None else blocks:
        layers = {module for module in block.modules() if _fits(module)}
        convert_to_float8_training(
            block,
            config=config,
            module_filter_fn=lambda module, name, chosen=layers: (
                type(module) is nn.Linear and module in chosen
            ),
        )
        for layer in layers:
            if type(layer) is not nn.Linear:
                _convert_conv1d(layer, config)
        converted += len(layers)
    if not converted:
        raise ConfigError(
            f"fp8: {type(model).__name__} has no linear layer in its blocks whose sizes are "
            f"multiples of {MULTIPLE}: leave fp8 out"
        )
    model._nearlinear_fp8 = True
    return model


def is_converted(model: nn.Module) -> bool:
    return getattr(model, "_nearlinear_fp8", False)


def _require(device: torch.device, emulate: bool) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError("fp8 needs torchao, which is not installed: pip install torchao")
    if emulate:
        return
    least = ".".join(map(str, CAPABILITY))
    if device.type != "cuda":
        raise ConfigError(
            f"fp8 needs a GPU of CUDA capability {least} or newer, and this rank is on the "
            f"{device.type}: leave fp8 out, or see its rounding with "
            "nl.convert_to_fp8(model, emulate=True)"
        )
    here = torch.cuda.get_device_capability(device)
    if here < CAPABILITY:
        raise ConfigError(
            f"fp8 needs CUDA capability {least} or newer, and {torch.cuda.get_device_name(device)} "
            f"has {here[0]}.{here[1]}: leave fp8 out"
        )


def _fits(module: nn.Module) -> bool:
    """Whether ``module`` is a plain linear layer, of sizes that float8 products take."""
    plain = type(module) is nn.Linear or _is_conv1d(module)
    return plain and all(size % MULTIPLE == 0 for size in module.weight.shape)


def _is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, told without importing transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _convert_conv1d(layer: nn.Module, config) -> None:
    from torchao.float8.float8_linear import Float8Linear

    with torch.device("meta"):
        like = Float8Linear(MULTIPLE, MULTIPLE, bias=False, config=config)
    layer._nearlinear_product = (like.linear_mm_config, config)
    layer.__class__ = _fp8_conv1d(type(layer))


@cache
def _fp8_conv1d(kind: type) -> type:
    """``kind``, GPT-2's layer, which keeps its weight transposed, as torchao's product takes it."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    class Fp8Conv1D(kind):
        def forward(self, x_BSF: torch.Tensor) -> torch.Tensor:
            product = matmul_with_hp_or_float8_args.apply(
                x_BSF, self.weight, *self._nearlinear_product
            )
            return product + self.bias.to(product.dtype)

    return Fp8Conv1D
