"""Schedule of a step: units that stay gathered and unreduced, and the collectives that are left."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives
from nearlinear.errors import ConfigError
from nearlinear.fsdp.prefetch import num_resident_blocks, plan_retention
from tests.support import tiny

LAYERS, MICRO_BATCHES = 4, 3


@given(
    st.integers(0, 50),
    st.lists(st.integers(1, 50), min_size=1, max_size=12),
    st.integers(0, 3),
    st.integers(0, 800),
)
def test_resident_blocks_stay_within_max_live_parameters(root, blocks, depth, live):
    kept = num_resident_blocks([root, *blocks], depth, live)
    held = root + sum(blocks[:kept])
    if kept == len(blocks):
        assert held <= live
    elif kept:
        assert held + (1 + depth) * max(blocks) <= live
    more = num_resident_blocks([root, *blocks], depth, live + 1)
    assert more >= kept


def gathers(rank, live, **options):
    nl.init({"hybrid_shard_degree": 2, "sdp_max_live_parameters": live})
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(LAYERS)
    nl.shard(model, **options)
    steps = []
    for step in range(2):
        calls = Counter()
        for batch in nl.accumulate(model, [tiny.batch(tiny.rows(step, 2))] * MICRO_BATCHES):
            with count_collectives() as counts:
                model(**batch).loss.backward()
            calls += counts.calls
        steps.append(calls["all_gather"])
        model.zero_grad()
    return steps


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        # the first block once, then backward only; the others twice; the root once
        (0, (1 + MICRO_BATCHES) + (LAYERS - 1) * 2 * MICRO_BATCHES + 1),
        (10**9, LAYERS + 1),
    ],
)
def test_number_of_all_gathers_per_step(live, expected):
    for steps in nl.spmd.run(gathers, 4, args=(live,)):
        assert steps == [expected] * 2


def test_reshard_after_forward_gathers_units_twice():
    def strict(rank):
        return gathers(rank, 0, reshard_after_forward=True)

    for steps in nl.spmd.run(strict, 4):
        assert steps == [2 * (LAYERS + 1) * MICRO_BATCHES] * 2


@given(
    st.integers(0, 50),
    st.lists(st.integers(1, 50), min_size=1, max_size=12),
    st.integers(0, 3),
    st.integers(0, 4000),
    st.integers(1, 4),
)
def test_retention_stays_within_the_budget(root, blocks, depth, budget, sharing):
    sizes = [root, *blocks]

    def plan(budget, **more):
        config = nl.ParallelConfig(memory_budget=f"{budget}B", prefetch_depth=depth, **more)
        return plan_retention(sizes, config, sharing)

    found = plan(budget)
    gathered = root + sum(blocks[: found.resident_blocks])
    kept = [size for size, kept in zip(sizes, found.unreduced, strict=True) if kept]
    left = [size for size, kept in zip(sizes, found.unreduced, strict=True) if not kept]
    more_than_shards = sum(size - size // sharing for size in kept)
    if more_than_shards:
        assert 4 * (gathered + more_than_shards) <= budget
    assert not left or sharing > 1  # whole gradients take no additional memory
    room = budget - 4 * (gathered + more_than_shards)
    if found.resident_blocks == len(blocks):  # no room for any unit that is left
        assert all(4 * (size - size // sharing) > room for size in left)
    assert not any(plan(budget, gradient_reduction="micro_batch").unreduced)


def test_largest_units_stay_unreduced_first():
    config = nl.ParallelConfig(memory_budget=f"{4 * (60 + 15)}B")
    found = plan_retention([10, 20, 30], config, sharing=2)  # 60 gathered, room for 15 of 30 / 2
    assert found.unreduced == (False, False, True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"memory_budget": "12 apples"}, "allowed are 'auto' and sizes such as '12GiB'"),
        ({"memory_budget": "1GiB", "sdp_max_live_parameters": 5}, "limit the same memory"),
        ({"gradient_reduction": "never"}, "allowed are 'auto', 'micro_batch'"),
    ],
)
def test_invalid_budgets_are_refused(config, words):
    with pytest.raises(ConfigError, match=words):
        nl.ParallelConfig(**config)


def step_within(rank, config, batches, disturb=False):
    """Return collectives and whole gradients of one step."""
    nl.init({"hybrid_shard_degree": 2} | config)
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(LAYERS)
    nl.shard(model)
    with count_collectives() as counts:
        for batch in nl.accumulate(model, batches):
            model(**batch).loss.backward()
            if disturb and batch is not batches[-1]:
                model.zero_grad()  # no gradients are visible yet
    return counts.calls, {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def test_units_without_room_are_reduced_after_every_micro_batch():
    batches = [tiny.batch(tiny.rows(i, 2)) for i in range(MICRO_BATCHES)]
    torch.manual_seed(0)
    model = tiny.gpt2(LAYERS)
    sum(model(**batch).loss / MICRO_BATCHES for batch in batches).backward()
    block = sum(p.numel() for p in model.transformer.h[0].parameters())
    total = sum(p.numel() for p in model.parameters())
    root = total - LAYERS * block
    assert root < block
    for blocks in (0, 2):  # all parameters, and the gradients of so many blocks
        budget = {"memory_budget": f"{4 * total + 2 * blocks * block}B"}
        found = nl.spmd.run(step_within, 4, args=(budget, batches, True))
        for calls, gradients in found:
            often = LAYERS + 1 - blocks
            assert calls["reduce_scatter"] == often * MICRO_BATCHES + blocks
            assert calls["all_gather"] == LAYERS + 1
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-6, rtol=1e-4)


def test_unreduced_gradients_of_bfloat16_are_summed_in_float32():
    batches = [tiny.batch(tiny.rows(i, 1)) for i in range(12)]

    def gradients(reduction):
        config = {"bf16": True, "gradient_reduction": reduction}
        return nl.spmd.run(step_within, 2, args=(config, batches))[0][1]

    each, once = gradients("micro_batch"), gradients("auto")
    for name, gradient in each.items():
        scale = gradient.abs().max()
        assert (once[name] - gradient).abs().max() <= 1e-5 * scale, name
