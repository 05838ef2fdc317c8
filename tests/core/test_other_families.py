"""Families without specific support equal one process or are rejected with the reason."""

import functools

import pytest
import torch
import transformers

import nearlinear as nl
from nearlinear.errors import ConfigError, RankError
from nearlinear.fsdp.model_state import parameter_state
from tests.support import parity

SHAPE = parity.FAMILIES["llama"][1] | {"num_hidden_layers": 2, "pad_token_id": 0}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURE |= {"moe_intermediate_size": 24}
CHANGES = {
    "Qwen3Moe": MIXTURE | {"head_dim": 4},
    "Qwen2Moe": MIXTURE,
    "GraniteMoe": MIXTURE,
    "GptOss": MIXTURE | {"head_dim": 4},
    "Olmoe": MIXTURE,
    "MiniMax": MIXTURE,
    "Helium": {"head_dim": 4},
    "Gemma4Text": {"head_dim": 4, "vocab_size_per_layer_input": 97},
    "Granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
}
TENSOR = {"tensor_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
SUPPORTED = {
    "tensor": "Qwen2 Qwen3 Qwen3Moe Olmo Olmo2 Olmo3 Phi Phi3 Granite Cohere Cohere2 Glm Glm4 "
    "Starcoder2 SmolLM3 Ernie4_5 Helium Exaone4 Arcee Apertus Qwen2Moe GraniteMoe Gemma Gemma2 "
    "StableLm GptOss Olmoe Persimmon Nemotron MiniMax",
    "pipeline": "Qwen2 Qwen3 Qwen3Moe Qwen2Moe Olmo Olmo2 Olmo3 Phi Phi3 Gemma Gemma3Text Glm Glm4 "
    "Starcoder2 SmolLM3 Ernie4_5 Helium GptOss Exaone4 Arcee Apertus Granite GraniteMoe Cohere "
    "Cohere2 Gemma2 StableLm Olmoe Persimmon Nemotron",
}
REJECTED = {"tensor": "JetMoe", "pipeline": "Gemma4Text"}
DEGREES = {"tensor": TENSOR, "pipeline": PIPELINE}
pytestmark = pytest.mark.slow


def build(kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE | CHANGES.get(kind, {}))
    return transformers.AutoModelForCausalLM.from_config(config)


@functools.cache
def alone(kind):
    model = build(kind)
    loss = model(**parity.rows(0)).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def loss_and_gradients(rank, kind, config):
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time():
        model = build(kind)
    model = nl.transform(model)
    model = nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)
    for batch in nl.accumulate(model, [parity.rows(0)]):
        loss = parity.forward_and_backward(model, batch)
    return loss.item(), {
        name: parity.gathered(p.grad, parameter_state(p).splits)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def cases(table):
    return [(parallelism, kind) for parallelism, kinds in table.items() for kind in kinds.split()]


@pytest.mark.parametrize(("parallelism", "kind"), cases(SUPPORTED))
def test_supported_families_equal_one_process(parallelism, kind):
    loss, gradients = alone(kind)
    seen = set()
    for rank_loss, found in nl.spmd.run(loss_and_gradients, 2, args=(kind, DEGREES[parallelism])):
        assert rank_loss == pytest.approx(loss, abs=1e-5)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=2e-5)
        seen |= found.keys()
    assert seen == {name for name, gradient in gradients.items() if gradient is not None}


@pytest.mark.parametrize(("parallelism", "kind"), cases(REJECTED))
def test_unsupported_families_are_rejected_with_the_reason(parallelism, kind):
    with pytest.raises(RankError) as caught:
        nl.spmd.run(loss_and_gradients, 2, args=(kind, DEGREES[parallelism]))
    message = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, ConfigError)
    assert "\n" not in message and ("= 1" in message or "yourself" in message), message
