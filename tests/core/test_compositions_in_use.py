"""Activation checkpointing, padding, freezing and reshaped batches under every parallelism."""

import pytest
import torch

import nearlinear as nl
from nearlinear.distributed import runtime
from nearlinear.fsdp.model_state import parameter_state
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


def padded_batch() -> dict:
    """Return a batch with one sequence padded on the left and one on the right."""
    batch = parity.rows(0)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :5] = mask[1, 10:] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def freeze(model: torch.nn.Module) -> None:
    """Freeze the first block, the embeddings and the final norm (in Llama all norms)."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in (".0.", "embed_tokens", "wte", "norm.", "ln_f")):
            parameter.requires_grad_(False)


def losses_and_gradients(rank, family, config, batches, recompute, frozen):
    """Return loss and gathered gradients of every batch; None for absent gradients."""
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build(family, **parity.layers(family, 4))
    if frozen:
        freeze(model)
    model = nl.transform(model)
    model = nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model).train()
    if recompute:
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
        name: None if p.grad is None else parity.gathered(p.grad, parameter_state(p).splits)
        for name, p in model.named_parameters()
    }


def assert_equal_one_process(run, batches, recompute=False, frozen=False) -> None:
    ranks, family, config = run
    expected = []
    for batch in batches:
        model = parity.build(family, **parity.layers(family, 4))
        if frozen:
            freeze(model)
        loss = model(**batch).loss
        loss.backward()
        expected.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    arguments = (family, config, batches, recompute, frozen)
    for rank_results in nl.spmd.run(losses_and_gradients, ranks, args=arguments):
        for (loss, found), (expected_loss, expected_gradients) in zip(
            rank_results, expected, strict=True
        ):
            assert loss == pytest.approx(expected_loss, abs=1e-5)
            for name, gradient in found.items():
                assert (gradient is None) == (expected_gradients[name] is None), name
                if gradient is not None:
                    torch.testing.assert_close(
                        gradient, expected_gradients[name], rtol=0, atol=1e-5
                    )


def run_id(run) -> str:
    return f"{run[1]}: {' x '.join(key.removesuffix('_parallel_degree') for key in run[2])}"


@pytest.mark.parametrize("run", LAYOUTS, ids=run_id)
def test_activation_checkpointing_equals_one_process(run):
    assert_equal_one_process(run, [parity.rows(0)], recompute=True)


@pytest.mark.parametrize("run", LAYOUTS, ids=run_id)
def test_padded_sequences_equal_one_process(run):
    assert_equal_one_process(run, [padded_batch()])


@pytest.mark.parametrize("run", LAYOUTS, ids=run_id)
def test_frozen_parameters_equal_one_process(run):
    assert_equal_one_process(run, [parity.rows(0)], frozen=True)


@pytest.mark.parametrize("run", LAYOUTS, ids=run_id)
def test_changing_batch_shapes_equal_one_process(run):
    assert_equal_one_process(
        run, [parity.rows(0, 4, 16), parity.rows(1, 8, 9), parity.rows(2, 2, 13)]
    )


def alternate_models(rank):
    """Alternate between two models with different layouts in one job."""
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


def test_models_with_different_layouts_are_independent():
    expected = parity.build("llama")(**parity.rows(0)).loss.item()
    for losses in nl.spmd.run(alternate_models, 2):
        assert losses == pytest.approx([expected] * 4, abs=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_block_memory_shrinks_by_the_product_of_degrees(family):
    """Counts matrices of blocks only; embeddings and head are on the outer stages."""

    def count_elements(rank):
        nl.init(PIPELINE | TENSOR | {"hybrid_shard_degree": 2})
        with nl.deferred_init():
            model = parity.unseeded(family, **parity.layers(family, 4))
        model = nl.shard(nl.pipeline(nl.transform(model)))
        blocks = [p for block in model.blocks() for p in block.parameters() if p.dim() > 1]
        return sum(parameter.to_local().numel() for parameter in blocks)

    blocks = [p for name, p in parity.build(family).named_parameters() if ".0." in name]
    whole = 4 * sum(p.numel() for p in blocks if p.dim() > 1)
    assert nl.spmd.run(count_elements, 8) == [whole // 8] * 8
