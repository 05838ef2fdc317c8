"""Model FLOPS against the closed form of the published benchmark, and peaks by name."""

import math

import pytest
import torch

import nearlinear as nl
from nearlinear.train.config import ModelConfig
from nearlinear.train.flops import PEAK_TFLOPS, flops_per_token, peak_tflops
from nearlinear.train.model import build_model


def test_the_30b_model_of_the_benchmark():
    """6 N plus attention: 73.52 sequences/s of 2048 on 256 GPUs are about 35.5 % of an A100."""
    model = build_model(ModelConfig(preset="gpt2-30b"), 50257)
    flops = flops_per_token(model, 2048)
    parameters = 48 * 12 * 7168**2 + 50257 * 7168
    assert flops == pytest.approx(6 * parameters + 12 * 48 * 7168 * 2048, rel=1e-3)
    share = 73.52 * 2048 / 256 * flops / 1e12 / PEAK_TFLOPS["A100", "bf16"]
    assert share == pytest.approx(0.355, abs=0.002)


def test_an_untied_input_table_is_no_matrix_product():
    model = build_model(ModelConfig(preset="llama2-7b"), 32000)
    total = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    attention = 12 * 32 * 4096 * 100
    assert flops_per_token(model, 100) == 6 * (total - 32000 * 4096) + attention


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cpus_peak_is_measured(precision):
    def measure(rank):
        nl.init()
        return peak_tflops(torch.device("cpu"), precision)

    (peak,) = nl.spmd.run(measure, 1)
    assert math.isfinite(peak) and peak > 0


@pytest.mark.gpu
def test_a_gpus_peak_is_known():
    assert math.isfinite(peak_tflops(torch.device("cuda", 0), "bf16"))
