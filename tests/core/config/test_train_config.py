"""`TrainConfig`: presets, launcher variable, errors, and TOML round trips."""

import json
import tomllib

import pytest

from nearlinear.config import train as train_config
from nearlinear.config.architecture import (
    CONFIG_CLASSES,
    CONTEXT_KEY,
    LAYERS_KEY,
    PRESETS,
    get_preset,
)
from nearlinear.config.parallel import LAUNCHER_VARIABLE, schema
from nearlinear.config.train import TrainConfig
from nearlinear.errors import ConfigError


def test_toml_has_a_comment_per_key_and_round_trips():
    config = train_config.load({"model": {"overrides": {"n_layer": 3}}}, environment={})
    text = schema.to_toml(config)
    assert train_config.load(tomllib.loads(text), environment={}) == config
    for line in text.splitlines():
        if " = " in line and not line.startswith('"'):
            assert "  # " in line and line.split("  # ")[1].strip(), line


def test_launcher_and_settings_override_the_file():
    launcher = {LAUNCHER_VARIABLE: json.dumps({"hybrid_shard_degree": 8})}
    data = {"parallel": {"sharded_data_parallel_degree": 2, "bf16": True}, "train": {"steps": 5}}
    config = train_config.load(data, ["train.steps=7"], launcher)
    assert config.train.steps == 7
    assert config.parallel.hybrid_shard_degree == 8 and config.parallel.bf16


def test_load_does_not_modify_its_argument():
    data = {"train": {"steps": 5}}
    train_config.load(data, ["train.steps=7", "data.seed=3"], {})
    assert data == {"train": {"steps": 5}}


def test_sequence_length_defaults_to_model_context():
    assert TrainConfig().sequence_length == 256
    config = train_config.load({"model": {"preset": "gpt2-30b"}}, environment={})
    assert config.sequence_length == 2048
    config = train_config.load({"model": {"context": 64}}, environment={})
    assert config.sequence_length == config.model.longest_sequence == 64
    config = train_config.load({"model": {"overrides": {"n_positions": 48}}}, environment={})
    assert config.sequence_length == 48


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"modle": {}}, "'modle': did you mean 'model'"),
        ({"model": {"preset": "gpt2-smal"}}, "unknown preset 'gpt2-smal'.*'gpt2-small'"),
        ({"data": {"sequence_length": 512}}, "longer than the model's context of 256"),
        ({"data": {"verify": "no"}}, 'allowed are "auto", "full", "size"'),
        ({"batch": {"accumulation": 0}}, "batch.accumulation = 0: must be at least 1"),
        ({"optimizer": {"min_lr_ratio": 1.5}}, "must be from 0 to 1"),
        ({"parallel": 3}, "parallel = 3: expected a table"),
        ({"parallel": {"hybrid_shard_degre": 3}}, "did you mean 'hybrid_shard_degree'"),
    ],
)
def test_invalid_config_raises(data, message):
    with pytest.raises(ConfigError, match=message):
        train_config.load(data, environment={})


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt2-small", 0.1244),
        ("gpt2-xl", 1.5576),
        ("gpt2-30b", 29.974),
        ("llama2-7b", 6.738),
        ("llama2-13b", 13.016),
        ("llama2-70b", 68.977),
        ("gpt-neox-20b", 20.55),
        ("mistral-7b", 7.242),
        ("mixtral-8x7b", 46.703),
    ],
)
def test_presets_have_published_parameter_counts(name, billions):
    from nearlinear.config.train import ModelConfig
    from nearlinear.train.model import build_model

    vocabulary = {"gpt2": 50257, "gpt_neox": 50432}.get(get_preset(name)["family"], 32000)
    model = build_model(ModelConfig(preset=name), vocabulary)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_every_preset_has_a_known_family():
    families = {entry["family"] for entry in PRESETS.values()}
    assert families == set(CONFIG_CLASSES) == set(CONTEXT_KEY) == set(LAYERS_KEY)


def test_attn_implementation_override_raises():
    from nearlinear.config.train import ModelConfig
    from nearlinear.train.model import build_model

    overrides = {"attn_implementation": "flash_attention_2"}
    with pytest.raises(
        ConfigError, match="attn_implementation cannot be set: .* uses sdpa, .*Remove the key"
    ):
        build_model(ModelConfig(overrides=overrides), 100)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gemma2", None),  # full and sliding-window attention
        ("bloom", "takes no position_ids"),
        ("lfm2", "carries conv from token to token"),
        (
            "granitemoehybrid",
            "carries .*, which an attention mask cannot restrict; set it to false, or choose",
        ),
    ],
)
def test_document_mask_raises_for_unsupported_models(family, message):
    import torch
    import transformers

    from nearlinear.train.data import check_document_mask

    config = transformers.CONFIG_MAPPING[family](num_hidden_layers=2, vocab_size=100)
    if family == "lfm2":
        config.layer_types = ["conv", "full_attention"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if message is None:
        check_document_mask(model)
        return
    with pytest.raises(ConfigError, match=f"data.document_mask = true: .*{message}"):
        check_document_mask(model)


def test_invalid_model_overrides_raise():
    from nearlinear.config.train import ModelConfig
    from nearlinear.train.model import build_model

    with pytest.raises(ConfigError, match="model.overrides.n_layers: GPT2Config has no such key"):
        build_model(ModelConfig(overrides={"n_layers": 3}), 97)
    with pytest.raises(ConfigError, match="cannot be built"):
        build_model(ModelConfig(overrides={"n_head": 7}), 97)
