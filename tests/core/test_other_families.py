"""Families that nearlinear knows only by what their configs say: as on one process, or refused."""

import functools

import pytest
import torch
import transformers

import nearlinear as nl
from nearlinear.errors import ConfigError
from nearlinear.parallel.layout import cuts_of
from nearlinear.spmd.failures import RankError
from tests.support import parity

SHAPE = parity.FAMILIES["llama"][1] | {"num_hidden_layers": 2, "pad_token_id": 0}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURE |= {"moe_intermediate_size": 24}
OF_KIND = {
    "Qwen3Moe": MIXTURE | {"head_dim": 4},
    "Qwen2Moe": MIXTURE,
    "GraniteMoe": MIXTURE,
    "GptOss": MIXTURE | {"head_dim": 4},
    "Olmoe": MIXTURE,
    "MiniMax": MIXTURE,
    "Helium": {"head_dim": 4},
    "Granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
}
TENSOR = {"tensor_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
RIGHT = {
    "tensor": "Qwen2 Qwen3 Qwen3Moe Olmo Olmo2 Olmo3 Phi Phi3 Granite Cohere Cohere2 Glm Glm4 "
    "Starcoder2 SmolLM3 Ernie4_5 Helium Exaone4 Arcee Apertus",
    "pipeline": "Qwen2 Qwen3 Qwen3Moe Qwen2Moe Olmo Olmo2 Olmo3 Phi Phi3 Gemma Gemma3Text Glm Glm4 "
    "Starcoder2 SmolLM3 Ernie4_5 Helium GptOss Exaone4 Arcee Apertus",
}
REFUSED = {
    "tensor": "Qwen2Moe GraniteMoe Gemma Gemma2 StableLm GptOss Olmoe Persimmon Nemotron MiniMax",
    "pipeline": "Granite GraniteMoe Cohere Cohere2 Gemma2 StableLm Olmoe Persimmon Nemotron",
}
DEGREES = {"tensor": TENSOR, "pipeline": PIPELINE}
pytestmark = pytest.mark.slow


def build(kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE | OF_KIND.get(kind, {}))
    return transformers.AutoModelForCausalLM.from_config(config)


@functools.cache
def alone(kind):
    model = build(kind)
    loss = model(**parity.rows(0)).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def on_one_rank(rank, kind, config):
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time():
        model = build(kind)
    model = nl.transform(model)
    model = nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)
    for batch in nl.accumulate(model, [parity.rows(0)]):
        loss = parity.forward_and_backward(model, batch)
    return loss.item(), {
        name: parity.gathered(p.grad, cuts_of(p))
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def cases(table):
    return [(how, kind) for how, kinds in table.items() for kind in kinds.split()]


@pytest.mark.parametrize(("how", "kind"), cases(RIGHT))
def test_they_train_as_on_one_process(how, kind):
    loss, gradients = alone(kind)
    seen = set()
    for its_loss, found in nl.spmd.run(on_one_rank, 2, args=(kind, DEGREES[how])):
        assert its_loss == pytest.approx(loss, abs=1e-5)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=2e-5)
        seen |= found.keys()
    assert seen == {name for name, gradient in gradients.items() if gradient is not None}


@pytest.mark.parametrize(("how", "kind"), cases(REFUSED))
def test_they_are_refused_with_the_reason(how, kind):
    with pytest.raises(RankError) as caught:
        nl.spmd.run(on_one_rank, 2, args=(kind, DEGREES[how]))
    said = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, ConfigError)
    assert "\n" not in said and ("= 1" in said or "yourself" in said), said
