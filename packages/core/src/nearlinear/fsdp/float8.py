"""FP8 training: matrix products of the blocks in float8, through torchao.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning": e4m3 forward, e5m2 for gradients,
scaled by the largest value of each tensor. Only products are in float8; parameters, activations and
everything else stay in bfloat16. The head, layers with sizes that 16 does not divide, and
row-parallel layers, which sum over tensor ranks, are not converted.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from ..distributed import runtime
from ..errors import ConfigError
from .model_state import find_blocks, is_conv1d, model_state

CAPABILITY = (8, 9)  # CUDA capability of GPUs with float8 products: Ada, Hopper and later
MULTIPLE = 16  # divides both sizes of a matrix in a float8 product


def convert_to_fp8(
    model: nn.Module, *, blocks: list[nn.Module] | None = None, emulate: bool = False
) -> nn.Module:
    """Make the linear layers of ``model``'s blocks multiply in float8, in place; return the model.

    Example::

        model = nl.shard(nl.convert_to_fp8(model))

    Call it after `transform` and before `pipeline` and `shard`.

    Args:
        blocks: Blocks to convert, as in `shard`.
        emulate: Round to float8 and multiply in full precision, on any device, to see the effect of
            the rounding.

    Raises ConfigError without torchao, without a GPU for float8 products, or if no layer can be
    converted.
    """
    _check_device(runtime.current().device, emulate)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports] optional

    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)  # tokens need not divide
    converted = 0
    for block in find_blocks(model) if blocks is None else blocks:
        layers = {module for module in block.modules() if _is_convertible(module)}
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
            f"fp8: no linear layer in the blocks of {type(model).__name__} has sizes that are "
            f"multiples of {MULTIPLE}: leave fp8 out"
        )
    model_state(model).converted_to_fp8 = True
    return model


def _check_device(device: torch.device, emulate: bool) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError("fp8 needs torchao, which is not installed: pip install torchao")
    if emulate:
        return
    minimum = ".".join(map(str, CAPABILITY))
    if device.type != "cuda":
        raise ConfigError(
            f"fp8 needs a GPU of CUDA capability {minimum} or newer, and this rank is on the "
            f"{device.type}: leave fp8 out, or see its rounding with "
            "nl.convert_to_fp8(model, emulate=True)"
        )
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        raise ConfigError(
            f"fp8 needs CUDA capability {minimum} or newer, and "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}: leave fp8 out"
        )


def _is_convertible(module: nn.Module) -> bool:
    """Return whether ``module`` is a plain linear layer of sizes that float8 products take."""
    if type(module) is not nn.Linear and not is_conv1d(module):
        return False
    if "forward" in vars(module):  # row-parallel: its forward sums over tensor ranks
        return False
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return all(size % MULTIPLE == 0 for size in weight.shape)


def _convert_conv1d(layer: nn.Module, config) -> None:
    from torchao.float8.float8_linear import Float8Linear  # pyright: ignore[reportMissingImports] optional

    with torch.device("meta"):
        like = Float8Linear(MULTIPLE, MULTIPLE, bias=False, config=config)
    layer.forward = Float8Conv1D(layer, like.linear_mm_config, config)


class Float8Conv1D:
    """The ``forward`` of GPT-2's linear layer in float8; its weight is transposed already."""

    def __init__(self, layer: nn.Module, *settings):
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args  # pyright: ignore[reportMissingImports] optional

        self.layer, self.settings = layer, settings
        self.multiply = matmul_with_hp_or_float8_args.apply

    def __call__(self, x_BSF: torch.Tensor) -> torch.Tensor:
        bias = self.layer.bias
        assert isinstance(bias, torch.Tensor)
        product = self.multiply(x_BSF, self.layer.weight, *self.settings)
        return product + bias.to(product.dtype)
