"""A run's config: presets, the launcher, what cannot be, and that it prints and reads back."""

import json
import tomllib

import pytest

from nearlinear import schema
from nearlinear.config import LAUNCHER_VARIABLE
from nearlinear.errors import ConfigError
from nearlinear.train import config as train_config
from nearlinear.train.config import TrainConfig
from nearlinear.train.presets import CONFIG, CONTEXT_KEY, LAYERS_KEY, PRESETS, preset


def test_every_key_is_explained_and_reads_back():
    config = train_config.load({"model": {"overrides": {"n_layer": 3}}}, environment={})
    text = schema.to_toml(config)
    assert train_config.load(tomllib.loads(text), environment={}) == config
    for line in text.splitlines():
        if " = " in line and not line.startswith('"'):
            assert "  # " in line and line.split("  # ")[1].strip(), line


def test_settings_then_launcher_win():
    launcher = {LAUNCHER_VARIABLE: json.dumps({"hybrid_shard_degree": 8})}
    data = {"parallel": {"sharded_data_parallel_degree": 2, "bf16": True}, "train": {"steps": 5}}
    config = train_config.load(data, ["train.steps=7"], launcher)
    assert config.train.steps == 7
    assert config.parallel.hybrid_shard_degree == 8 and config.parallel.bf16


def test_settings_leave_the_callers_data_alone():
    data = {"train": {"steps": 5}}
    train_config.load(data, ["train.steps=7", "data.seed=3"], {})
    assert data == {"train": {"steps": 5}}


def test_sequence_length_follows_the_model():
    assert TrainConfig().sequence_length == 256
    config = train_config.load({"model": {"preset": "gpt2-30b"}}, environment={})
    assert config.sequence_length == 2048
    config = train_config.load({"model": {"context": 64}}, environment={})
    assert config.sequence_length == config.model.longest_sequence == 64
    config = train_config.load({"model": {"overrides": {"n_positions": 48}}}, environment={})
    assert config.sequence_length == 48


@pytest.mark.parametrize(
    ("data", "words"),
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
def test_mistakes(data, words):
    with pytest.raises(ConfigError, match=words):
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
def test_presets_have_the_published_sizes(name, billions):
    from nearlinear.train.config import ModelConfig
    from nearlinear.train.model import build_model

    vocabulary = {"gpt2": 50257, "gpt_neox": 50432}.get(preset(name)["family"], 32000)
    model = build_model(ModelConfig(preset=name), vocabulary)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_every_preset_has_a_family_the_code_knows():
    families = {entry["family"] for entry in PRESETS.values()}
    assert families == set(CONFIG) == set(CONTEXT_KEY) == set(LAYERS_KEY)


def test_attention_that_does_not_hide_documents_is_refused():
    from nearlinear.train.config import ModelConfig
    from nearlinear.train.model import build_model

    asked = {"attn_implementation": "flash_attention_2"}
    with pytest.raises(ConfigError, match="attn_implementation: .* attend by sdpa, .*; drop it"):
        build_model(ModelConfig(overrides=asked), 100)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gemma2", None),  # full and sliding attention
        ("bloom", "takes no position_ids"),
        ("lfm2", "passes conv from token to token"),
        ("granitemoehybrid", "passes .*, which no mask of attention hides; drop it, or take"),
    ],
)
def test_models_that_cannot_hide_documents_are_refused(family, words):
    import torch
    import transformers

    from nearlinear.train.batches import check_positions

    config = transformers.CONFIG_MAPPING[family](num_hidden_layers=2, vocab_size=100)
    if family == "lfm2":
        config.layer_types = ["conv", "full_attention"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    if words is None:
        check_positions(model)
        return
    with pytest.raises(ConfigError, match=f"data.document_mask = true: .*{words}"):
        check_positions(model)


def test_an_override_the_model_does_not_have():
    from nearlinear.train.config import ModelConfig
    from nearlinear.train.model import build_model

    with pytest.raises(ConfigError, match="model.overrides.n_layers: GPT2Config has no such key"):
        build_model(ModelConfig(overrides={"n_layers": 3}), 97)
    with pytest.raises(ConfigError, match="cannot be built"):
        build_model(ModelConfig(overrides={"n_head": 7}), 97)
