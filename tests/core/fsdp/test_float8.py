"""Float8 products: errors where they are unsupported, and rounding."""

import functools
import importlib.util

import pytest
import torch

import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.config.parallel import ParallelConfig
from nearlinear.fsdp import float8
from nearlinear.fsdp.model_state import find_blocks
from tests.support import parity, tiny

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(
    not HAS_TORCHAO, reason="torchao is not installed: pip install torchao"
)
EMULATED = functools.partial(nl.convert_to_fp8, emulate=True)
FP8 = {"bf16": True, "fp8": True}


def refused(model, words, config=None, convert=nl.convert_to_fp8):
    def work(rank):
        nl.init(config)
        with pytest.raises(nl.errors.ConfigError, match=words):
            convert(model)

    nl.spmd.run(work, 1)


@pytest.mark.skipif(HAS_TORCHAO, reason="torchao is installed")
@pytest.mark.parametrize("convert", [nl.convert_to_fp8, EMULATED])
def test_fp8_without_torchao_is_refused(convert):
    refused(tiny.llama(), "pip install torchao", convert=convert)


def test_fp8_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    refused(tiny.llama(), "capability 8.9 or newer, and this rank is on the cpu")


def test_fp8_on_an_older_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(nl.errors.ConfigError, match="NVIDIA A100 has 8.0: leave fp8 out"):
        float8._check_device(torch.device("cuda"), emulate=False)


def test_fp8_requires_bf16():
    for other in ({}, {"fp16": True}):
        with pytest.raises(nl.errors.ConfigError, match="set bf16 = true"):
            ParallelConfig(fp8=True, **other)


def test_unconverted_model_is_refused():
    refused(tiny.llama(), r"call nl.convert_to_fp8\(model\) before", FP8, convert=nl.shard)


def test_trainer_names_missing_fp8_requirements(small_run):
    def start(rank):
        with pytest.raises(nl.errors.ConfigError, match="torchao|capability"):
            nl.Trainer(train_config.load(small_run | {"parallel": FP8}, environment={}))

    nl.spmd.run(start, 1)


@needs_torchao
def test_fp8_refuses_models_of_unsuitable_sizes():
    refused(tiny.gpt2(), "multiples of 16", convert=EMULATED)  # 24 wide


@needs_torchao
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_fp8_converts_linear_layers_of_blocks(family):
    def names(rank):
        nl.init(FP8)
        model = parity.build(family)
        before = {name: parameter for name, parameter in model.named_parameters()}
        EMULATED(model)
        after = dict(model.named_parameters())
        assert after.keys() == before.keys() and all(after[n] is p for n, p in before.items())
        modules = [m for block in find_blocks(model) for m in block.modules()]
        replaced = [vars(m).get("forward", m) for m in modules]
        kinds = {type(each).__name__ for each in replaced}
        return kinds, type(model.lm_head).__name__

    ((kinds, head),) = nl.spmd.run(names, 1)
    assert kinds & {"Float8Linear", "Float8Conv1D"} and not kinds & {"Linear", "Conv1D"}
    assert head == "Linear"


def trained(rank, family, config, prepare=lambda model: None):
    layers = parity.layers(family, 4)
    return parity.together(rank, family, config, 2, prepare=prepare, **layers)


@needs_torchao
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("ranks", "config"), [(4, {"hybrid_shard_degree": 2}), (2, {"tensor_parallel_degree": 2})]
)
def test_fp8_training_within_rounding(family, ranks, config):
    found = nl.spmd.run(trained, ranks, args=(family, config | FP8, EMULATED))
    plain = nl.spmd.run(trained, ranks, args=(family, config | {"bf16": True}))
    expected = parity.alone(family, **parity.layers(family, 4))
    for run, other in zip(found, plain, strict=True):
        apart = parity.differences(run, expected)
        assert apart["losses"] < 0.05 and apart["values"] < 0.01 and apart["gradients"] < 0.15
        assert apart["gradients"] > 2 * parity.differences(other, expected)["gradients"]


@pytest.mark.gpu
@needs_torchao
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_fp8_training_on_a_gpu(family):
    (plain,) = nl.spmd.run(trained, 1, args=(family, {"bf16": True}), processes=True)
    (found,) = nl.spmd.run(trained, 1, args=(family, FP8, nl.convert_to_fp8), processes=True)
    apart = parity.differences(found, plain)
    assert 0 < apart["losses"] < 0.05 and apart["values"] < 0.01
