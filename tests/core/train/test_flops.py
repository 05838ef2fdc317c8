"""Model FLOPS compared with the closed form of a published benchmark, and peaks by device."""

import math

import pytest
import torch

import nearlinear as nl
from nearlinear import hardware
from nearlinear.config.train import ModelConfig
from nearlinear.train.model import build_model, flops_per_token, peak_tflops


def test_flops_of_the_published_30b_model():
    """6 N plus attention: 73.52 sequences/s of 2048 tokens on 256 A100 are about 35.5 % MFU."""
    model = build_model(ModelConfig(preset="gpt2-30b"), 50257)
    flops = flops_per_token(model, 2048)
    parameters = 48 * 12 * 7168**2 + 50257 * 7168
    assert flops == pytest.approx(6 * parameters + 12 * 48 * 7168 * 2048, rel=1e-3)
    share = (
        73.52 * 2048 / 256 * flops / 1e12 / hardware.peak_tflops("NVIDIA A100-SXM4-40GB", "bf16")
    )
    assert share == pytest.approx(0.355, abs=0.002)


def test_untied_input_embeddings_are_not_counted():
    model = build_model(ModelConfig(preset="llama2-7b"), 32000)
    total = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    attention = 12 * 32 * 4096 * 100
    assert flops_per_token(model, 100) == 6 * (total - 32000 * 4096) + attention


def test_flops_count_two_of_eight_experts():
    """12.9 of Mixtral 8x7B's 46.7 billion parameters (Jiang et al. 2024)."""
    model = build_model(ModelConfig(preset="mixtral-8x7b"), 32000)
    used = flops_per_token(model, 0) / 6 + 32000 * 4096
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(46.7e9, rel=0.01)
    assert used == pytest.approx(12.9e9, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peak_of_a_cpu_is_measured(precision):
    def measure(rank):
        nl.init()
        return peak_tflops(torch.device("cpu"), precision)

    (peak,) = nl.spmd.run(measure, 1)
    assert math.isfinite(peak) and peak > 0


@pytest.mark.gpu
def test_peak_of_a_gpu_is_known():
    assert math.isfinite(peak_tflops(torch.device("cuda", 0), "bf16"))
