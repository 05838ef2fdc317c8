"""AdamW: parameter groups, implementations, 8-bit states, and the learning-rate schedule."""

import sys

import pytest
import torch

import nearlinear as nl
from nearlinear.config.train import OptimizerConfig, load
from nearlinear.distributed import runtime
from nearlinear.fsdp.model_state import local_tensor
from nearlinear.train.optimizer import build_optimizer, learning_rate, set_learning_rate
from tests.support import mixtures, parity, tiny


def test_matrices_decay_and_vectors_do_not():
    model = tiny.gpt2(1)
    decayed, plain = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3 and plain["weight_decay"] == 0.0
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for_loop"])
def test_implementations_give_equal_updates(implementation, offloaded):
    """Parameters are on two meshes, because experts have their own."""

    def work(rank):
        nl.init({"expert_parallel_degree": 2, "offload_optimizer": offloaded})
        model = nl.shard(mixtures.transformed("mixtral", 4, None))
        config = OptimizerConfig(implementation=implementation, lr=1e-3)
        optimizer = build_optimizer(model, config)
        for number in range(2):
            for batch in nl.accumulate(model, [tiny.batch(tiny.rows(number, 2))]):
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ways = {(group["fused"], group["foreach"]) for group in optimizer.param_groups}
        return ways, parity.whole(model, lambda parameter: parameter.detach())

    torch.manual_seed(0)
    alone = mixtures.build("mixtral", 4)
    optimizer = build_optimizer(alone, OptimizerConfig(implementation="for_loop", lr=1e-3))
    for number in range(2):
        alone(**tiny.batch(tiny.rows(number, 2))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for ways, values in nl.spmd.run(work, 2):
        assert ways == {(implementation == "fused", implementation == "foreach")}
        for name, value in alone.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), atol=1e-5, rtol=0)


def test_adamw_8bit_without_torchao_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(nl.errors.ConfigError, match="pip install torchao"):
        build_optimizer(tiny.gpt2(1), OptimizerConfig(kind="adamw_8bit"))


@pytest.mark.parametrize(
    "other",
    [
        {"checkpoint": {"folder": "kept"}},
        {"optimizer": {"implementation": "foreach"}},
        {"parallel": {"offload_optimizer": True}},
    ],
)
def test_settings_incompatible_with_adamw_8bit_are_refused(other):
    data = other | {"optimizer": {"kind": "adamw_8bit"} | other.get("optimizer", {})}
    with pytest.raises(nl.errors.ConfigError, match='optimizer.kind = "adamw_8bit" and'):
        load(data, environment={})


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(128, 128, bias=False)])

    def forward(self, x):
        return self.layers[0](x).square().mean()


@pytest.mark.slow
def test_adamw_8bit_trains_near_adamw(tmp_path):
    """States take a quarter of the bytes, and cannot be saved."""
    pytest.importorskip("torchao.optim")

    def train(kind, lr):
        nl.init({})
        torch.manual_seed(0)
        model = Wide()
        nl.shard(model, blocks=list(model.layers))
        optimizer = build_optimizer(model, OptimizerConfig(kind=kind, lr=lr, weight_decay=0.0))
        for number in range(6):
            set_learning_rate(optimizer, lr)
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(number))
            for batch in nl.accumulate(model, [{"x": x}]):
                model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        (state,) = optimizer.state.values()
        return model, optimizer, local_tensor(state["exp_avg"])

    model, _, whole = train("adamw", 1e-3)
    expected = local_tensor(model.layers[0].weight.detach())
    model, optimizer, coded = train("adamw_8bit", 1e-3)
    assert type(coded).__name__ == "OptimState8bit"
    assert coded.codes.nbytes + coded.scale.nbytes < 0.27 * whole.nbytes
    found = local_tensor(model.layers[0].weight.detach())
    assert (found - expected).abs().max() < 1e-3  # each has moved by 6e-3
    with pytest.raises(nl.errors.CheckpointError, match="save the model alone"):
        nl.save(tmp_path, model, optimizer)
    runtime.shutdown()


def test_learning_rate_warms_up_and_follows_a_cosine():
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=10)
    rates = [learning_rate(step, 110, config) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[9] == max(rates) == 1.0
    assert rates[59] == pytest.approx(0.55)  # half-way down the cosine
    assert rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_learning_rate_without_warm_up():
    config = OptimizerConfig(lr=1.0, warmup_steps=0, min_lr_ratio=0.0)
    assert learning_rate(1, 1, config) == pytest.approx(0.0)
    assert learning_rate(1, 4, config) == pytest.approx(0.853553, rel=1e-5)
