"""Floating-point work per token, the peak it is held against, and the share reached (MFU).

Model FLOPS as in PaLM (Chowdhery et al. 2022, appendix B): 6 per matrix parameter and token for
forward and backward, plus 12 * layers * width * sequence for attention; recomputation is not
counted. GPU peaks are dense datasheet numbers; a CPU's is measured with a matrix product.
"""

import time

import torch
import torch.distributed as dist
from torch import nn

from ..parallel.shard import COMPUTED_IN

PEAK_TFLOPS = {
    ("B200", "bf16"): 2250.0,
    ("H200", "bf16"): 989.0,
    ("H100", "bf16"): 989.0,
    ("A100", "bf16"): 312.0,
    ("L40S", "bf16"): 362.0,
    ("A10G", "bf16"): 70.0,
    ("H200", "fp32"): 67.0,
    ("H100", "fp32"): 67.0,
    ("A100", "fp32"): 19.5,
}
"""Dense peak by part of the device's name (SXM parts); fp32 as torch computes it, without TF32."""


ALIKE = {"fp16": "bf16"}
"""Precisions with the peak of another."""


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Model FLOPS of one token's forward and backward in a sequence of ``sequence_length``."""
    config = model.config
    tables = {id(model.get_input_embeddings().weight)}
    tables -= {id(model.get_output_embeddings().weight)}  # a tied table is the head's matrix
    matrices = sum(
        p.numel() * (_experts_used(model.config) if ".experts." in name else 1)
        for name, p in model.named_parameters()
        if p.dim() >= 2 and id(p) not in tables
    )
    positions = getattr(getattr(model, "transformer", None), "wpe", None)
    if positions is not None:
        matrices -= positions.weight.numel()
    attention = 12 * config.num_hidden_layers * config.hidden_size * sequence_length
    return 6.0 * matrices + attention


def _experts_used(config) -> float:
    """The share of a mixture's experts that compute for a token."""
    return config.num_experts_per_tok / config.num_local_experts


def peak_tflops(device: torch.device, precision: str) -> float:
    """One rank's peak in TFLOPS: by the GPU's name, or measured on the CPU; NaN if unknown.

    On the CPU all ranks measure at the same time, so that cores they share are counted once.
    """
    if device.type == "cuda":
        name, like = torch.cuda.get_device_name(device), ALIKE.get(precision, precision)
        known = (t for (part, kind), t in PEAK_TFLOPS.items() if part in name and kind == like)
        return next(known, float("nan"))
    return _measured_tflops(COMPUTED_IN[precision])


def _measured_tflops(dtype: torch.dtype, size: int = 512, seconds: float = 0.3) -> float:
    """The rate of a square matrix product over ``seconds``, run by all ranks at once."""
    matrix = torch.full((size, size), 0.5, dtype=dtype)
    matrix @ matrix
    dist.barrier()
    products, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        matrix @ matrix
        products += 1
    return 2 * size**3 * products / elapsed / 1e12
