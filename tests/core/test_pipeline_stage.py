"""What stands in for other stages' parts."""

import pytest
import torch
from torch import nn

from nearlinear.parallel.pipeline.parts import parts_of
from nearlinear.parallel.pipeline.stage import Skip, Zero, gives_tuple, stage_of
from tests.support import families

FAMILIES = ["gpt2", "gpt_neox", "llama", "mistral", "mixtral"]


class Says(nn.Module):
    def forward(self, x) -> tuple[torch.Tensor]:
        return self.made(x)


class Makes(nn.Module):
    def forward(self, x):
        outputs = (x,)
        outputs += (x,)
        return outputs


class Returns(nn.Module):
    def forward(self, x):
        return x, None


class Plain(nn.Module):
    def forward(self, x):
        x, _ = x, None
        return x


@pytest.mark.parametrize(
    ("kind", "expected"), [(Says, True), (Makes, True), (Returns, True), (Plain, False)]
)
def test_whether_a_block_returns_a_tuple(kind, expected):
    assert gives_tuple(kind) == expected
    x = torch.ones(2)
    assert (Skip(expected)(x, 1, mask=None) is x) != expected


@pytest.mark.parametrize("family", FAMILIES)
def test_stand_ins_return_what_the_blocks_of_this_release_do(family):
    model, seen = families.build(family, 2), []
    block = parts_of(model).list_of(model)[0]
    block.register_forward_hook(lambda module, args, output: seen.append(output))
    model(**families.batch(0, 2))
    assert gives_tuple(type(block)) == isinstance(seen[0], tuple)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_the_model_without_the_rest(family):
    model = families.build(family, 3)
    parts = parts_of(model)
    names = {name: parameter for name, parameter in model.named_parameters()}
    stages = [stage_of(model, parts, [i], 3) for i in range(3)]
    assert dict(model.named_parameters()) == names  # the model is as it was
    held = [dict(stage.named_parameters(remove_duplicate=False)) for stage in stages]
    for of_stage in held:  # the same parameters, not copies
        assert all(names.get(name, value) is value for name, value in of_stage.items())
    assert {name for of_stage in held for name in of_stage} >= names.keys()
    block = f"{parts.base}.{parts.blocks}.1."
    assert all(name.startswith(block) for name in held[1])
    assert all(isinstance(m, type(model)) and type(m).__name__ == type(model).__name__
               for m in stages)  # fmt: skip


def test_learned_positions_are_added_once():
    model = families.build("gpt2", 2)
    later = stage_of(model, parts_of(model), [1], 2)
    assert isinstance(later.transformer.wpe, Zero) and isinstance(later.transformer.wte, Skip)
