"""Context parallelism of unmodified Hugging Face models gives the training of one process."""

import functools

import pytest
import torch
import torch.distributed as dist
import transformers

import nearlinear as nl
from tests.support import parity
from tests.support.processes import in_turn

LAYOUTS = {
    "context 2": (2, {"context_parallel_degree": 2}),
    "context 4": (4, {"context_parallel_degree": 4}),
    "context 2 x shard 2": (4, {"context_parallel_degree": 2, "hybrid_shard_degree": 4}),
    "context 2 x replicate 2": (4, {"context_parallel_degree": 2, "hybrid_shard_degree": 2}),
}
EXCHANGES = ("p2p", "all_gather")
reference = functools.cache(parity.alone)


@pytest.mark.parametrize(
    ("family", "layout", "comm_type"),
    [
        (family, layout, EXCHANGES[(row + column) % 2])
        for row, family in enumerate(parity.FAMILIES)
        for column, layout in enumerate(LAYOUTS)
    ],
)
def test_context_parallel_training_equals_one_process(family, layout, comm_type):
    """All pairs of family, layout and exchange.

    Each step has two micro-batches with different numbers of targets.
    """
    ranks, config = LAYOUTS[layout]
    config = config | {"cp_comm_type": comm_type}
    parity.assert_equal(
        nl.spmd.run(parity.together, ranks, args=(family, config, 2)), reference(family)
    )


def test_context_parallelism_with_shards_and_replicas():
    config = {"context_parallel_degree": 2, "hybrid_shard_degree": 4}
    parity.assert_equal(
        nl.spmd.run(parity.together, 8, args=("llama", config, 2)), reference("llama")
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_context_parallelism_with_tensor_parallelism(family):
    config = {"context_parallel_degree": 2, "tensor_parallel_degree": 2}
    parity.assert_equal(
        nl.spmd.run(parity.together, 4, args=(family, config, 2)), reference(family)
    )


def loss_and_logits(rank, batch):
    nl.init({"context_parallel_degree": 2, "tensor_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    model = nl.transform(model)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return model(**batch).loss.item(), logits.detach()


def test_padding_and_logits_with_tensor_parallelism():
    model, batch = parity.build("llama"), padded_batch("left")
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    for loss, found in nl.spmd.run(loss_and_logits, 4, args=(batch,)):
        assert loss == pytest.approx(model(**batch).loss.item(), abs=1e-5)
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)


FAMILY_CHANGES = {
    "Cohere2": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.0},
    "Phimoe": {"sliding_window": 5, "num_local_experts": 2},
    "Qwen2Moe": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5,
                 "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "GptOss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 2},
    "Gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0},
}  # fmt: skip


def build_family(kind: str):
    """Build a model without family-specific support."""
    torch.manual_seed(0)
    sizes = parity.FAMILIES["llama"][1] | {"pad_token_id": 0, "head_dim": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes | FAMILY_CHANGES.get(kind, {}))
    return transformers.AutoModelForCausalLM.from_config(config)


def loss_and_gradients(rank, kind, batch):
    nl.init({"context_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = build_family(kind)
    model = nl.shard(nl.transform(model))
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), parity.whole(model, lambda parameter: parameter.grad)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", ["Qwen3", *FAMILY_CHANGES])
def test_masks_are_those_of_the_model(kind, documents):
    """OPT's mask functions ignore positions that restart."""
    model, batch = build_family(kind), padded_batch("right")
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    if documents:
        batch["position_ids"] = torch.tensor([[*range(5), *range(9)]]).expand(3, -1)
        batch |= {"attention_mask": None, "use_cache": False}
    model(**batch).loss.backward()
    for _, grads in nl.spmd.run(loss_and_gradients, 2, args=(kind, batch)):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-5)


def test_eager_attention_of_a_padded_query_is_refused():
    """The averages of its whole sequence differ from the zeros of other attentions."""
    batch = padded_batch("left")
    with pytest.raises(nl.spmd.RankError, match="predicted from a padded token"):
        nl.spmd.run(loss_and_gradients, 2, args=("Gemma2", batch))
    first = batch["attention_mask"].cumsum(1) == 1
    batch["labels"] = batch["labels"].masked_fill(first, -100)
    model = build_family("Gemma2")
    loss = model(**batch).loss
    loss.backward()
    for found, grads in nl.spmd.run(loss_and_gradients, 2, args=("Gemma2", batch)):
        assert found == pytest.approx(loss.item(), abs=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 7, 13])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_indivisible_sequence_lengths_equal_one_process(family, tokens):
    """Includes a position table as long as the sequence, and ranks with padding only."""
    changes = {"n_positions": tokens} if family == "gpt2" else {}
    expected = parity.alone(family, tokens, **changes)
    config = {"context_parallel_degree": 4}
    run = functools.partial(parity.together, **changes)
    parity.assert_equal(nl.spmd.run(run, 4, args=(family, config, 1, tokens)), expected)


def test_context_parallelism_over_processes():
    configs = [{"context_parallel_degree": 2, "cp_comm_type": comm_type} for comm_type in EXCHANGES]
    for found in in_turn(parity.together, 2, [("gpt2", config) for config in configs]):
        parity.assert_equal(found, reference("gpt2"))


@pytest.mark.parametrize(("family", "bound"), [("gpt2", 0.03), ("llama", 0.03), ("mixtral", 0.1)])
def test_bf16_training_is_close_to_float32(family, bound):
    """The bound is relative to the largest gradient.

    bfloat16 has 8 bits of precision. A token whose two best experts have nearly equal scores may
    choose a different expert.
    """
    expected = reference(family)
    largest = max(value.abs().max().item() for value in expected.gradients.values())
    for comm_type in EXCHANGES:
        config = {"context_parallel_degree": 2, "bf16": True, "cp_comm_type": comm_type}
        for found in nl.spmd.run(parity.together, 4, args=(family, config)):
            difference = parity.differences(found, expected)
            assert difference["losses"] < 0.01 * expected.losses[0]
            assert difference["gradients"] < bound * largest


# --- masks and positions -------------------------------------------------------------------------


def gradients(rank, family, batch, ranks, recompute, changes):
    """Return loss and gradients of one batch, which is equal on all ranks."""
    nl.init({"context_parallel_degree": ranks})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build(family, **changes)
    model = nl.shard(nl.transform(model))
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for each in nl.accumulate(model, [batch]):
        loss = model(**each).loss
        loss.backward()
    return loss.item(), parity.whole(model, lambda parameter: parameter.grad)


def assert_equal_one_process(family, batch, ranks=2, recompute=False, **changes):
    model = parity.build(family, **changes)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(**batch).loss
    loss.backward()
    arguments = (family, batch, ranks, recompute, changes)
    for found, grads in nl.spmd.run(gradients, ranks, args=arguments):
        assert found == pytest.approx(loss.item(), abs=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-5)


def padded_batch(side: str) -> dict:
    """Return sequences of 14, 9 and 5 tokens padded to 14, on the left or on the right."""
    batch = parity.rows(0, 3, 14)
    lengths = torch.tensor([[14], [9], [5]])
    at = torch.arange(14)
    mask = at < lengths if side == "right" else at >= 14 - lengths
    ids = batch["input_ids"]
    # the first token after padding is a target too; its query is padding and attends to no key
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "mistral", "mixtral"])
def test_padding_is_not_attended_to(family, side):
    assert_equal_one_process(family, padded_batch(side))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_custom_position_ids_equal_one_process(family):
    batch = padded_batch("left")
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert_equal_one_process(family, batch, 4)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_packed_documents_do_not_see_each_other(family):
    """Restarting positions mark documents, as in transformers, unless a cache is used.

    transformers uses a cache by default unless activations are checkpointed.
    """
    packed = [[*range(5), *range(9)], [*range(3), *range(1), *range(10)]]
    batch = parity.rows(0, 2, 14) | {"position_ids": torch.tensor(packed)}
    assert_equal_one_process(family, batch)
    assert_equal_one_process(family, batch | {"use_cache": False})
    assert_equal_one_process(family, batch, use_cache=False)
    assert_equal_one_process(family, batch, recompute=True)


def test_inputs_embeds_and_shift_labels_equal_one_process():
    model, batch = parity.build("llama"), parity.rows(0)
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach()
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    given = {"inputs_embeds": embedded, "labels": batch["labels"], "shift_labels": labels}
    expected = model(**batch).loss.item()

    def run(rank):
        nl.init({"context_parallel_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build("llama")
        return nl.transform(model)(**given).loss.item()

    assert nl.spmd.run(run, 2) == pytest.approx([expected] * 2, abs=1e-6)


# --- without labels, and generation --------------------------------------------------------------


def logits_and_text(rank, family, ids, mask):
    nl.init({"context_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build(family)
    model = nl.shard(nl.transform(model)).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": False}
    with torch.no_grad():
        found = {
            "all": model(ids).logits,  # a positional argument
            "two": model(input_ids=ids, logits_to_keep=2).logits,
            "chosen": model(input_ids=ids, logits_to_keep=torch.tensor([0, 3])).logits,
            "tuple": model(ids, return_dict=False)[0],
        }
        return found, model.generate(ids, attention_mask=mask, **options)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_forward_without_labels_gives_full_logits_on_every_rank(family):
    model, ids = parity.build(family).eval(), parity.rows(0, 2, 5)["input_ids"]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    with torch.no_grad():
        expected = model(ids).logits
        text = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for found, generated in nl.spmd.run(logits_and_text, 2, args=(family, ids, mask)):
        torch.testing.assert_close(found["all"], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found["two"], found["all"][:, -2:])
        assert torch.equal(found["chosen"], found["all"][:, [0, 3]])
        assert torch.equal(found["tuple"], found["all"])
        assert torch.equal(generated, text)


def custom_loss_gradients(rank):
    """Return the gradients of a custom loss on the logits, equal on both ranks."""
    nl.init({"context_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    model = nl.shard(nl.transform(model))
    model(input_ids=parity.rows(0, tokens=13)["input_ids"]).logits.square().mean().backward()
    return parity.whole(model, lambda parameter: parameter.grad)


def test_custom_loss_gradients_equal_one_process():
    model = parity.build("llama")
    model(input_ids=parity.rows(0, tokens=13)["input_ids"]).logits.square().mean().backward()
    for found in nl.spmd.run(custom_loss_gradients, 2):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-5)


# --- several models and batches, checkpointing ---------------------------------------------------


def interleaved_batches(rank, batches, recompute):
    """Run forward on batches of different shapes and masks, then all backward passes."""
    nl.init({"context_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("mistral")
        untouched = type(model)(model.config)
    nl.transform(model)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    losses = [model(**batch).loss for batch in batches]
    assert untouched(**batches[0]).loss.isfinite()  # same config, not transformed
    for loss in losses:
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= 2
    return [loss.item() for loss in losses], grads


@pytest.mark.parametrize("recompute", [False, True])
def test_interleaved_batches_and_models_are_independent(recompute):
    batches = [padded_batch("left"), parity.rows(1, 2, 9), padded_batch("right")]
    model = parity.build("mistral")
    losses = [model(**batch).loss for batch in batches]
    sum(losses).backward()
    for found, grads in nl.spmd.run(interleaved_batches, 2, args=(batches, recompute)):
        assert found == pytest.approx([loss.item() for loss in losses], abs=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-5)


def losses_with_dropout(rank, comm_type):
    nl.init({"context_parallel_degree": 2, "cp_comm_type": comm_type})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("gpt2", attn_pdrop=0.3)
    model = nl.transform(model)
    losses = [model.train(mode)(**parity.rows(0)).loss for mode in (True, True, False, False)]
    losses[0].backward()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("comm_type", EXCHANGES)
def test_attention_dropout_is_applied_in_training_only(comm_type):
    expected = parity.build("gpt2")(**parity.rows(0)).loss.item()
    for found in nl.spmd.run(losses_with_dropout, 2, args=(comm_type,)):
        assert len(set(found[:2])) == 2
        assert found[2:] == pytest.approx([expected] * 2, abs=1e-6)
        assert found[0] == pytest.approx(expected, abs=0.3)


# --- communication and memory --------------------------------------------------------------------


def count_step_collectives(rank, comm_type, ranks):
    nl.init({"context_parallel_degree": ranks, "cp_comm_type": comm_type})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    model = nl.transform(model)
    model(**parity.rows(0))  # ranks compare their first batch
    forward, backward = nl.count_collectives(), nl.count_collectives()
    with forward:
        loss = model(**parity.rows(0)).loss
    with backward:
        loss.backward()
    return dict(forward.calls), dict(backward.calls), dict(forward.bytes), dict(backward.bytes)


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_step_has_the_expected_collectives(ranks):
    """Each layer exchanges keys and values of half the heads; the loss all-reduces two numbers."""
    layers = 2
    keys_and_values = 2 * parity.ROWS * parity.SEQUENCE * 16 * 4 // ranks  # bytes of one rank
    for forward, backward, *sizes in nl.spmd.run(
        count_step_collectives, ranks, args=("p2p", ranks)
    ):
        hops = layers * (ranks - 1)
        assert forward == {"send": hops, "recv": hops, "all_reduce": 1}
        assert backward == {"send": 2 * hops, "recv": 2 * hops}
        assert sizes[0]["send"] == hops * keys_and_values
        assert sizes[1]["send"] == 2 * hops * keys_and_values
    for forward, backward, *sizes in nl.spmd.run(
        count_step_collectives, ranks, args=("all_gather", ranks)
    ):
        assert forward == {"all_gather": layers, "all_reduce": 1}
        assert backward == {"reduce_scatter": layers}
        assert sizes[0]["all_gather"] == layers * ranks * keys_and_values
        assert sizes[1]["reduce_scatter"] == layers * ranks * keys_and_values


def largest_square(rank):
    """Return the largest min(shape[-2:]) of all tensors created in a training step."""
    from nearlinear._torch import TorchDispatchMode

    nl.init({"context_parallel_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("gpt2", n_positions=512)
    model = nl.transform(model)
    largest = [0]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            for value in found if isinstance(found, tuple | list) else [found]:
                if isinstance(value, torch.Tensor) and value.dim() > 1:
                    largest[0] = max(largest[0], min(value.shape[-2:]))
            return found

    with Watch():
        model(**parity.rows(0, 2, 512)).loss.backward()
    return largest[0]


def test_attention_never_materializes_mask_or_scores():
    """No tensor is as large as 256 x 256, the scores of a rank's own rows; the MLP is 128 wide."""
    assert nl.spmd.run(largest_square, 2) == [128, 128]
