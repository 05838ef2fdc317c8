"""Gathered copies are never of old parameters, whatever stays gathered within a step."""

import contextlib

import pytest
import torch

import nearlinear as nl
from tests.support import tiny


def prepared(live, layers=2, shard_degree=2):
    nl.init({"hybrid_shard_degree": shard_degree, "sdp_max_live_parameters": live})
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


@pytest.mark.parametrize("bf16", [False, True])
def test_whole_replica_computes_with_its_own_parameters_in_float32(bf16):
    def addresses(rank):
        nl.init({"hybrid_shard_degree": 1, "bf16": bf16})
        with nl.spmd.one_at_a_time(seed=0):
            model = nl.shard(tiny.gpt2(2))
        optimizer = tiny.optimizer_for(model, "sgd")
        block, computed = model.transformer.h[0], []
        block.register_forward_hook(
            lambda *_: computed.append([p.data_ptr() for p in block.parameters()])
        )
        own = [p.to_local().data_ptr() for p in block.parameters()]
        for number in range(2):
            step(model, optimizer, number)
        return own, computed

    for own, computed in nl.spmd.run(addresses, 2):
        assert len(computed) == 4  # two micro-batches of two steps
        assert all((found == own) is not bf16 for found in computed)


def test_whole_replica_computes_with_parameters_assigned_after_a_step():
    def losses(rank, assign):
        model, optimizer = prepared(0, shard_degree=1)
        step(model, optimizer, 0)
        evaluate(model)
        halved = {name: value.detach() / 2 for name, value in model.state_dict().items()}
        model.load_state_dict(halved, assign=assign)
        optimizer = tiny.optimizer_for(model, "sgd")
        first = evaluate(model)
        step(model, optimizer, 1)
        return first, evaluate(model)

    copied, assigned = (nl.spmd.run(losses, 2, args=(on,))[0] for on in (False, True))
    assert assigned == copied
    assert copied[0] != copied[1]
