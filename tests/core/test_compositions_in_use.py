"""What people do with models, under every kind of parallelism: recompute, pad, freeze, reshape."""

import pytest
import torch

import nearlinear as nl
from nearlinear import runtime
from nearlinear.parallel.layout import cuts_of
from tests.support import parity

TENSOR = {"tensor_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}
EXPERT = {"expert_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
LAYOUTS = [
    (2, "llama", TENSOR),
    (2, "gpt2", TENSOR),
    (2, "gpt2", PIPELINE),
    (4, "llama", PIPELINE | TENSOR),
    (4, "llama", PIPELINE | CONTEXT),
    (4, "gpt2", TENSOR | CONTEXT),
    (4, "mixtral", TENSOR | EXPERT),
]


def padded() -> dict:
    """One sequence is padded on its left, another on its right."""
    batch = parity.rows(0)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :5] = mask[1, 10:] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def freeze(model: torch.nn.Module) -> None:
    """A block, and what comes before and after all of them."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in (".0.", "embed_tokens", "wte", "norm.", "ln_f")):
            parameter.requires_grad_(False)


def on_one_rank(rank, family, config, batches, recomputing, freezing):
    """The gradients of every batch by itself, gathered; None where there is none."""
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build(family, **parity.layers(family, 4))
    if freezing:
        freeze(model)
    model = nl.transform(model)
    model = nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model).train()
    if recomputing:
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    found = []
    for batch in batches:
        for part in nl.accumulate(model, [batch]):
            loss = parity.forward_and_backward(model, part)
        found.append((loss.item(), gradients(model)))
        model.zero_grad()
    return found


def gradients(model) -> dict:
    return {
        name: None if p.grad is None else parity.gathered(p.grad, cuts_of(p))
        for name, p in model.named_parameters()
    }


def check(run, batches, recomputing=False, freezing=False) -> None:
    ranks, family, config = run
    expected = []
    for batch in batches:
        model = parity.build(family, **parity.layers(family, 4))
        if freezing:
            freeze(model)
        loss = model(**batch).loss
        loss.backward()
        expected.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    arguments = (family, config, batches, recomputing, freezing)
    for of_rank in nl.spmd.run(on_one_rank, ranks, args=arguments):
        for (loss, found), (its_loss, theirs) in zip(of_rank, expected, strict=True):
            assert loss == pytest.approx(its_loss, abs=1e-5)
            for name, gradient in found.items():
                assert (gradient is None) == (theirs[name] is None), name
                if gradient is not None:
                    torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=1e-5)


def name_of(run) -> str:
    return f"{run[1]}: {' x '.join(key.removesuffix('_parallel_degree') for key in run[2])}"


@pytest.mark.parametrize("run", LAYOUTS, ids=name_of)
def test_activations_are_recomputed(run):
    check(run, [parity.rows(0)], recomputing=True)


@pytest.mark.parametrize("run", LAYOUTS, ids=name_of)
def test_sequences_are_padded(run):
    check(run, [padded()])


@pytest.mark.parametrize("run", LAYOUTS, ids=name_of)
def test_parameters_are_frozen(run):
    check(run, [parity.rows(0)], freezing=True)


@pytest.mark.parametrize("run", LAYOUTS, ids=name_of)
def test_batches_change_their_shape(run):
    check(run, [parity.rows(0, 4, 16), parity.rows(1, 8, 9), parity.rows(2, 2, 13)])


def one_after_the_other(rank):
    """Two models and two layouts in one job, used in turn."""
    losses = []
    models = []
    for config in (TENSOR, CONTEXT | {"hybrid_shard_degree": 2}):
        nl.init(config)
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build("llama")
        models.append((runtime.current(), nl.shard(nl.transform(model))))
    for _ in range(2):
        for _, model in models:
            losses.append(model(**parity.rows(0)).loss.item())
    return losses


def test_two_models_of_two_layouts_do_not_mind_each_other():
    expected = parity.build("llama")(**parity.rows(0)).loss.item()
    for losses in nl.spmd.run(one_after_the_other, 2):
        assert losses == pytest.approx([expected] * 4, abs=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_memory_of_stages_split_and_sharded_shrinks_by_the_product(family):
    """Of blocks, whose matrices are all cut; embeddings and head are on the outer stages."""

    def held(rank):
        nl.init(PIPELINE | TENSOR | {"hybrid_shard_degree": 2})
        with nl.delayed_init():
            model = parity.unseeded(family, **parity.layers(family, 4))
        model = nl.shard(nl.pipeline(nl.transform(model)))
        blocks = [p for block in model.blocks() for p in block.parameters() if p.dim() > 1]
        return sum(parameter.to_local().numel() for parameter in blocks)

    blocks = [p for name, p in parity.build(family).named_parameters() if ".0." in name]
    whole = 4 * sum(p.numel() for p in blocks if p.dim() > 1)
    assert nl.spmd.run(held, 8) == [whole // 8] * 8
