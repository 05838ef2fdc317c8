"""Small models for memory estimates, and the relative error of an estimate."""

from nearlinear.config.train import load

WORDS = 256  # small, so that blocks need more memory than the loss
GPT2 = ("gpt2-small", {"n_embd": 256, "n_head": 8, "n_layer": 5})
LLAMA = (
    "llama-tiny",
    {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 5,
    },
)
NEOX = (
    "gpt-neox-tiny",
    {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 5},
)
MIXTRAL = (
    "mixtral-tiny",
    {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "num_local_experts": 8,
    },
)


def config(
    model, checkpoint="", micro_batch=4, accumulation=1, bf16=True, sequence=256, **parallel
):
    preset, overrides = model
    return load(
        {
            "model": {"preset": preset, "overrides": {"vocab_size": WORDS, **overrides}},
            "data": {"sequence_length": sequence},
            "parallel": {"bf16": bf16, **parallel},
            "batch": {"micro_batch_size": micro_batch, "accumulation": accumulation},
            "activations": {"checkpoint": checkpoint},
            "optimizer": {"implementation": "fused"},
        }
    )


def off(plan, found: int) -> float:
    return abs(plan.peak / found - 1)
