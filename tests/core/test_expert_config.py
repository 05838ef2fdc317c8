"""MoEConfig, and what is refused: one line, with the cause and the remedy."""

import logging
from types import SimpleNamespace

import pytest
from torch import nn

import nearlinear as nl
from nearlinear.parallel.expert import config as wish
from nearlinear.schema import field_docs
from tests.support import mixtures, tiny

EP = "expert_parallel_degree"


def test_every_key_is_known_and_explained():
    promised = (
        "smp_moe random_seed moe_load_balancing global_token_shuffle moe_all_to_all_dispatcher "
        "moe_aux_loss_coeff moe_z_loss_coeff"
    )
    assert set(field_docs(nl.MoEConfig)) == set(promised.split())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"moe_loadbalancing": "none"}, "did you mean 'moe_load_balancing'"),
        ({"moe_load_balancing": "sinkhron"}, "did you mean 'sinkhorn'"),
        ({"moe_z_loss_coeff": -1}, "moe_z_loss_coeff = -1.*0 or more"),
        ({"moe_aux_loss_coeff": "much"}, "moe_aux_loss_coeff = 'much': expected a number"),
        ("sinkhorn", "expected nl.MoEConfig or a dict"),
    ],
)
def test_a_bad_config(config, words):
    with pytest.raises(nl.ConfigError, match=words):
        wish.load(config)


def test_a_bad_word_in_the_class_itself():
    with pytest.raises(nl.ConfigError, match="allowed are 'sinkhorn', 'balanced'"):
        nl.MoEConfig(moe_load_balancing="even")


def test_what_has_no_effect_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        nl.MoEConfig(global_token_shuffle=True)
        assert "global_token_shuffle has no effect" in caplog.text
        caplog.clear()
        nl.MoEConfig(moe_aux_loss_coeff=0.1, moe_load_balancing="none")
        assert "moe_aux_loss_coeff = 0.1 has no effect" in caplog.text
        caplog.clear()
        nl.MoEConfig(global_token_shuffle=True, moe_load_balancing="balanced")
        nl.MoEConfig(moe_aux_loss_coeff=0.1)
        nl.MoEConfig(moe_aux_loss_coeff=0.1, moe_load_balancing="aux_loss")
        assert caplog.text == ""


class OneByOne(nn.Module):
    """As transformers 4 built a mixture."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Bilinear(4, 4, 4)


def without_coefficient():
    model = mixtures.mixtral(4)
    model.config = SimpleNamespace(output_router_logits=True)
    return model


@pytest.mark.parametrize(
    ("build", "config", "moe", "words"),
    [
        (lambda: mixtures.mixtral(6), {EP: 4}, None, "6 experts of .*allowed are 1, 2, 3, 6"),
        (tiny.llama, {EP: 2}, None, "LlamaForCausalLM has no experts: set expert_parallel_degree"),
        (OneByOne, {EP: 2}, None, "one by one, as transformers 4 does: pip install -U"),
        (Unknown, {EP: 2}, None, "experts of Unknown is a Bilinear, which .* cannot divide"),
        (lambda: mixtures.mixtral(4), {EP: 2}, {"smp_moe": False}, "smp_moe = false"),
        (
            without_coefficient,
            {EP: 2},
            None,
            "router_aux_loss_coef .* give moe_aux_loss_coeff",
        ),
    ],
    ids=["degree", "dense", "transformers-4", "unknown", "smp_moe", "coefficient"],
)
def test_what_cannot_be_divided(build, config, moe, words):
    def refused(rank):
        nl.init(config)
        with nl.spmd.one_at_a_time():
            model = build()
        with pytest.raises(nl.ConfigError, match=words) as error:
            nl.transform(model, moe)
        assert "\n" not in str(error.value)

    nl.spmd.run(refused, 4)


def test_a_degree_beyond_the_shard_group():
    def refused(rank):
        with pytest.raises(nl.ConfigError, match="does not divide hybrid_shard_degree, 2"):
            nl.init({EP: 4, "hybrid_shard_degree": 2})

    nl.spmd.run(refused, 4)


def test_a_model_that_was_not_transformed():
    def refused(rank):
        nl.init({EP: 2})
        with nl.spmd.one_at_a_time():
            model = mixtures.mixtral(4)
        with pytest.raises(nl.ConfigError, match=r"call nl.transform\(model\) before nl.shard"):
            nl.shard(model)

    nl.spmd.run(refused, 2)


def test_the_models_own_mixtures_stay_as_they_are():
    def untouched(rank):
        nl.init()
        model = mixtures.transformed("mixtral", 4, {"smp_moe": False})
        same = mixtures.mixtral(4)
        assert [type(m) for m in model.modules()] == [type(m) for m in same.modules()]
        assert not model._forward_hooks

    nl.spmd.run(untouched, 1)
