"""Context parallelism splits batches, and rejects unsupported models and arguments with a remedy.

Tests of losses and gradients are in test_context.py.
"""

import pytest
import torch
import transformers

import nearlinear as nl
from nearlinear.context_parallel.batch import PaddingMask, predicts_from_padding, split_arguments
from nearlinear.context_parallel.parallelize import check_model
from tests.support import parity


def split_batch(batch, ranks=2, documents=True):
    return [split_arguments(batch, rank, ranks, documents)[0] for rank in range(ranks)]


def test_split_arguments_gives_every_rank_two_chunks():
    ids = torch.arange(16).view(2, 8)
    first, second = split_batch({"input_ids": ids, "labels": ids, "use_cache": False, "flag": 3})
    assert first["input_ids"].tolist() == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert second["input_ids"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert first["position_ids"].tolist() == [[0, 1, 6, 7]]
    # the target of a chunk's last token is on another rank
    assert first["labels"].tolist() == [[1, 2, 7, -100], [9, 10, 15, -100]]
    assert second["shift_labels"].tolist() == [[3, 4, 5, 6], [11, 12, 13, 14]]
    assert first["attention_mask"] is None and first["use_cache"] is False and first["flag"] == 3


def test_padding_repeats_the_last_token_and_is_no_target():
    ids = torch.arange(5)[None]
    first, second = split_batch({"input_ids": ids, "labels": ids})
    assert first["input_ids"].tolist() == [[0, 1, 4, 4]]
    assert first["position_ids"].tolist() == [[0, 1, 4, 4]]
    assert first["labels"].tolist() == [[1, 2, -100, -100]]
    assert second["labels"].tolist() == [[3, 4, -100, -100]]


def test_labels_at_padding_are_found():
    labels = torch.tensor([[-100, 1, 2, 3]])  # each is predicted by the token before
    left, right = torch.tensor([[0, 1, 1, 1]]), torch.tensor([[1, 1, 1, 0]])
    assert predicts_from_padding({"attention_mask": left, "labels": labels})
    assert not predicts_from_padding({"attention_mask": right, "labels": labels})
    assert not predicts_from_padding({"attention_mask": left})
    assert not predicts_from_padding({"labels": labels})
    scores = torch.zeros(1, 1, 4, 4)  # a mask of scores hides no token as a whole
    assert not predicts_from_padding({"attention_mask": scores, "labels": labels})


def test_masks_are_built_from_the_whole_batch():
    ids, mask = torch.arange(6)[None], torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    local, full = split_arguments({"input_ids": ids, "attention_mask": mask}, 0, 2, True)
    assert isinstance(local["attention_mask"], PaddingMask)
    assert full.masks.padding_BS.tolist() == mask.bool().tolist()
    for documents in (True, False):
        given = {"input_ids": ids, "position_ids": positions}
        local, full = split_arguments(given, 1, 2, documents)
        assert local["attention_mask"] is None and full.masks.padding_BS is None
        assert full.masks.positions_BS is (positions if documents else None)
        assert full.masks.shape == (1, 6) and full.masks.local_length == 4


@pytest.mark.parametrize(
    "compute",
    [
        lambda mask: mask[0],
        lambda mask: 1 - mask,
        lambda mask: ~mask,
        lambda mask: mask.sum(),
        bool,
        lambda mask: torch.where(mask, 1, 0),
        lambda mask: mask.view(-1),
    ],
)
def test_model_that_computes_with_its_mask_is_refused(compute):
    mask = PaddingMask()
    assert mask.to(torch.bool).view(2, -1) is mask and mask.dim() == mask.ndim == 2
    with pytest.raises(nl.errors.ConfigError, match="the model computes with its attention mask"):
        compute(mask)


IDS = torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"past_key_values": object()}, "Pass use_cache=False"),
        ({"use_cache": True}, "Pass use_cache=False"),
        ({"output_attentions": True}, "output_attentions = True"),
        ({"output_hidden_states": True}, "output_hidden_states = True"),
        ({"output_router_logits": True}, "output_router_logits = True"),
        ({"attention_mask": torch.ones(2, 1, 8, 8)}, r"shape \(2, 1, 8, 8\): .* position_ids"),
        ({"attention_mask": {"full_attention": None}}, "is a dict"),
        ({"attention_mask": torch.ones(2, 7)}, r"attention_mask has shape \(2, 7\), .* 8 tokens"),
        ({"labels": torch.zeros(2, 9)}, r"labels has shape \(2, 9\)"),
        ({"position_ids": torch.zeros(8)}, r"position_ids has shape \(8,\)"),
        ({"labels": IDS, "logits_to_keep": 1}, "logits_to_keep cannot be combined with labels"),
        ({"is_causal": False}, "causal attention only"),
        ({"encoder_hidden_states": torch.zeros(2, 3, 4)}, "encoder_hidden_states: .* not support"),
        ({"input_ids": None}, "input_ids or inputs_embeds"),
    ],
)
def test_unsupported_arguments_are_rejected(arguments, message):
    with pytest.raises(nl.errors.NearlinearError, match=message):
        split_arguments({"input_ids": IDS} | arguments, 0, 2, False)


def family_builder(family, **changes):
    return lambda: parity.build(family, **changes)


def config_builder(name, **arguments):
    def make():
        config = getattr(transformers, name)(**arguments)
        return transformers.AutoModelForCausalLM.from_config(config)

    return make


def eager_and_reordered():
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, reorder_and_upcast_attn=True)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def softcapped_without_eager_attention():
    """The default of transformers 4, which leaves the cap out of SDPA."""
    config = transformers.Gemma2Config(num_hidden_layers=1, hidden_size=8, intermediate_size=8,
                                       num_attention_heads=2, num_key_value_heads=2, head_dim=4,
                                       vocab_size=9)  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = "sdpa"
    return model


def encoder_decoder():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


SMALL = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2}
ROTARY = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
REFUSED = {
    "no transformer": (lambda: torch.nn.Linear(2, 2), "Linear is not a Hugging Face transformer"),
    "no head": (lambda: parity.build("llama").model, "LlamaModel has no language model head"),
    "cross attention": (family_builder("gpt2", add_cross_attention=True), "has cross attention"),
    "encoder and decoder": (encoder_decoder, "has cross attention"),
    "own attention": (
        config_builder("BloomConfig", vocab_size=9, hidden_size=8, n_layer=1, n_head=2),
        "BloomForCausalLM does not use transformers' attention interface",
    ),
    "a state": (
        config_builder("MambaConfig", **SMALL, state_size=2, expand=1),
        "MambaForCausalLM .* Set context_parallel_degree = 1",
    ),
    "linear attention": (
        config_builder(
            "Qwen3NextConfig", **SMALL, num_attention_heads=2, num_key_value_heads=2, num_experts=2
        ),
        "passes linear_attention from token to token",
    ),
    "rotary": (family_builder("llama", rope_scaling=ROTARY), "depend on length .'dynamic'"),
    "softcap": (softcapped_without_eager_attention, 'attn_implementation="eager"'),
    "reordered": (eager_and_reordered, "reorder_and_upcast_attn = False"),
    "router": (family_builder("mixtral", output_router_logits=True), "output_router_logits = True"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_models_are_rejected(kind):
    make, message = REFUSED[kind]
    with pytest.raises(nl.errors.ConfigError, match=message):
        check_model(make())


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Gemma", "Phi3", "Starcoder2", "Cohere2"])
def test_supported_families_pass_check_model(kind):
    arguments = parity.FAMILIES["llama"][1] | {"pad_token_id": 0, "head_dim": 4}
    check_model(config_builder(f"{kind}Config", **arguments)())


def forward_loss(rank, make, batch):
    nl.init({"context_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = make()
    return nl.transform(model)(**batch).loss


def doge():
    sizes = parity.FAMILIES["llama"][1] | {"num_key_value_heads": 4, "head_dim": 4}
    config = transformers.DogeConfig(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def opt():
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, word_embed_proj_dim=16))


PADDED = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.tensor([[1] * 8, [0] * 8])}


@pytest.mark.parametrize(
    ("make", "batch", "message"),
    [
        (doge, {"input_ids": IDS, "labels": IDS}, "computes with its attention mask"),
        (opt, PADDED, "Pass position_ids too"),
        (family_builder("llama", output_hidden_states=True), PADDED, "output_hidden_states = True"),
    ],
)
def test_forward_rejects_unsupported_attention_and_arguments(make, batch, message):
    with pytest.raises(nl.spmd.RankError, match=message) as caught:
        nl.spmd.run(forward_loss, 2, args=(make, batch))
    assert isinstance(caught.value.__cause__, nl.errors.ConfigError)


def test_forward_rejects_attention_replaced_after_transform():
    def run(rank):
        nl.init({"context_parallel_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build("llama")
        nl.transform(model).set_attn_implementation("sdpa")
        model(input_ids=IDS)

    with pytest.raises(nl.spmd.RankError, match="Set attn_implementation before"):
        nl.spmd.run(run, 2)


def test_saved_config_does_not_name_nearlinear_attention(tmp_path):
    def run(rank):
        nl.init({"context_parallel_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build("llama")
        nl.transform(model)
        model.config.save_pretrained(tmp_path / str(rank))

    nl.spmd.run(run, 2)
    loaded = transformers.AutoConfig.from_pretrained(tmp_path / "0")
    loaded._attn_implementation = "sdpa"
    assert transformers.AutoModelForCausalLM.from_config(loaded)
    assert "nearlinear" not in (tmp_path / "0" / "config.json").read_text()


def test_unknown_cp_comm_type_is_rejected():
    def run(rank):
        nl.init({"context_parallel_degree": 2})
        nl.transform(parity.build("llama"), cp_comm_type="carrier pigeon")

    with pytest.raises(nl.spmd.RankError, match="allowed are 'p2p' and 'all_gather'"):
        nl.spmd.run(run, 2)
