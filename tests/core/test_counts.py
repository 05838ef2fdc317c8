"""Collective counts: the right kinds and bytes, on threads and on processes, nested and reset."""

import pytest
import torch
import torch.distributed as dist

import nearlinear as nl
from nearlinear.counts import count_collectives

# since 2.13 under their new names, which do not warn
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kinds_and_bytes(processes):
    def work(rank):
        part, whole = torch.ones(4), torch.empty(8)
        with count_collectives() as outer:
            dist.all_reduce(part)
            with count_collectives() as inner:
                all_gather(whole, part)
                reduce_scatter(part, whole)
                dist.broadcast(part, src=0)
        dist.all_reduce(part)  # outside: not counted
        return dict(inner.calls), dict(inner.bytes), dict(outer.calls), repr(inner)

    for inner, size, outer, text in nl.spmd.run(work, 2, processes=processes):
        assert inner == {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
        assert size == {"all_gather": 32, "reduce_scatter": 32, "broadcast": 16}
        assert outer == {**inner, "all_reduce": 1}
        assert "1 all_gather (32 B)" in text
