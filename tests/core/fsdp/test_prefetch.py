"""Resident units: number of blocks, and all-gathers of a whole step."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives
from nearlinear.fsdp.prefetch import num_resident_blocks
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
        # the first block once, then backward only; the last once; two between twice; the root once
        (0, (1 + MICRO_BATCHES) + MICRO_BATCHES + 2 * 2 * MICRO_BATCHES + 1),
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
