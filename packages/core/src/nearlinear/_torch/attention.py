"""Flash kernels of torch's attention, with the logsumexp that ring attention needs."""

import torch


def has_flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether a flash kernel takes q (B, H, Q, D) and k, v (B, K, S, D), H a multiple of K.

    On the CPU any floating dtype; on CUDA half precision, from the Ampere generation on.
    """
    if not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    halves = q.dtype in (torch.bfloat16, torch.float16)
    fits = halves and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cuda" and fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def flash_attention(q, k, v, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one block's output (B, H, Q, D) in q's dtype, and lse (B, H, Q) in float32.

    Checked on torch 2.13.0; on CUDA its declared shapes only.
    """
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, 0.0, causal, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def flash_attention_backward(grad, q, k, v, out, lse, causal: bool, scale: float):
    """Return the gradients of q, k and v.

    ``out`` and ``lse`` may be those of a softmax over more keys than ``k``. Checked as
    `flash_attention`.
    """
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # the generator's state
    return kernel(
        *(grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous()),
        *(None, None, q.shape[2], k.shape[2], 0.0, causal, no_dropout, no_dropout),
        scale=scale,
    )
