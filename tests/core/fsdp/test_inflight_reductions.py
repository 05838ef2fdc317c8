"""Limit of the reductions in flight."""

import time

import pytest

import nearlinear as nl
from nearlinear.distributed.comm_thread import CommWork
from nearlinear.fsdp.model_state import model_state
from nearlinear.fsdp.unit_collectives import GradientReduction
from tests.support import tiny
from tests.support.processes import in_turn
from tests.support.releases import needs_hooks


class Done(CommWork):
    """Ends when it is waited for."""

    def wait(self, timeout=None):
        if not self.is_completed():
            self.perform()
        return super().wait(timeout)


@pytest.mark.parametrize(
    ("most", "asked", "left"),
    [(12, 2, [4, 3, 3]), (11, 2, [3, 3]), (10, 4, [3, 3]), (9, 5, [3]), (5, 50, []), (0, 1, [])],
)
def test_make_room_waits_for_the_oldest_reductions(most, asked, left):
    reduction = GradientReduction(None, None, most)
    reduction.inflight.extend((Done(lambda: None), elements) for elements in (4, 3, 3))
    reduction.make_room(asked)
    assert [elements for _, elements in reduction.inflight] == left


def test_completed_reductions_take_no_room():
    reduction = GradientReduction(None, None, 10)
    reduction.inflight.extend((Done(lambda: None), elements) for elements in (6, 4))
    reduction.inflight[0][0].perform()
    reduction.make_room(6)
    assert [elements for _, elements in reduction.inflight] == [4]


def under_way_in_a_pass(rank, bucket):
    """Gradients still on their way, at most, when the next unit's memory was handed out."""
    nl.init({"hybrid_shard_degree": 2, "sdp_reduce_bucket_size": bucket})
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(6)
    total = sum(p.numel() for p in model.parameters())
    nl.shard(model)
    reduction, seen = model_state(model).reduction, []
    scatter, make_room = reduction.units[0].reduce_scatter, reduction.make_room

    def slowly(*arguments):
        time.sleep(0.1)
        scatter(*arguments)

    def watched(elements):
        make_room(elements)
        pending = (n for item, n in reduction.inflight if not item.is_completed())
        seen.append(sum(pending) + elements)

    reduction.make_room = watched
    for unit in reduction.units:
        unit.reduce_scatter = slowly
    model(**tiny.batch(tiny.rows(0, 2))).loss.backward()
    return max(seen), total


@needs_hooks
@pytest.mark.slow
def test_bucket_size_limits_inflight_reductions():
    block = 0.16  # share of the model, approximately; the root is smaller
    none, any_number = in_turn(under_way_in_a_pass, 2, [(0,), (10**9,)])
    assert all(seen / total < 1.2 * block for seen, total in none)
    assert all(seen / total > 3 * block for seen, total in any_number)
