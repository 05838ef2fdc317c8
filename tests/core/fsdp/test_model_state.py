"""The units of a model are found: by Hugging Face's own names, or as the largest stack."""

import pytest
import transformers
from torch import nn

import nearlinear as nl
from nearlinear.errors import ConfigError
from nearlinear.fsdp.model_state import find_blocks
from tests.support import objectives, tiny


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


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "t5", "bart", "whisper"])
def test_no_block_shares_a_parameter_with_the_rest_of_the_model(name):
    """Some models list their embeddings beside their layers in ``_no_split_modules``."""
    model = objectives.build(name)
    blocks = find_blocks(model)
    assert len(blocks) == (4 if model.config.is_encoder_decoder else 2)
    inside = [set(block.parameters()) for block in blocks]
    rest = set(model.parameters()).difference(*inside)
    assert sum(map(len, inside)) + len(rest) == len(set(model.parameters()))
    assert model.get_input_embeddings().weight in rest


def test_blocks_that_share_a_parameter_are_refused():
    def on_rank(rank):
        nl.init()
        model = objectives.build("bert")
        with pytest.raises(ConfigError, match=r"BertEmbeddings shares bert\.embeddings\.word"):
            nl.shard(model, blocks=[model.bert.embeddings])

    nl.spmd.run(on_rank, 1)


def test_find_blocks_without_a_stack_is_an_error():
    with pytest.raises(ConfigError, match="Linear has no list of equal blocks"):
        find_blocks(nn.Linear(2, 2))


def test_find_blocks_leaves_the_input_embeddings_in_the_root_unit():
    """Models of images and text call the table of their text model by itself."""
    config = transformers.ModernBertConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        vocab_size=9, tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    bert = transformers.ModernBertForMaskedLM(config)
    assert find_blocks(bert) == list(bert.model.layers)


def test_find_blocks_looks_into_stacks_of_stacks():
    stages = [nn.ModuleList([nn.Linear(2, 2) for _ in range(count)]) for count in (1, 2)]
    model = nn.Module()
    model.stages = nn.ModuleList(stages)
    assert find_blocks(model) == [*stages[0], *stages[1]]
