"""Private torch names that `_torch` depends on exist."""

import pytest
import torch

from nearlinear import _torch
from tests.support import tiny


def test_thread_group_has_the_counted_collectives():
    group, *_ = _torch.thread_group_base()
    for name in ("allreduce", "broadcast", "exception_handle", "reset"):
        assert hasattr(group, name), f"torch {torch.__version__} moved {name}: update _torch.py"
    gathers = {"all_gather_single", "_allgather_base"} & set(vars(group))
    scatters = {"reduce_scatter_single", "_reduce_scatter_base"} & set(vars(group))
    assert gathers and scatters, f"torch {torch.__version__} renamed collectives: update _torch.py"


def test_map_tensors_maps_model_outputs():
    with torch.no_grad():
        output = tiny.gpt2(1)(**tiny.batch(tiny.rows(0, 1)))
    doubled = _torch.map_tensors(lambda tensor: tensor * 2, output)
    assert type(doubled) is type(output)
    assert doubled.loss.item() == pytest.approx(2 * output.loss.item())


def test_cuda_flash_kernels_have_the_expected_shapes():
    """Checked with meta tensors, on any machine."""
    q = torch.empty(2, 8, 16, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 24, 64, dtype=torch.bfloat16, device="meta")
    out, lse = _torch.flash_attention(q, k, k, causal=False, scale=0.125)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((2, 8, 16), torch.float32)
    gradients = _torch.flash_attention_backward(out, q, k, k, out, lse, causal=False, scale=0.125)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, k.shape]
    assert not _torch.has_flash_attention(q, k, k), "neither the CPU nor CUDA"
