"""Cross entropy over parts of the vocabulary and of the sequence, against transformers' own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.loss.loss_utils import ForCausalLMLoss

import nearlinear as nl
from nearlinear import runtime
from nearlinear.parallel import loss as losses
from nearlinear.parallel.layout import even


def whole(seed, batch, tokens, vocabulary, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, tokens, vocabulary, generator=generator) * scale
    labels = torch.randint(vocabulary, (batch, tokens), generator=generator)
    labels[torch.rand(batch, tokens, generator=generator) < 0.3] = -100
    labels[0, 1] = 0  # one target at least
    return logits, labels


def by_vocabulary(rank, ranks, logits, labels, more):
    """Loss, and this rank's part of the logits' gradient."""
    nl.init({"tensor_parallel_degree": ranks})
    now = runtime.current()
    ((first, count),) = even("tensor", 0, logits.shape[-1], rank, ranks).mine
    mine = logits[..., first : first + count].clone().requires_grad_()
    loss = losses.CausalLoss(now.group("tensor"), first)(mine, labels, logits.shape[-1], **more)
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
def test_parts_of_the_vocabulary(ranks, batch, tokens, vocabulary, scale, more, seed):
    logits, labels = whole(seed, batch, tokens, vocabulary, scale)
    reference = logits.clone().requires_grad_()
    expected = ForCausalLMLoss(reference, labels, vocabulary, **more)
    (expected * 3).backward()
    found = nl.spmd.run(by_vocabulary, ranks, args=(ranks, logits, labels, more))
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    gradient = torch.cat([part for _, part in found], -1)
    torch.testing.assert_close(gradient, reference.grad, rtol=1e-5, atol=1e-6)


def by_sequence(rank, logits, shifted):
    nl.init({"context_parallel_degree": 2})
    now = runtime.current()
    mine = logits.chunk(2, 1)[rank].clone().requires_grad_()
    loss = losses.CausalLoss(context=now.group("context"))(
        mine, shifted, shift_labels=shifted.chunk(2, 1)[rank]
    )
    loss.backward()
    return loss.detach(), mine.grad


def test_parts_of_the_sequence():
    """The mean is the whole sequence's; gradients are twice as large, for the average of two."""
    logits, labels = whole(0, 2, 8, 11)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    shifted[:, 5:] = -100  # the second half has fewer targets
    reference = logits.clone().requires_grad_()
    expected = ForCausalLMLoss(reference, labels, 11, shift_labels=shifted)
    expected.backward()
    found = nl.spmd.run(by_sequence, 2, args=(logits, shifted))
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach())
    gradient = torch.cat([part for _, part in found], 1) / 2
    torch.testing.assert_close(gradient, reference.grad)


def test_without_targets_nothing_flows_back():
    def one(rank):
        nl.init({"tensor_parallel_degree": 2})
        logits = torch.randn(1, 3, 5, requires_grad=True)
        labels = torch.full((1, 3), -100)
        loss = losses.CausalLoss(runtime.current().group("tensor"), 5 * rank)(logits, labels, 10)
        (loss * 0.0).backward()
        return loss.item(), logits.grad

    for loss, gradient in nl.spmd.run(one, 2):
        assert loss != loss  # as torch's mean over nothing
        assert not gradient.any()


@pytest.mark.parametrize(("ranks", "calls"), [(1, 0), (2, 1), (4, 1)])
def test_three_numbers_per_token_travel(ranks, calls):
    logits, labels = whole(1, 2, 6, 12)

    def one(rank):
        nl.init({"tensor_parallel_degree": ranks})
        group = runtime.current().group("tensor") if ranks > 1 else None
        part = logits.chunk(ranks, -1)[rank].clone().requires_grad_()
        with nl.count_collectives() as counts:
            losses.CausalLoss(group, rank * 12 // ranks)(part, labels).backward()
        return dict(counts.calls), dict(counts.bytes)

    for made, sizes in nl.spmd.run(one, ranks):
        assert made == ({"all_gather": calls} if calls else {})
        assert sizes == ({"all_gather": ranks * 3 * 12 * 4} if calls else {})
