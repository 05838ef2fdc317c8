"""Cross entropy of split logits, by vocabulary or sequence, against the loss of transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.loss.loss_utils import ForCausalLMLoss

import nearlinear as nl
from nearlinear.distributed import runtime
from nearlinear.fsdp.model_state import split_evenly
from nearlinear.tensor_parallel import loss as losses


def random_batch(seed, batch, tokens, vocabulary, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, tokens, vocabulary, generator=generator) * scale
    labels = torch.randint(vocabulary, (batch, tokens), generator=generator)
    labels[torch.rand(batch, tokens, generator=generator) < 0.3] = -100
    labels[0, 1] = 0  # at least one target
    return logits, labels


def vocabulary_parallel_loss(rank, ranks, logits, labels, options):
    """Return the loss and the gradient of this rank's shard of the logits."""
    nl.init({"tensor_parallel_degree": ranks})
    runtime_state = runtime.current()
    ((first, count),) = split_evenly("tensor", 0, logits.shape[-1], rank, ranks).ranges
    mine = logits[..., first : first + count].clone().requires_grad_()
    loss = losses.CausalLoss(runtime_state.group("tensor"), first)(
        mine, labels, logits.shape[-1], **options
    )
    (loss * 3).backward()
    return loss.detach(), mine.grad


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(2, 9),
    st.integers(4, 40),
    st.sampled_from([1.0, 50.0]),
    st.sampled_from([{}, {"num_items_in_batch": 7}]),
    st.integers(0, 999),
)
def test_vocabulary_parallel_loss_equals_transformers(
    ranks, batch, tokens, vocabulary, scale, options, seed
):
    logits, labels = random_batch(seed, batch, tokens, vocabulary, scale)
    reference = logits.clone().requires_grad_()
    expected = ForCausalLMLoss(reference, labels, vocabulary, **options)
    (expected * 3).backward()
    found = nl.spmd.run(vocabulary_parallel_loss, ranks, args=(ranks, logits, labels, options))
    # Large logits: the log of the sum is as large, and so is its rounding in loss and gradient.
    atol = 1e-6 if scale == 1.0 else 1.5e-5
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=atol)
    gradient = torch.cat([part for _, part in found], -1)
    torch.testing.assert_close(gradient, reference.grad, rtol=1e-5, atol=atol)


def context_parallel_loss(rank, logits, shifted):
    nl.init({"context_parallel_degree": 2})
    runtime_state = runtime.current()
    mine = logits.chunk(2, 1)[rank].clone().requires_grad_()
    loss = losses.CausalLoss(context=runtime_state.group("context"))(
        mine, shifted, shift_labels=shifted.chunk(2, 1)[rank]
    )
    loss.backward()
    return loss.detach(), mine.grad


def test_context_parallel_loss_equals_transformers():
    """Every rank has the mean over the full sequence.

    Gradients are multiplied by the two ranks because sharding averages them afterwards.
    """
    logits, labels = random_batch(0, 2, 8, 11)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    shifted[:, 5:] = -100  # the second half has fewer targets
    reference = logits.clone().requires_grad_()
    expected = ForCausalLMLoss(reference, labels, 11, shift_labels=shifted)
    expected.backward()
    found = nl.spmd.run(context_parallel_loss, 2, args=(logits, shifted))
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach())
    gradient = torch.cat([part for _, part in found], 1) / 2
    torch.testing.assert_close(gradient, reference.grad)


def test_loss_without_targets_has_zero_gradients():
    def loss_without_targets(rank):
        nl.init({"tensor_parallel_degree": 2})
        logits = torch.randn(1, 3, 5, requires_grad=True)
        labels = torch.full((1, 3), -100)
        loss = losses.CausalLoss(runtime.current().group("tensor"), 5 * rank)(logits, labels, 10)
        (loss * 0.0).backward()
        return loss.item(), logits.grad

    for loss, gradient in nl.spmd.run(loss_without_targets, 2):
        assert loss != loss  # NaN, like torch's mean of an empty tensor
        assert not gradient.any()


@pytest.mark.parametrize(("ranks", "calls"), [(1, 0), (2, 1), (4, 1)])
def test_loss_gathers_three_numbers_per_token(ranks, calls):
    logits, labels = random_batch(1, 2, 6, 12)

    def count(rank):
        nl.init({"tensor_parallel_degree": ranks})
        group = runtime.current().group("tensor") if ranks > 1 else None
        part = logits.chunk(ranks, -1)[rank].clone().requires_grad_()
        with nl.count_collectives() as counts:
            losses.CausalLoss(group, rank * 12 // ranks)(part, labels).backward()
        return dict(counts.calls), dict(counts.bytes)

    for made, sizes in nl.spmd.run(count, ranks):
        assert made == ({"all_gather": calls} if calls else {})
        assert sizes == ({"all_gather": ranks * 3 * 12 * 4} if calls else {})


def loss_with_the_vocabulary_of_the_logits(rank):
    nl.init({"tensor_parallel_degree": 2})
    group = runtime.current().group("tensor")
    logits, labels = random_batch(0, 1, 4, 8)
    losses.CausalLoss(group, 4 * rank)(logits[..., :4], labels, 4)


def test_vocabulary_size_that_is_that_of_a_part_is_refused():
    with pytest.raises(nl.errors.RankError, match="takes the size of its vocabulary from the logi"):
        nl.spmd.run(loss_with_the_vocabulary_of_the_logits, 2)
