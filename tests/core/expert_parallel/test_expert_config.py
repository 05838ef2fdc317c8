"""MoEConfig and one-line errors of expert parallelism with cause and remedy."""

import logging
from types import SimpleNamespace

import pytest
from torch import nn

import nearlinear as nl
from nearlinear.config import moe as moe_config
from nearlinear.config.moe import MoEConfig
from nearlinear.config.schema import field_docs
from tests.support import mixtures, tiny

EP = "expert_parallel_degree"


def test_every_moe_key_has_documentation():
    expected = (
        "smp_moe random_seed moe_load_balancing global_token_shuffle moe_all_to_all_dispatcher "
        "moe_aux_loss_coeff moe_z_loss_coeff"
    )
    assert set(field_docs(MoEConfig)) == set(expected.split())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"moe_loadbalancing": "none"}, "did you mean 'moe_load_balancing'"),
        ({"moe_load_balancing": "sinkhron"}, "did you mean 'sinkhorn'"),
        ({"moe_z_loss_coeff": -1}, "moe_z_loss_coeff = -1.*at least 0"),
        ({"moe_aux_loss_coeff": "much"}, "moe_aux_loss_coeff = 'much': expected a number"),
        ("sinkhorn", "expected a MoEConfig or a dict"),
    ],
)
def test_invalid_moe_config_is_rejected(config, message):
    with pytest.raises(nl.errors.ConfigError, match=message):
        moe_config.load(config)


def test_moe_config_class_rejects_unknown_load_balancing():
    with pytest.raises(nl.errors.ConfigError, match="allowed are 'sinkhorn', 'balanced'"):
        MoEConfig(moe_load_balancing="even")


def test_settings_without_effect_are_logged(caplog):
    with caplog.at_level(logging.WARNING):
        MoEConfig(global_token_shuffle=True)
        assert "global_token_shuffle has no effect" in caplog.text
        caplog.clear()
        MoEConfig(moe_aux_loss_coeff=0.1, moe_load_balancing="none")
        assert "moe_aux_loss_coeff = 0.1 has no effect" in caplog.text
        caplog.clear()
        MoEConfig(global_token_shuffle=True, moe_load_balancing="balanced")
        MoEConfig(moe_aux_loss_coeff=0.1)
        MoEConfig(moe_aux_loss_coeff=0.1, moe_load_balancing="aux_loss")
        assert caplog.text == ""


class ModulePerExpert(nn.Module):
    """Mixture with one module per expert, the layout of transformers 4."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


class UnknownExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Bilinear(4, 4, 4)


def mixture_without_coefficient():
    model = mixtures.mixtral(4)
    model.config = SimpleNamespace(output_router_logits=True)
    return model


@pytest.mark.parametrize(
    ("build", "config", "moe", "message"),
    [
        (lambda: mixtures.mixtral(6), {EP: 4}, None, "6 experts of .*allowed are 1, 2, 3, 6"),
        (
            tiny.llama,
            {EP: 2},
            None,
            "LlamaForCausalLM has no experts. Set expert_parallel_degree = 1",
        ),
        (
            ModulePerExpert,
            {EP: 2},
            None,
            "one module per expert, as in transformers 4: pip install -U",
        ),
        (
            UnknownExperts,
            {EP: 2},
            None,
            "experts of UnknownExperts is a Bilinear, which cannot be divided",
        ),
        (lambda: mixtures.mixtral(4), {EP: 2}, {"smp_moe": False}, "smp_moe = false"),
        (
            mixture_without_coefficient,
            {EP: 2},
            None,
            "router_aux_loss_coef .* Set moe_aux_loss_coeff",
        ),
    ],
    ids=["degree", "dense", "transformers-4", "unknown", "smp_moe", "coefficient"],
)
def test_transform_rejects_unsupported_mixtures(build, config, moe, message):
    def check(rank):
        nl.init(config)
        with nl.spmd.one_at_a_time():
            model = build()
        with pytest.raises(nl.errors.ConfigError, match=message) as error:
            nl.transform(model, moe)
        assert "\n" not in str(error.value)

    nl.spmd.run(check, 4)


def test_degree_must_divide_the_shard_degree():
    def check(rank):
        with pytest.raises(nl.errors.ConfigError, match="does not divide hybrid_shard_degree, 2"):
            nl.init({EP: 4, "hybrid_shard_degree": 2})

    nl.spmd.run(check, 4)


def test_shard_rejects_a_model_without_transform():
    def check(rank):
        nl.init({EP: 2})
        with nl.spmd.one_at_a_time():
            model = mixtures.mixtral(4)
        with pytest.raises(
            nl.errors.ConfigError, match=r"call nl.transform\(model\) before nl.shard"
        ):
            nl.shard(model)

    nl.spmd.run(check, 2)


def test_smp_moe_false_leaves_the_model_unchanged():
    def transform_disabled(rank):
        nl.init()
        model = mixtures.transformed("mixtral", 4, {"smp_moe": False})
        same = mixtures.mixtral(4)
        assert [type(m) for m in model.modules()] == [type(m) for m in same.modules()]
        assert not model._forward_hooks

    nl.spmd.run(transform_disabled, 1)
