"""The units of a model are found: by Hugging Face's own names, or as the largest stack."""

import pytest
from torch import nn

from nearlinear.errors import ConfigError
from nearlinear.fsdp.model_state import find_blocks
from tests.support import tiny


@pytest.mark.parametrize("layers", [1, 3])
def test_find_blocks_of_hugging_face_models(layers):
    gpt2, llama = tiny.gpt2(layers), tiny.llama(layers)
    assert find_blocks(gpt2) == list(gpt2.transformer.h)
    assert find_blocks(llama) == list(llama.model.layers)


def test_find_blocks_takes_the_largest_stack_of_equal_modules():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.small = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
            self.large = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.ReLU()) for _ in range(3))
            self.mixed = nn.ModuleList([nn.Linear(99, 99), nn.LayerNorm(99)])

    net = Net()
    assert find_blocks(net) == list(net.large)


def test_find_blocks_without_a_stack_is_an_error():
    with pytest.raises(ConfigError, match="Linear has no list of equal blocks"):
        find_blocks(nn.Linear(2, 2))
