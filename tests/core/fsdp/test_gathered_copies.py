"""Gathered copies are never of old parameters, whatever stays gathered within a step."""

import contextlib

import pytest
import torch

import nearlinear as nl
from tests.support import tiny


def prepared(live, layers=2):
    nl.init({"hybrid_shard_degree": 2, "sdp_max_live_parameters": live})
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(layers)
    nl.shard(model)
    return model, tiny.optimizer_for(model, "sgd")


def batches(step):
    return [tiny.batch(tiny.rows(step, 2))] * 2


def evaluate(model):
    with torch.no_grad():
        return model(**batches(9)[0]).loss.item()


def step(model, optimizer, number, before_step=lambda: None, in_loop=lambda: None):
    for batch in nl.accumulate(model, batches(number)):
        model(**batch).loss.backward()
        in_loop()
    before_step()
    nl.clip_grad_norm_(model, 0.1)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("live", [0, 10**9])
@pytest.mark.parametrize("where", ["before_step", "in_loop"])
def test_evaluation_between_passes_leaves_training_unchanged(live, where):
    def losses(rank, evaluating):
        model, optimizer = prepared(live)
        found = []
        for number in range(3):
            extra = {where: lambda: evaluate(model)} if evaluating else {}
            step(model, optimizer, number, **extra)
            found.append(evaluate(model))
        return found

    plain, disturbed = (nl.spmd.run(losses, 4, args=(on,))[0] for on in (False, True))
    assert disturbed == plain


@pytest.mark.parametrize("live", [0, 10**9])
def test_gathered_copies_of_swapped_weights_are_freed_after_evaluation(live):
    """Averaged weights are put in, evaluated, and taken out again."""

    def losses(rank, swapping):
        model, optimizer = prepared(live)
        step(model, optimizer, 0)
        if swapping:
            kept = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
                halved = evaluate(model)
                for parameter, before in zip(model.parameters(), kept, strict=True):
                    parameter.copy_(before)
            assert halved != evaluate(model)
        step(model, optimizer, 1)
        return evaluate(model)

    plain, swapped = (nl.spmd.run(losses, 4, args=(on,))[0] for on in (False, True))
    assert swapped == plain


@pytest.mark.parametrize("live", [0, 10**9])
def test_unfinished_step_frees_gathered_parameters(live):
    def losses(rank, leaving):
        model, optimizer = prepared(live)
        if leaving:
            with contextlib.suppress(KeyError):
                for batch in nl.accumulate(model, batches(5)):
                    model(**batch).loss.backward()
                    raise KeyError
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        step(model, optimizer, 1)
        return evaluate(model)

    plain, left = (nl.spmd.run(losses, 4, args=(on,))[0] for on in (False, True))
    assert left == plain
