"""AdamW's groups and the learning rate's shape."""

import pytest

from nearlinear.train.config import OptimizerConfig
from nearlinear.train.optimizer import build_optimizer, learning_rate
from tests.support import tiny


def test_matrices_decay_and_vectors_do_not():
    model = tiny.gpt2(1)
    decayed, plain = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3 and plain["weight_decay"] == 0.0
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_warm_up_then_cosine():
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=10)
    rates = [learning_rate(step, 110, config) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[9] == max(rates) == 1.0
    assert rates[59] == pytest.approx(0.55)  # half-way down the cosine
    assert rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_no_warm_up():
    config = OptimizerConfig(lr=1.0, warmup_steps=0, min_lr_ratio=0.0)
    assert learning_rate(1, 1, config) == pytest.approx(0.0)
    assert learning_rate(1, 4, config) == pytest.approx(0.853553, rel=1e-5)
