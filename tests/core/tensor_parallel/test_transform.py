"""Tensor parallelism of unmodified Hugging Face models gives the training of one process."""

import functools
import itertools
import logging
import re

import pytest
import torch
import torch.distributed as dist
import transformers

import nearlinear as nl
from nearlinear.errors import ConfigError, RankError
from nearlinear.fsdp.model_state import parameter_state
from tests.support import parity

TP2 = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 1}
LAYOUTS = {
    "tensor 2": (2, TP2),
    "tensor 4": (4, {"tensor_parallel_degree": 4}),
    "tensor 2 x shard 2": (4, TP2 | {"hybrid_shard_degree": 2}),
    "tensor 2 x shard 2 x replicate 2": (8, TP2 | {"hybrid_shard_degree": 2}),
    "tensor 2 x replicate 2, spread": (4, TP2 | {"placement_strategy": "spread"}),
}
reference = functools.cache(parity.alone)


@pytest.mark.parametrize(
    ("family", "layout_name"),
    [
        *itertools.product(parity.FAMILIES, ("tensor 4", "tensor 2 x shard 2 x replicate 2")),
        *itertools.product(("gpt2", "mixtral"), ("tensor 2", "tensor 2 x shard 2")),
        ("gpt2", "tensor 2 x replicate 2, spread"),
    ],
)
def test_tensor_parallel_training_equals_one_process(family, layout_name):
    ranks, config = LAYOUTS[layout_name]
    parity.assert_equal(
        nl.spmd.run(parity.together, ranks, args=(family, config, 2)), reference(family)
    )


@pytest.mark.parametrize("changes", [{"overlap_communication": False}, {"prefetch_depth": 2}])
def test_training_does_not_depend_on_overlap_or_prefetch(changes):
    config = TP2 | {"hybrid_shard_degree": 2} | changes
    parity.assert_equal(
        nl.spmd.run(parity.together, 8, args=("gpt2", config, 2)), reference("gpt2")
    )


@pytest.mark.parametrize("tokens", [1, 7, 15])
def test_indivisible_sequence_lengths_equal_one_process(tokens):
    """The vocabulary of 97 is not divisible by 4 ranks either."""
    if tokens == 1:  # no target, therefore compare logits

        def logits(rank):
            nl.init({"tensor_parallel_degree": 4})
            with nl.spmd.one_at_a_time(seed=0):
                model = parity.build("llama")
            model = nl.shard(nl.transform(model))
            return model(parity.rows(0, tokens=1)["input_ids"]).logits.detach()

        expected = parity.build("llama")(parity.rows(0, tokens=1)["input_ids"]).logits
        for found in nl.spmd.run(logits, 4):
            torch.testing.assert_close(found, expected)
        return
    expected = parity.alone("llama", tokens)
    config = {"tensor_parallel_degree": 4}
    parity.assert_equal(
        nl.spmd.run(parity.together, 4, args=("llama", config, 1, tokens)), expected
    )


def train_gpt2(rank):
    return parity.together(rank, "gpt2", TP2)


def test_tensor_parallelism_over_processes():
    parity.assert_equal(nl.spmd.run(train_gpt2, 2, processes=True), reference("gpt2"))


@pytest.mark.parametrize(("family", "bound"), [("gpt2", 0.03), ("llama", 0.03), ("mixtral", 0.1)])
def test_bf16_training_is_close_to_float32(family, bound):
    """The bound is relative to the largest gradient.

    bfloat16 has 8 bits of precision, and sums are rounded in a different order. A token whose two
    best experts have nearly equal scores may choose a different expert.
    """
    config = TP2 | {"hybrid_shard_degree": 2, "bf16": True}
    expected = reference(family)
    largest = max(value.abs().max().item() for value in expected.gradients.values())
    for found in nl.spmd.run(parity.together, 4, args=(family, config)):
        difference = parity.differences(found, expected)
        assert difference["losses"] < 0.01 * expected.losses[0]
        assert difference["gradients"] < bound * largest
        assert difference["norm"] < bound * expected.norm


def plain_loop(rank, config, backwards):
    """Sum micro-batches of equal weight with autograd, without `nl.accumulate`."""
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    model = nl.shard(nl.transform(model))
    for number in range(backwards):
        batch = parity.rows(number)
        batch["labels"] = batch["input_ids"]
        mine = parity.split(batch, mesh.data_ranks)[mesh.data_rank(rank)]
        model(**mine).loss.backward()
    return parity.whole(model, lambda parameter: parameter.grad)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("backwards", [1, 2])
def test_gradients_are_summed_without_accumulate(backwards, degree):
    model = parity.build("llama")
    for number in range(backwards):
        ids = parity.rows(number)["input_ids"]
        model(input_ids=ids, labels=ids).loss.backward()
    config = TP2 | {"hybrid_shard_degree": degree}
    for found in nl.spmd.run(plain_loop, 2 * degree, args=(config, backwards)):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-5)


# --- communication -------------------------------------------------------------------------------


def count_step_collectives(rank, family, degree):
    """Count the collectives of forward, backward and the end of a step with one micro-batch."""
    nl.init({"tensor_parallel_degree": degree, "overlap_communication": False})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build(family)
    model = nl.shard(nl.transform(model))
    model(**parity.rows(0))  # ranks compare their first batch
    forward, backward, end = (nl.count_collectives() for _ in range(3))
    step = nl.accumulate(model, [parity.rows(0)])
    batch = next(step)
    with forward:
        loss = model(**batch).loss
    with backward:
        loss.backward()
    with end:
        next(step, None)
    return [dict(counts.calls) for counts in (forward, backward, end)], dict(forward.bytes)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "mixtral"])
def test_tensor_parallel_step_has_the_expected_collectives(family, degree):
    """Per layer and direction, two all-gathers and two reduce-scatters.

    Embeddings and head add one of each, the loss gathers three numbers per token, and a step
    all-reduces the gradients of norms and biases once.
    """
    layers, values = 2, parity.ROWS * parity.SEQUENCE * 32
    for (forward, backward, end), sizes in nl.spmd.run(
        count_step_collectives, degree, args=(family, degree)
    ):
        assert forward == {"all_gather": 2 * layers + 2, "reduce_scatter": 2 * layers + 1}
        assert backward == {"all_gather": 2 * layers + 1, "reduce_scatter": 2 * layers + 1}
        assert end == {"all_reduce": 1}
        assert sizes["reduce_scatter"] == (2 * layers + 1) * values * 4
        loss = degree * 3 * parity.ROWS * parity.SEQUENCE * 4
        assert sizes["all_gather"] == (2 * layers + 1) * values * 4 + loss


def largest_tensor(rank):
    """Return the number of elements of the largest tensor created in forward and backward."""
    from nearlinear._torch import TorchDispatchMode

    nl.init({"tensor_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama", vocab_size=4096)
    model = nl.shard(nl.transform(model))
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            for value in found if isinstance(found, tuple | list) else [found]:
                if isinstance(value, torch.Tensor):
                    largest[0] = max(largest[0], value.numel())
            return found

    with Watch():
        model(**parity.rows(0)).loss.backward()
    return largest[0]


def test_loss_never_materializes_full_vocabulary_logits():
    tokens = parity.ROWS * parity.SEQUENCE
    for size in nl.spmd.run(largest_tensor, 2):
        assert size == tokens * 4096 // 2


# --- memory and initial values -------------------------------------------------------------------


def bytes_held(rank, config):
    nl.init(config)
    with nl.deferred_init():
        model = parity.build("llama", vocab_size=96)
    model = nl.shard(nl.transform(model))
    kept = [p for p in model.parameters() if parameter_state(p).splits]
    return sum(p.to_local().nbytes for p in kept), sum(
        p.to_local().nbytes for p in model.parameters()
    )


def test_parameter_memory_shrinks_by_the_product_of_degrees():
    alone = parity.build("llama", vocab_size=96)
    matrices = sum(p.nbytes for p in alone.parameters() if p.dim() > 1)
    norms = sum(p.nbytes for p in alone.parameters() if p.dim() == 1)
    for tensor, shard in ((2, 1), (4, 1), (2, 2), (4, 2)):
        config = {"tensor_parallel_degree": tensor, "hybrid_shard_degree": shard}
        for cut, everything in nl.spmd.run(bytes_held, tensor * shard, args=(config,)):
            assert cut == matrices / (tensor * shard)
            assert everything == cut + norms / shard


def initial_values(rank, config, deferred):
    nl.init(config | {"random_seed": 5})
    if deferred:
        with nl.deferred_init():
            model = parity.build("gpt2")
    model = nl.shard(nl.transform(model))
    return parity.whole(model, lambda parameter: parameter.detach())


def test_deferred_initialization_does_not_depend_on_the_layout():
    (alone,) = nl.spmd.run(initial_values, 1, args=({}, True))
    for ranks, config in LAYOUTS.values():
        for found in nl.spmd.run(initial_values, ranks, args=(config, True)):
            for name, value in alone.items():
                assert torch.equal(found[name], value), name


def dropout_masks(rank):
    """Return the dropout mask of the first MLP and the input of the first block on this rank."""
    nl.init({"tensor_parallel_degree": 2, "random_seed": 3})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.0)
    torch.manual_seed(7)  # equal seeds: nl.transform must make masks differ
    model = nl.shard(nl.transform(model)).train()
    masks = []
    model.transformer.h[0].mlp.dropout.register_forward_hook(
        lambda module, args, output: masks.append(output == 0)
    )
    entered = []
    model.transformer.h[0].register_forward_pre_hook(
        lambda module, args: entered.append(args[0].detach())
    )
    model(**parity.rows(0)).loss.backward()
    return masks[0], entered[0]


def test_dropout_masks_differ_between_tensor_ranks():
    (one, here), (other, there) = nl.spmd.run(dropout_masks, 2)
    assert one.shape == other.shape == (1, parity.ROWS * parity.SEQUENCE // 2, 32)
    assert 0.4 < one.float().mean() < 0.6
    assert 0.3 < (one == other).float().mean() < 0.7
    assert 0.4 < (here == 0).float().mean() < 0.6  # dropout was applied to embeddings once
    assert not torch.equal(here == 0, there == 0)


# --- without labels, and generation --------------------------------------------------------------


def logits_and_text(rank):
    nl.init({"tensor_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    model = nl.shard(nl.transform(model)).eval()
    ids = parity.rows(0, 2, 5)["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        text = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)
    return logits, text


def test_forward_without_labels_and_generate_equal_one_process():
    model, ids = parity.build("llama").eval(), parity.rows(0, 2, 5)["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        text = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)
    for logits, found in nl.spmd.run(logits_and_text, 2):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found, text)


def custom_loss_gradients(rank):
    """Return the gradients of a custom loss on the logits, equal on both ranks."""
    nl.init({"tensor_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    model = nl.shard(nl.transform(model))
    model(input_ids=parity.rows(0)["input_ids"]).logits.square().mean().backward()
    return parity.whole(model, lambda parameter: parameter.grad)


def test_custom_loss_gradients_equal_one_process():
    model = parity.build("llama")
    model(input_ids=parity.rows(0)["input_ids"]).logits.square().mean().backward()
    for found in nl.spmd.run(custom_loss_gradients, 2):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-5)


# --- other families and rejected models ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Olmo2", "Phi3", "Granite", "Cohere"])
def test_families_with_a_transformers_plan_equal_one_process(kind):
    def run(rank, config):
        mesh = nl.init(config)
        with nl.spmd.one_at_a_time(seed=0):
            model = build_family(kind)
        model = nl.shard(nl.transform(model))
        mine = parity.split(parity.rows(0), mesh.data_ranks)[mesh.data_rank(rank)]
        for batch in nl.accumulate(model, [mine]):
            model(**batch).loss.backward()
        return parity.whole(model, lambda parameter: parameter.grad)

    alone = build_family(kind)
    alone(**parity.rows(0)).loss.backward()
    for found in nl.spmd.run(run, 4, args=(TP2 | {"hybrid_shard_degree": 2},)):
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-5)


DERIVED = {
    "DeepseekV3": {"num_key_value_heads": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "n_group": 1,
                   "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
                   "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 8, "first_k_dense_replace": 1},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2,
                 "shared_expert_intermediate_size": 16},
    "Llama4Text": {"num_local_experts": 2, "head_dim": 4, "attention_chunk_size": 6,
                   "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
    "Gemma3Text": {"num_key_value_heads": 4, "head_dim": 4, "sliding_window": 5},
    "Phimoe": {"num_local_experts": 4, "num_key_value_heads": 2, "router_jitter_noise": 0.0},
    "Bloom": {"n_head": 8, "n_layer": 2},
    "Falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "DiffLlama": {"num_key_value_heads": 4},
}  # fmt: skip


@pytest.mark.parametrize("kind", DERIVED)
def test_families_with_derived_plans_equal_one_process(kind):
    """Shared experts, latent attention, fused projections, ALiBi, odd attention and embeddings."""

    def make():
        torch.manual_seed(0)
        sizes = parity.FAMILIES["llama"][1] | {"pad_token_id": 0} | DERIVED[kind]
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # biases and norms that matter
            torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.1)
        return model

    def run(rank):
        nl.init(TP2)
        with nl.spmd.one_at_a_time(seed=0):
            model = make()
        held = sum(parameter.numel() for parameter in model.parameters())
        nl.transform(model)
        held = sum(parameter.numel() for parameter in model.parameters()) / held
        model = nl.shard(model)
        for batch in nl.accumulate(model, [parity.rows(0)]):
            model(**batch).loss.backward()
        return held, parity.whole(model, lambda parameter: parameter.grad)

    alone = make()
    alone(**parity.rows(0)).loss.backward()
    for held, found in nl.spmd.run(run, 2):
        assert held < 0.7  # of the parameters
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("degree", ["tensor_parallel_degree", "context_parallel_degree"])
def test_models_that_are_not_sharded_refuse_to_be_trained(degree):
    """Each rank has a part of the gradient of an embedding, and only nl.shard sums the parts."""

    def run(rank):
        nl.init({degree: 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build("llama")
        model = nl.transform(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(**parity.rows(0)).loss.backward()
        errors = []
        for call in (optimizer.step, lambda: nl.clip_grad_norm_(model, 1.0)):
            with pytest.raises(RuntimeError) as caught:
                call()
            errors.append(str(caught.value))
        return errors

    for errors in nl.spmd.run(run, 2):
        assert all("call nl.shard(model) after nl.transform" in error for error in errors)


def build_family(kind):
    torch.manual_seed(0)
    arguments = parity.FAMILIES["llama"][1]
    heads = {} if kind in ("Olmo2", "Phi3", "Granite", "Cohere") else {"head_dim": 4}
    more = {"pad_token_id": 0} if kind == "Phi3" else {}
    config = getattr(transformers, f"{kind}Config")(**arguments, **heads, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def transform_error(make, ranks=2, config=TP2, times=1) -> str:
    def run(rank):
        nl.init(config, ranks_per_node=2)
        with nl.spmd.one_at_a_time(seed=0):
            model = make()
        for _ in range(times):
            nl.transform(model)

    with pytest.raises(RankError) as caught:
        nl.spmd.run(run, ranks)
    assert isinstance(caught.value.__cause__, ConfigError)
    return str(caught.value.__cause__)


def test_transform_rejects_indivisible_models_with_the_reason():
    three = {"tensor_parallel_degree": 3}
    message = transform_error(lambda: parity.build("llama"), 3, three)
    assert message == (
        "tensor_parallel_degree = 3 does not divide num_attention_heads, 8: allowed are 1, 2, 4, 8"
    )
    message = transform_error(lambda: parity.build("llama", num_key_value_heads=1))
    assert "does not divide num_key_value_heads, 1: allowed are 1" in message
    message = transform_error(lambda: parity.build("llama", intermediate_size=49))
    assert "the width of model.layers.0.mlp.gate_proj, 49" in message
    message = transform_error(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)))
    assert "Sequential has no tensor-parallel plan" in message and "hybrid_shard_degree" in message
    message = transform_error(lambda: parity.build("mixtral", router_jitter_noise=0.1))
    assert "router_jitter_noise = 0.1" in message and "Set it to 0" in message
    classifier = transformers.LlamaForSequenceClassification
    message = transform_error(lambda: classifier(parity.build("llama").config))
    assert "LlamaForSequenceClassification has no language model head" in message
    size = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 9}
    masked = transformers.ModernBertConfig(num_hidden_layers=2, pad_token_id=0, **size)
    message = transform_error(lambda: transformers.ModernBertForMaskedLM(masked))
    assert "ModernBertForMaskedLM is not a causal language model" in message
    sizes = {"vocab_size": 97, "d_model": 16, "n_layers": 1, "n_heads": 2, "resid_pdrop": 0.1}
    message = transform_error(lambda: transformers.MptForCausalLM(transformers.MptConfig(**sizes)))
    assert "resid_pdrop = 0.1" in message and "Set it to 0" in message

    def sparse():
        model = parity.build("llama")
        model.model.layers[1].mlp.activation_sparsity = 0.95  # as in Gemma 3n
        return model

    assert "model.layers.1.mlp of LlamaForCausalLM keeps the largest" in transform_error(sparse)
    message = transform_error(lambda: parity.build("llama"), times=2)
    assert "transformed already" in message


def test_router_loss_is_counted_once():
    """Every tensor-parallel rank computes the complete router loss."""
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    expected = parity.alone("mixtral", **changes)
    run = functools.partial(parity.together, **changes)
    found = nl.spmd.run(run, 2, args=("mixtral", TP2))
    parity.assert_equal(found, expected)


def test_mixture_without_dense_layers_equals_one_process():
    """The plan of Qwen3-MoE names dense layers, which this model does not have."""
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 4}

    def make():
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(**parity.FAMILIES["llama"][1] | shape)
        return transformers.AutoModelForCausalLM.from_config(config)

    def run(rank):
        nl.init(TP2)
        with nl.spmd.one_at_a_time(seed=0):
            model = make()
        model = nl.shard(nl.transform(model))
        model(**parity.rows(0)).loss.backward()
        return parity.whole(model, lambda parameter: parameter.grad)

    alone = make()
    alone(**parity.rows(0)).loss.backward()
    for found in nl.spmd.run(run, 2):
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-5)


def model_returning_hidden_states():
    model = parity.build("llama")
    model.config.output_hidden_states = True
    return model


def test_shard_rejects_a_model_without_transform():
    def run(rank):
        nl.init(TP2)
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build("llama")
        nl.shard(model)

    with pytest.raises(RankError, match="call nl.transform.model. before nl.shard"):
        nl.spmd.run(run, 2)


def test_hidden_states_and_attentions_are_rejected():
    def run(rank, key, by_config=False):
        nl.init(TP2)
        with nl.spmd.one_at_a_time(seed=0):
            model = model_returning_hidden_states() if by_config else parity.build("llama")
        model = nl.shard(nl.transform(model))
        model(**parity.rows(0), **{} if by_config else {key: True})

    for key in ("output_hidden_states", "output_attentions"):
        with pytest.raises(RankError, match=f"{key} = True with tensor_parallel_degree > 1"):
            nl.spmd.run(run, 2, args=(key,))
    with pytest.raises(RankError, match="output_hidden_states = True with tensor_parallel"):
        nl.spmd.run(run, 2, args=("", True))


class LlamaWithOwnLoss(transformers.LlamaForCausalLM):
    """Model whose forward computes the loss itself, and needs all logits for that."""

    def forward(self, input_ids, labels=None):
        output = super().forward(input_ids=input_ids)
        if labels is not None:
            output.loss = torch.nn.functional.cross_entropy(
                output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
        return output


def test_loss_of_a_part_of_the_logits_is_refused():
    def run(rank):
        nl.init(TP2)
        with nl.spmd.one_at_a_time(seed=0):
            model = LlamaWithOwnLoss(parity.build("llama").config)
        model = nl.shard(nl.transform(model))
        batch = parity.rows(0)
        model(batch["input_ids"])  # without labels there is no loss
        model(batch["input_ids"] % 8, labels=batch["labels"] % 8)  # tokens of the first rank

    with pytest.raises(RankError, match="LlamaWithOwnLoss computes its loss without loss_function"):
        nl.spmd.run(run, 2)


@pytest.mark.parametrize(
    ("ranks", "per_node", "heads", "message"),
    [
        (3, 3, 6, "tensor_parallel_degree = 3 is not a power of two: .* Use 2 or 4"),
        (4, 2, 8, "tensor_parallel_degree = 4 spreads tensor ranks over 2 nodes: .* at most 2"),
        (4, 4, 8, ""),
    ],
)
def test_inefficient_degrees_are_logged_once(ranks, per_node, heads, message, caplog):
    def run(rank):
        nl.init({"tensor_parallel_degree": ranks}, ranks_per_node=per_node)
        with nl.spmd.one_at_a_time(seed=0):
            changes = {"num_attention_heads": heads, "num_key_value_heads": heads}
            model = parity.build("llama", **changes, hidden_size=48)
        nl.transform(model)
        dist.barrier()

    with caplog.at_level(logging.WARNING, "nearlinear"):
        nl.spmd.run(run, ranks)
    if message:
        assert re.search(message, caplog.text)
        assert caplog.text.count("tensor_parallel_degree") == 1  # logged by one rank only
    else:
        assert not caplog.text
