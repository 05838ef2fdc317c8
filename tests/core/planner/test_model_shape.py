"""Shapes of families without a preset are those of transformers' own models, or refused."""

import json
import math

import pytest
import torch
import transformers

from nearlinear import cli
from nearlinear.config.train import ModelConfig
from nearlinear.distributed.mesh import Mesh
from nearlinear.errors import ConfigError
from nearlinear.planner.memory.block_ops import known_family
from nearlinear.planner.memory.rank import block_of
from nearlinear.planner.model_shape import model_shape


def sizes(width, inner, layers, heads, kv_heads, vocabulary, tied=False, **others):
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 4096,
        **others,
    }


def mixture(experts, chosen, **others):
    return {"num_experts": experts, "num_experts_per_tok": chosen, **others}


# sizes of published models: family, config, billions of parameters
PUBLISHED = {
    "Qwen3 0.6B": ("qwen3", sizes(1024, 3072, 28, 16, 8, 151936, True, head_dim=128), 0.596),
    "Qwen3 30B-A3B": (
        "qwen3_moe",
        sizes(2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768)
        | mixture(128, 8),
        30.53,
    ),
    "Qwen1.5 MoE A2.7B": (
        "qwen2_moe",
        sizes(2048, 5632, 24, 16, 16, 151936, moe_intermediate_size=1408)
        | mixture(60, 4, shared_expert_intermediate_size=5632),
        14.32,
    ),
    "OLMoE 1B-7B": ("olmoe", sizes(2048, 1024, 16, 16, 16, 50304) | mixture(64, 8), 6.92),
    "gpt-oss 120B": (
        "gpt_oss",
        sizes(2880, 2880, 36, 64, 8, 201088, head_dim=64, num_local_experts=128)
        | {"num_experts_per_tok": 4},
        116.8,
    ),
    "Granite 3 1B-A400M": (
        "granitemoe",
        sizes(1024, 512, 24, 16, 8, 49155, True, num_local_experts=32, num_experts_per_tok=8),
        1.33,
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        sizes(2048, 10944, 27, 16, 16, 102400, moe_intermediate_size=1408, n_routed_experts=64)
        | {"n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None}
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"first_k_dense_replace": 1},
        15.71,
    ),
    "DeepSeek-V3": ("deepseek_v3", {"max_position_embeddings": 4096}, 671.0),  # the defaults
    "GLM-4.5-Air": ("glm4_moe", {"max_position_embeddings": 4096}, 103.5),  # the defaults
    "Gemma 2 2B": ("gemma2", sizes(2304, 9216, 26, 8, 4, 256000, True, head_dim=256), 2.61),
    "OLMo 2 7B": ("olmo2", sizes(4096, 11008, 32, 32, 32, 100352), 7.30),
    "Phi 3 mini": ("phi3", sizes(3072, 8192, 32, 32, 32, 32064, pad_token_id=0), 3.82),
    "OPT 125M": ("opt", {"ffn_dim": 3072, "max_position_embeddings": 2048}, 0.125),
}


@pytest.fixture
def config_file(tmp_path):
    """Write the config.json of a family, and return the config of a run that names it."""

    def write(family: str, described: dict) -> ModelConfig:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": family, **described}))
        return ModelConfig(init_from=str(path))

    return write


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_those_of_the_model(name, config_file):
    family, described, billions = PUBLISHED[name]
    shape = model_shape(config_file(family, described))
    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING[family](**described)
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters == model.num_parameters()
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    units = block_of(known_family(family, shape), shape, Mesh())
    matrices = sum(math.prod(dims) for unit in units for dims in unit.parameters if len(dims) > 1)
    assert matrices == shape.block_parameters
    assert shape.heads * shape.head_width == shape.attention_width
    if latent := shape.latent:
        query, *keys_values, output = latent.matrices(shape.width, shape.heads, shape.head_width)[
            -4:
        ]
        assert query[1] == shape.heads * (128 + 64) and output[0] == shape.heads * 128
        assert keys_values[1] == (512, shape.heads * (128 + 128)) and shape.dense_blocks in (1, 3)
    if "num_experts_per_tok" in described:
        assert shape.experts_per_token == described["num_experts_per_tok"] < shape.experts


@pytest.mark.parametrize(
    ("family", "described", "words"),
    [
        (
            "qwen3_next",
            sizes(512, 1024, 4, 8, 2, 1000, head_dim=64) | mixture(4, 2),
            "the planner does not know the matrix linear_attn",
        ),
        ("falcon", sizes(512, 1024, 2, 8, 8, 1000), "self_attention.query_key_value.weight"),
        ("jamba", sizes(512, 1024, 2, 8, 8, 1000), "the planner does not know the matrix"),
        ("qwen3", sizes(512, 1024, 2, 7, 7, 1000, head_dim=-1), "cannot be built"),
        ("no_such_family", sizes(512, 1024, 2, 8, 8, 1000), "is unknown to transformers"),
    ],
)
def test_models_that_the_planner_does_not_know_are_refused(family, described, words, config_file):
    with pytest.raises(ConfigError, match=words):
        model_shape(config_file(family, described))


def test_heads_of_their_own_width_are_read_for_families_with_presets(config_file):
    wide = sizes(5120, 14336, 40, 32, 8, 131072, head_dim=128)  # Mistral NeMo
    shape = model_shape(config_file("mistral", wide))
    assert shape.attention_width == 4096
    assert shape.parameters == pytest.approx(12.25e9, rel=0.001)


def test_plan_of_a_config_without_weights(config_file, capsys):
    family, described, _ = PUBLISHED["Qwen3 30B-A3B"]
    model = config_file(family, described | {"quantization_config": {"quant_method": "fp8"}})
    asked = ["--set", f"model.init_from={model.init_from}", "--set", "parallel.bf16=true"]
    cli.main(["plan", *asked, "--cluster", "p5.48xlarge:4"])
    shown = capsys.readouterr().out
    assert "30.53 billion parameters in 48 blocks" in shown
    assert "roughly" in shown  # operators of the most similar family
    assert cli.main(["train", *asked, "--nproc", "2"]) == 2
    assert "is not a folder: download the model first" in capsys.readouterr().err
