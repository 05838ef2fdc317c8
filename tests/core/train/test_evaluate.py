"""Held-out loss over windows that no batch size divides, and generation past the context."""

import numpy as np
import pytest
import torch

import nearlinear as nl
from nearlinear.data.dataset import WindowRows
from nearlinear.train.evaluate import generate, held_out_loss
from tests.support import tiny


class Windows:
    """``count`` windows of random tokens, with the interface that `held_out_loss` uses."""

    def __init__(self, count):
        self.tokens = tiny.rows(7, count).numpy()

    def __len__(self):
        return len(self.tokens)

    def rows(self, indices, documents):
        return WindowRows(self.tokens[np.asarray(indices)], None, None)


def loud_model():
    """Return a model with weights so large that the loss differs between windows."""
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 8
    return model


@pytest.mark.parametrize(
    ("ranks", "batch_size", "count"),
    [
        (1, 3, 7),  # a last batch of one window and two repeats
        (2, 2, 5),  # a rank whose last batch has repeats only
        (4, 3, 14),
        (2, 8, 3),  # a rank with repeats only
    ],
)
def test_every_held_out_target_counts_once(ranks, batch_size, count):
    dataset = Windows(count)
    with torch.no_grad():
        tokens = torch.from_numpy(dataset.tokens)
        logits = loud_model()(input_ids=tokens).logits[:, :-1].double()
        each = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    assert each.mean(1).std() > 0.3, "the test needs windows of different losses"

    def evaluate(rank):
        mesh = nl.init({"hybrid_shard_degree": ranks})
        return held_out_loss(nl.shard(loud_model()), dataset, mesh, batch_size, count)

    for found in nl.spmd.run(evaluate, ranks):
        assert found == pytest.approx(each.mean().item(), abs=1e-5)


def modes_seen(model, call):
    """Return the training modes in forward passes during ``call``, and of all modules after it."""
    inside = []
    handle = model.register_forward_pre_hook(lambda module, args: inside.append(module.training))
    call()
    handle.remove()
    return set(inside), {module.training for module in model.modules()}


def test_evaluation_and_generation_restore_training_mode():
    def work(rank):
        mesh = nl.init()
        model = nl.shard(loud_model().train())
        dataset = Windows(3)
        assert modes_seen(model, lambda: held_out_loss(model, dataset, mesh, 2, 3)) == (
            {False},
            {True},
        )
        assert modes_seen(model, lambda: generate(model, [1, 2], 3, 32)) == ({False}, {True})

    nl.spmd.run(work, 2)


def test_generation_limits_its_input_to_the_context():
    context, prompt, tokens = 6, [5, 6, 7, 8], 9

    def work(rank):
        nl.init()
        model, read = nl.shard(loud_model()), []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: read.append(kwargs["input_ids"][0].tolist()),
            with_kwargs=True,
        )
        return read, generate(model, prompt, tokens, context)

    results = nl.spmd.run(work, 2)
    assert results[0] == results[1]
    read, new = results[0]
    assert len(new) == tokens
    text = prompt + new
    assert read == [text[max(0, end - context) : end] for end in range(4, 4 + tokens)]
    assert [len(ids) for ids in read] == [4, 5, 6, 6, 6, 6, 6, 6, 6]


def test_generation_continues_past_the_position_limit():
    def work(rank):
        nl.init()
        return generate(nl.shard(loud_model()), [1], 40, 32)  # 32 positions

    for new in nl.spmd.run(work, 1):
        assert len(new) == 40
