"""`count_collectives`: kinds and bytes on threads and processes, also nested."""

import pytest
import torch
import torch.distributed as dist

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives

# torch >= 2.13 renamed these functions; the old names warn
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_count_collectives_records_kinds_and_bytes(processes):
    def work(rank):
        shard, full = torch.ones(4), torch.empty(8)
        with count_collectives() as outer:
            dist.all_reduce(shard)
            with count_collectives() as inner:
                all_gather(full, shard)
                reduce_scatter(shard, full)
                dist.broadcast(shard, src=0)
        dist.all_reduce(shard)  # outside of the context: not counted
        return dict(inner.calls), dict(inner.bytes), dict(outer.calls), repr(inner)

    for inner, size, outer, text in nl.spmd.run(work, 2, processes=processes):
        assert inner == {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
        assert size == {"all_gather": 32, "reduce_scatter": 32, "broadcast": 16}
        assert outer == {**inner, "all_reduce": 1}
        assert "1 all_gather (32 B)" in text
