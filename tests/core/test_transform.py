"""Tensor parallelism of untouched Hugging Face models: the same training as in one process."""

import functools
import logging
import re

import pytest
import torch
import torch.distributed as dist
import transformers

import nearlinear as nl
from nearlinear.errors import ConfigError
from nearlinear.parallel import layout
from nearlinear.spmd.failures import RankError
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


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("family", parity.FAMILIES)
def test_training_is_that_of_one_process(family, layout_name):
    ranks, config = LAYOUTS[layout_name]
    parity.assert_equal(
        nl.spmd.run(parity.together, ranks, args=(family, config, 2)), reference(family)
    )


@pytest.mark.parametrize("changes", [{"overlap_communication": False}, {"prefetch_depth": 2}])
def test_without_lanes_and_with_other_schedules(changes):
    config = TP2 | {"hybrid_shard_degree": 2} | changes
    parity.assert_equal(
        nl.spmd.run(parity.together, 8, args=("gpt2", config, 2)), reference("gpt2")
    )


@pytest.mark.parametrize("tokens", [1, 7, 15])
def test_sequences_that_do_not_divide(tokens):
    """Also a vocabulary of 97 does not."""
    if tokens == 1:  # nothing to predict: the logits must be right

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


def over_processes(rank):
    return parity.together(rank, "gpt2", TP2)


def test_over_real_processes():
    parity.assert_equal(nl.spmd.run(over_processes, 2, processes=True), reference("gpt2"))


@pytest.mark.parametrize(("family", "bound"), [("gpt2", 0.03), ("llama", 0.03), ("mixtral", 0.1)])
def test_bf16(family, bound):
    """The bound is relative to the largest gradient: bfloat16 has 8 bits, and sums are rounded in
    other places; a token whose two best experts are nearly equal may take another one."""
    config = TP2 | {"hybrid_shard_degree": 2, "bf16": True}
    expected = reference(family)
    largest = max(value.abs().max().item() for value in expected.gradients.values())
    for found in nl.spmd.run(parity.together, 4, args=(family, config)):
        difference = parity.differences(found, expected)
        assert difference["losses"] < 0.01 * expected.losses[0]
        assert difference["gradients"] < bound * largest
        assert difference["norm"] < bound * expected.norm


def plain_loop(rank, config, backwards):
    """No nl.accumulate: two micro-batches of equal weight, added up by autograd."""
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
def test_gradients_are_summed_outside_accumulate_too(backwards, degree):
    model = parity.build("llama")
    for number in range(backwards):
        ids = parity.rows(number)["input_ids"]
        model(input_ids=ids, labels=ids).loss.backward()
    config = TP2 | {"hybrid_shard_degree": degree}
    for found in nl.spmd.run(plain_loop, 2 * degree, args=(config, backwards)):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-5)


# --- communication -------------------------------------------------------------------------------


def counted(rank, family, degree):
    """Calls of a step of one micro-batch: forward, backward, the end of the step."""
    nl.init({"tensor_parallel_degree": degree, "overlap_communication": False})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build(family)
    model = nl.shard(nl.transform(model))
    model(**parity.rows(0))  # the first batch is compared with that of the other ranks
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
def test_communication_is_what_theory_says(family, degree):
    """Two gathers and two reduce-scatters per layer each way; one more of each for embeddings and
    head; three numbers per token for the loss; one all-reduce per step for norms and biases."""
    layers, values = 2, parity.ROWS * parity.SEQUENCE * 32
    for (forward, backward, end), sizes in nl.spmd.run(counted, degree, args=(family, degree)):
        assert forward == {"all_gather": 2 * layers + 2, "reduce_scatter": 2 * layers + 1}
        assert backward == {"all_gather": 2 * layers + 1, "reduce_scatter": 2 * layers + 1}
        assert end == {"all_reduce": 1}
        assert sizes["reduce_scatter"] == (2 * layers + 1) * values * 4
        loss = degree * 3 * parity.ROWS * parity.SEQUENCE * 4
        assert sizes["all_gather"] == (2 * layers + 1) * values * 4 + loss


def largest_logits(rank):
    """Elements of the largest tensor that was made in forward and backward."""
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


def test_no_rank_makes_the_logits_of_the_whole_vocabulary():
    tokens = parity.ROWS * parity.SEQUENCE
    for found in nl.spmd.run(largest_logits, 2):
        assert found == tokens * 4096 // 2


# --- what a rank holds ---------------------------------------------------------------------------


def bytes_held(rank, config):
    nl.init(config)
    with nl.delayed_init():
        model = parity.build("llama", vocab_size=96)
    model = nl.shard(nl.transform(model))
    kept = [p for p in model.parameters() if layout.cuts_of(p)]
    return sum(p.to_local().nbytes for p in kept), sum(
        p.to_local().nbytes for p in model.parameters()
    )


def test_memory_shrinks_by_the_product_of_degrees():
    alone = parity.build("llama", vocab_size=96)
    matrices = sum(p.nbytes for p in alone.parameters() if p.dim() > 1)
    norms = sum(p.nbytes for p in alone.parameters() if p.dim() == 1)
    for tensor, shard in ((2, 1), (4, 1), (2, 2), (4, 2)):
        config = {"tensor_parallel_degree": tensor, "hybrid_shard_degree": shard}
        for cut, everything in nl.spmd.run(bytes_held, tensor * shard, args=(config,)):
            assert cut == matrices / (tensor * shard)
            assert everything == cut + norms / shard


def started(rank, config, delayed):
    nl.init(config | {"random_seed": 5})
    if delayed:
        with nl.delayed_init():
            model = parity.build("gpt2")
    model = nl.shard(nl.transform(model))
    return parity.whole(model, lambda parameter: parameter.detach())


def test_delayed_values_do_not_depend_on_the_layout():
    (alone,) = nl.spmd.run(started, 1, args=({}, True))
    for ranks, config in LAYOUTS.values():
        for found in nl.spmd.run(started, ranks, args=(config, True)):
            for name, value in alone.items():
                assert torch.equal(found[name], value), name


def dropped(rank):
    """Which of a rank's rows dropout has zeroed after the last layer but one, and which heads."""
    nl.init({"tensor_parallel_degree": 2, "random_seed": 3})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.0)
    torch.manual_seed(7)  # the same everywhere: transform must see to it that masks differ
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


def test_dropout_differs_where_tokens_do():
    (one, here), (other, there) = nl.spmd.run(dropped, 2)
    assert one.shape == other.shape == (1, parity.ROWS * parity.SEQUENCE // 2, 32)
    assert 0.4 < one.float().mean() < 0.6
    assert 0.3 < (one == other).float().mean() < 0.7
    assert 0.4 < (here == 0).float().mean() < 0.6  # embeddings were dropped, once
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


def test_without_labels_there_are_logits_of_the_whole_vocabulary():
    model, ids = parity.build("llama").eval(), parity.rows(0, 2, 5)["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        text = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)
    for logits, found in nl.spmd.run(logits_and_text, 2):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found, text)


def own_loss(rank):
    """A loss of one's own on the logits, the same on both ranks."""
    nl.init({"tensor_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    model = nl.shard(nl.transform(model))
    model(input_ids=parity.rows(0)["input_ids"]).logits.square().mean().backward()
    return parity.whole(model, lambda parameter: parameter.grad)


def test_gradients_of_ones_own_loss():
    model = parity.build("llama")
    model(input_ids=parity.rows(0)["input_ids"]).logits.square().mean().backward()
    for found in nl.spmd.run(own_loss, 2):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-5)


# --- other models, and what is refused -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Olmo2", "Phi3", "Granite", "Cohere"])
def test_models_that_say_how_they_are_split(kind):
    def run(rank, config):
        mesh = nl.init(config)
        with nl.spmd.one_at_a_time(seed=0):
            model = other(kind)
        model = nl.shard(nl.transform(model))
        mine = parity.split(parity.rows(0), mesh.data_ranks)[mesh.data_rank(rank)]
        for batch in nl.accumulate(model, [mine]):
            model(**batch).loss.backward()
        return parity.whole(model, lambda parameter: parameter.grad)

    alone = other(kind)
    alone(**parity.rows(0)).loss.backward()
    for found in nl.spmd.run(run, 4, args=(TP2 | {"hybrid_shard_degree": 2},)):
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-5)


def other(kind):
    torch.manual_seed(0)
    arguments = parity.FAMILIES["llama"][1]
    heads = {} if kind in ("Olmo2", "Phi3", "Granite", "Cohere") else {"head_dim": 4}
    more = {"pad_token_id": 0} if kind == "Phi3" else {}
    config = getattr(transformers, f"{kind}Config")(**arguments, **heads, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def refused(make, ranks=2, config=TP2, times=1) -> str:
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


def test_what_cannot_be_split_is_refused_with_the_reason():
    three = {"tensor_parallel_degree": 3}
    said = refused(lambda: parity.build("llama"), 3, three)
    assert said == (
        "tensor_parallel_degree = 3 does not divide num_attention_heads, 8: allowed are 1, 2, 4, 8"
    )
    said = refused(lambda: parity.build("llama", num_key_value_heads=1))
    assert "does not divide num_key_value_heads, 1: allowed are 1" in said
    said = refused(lambda: parity.build("llama", intermediate_size=49))
    assert "the width of model.layers.0.mlp.gate_proj, 49" in said
    said = refused(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)))
    assert "Sequential says not how it can be split" in said and "hybrid_shard_degree" in said
    said = refused(lambda: parity.build("mixtral", router_jitter_noise=0.1))
    assert "router_jitter_noise = 0.1" in said and "set it to 0" in said
    said = refused(convolving)
    assert "does not split model.layers.1.mixer, a Conv1d, which needs all tokens" in said
    classifier = transformers.LlamaForSequenceClassification
    said = refused(lambda: classifier(parity.build("llama").config))
    assert "LlamaForSequenceClassification has no language model's head" in said
    said = refused(strange)
    assert "wants layers.*.mlp.up_proj split as 'diagonal', which nearlinear does not do" in said
    said = refused(lambda: parity.build("llama"), times=2)
    assert "transformed already" in said


def test_a_routers_loss_is_counted_once():
    """Every tensor rank computes it whole."""
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    expected = parity.alone("mixtral", **changes)
    run = functools.partial(parity.together, **changes)
    found = nl.spmd.run(run, 2, args=("mixtral", TP2))
    parity.assert_equal(found, expected)


def test_mixtures_without_dense_layers():
    """The plan of Qwen3-MoE names layers that are not there."""
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


def convolving():
    """A block that mixes tokens in a way that its plan does not know."""
    model = parity.build("llama")
    model.model.layers[1].mixer = torch.nn.Conv1d(32, 32, 3)
    return model


def asking_for_states():
    model = parity.build("llama")
    model.config.output_hidden_states = True
    return model


def strange():
    model = parity.build("llama")
    model.config.base_model_tp_plan = {"layers.*.mlp.up_proj": "diagonal"}
    return model


def test_a_model_that_is_not_transformed_is_not_sharded():
    def run(rank):
        nl.init(TP2)
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build("llama")
        nl.shard(model)

    with pytest.raises(RankError, match="call nl.transform.model. before nl.shard"):
        nl.spmd.run(run, 2)


def test_hidden_states_and_attentions_are_refused():
    def run(rank, key, by_config=False):
        nl.init(TP2)
        with nl.spmd.one_at_a_time(seed=0):
            model = asking_for_states() if by_config else parity.build("llama")
        model = nl.shard(nl.transform(model))
        model(**parity.rows(0), **{} if by_config else {key: True})

    for key in ("output_hidden_states", "output_attentions"):
        with pytest.raises(RankError, match=f"{key} = True with tensor_parallel_degree > 1"):
            nl.spmd.run(run, 2, args=(key,))
    with pytest.raises(RankError, match="output_hidden_states = True with tensor_parallel"):
        nl.spmd.run(run, 2, args=("", True))


@pytest.mark.parametrize(
    ("ranks", "per_node", "heads", "words"),
    [
        (3, 3, 6, "tensor_parallel_degree = 3 is no power of two: .* take 2 or 4"),
        (4, 2, 8, "tensor_parallel_degree = 4 puts tensor ranks on 2 nodes: .* at most 2"),
        (4, 4, 8, ""),
    ],
)
def test_what_is_not_wise_is_said(ranks, per_node, heads, words, caplog):
    def run(rank):
        nl.init({"tensor_parallel_degree": ranks}, ranks_per_node=per_node)
        with nl.spmd.one_at_a_time(seed=0):
            changes = {"num_attention_heads": heads, "num_key_value_heads": heads}
            model = parity.build("llama", **changes, hidden_size=48)
        nl.transform(model)
        dist.barrier()

    with caplog.at_level(logging.WARNING, "nearlinear"):
        nl.spmd.run(run, ranks)
    if words:
        assert re.search(words, caplog.text)
        assert caplog.text.count("tensor_parallel_degree") == 1  # once, not by every rank
    else:
        assert not caplog.text
