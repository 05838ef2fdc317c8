"""Settings take effect: optimizer, FLOPS, reduction dtype, warnings, frozen parameters."""

import logging

import pytest
import torch
from torch import nn

import nearlinear as nl
from nearlinear.config.train import OptimizerConfig
from nearlinear.distributed.collectives import count_collectives
from nearlinear.train.model import flops_per_token
from nearlinear.train.optimizer import build_optimizer
from tests.support import tiny


def test_betas_and_eps_reach_the_optimizer():
    config = OptimizerConfig(lr=0.25, beta1=0.3, beta2=0.7, eps=1e-2)
    for group in build_optimizer(tiny.gpt2(1), config).param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.3, 0.7), 1e-2)


def test_optimizer_excludes_frozen_parameters():
    model = tiny.gpt2(1)
    model.transformer.wpe.weight.requires_grad_(False)
    groups = build_optimizer(model, OptimizerConfig()).param_groups
    held = {id(p) for group in groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize("layers", [1, 3])
def test_flops_of_gpt2_are_exact(layers):
    """Only matrices that multiply activations count: no positions, no biases, one head."""
    width, sequence = 24, 16
    matrices = layers * 12 * width**2 + tiny.VOCABULARY * width
    attention = 12 * layers * width * sequence
    assert flops_per_token(tiny.gpt2(layers), sequence) == 6 * matrices + attention


def test_flops_of_llama_are_exact():
    width, inner, heads_of_values, sequence = 24, 40, 2 * 6, 16
    block = 2 * width**2 + 2 * width * heads_of_values + 3 * width * inner
    expected = 6 * (3 * block + tiny.VOCABULARY * width) + 12 * 3 * width * sequence
    assert flops_per_token(tiny.llama(3), sequence) == expected


def gradient_traffic(rank, bf16):
    """Return the bytes of one backward pass on 2 replicas x 2 shards, by collective."""
    nl.init({"hybrid_shard_degree": 2, "bf16": bf16})
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(2)
    nl.shard(model)
    for batch in nl.accumulate(model, [tiny.batch(tiny.rows(0, 2))]):
        with count_collectives() as counts:
            model(**batch).loss.backward()
    return dict(counts.bytes)


def test_bf16_gathers_in_half_the_bytes_and_reduces_in_float32():
    plain = nl.spmd.run(gradient_traffic, 4, args=(False,))
    half = nl.spmd.run(gradient_traffic, 4, args=(True,))
    whole = 4 * sum(p.numel() for p in tiny.gpt2(2).parameters())
    for fp32, bf16 in zip(plain, half, strict=True):
        assert fp32["reduce_scatter"] >= whole
        assert bf16["reduce_scatter"] == fp32["reduce_scatter"]
        assert bf16["all_reduce"] == fp32["all_reduce"]
        assert 2 * bf16["all_gather"] == fp32["all_gather"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"allow_empty_shards": True}, ["allow_empty_shards = True has no effect"]),
        ({}, []),
    ],
)
def test_setting_without_effect_is_a_warning(config, words, caplog):
    def work(rank):
        nl.init(config)
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2(1)
        nl.shard(model)

    with caplog.at_level(logging.WARNING, logger="nearlinear"):
        nl.spmd.run(work, 1)
    found = [r.getMessage() for r in caplog.records if r.name.startswith("nearlinear")]
    assert len(found) == len(words)
    for message, part in zip(found, words, strict=True):
        assert part in message


class HalfFrozen(nn.Module):
    """A model with one frozen parameter per block and one at the root."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

        def reset_parameters(self):
            nn.init.constant_(self.scale, 2.0)

        def forward(self, x):
            return self.inner(x) * self.scale

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(HalfFrozen.Block() for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(4), requires_grad=False)

    def reset_parameters(self):
        nn.init.constant_(self.shift, 0.5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x + self.shift).square().mean()


def test_frozen_parameters_stay_frozen_through_delayed_init():
    def work(rank):
        nl.init({"hybrid_shard_degree": 2})
        with nl.deferred_init():
            model = HalfFrozen()
        built = {name: p.requires_grad for name, p in model.named_parameters()}
        nl.shard(model)
        placed = {name: p.requires_grad for name, p in model.named_parameters()}
        model(torch.ones(2, 4)).backward()
        graded = {name: p.grad is not None for name, p in model.named_parameters()}
        return built, placed, graded

    expected = {name: p.requires_grad for name, p in HalfFrozen().named_parameters()}
    assert sorted(name for name, grad in expected.items() if not grad) == [
        "layers.0.scale",
        "layers.1.scale",
        "shift",
    ]
    for found in nl.spmd.run(work, 2):
        assert found == (expected, expected, expected)


@pytest.mark.parametrize(
    ("max_norm", "expected"), [(4.9, 4.9), (4.0, 4.0), (5.1, 5.0), (10.0, 5.0)]
)
def test_clipping_starts_right_above_the_largest_norm(max_norm, expected):
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([value])
    assert nl.clip_grad_norm_(parameters, max_norm) == pytest.approx(5.0)
    after = torch.cat([p.grad for p in parameters])
    assert after.norm().item() == pytest.approx(expected, rel=1e-6)
    assert (after[1] / after[0]).item() == pytest.approx(4 / 3)
