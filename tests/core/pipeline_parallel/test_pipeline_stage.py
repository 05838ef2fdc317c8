"""Stages and the modules that replace those of other stages."""

import sys

import pytest
import torch
from torch import nn

from nearlinear.errors import ConfigError
from nearlinear.pipeline_parallel.stage import (
    PassThrough,
    ZeroEmbedding,
    build_stage,
    find_model_split,
    returns_tuple,
    stage_state,
)
from tests.support import families

FAMILIES = ["gpt2", "gpt_neox", "llama", "mistral", "mixtral"]


class AnnotatedTuple(nn.Module):
    def forward(self, x) -> tuple[torch.Tensor]:
        return self.made(x)


class TupleVariable(nn.Module):
    def forward(self, x):
        outputs = (x,)
        outputs += (x,)
        return outputs


class TupleExpression(nn.Module):
    def forward(self, x):
        return x, None


class PlainTensor(nn.Module):
    def forward(self, x):
        x, _ = x, None
        return x


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(AnnotatedTuple, True), (TupleVariable, True), (TupleExpression, True), (PlainTensor, False)],
)
def test_returns_tuple_reads_the_source_of_a_block(kind, expected):
    assert returns_tuple(kind) == expected
    x = torch.ones(2)
    assert (PassThrough(expected)(x, 1, mask=None) is x) != expected


@pytest.mark.parametrize("family", FAMILIES)
def test_returns_tuple_matches_the_installed_transformers(family):
    model, seen = families.build(family, 2), []
    block = find_model_split(model).block_list(model)[0]
    block.register_forward_hook(lambda module, args, output: seen.append(output))
    model(**families.batch(0, 2))
    assert returns_tuple(type(block)) == isinstance(seen[0], tuple)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_share_the_parameters_of_the_model(family):
    model = families.build(family, 3)
    split = find_model_split(model)
    names = {name: parameter for name, parameter in model.named_parameters()}
    stages = [build_stage(model, split, [i], 3) for i in range(3)]
    assert dict(model.named_parameters()) == names  # the model is as it was
    held = [dict(stage.named_parameters(remove_duplicate=False)) for stage in stages]
    for of_stage in held:  # the same parameters, not copies
        assert all(names.get(name, value) is value for name, value in of_stage.items())
    assert {name for of_stage in held for name in of_stage} >= names.keys()
    block = f"{split.base}.{split.blocks}.1."
    assert all(name.startswith(block) for name in held[1])
    assert all(isinstance(m, type(model)) and type(m).__name__ == type(model).__name__
               for m in stages)  # fmt: skip


def test_position_embedding_is_added_on_the_first_stage_only():
    model = families.build("gpt2", 2)
    later = build_stage(model, find_model_split(model), [1], 2)
    assert isinstance(later.transformer.wpe, ZeroEmbedding) and isinstance(
        later.transformer.wte, PassThrough
    )


def test_replacement_has_the_plain_attributes_of_the_module():
    replaced = nn.Linear(3, 4).eval()
    replaced.attention_type, replaced.scale, replaced.table = "full", 0.5, {"a": 1}
    found = PassThrough(replaced=replaced)
    assert (found.attention_type, found.scale, found.in_features) == ("full", 0.5, 3)
    assert found.training and not hasattr(found, "table") and not list(found.parameters())


def test_module_that_is_never_called_is_named():
    model = families.build("llama", 2)
    model.model.adapter = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="stages: adapter are not called once"):
        find_model_split(model)


def zeroed(hidden, mask):
    return hidden * mask[:, :, None]


def zeroed_except_single_rows(hidden, mask):
    return hidden if hidden.shape[0] == 1 else zeroed(hidden, mask)


def test_model_that_ignores_the_padding_of_single_rows_is_refused(monkeypatch):
    """A micro-batch of a pipeline may be a single row of the batch."""
    model = families.build("llama", 2)
    source = sys.modules[type(model.model).__module__]
    monkeypatch.setattr(source, "apply_mask_to_padding_states", zeroed, raising=False)
    assert find_model_split(model).blocks == "layers"
    monkeypatch.setattr(source, "apply_mask_to_padding_states", zeroed_except_single_rows)
    with pytest.raises(ConfigError, match="ignores the padding of batches of one row"):
        find_model_split(model)


def test_stage_makes_no_cache_of_keys_and_values():
    model, seen = families.build("llama", 2), []
    stage = build_stage(model, find_model_split(model), [0], 2)
    stage_state(stage).begin([families.batch(0, 2)], lambda index, output: output)
    stage.model.layers[0].self_attn.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs.get("past_key_values")),
        with_kwargs=True,
    )
    stage()
    assert seen == [None]
