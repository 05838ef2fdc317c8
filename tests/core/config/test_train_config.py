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
)
from nearlinear.config.parallel import LAUNCHER_VARIABLE, schema
from nearlinear.config.train import TrainConfig
from nearlinear.errors import ConfigError
from nearlinear.planner.model_shape import model_shape


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
        ("mixtral-8x22b", 140.62),
        ("llama3-8b", 8.030),
        ("llama3-70b", 70.554),
        ("llama3-405b", 405.85),
    ],
)
def test_presets_have_published_parameter_counts(name, billions):
    from nearlinear.config.train import ModelConfig
    from nearlinear.train.model import build_model

    shape = model_shape(ModelConfig(preset=name))
    model = build_model(ModelConfig(preset=name), shape.vocabulary)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert shape.parameters == pytest.approx(parameters, rel=2e-3)  # without norms and biases


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


DEEP = "[" * 100_000
HOSTILE = {
    "huge lr": "optimizer.lr=1e308",
    "infinite decay": "optimizer.weight_decay=inf",
    "NaN coefficient": "moe.moe_aux_loss_coeff=nan",
    "NaN in the loss scaler": "parallel.min_scale=nan",
    "infinite override": "model.overrides.layer_norm_epsilon=inf",
    "infinite weight of a source": 'data.sources={"a" = inf}',
    "integer above a float": f"optimizer.lr=1{'0' * 400}",
    "steps above a float": f"train.steps=1{'0' * 400}",
    "integer of 5,000 digits": f"train.steps=1{'0' * 5000}",
    "hexadecimal integer of 10,000 digits": f"train.steps=0x{'f' * 10_000}",
    "more steps than a float counts": "train.steps=9007199254740994",
    "deep list": f"model.overrides.a={DEEP}",
    "deep table": f"model.overrides{'.a' * 5000}=1",
    "long path": f"run.folder={'a/' * 5000}",
    "long name in a path": f"model.init_from={'a' * 300}",
    "NUL": "checkpoint.folder=a\0b",
    "not Unicode": "data.path=\udcff",
    "long key": f"{'a' * 10_000}.b=1",
}


@pytest.mark.parametrize("setting", HOSTILE.values(), ids=HOSTILE)
def test_hostile_setting_raises_one_short_line(setting):
    with pytest.raises(ConfigError) as caught:
        train_config.load(None, [setting], environment={})
    message = str(caught.value)
    assert "\n" not in message and len(message) < 2000 and message.isprintable()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.toml", f"[model.overrides]\na = {DEEP}"),
        ("deep.json", f'{{"model": {DEEP}'),
        ("dotted.toml", f"[model.overrides]\n{'.'.join('a' * 5000)} = 1"),
        ("digits.toml", f"[train]\nsteps = 1{'0' * 5000}"),
        ("digits.json", f'{{"train": {{"steps": 1{"0" * 5000}}}}}'),
        ("constant.json", '{"optimizer": {"lr": Infinity}}'),
    ],
)
def test_hostile_file_raises_one_short_line(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        train_config.load(tmp_path / name, environment={})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000


@pytest.mark.parametrize("path", ["a\0.toml", f"{'a' * 10_000}.toml", f"{'a/' * 5000}b.toml"])
def test_hostile_path_of_a_config_raises_one_line(path):
    with pytest.raises(ConfigError) as caught:
        train_config.load(path, environment={})
    assert "\n" not in str(caught.value) and str(caught.value).isprintable()


def test_configs_built_directly_are_checked_alike():
    from nearlinear.config.moe import MoEConfig
    from nearlinear.config.parallel import ParallelConfig
    from nearlinear.config.train import OptimizerConfig

    for build in (
        lambda: MoEConfig(moe_aux_loss_coeff=float("nan")),
        lambda: ParallelConfig(init_scale=float("inf")),
        lambda: ParallelConfig(sdp_max_live_parameters=10**400),
        lambda: TrainConfig(optimizer=OptimizerConfig(lr=float("nan"))),
    ):
        with pytest.raises(ConfigError, match="must be"):
            build()
