"""Model FLOPS per token and peak FLOPS of a device, for the model FLOPS utilization (MFU).

Model FLOPS follow PaLM (Chowdhery et al. 2022, appendix B): 6 per matrix parameter and token for
forward and backward, plus 12 * layers * width * sequence for attention. Recomputation is not
counted. GPU peaks are dense datasheet numbers; the peak of a CPU is measured with a matrix product.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .. import hardware
from ..fsdp.shard import COMPUTE_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Return the model FLOPS of forward and backward per token of a sequence."""
    config: Any = model.config
    head: Any = model.get_output_embeddings()
    tables = {id(model.get_input_embeddings().weight)}
    tables -= {id(head.weight)}  # tied: the head's matrix
    matrices = sum(
        p.numel() * (_active_expert_share(config) if ".experts." in name else 1)
        for name, p in model.named_parameters()
        if p.dim() >= 2 and id(p) not in tables
    )
    positions = getattr(getattr(model, "transformer", None), "wpe", None)
    if positions is not None:
        matrices -= positions.weight.numel()
    attention = 12 * config.num_hidden_layers * config.hidden_size * sequence_length
    return 6.0 * matrices + attention


def _active_expert_share(config) -> float:
    """Return the share of a mixture's experts that compute for each token."""
    return config.num_experts_per_tok / config.num_local_experts


def peak_tflops(device: torch.device, precision: str) -> float:
    """Return the peak TFLOPS of one rank: known for GPUs, measured on a CPU; NaN if unknown.

    On a CPU all ranks measure at the same time, so that shared cores are counted once. A collective
    call there.
    """
    if device.type == "cuda":
        peak = hardware.peak_tflops(torch.cuda.get_device_name(device), precision)
        return float("nan") if peak is None else peak
    return _measure_tflops(COMPUTE_DTYPES[precision])


def _measure_tflops(dtype: torch.dtype, size: int = 512, seconds: float = 0.3) -> float:
    """Return the rate of a square matrix product over ``seconds``, on all ranks at once."""
    matrix = torch.full((size, size), 0.5, dtype=dtype)
    matrix @ matrix
    dist.barrier()
    products, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        matrix @ matrix
        products += 1
    return 2 * size**3 * products / elapsed / 1e12
