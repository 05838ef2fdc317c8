"""Delayed initialisation: no whole model anywhere, the same values whatever the layout."""

import pytest
import torch
from torch import nn

import nearlinear as nl
from tests.support import tiny


def built(rank, kind, degree, seed=0):
    nl.init({"hybrid_shard_degree": degree, "random_seed": seed})
    with nl.delayed_init():
        model = tiny.MODELS[kind]()
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    nl.shard(model)
    with torch.no_grad():
        return {name: p.full_tensor().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_values_do_not_depend_on_the_layout(kind):
    reference = nl.spmd.run(built, 1, args=(kind, 1))[0]
    for ranks, degree in [(2, 2), (4, 2), (8, 8)]:
        for found in nl.spmd.run(built, ranks, args=(kind, degree)):
            assert found.keys() == reference.keys()
            for name, value in reference.items():
                assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_values_follow_the_models_own_initialisation(kind):
    """Same spread, means and constants per parameter as transformers gives."""
    torch.manual_seed(3)
    expected = dict(tiny.MODELS[kind]().named_parameters())
    for name, value in nl.spmd.run(built, 2, args=(kind, 2))[0].items():
        theirs = expected[name]
        if theirs.std() == 0 or theirs.numel() == 1:
            assert torch.equal(value, theirs), name
        else:
            assert value.std().item() == pytest.approx(theirs.std().item(), rel=0.2), name
            assert abs(value.mean().item()) < 5 * value.std().item() / value.numel() ** 0.5, name


def test_gpt2_scales_its_residual_projections():
    values = nl.spmd.run(built, 1, args=("gpt2", 1))[0]
    ratio = values["transformer.h.0.mlp.c_proj.weight"].std() / (
        values["transformer.h.0.mlp.c_fc.weight"].std()
    )
    assert ratio.item() == pytest.approx(6**-0.5, rel=0.1)  # 2 residual additions x 3 layers


def test_blocks_and_seeds_differ():
    zero, one = (nl.spmd.run(built, 1, args=("gpt2", 1, seed))[0] for seed in (0, 1))
    name = "transformer.h.{}.attn.c_attn.weight"
    assert not torch.equal(zero[name.format(0)], zero[name.format(1)])
    assert not torch.equal(zero[name.format(0)], one[name.format(0)])


def test_tied_weights_stay_tied_and_trainable():
    def work(rank):
        nl.init({"hybrid_shard_degree": 2})
        with nl.delayed_init():
            model = tiny.gpt2()
        nl.shard(model)
        assert model.lm_head.weight is model.transformer.wte.weight
        optimizer = tiny.optimizer_for(model, "sgd")
        losses = []
        for _ in range(3):
            for batch in nl.accumulate(model, [tiny.batch(tiny.rows(0, 4))]):
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for losses in nl.spmd.run(work, 4):
        assert losses[2] < losses[0]


def test_plain_modules_initialise_themselves():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def work(rank):
        nl.init()
        with nl.delayed_init():
            net = Net()
        nl.shard(net)
        return [p.full_tensor().abs().max().item() for p in net.parameters()]

    for largest in nl.spmd.run(work, 2):
        assert all(0 < value <= 5**-0.5 for value in largest)


def test_a_module_that_cannot_initialise_itself_is_named():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    def work(rank):
        nl.init()
        with nl.delayed_init():
            net = nn.Sequential(Scale(), Scale())
        with pytest.raises(nl.ConfigError, match="Scale has parameters but no reset_parameters"):
            nl.shard(net)

    nl.spmd.run(work, 1)
