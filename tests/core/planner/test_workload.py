"""Workload of a config: each key has the effect that it has in the trainer."""

import dataclasses

import pytest

from nearlinear.config import train as train_config
from nearlinear.errors import ConfigError
from nearlinear.planner import search
from nearlinear.planner.api import parse_cluster
from nearlinear.planner.cluster import find_accelerator
from nearlinear.planner.fitted_constants import load_constants
from nearlinear.planner.memory.pipeline import stages_of
from nearlinear.planner.memory.rank import RankModel
from nearlinear.planner.step_time import step_time
from nearlinear.planner.workload import workload_from_config

FITTED = load_constants()
BATCH = {"micro_batch_size": 2, "accumulation": 2}


def config_of(preset="gpt2-30b", **tables):
    """Load a config; ``tables``: keys of [parallel], or whole tables by name."""
    data = {name: tables.pop(name) for name in ("activations", "data") if name in tables}
    batch = tables.pop("batch", BATCH)
    data |= {"model": {"preset": preset}, "batch": batch, "parallel": {"bf16": True} | tables}
    return train_config.load(data, environment={})


def planned(preset="gpt2-30b", world=64, on_cpu=False, **tables):
    return workload_from_config(config_of(preset, **tables), world, 8, on_cpu=on_cpu)


@pytest.mark.parametrize("keys", [{"overlap_communication": False}, {"prefetch_depth": 0}])
def test_gpus_always_prefetch_one_unit(keys):
    cluster = parse_cluster("p4d.24xlarge:8")
    assert planned(**keys) == planned()
    asked = train_config.load({"parallel": {"bf16": True, **keys}}, environment={})
    plain = train_config.load({"parallel": {"bf16": True}}, environment={})
    assert search.evaluate(asked, cluster).seconds == search.evaluate(plain, cluster).seconds
    assert planned(prefetch_depth=3).prefetch == 3


def test_cpu_overlaps_only_with_overlap_communication():
    assert planned(on_cpu=True).prefetch == 1 and planned(on_cpu=True).overlapped_reduce
    apart = planned(on_cpu=True, overlap_communication=False)
    assert apart.prefetch == 0 and not apart.overlapped_reduce
    assert planned(on_cpu=True, prefetch_depth=0).prefetch == 0


def test_cpu_has_one_multiprocessor():
    gpu = find_accelerator("A100-40GB")
    assert not gpu.is_cpu and dataclasses.replace(gpu, multiprocessors=1).is_cpu


def test_resident_blocks_match_the_trainer():
    """Llama-2 7B: 32 blocks of 202,383,360 parameters, and 262,148,096 outside of blocks."""
    block, root = 202_383_360, 262_148_096
    many = root + 2 * block + 10 * block  # root, current and next block, ten more
    for live, kept in ((many, 10), (many - 1, 9), (0, 0), (root + 32 * block, 32)):
        found = planned("llama2-7b", sdp_max_live_parameters=live)
        assert (found.resident_blocks, found.reshard_after_forward) == (kept, kept < 32)


@pytest.mark.parametrize(("kept", "gathers"), [(0, 32 + 31 + 31 + 31), (10, 32 + 21 + 22 + 21)])
def test_resident_blocks_are_not_gathered_again(kept, gathers):
    """Count all-gathers of two micro-batches: forward all, backward all but last and resident.

    The first block stays gathered between micro-batches."""
    work = dataclasses.replace(planned("llama2-7b"), resident_blocks=kept)
    assert (work.micro_batches, work.reshard_after_forward) == (2, True)
    found = step_time(work, parse_cluster("p4d.24xlarge:8"), FITTED)
    expected = (
        found.blocks.all_gather(found.blocks.root_parameters)
        + gathers * found.blocks.block_all_gather
    )
    assert found.busy["all-gather"] == pytest.approx(expected)


PIPE = {"pipeline_parallel_degree": 8, "microbatches": 16}


@pytest.mark.parametrize("preset", ["gpt2-30b", "llama2-70b", "mixtral-8x7b"])
@pytest.mark.parametrize("keys", [{}, {"tensor_parallel_degree": 2}, {"memory_weight": 0.3}])
def test_time_and_memory_use_the_same_stages(preset, keys):
    asked = PIPE | keys | {"pipeline": "interleaved_1f1b", "batch": {"micro_batch_size": 16}}
    found, config = planned(preset, **asked), config_of(preset, **asked)
    rank = RankModel(config, found.mesh, found.shape, config.model.family)
    assert found.stage_blocks == tuple(map(len, stages_of(rank, found.stage_layout.plan)))
    assert sum(found.stage_blocks) == found.shape.layers


def test_partition_without_default_raises():
    """As in the trainer, only `nl.pipeline` accepts custom stages."""
    with pytest.raises(ConfigError, match="default_partition"):
        planned(batch={"micro_batch_size": 16}, auto_partition=False, **PIPE)


@pytest.mark.parametrize(
    ("checkpoint", "live", "expected"),
    [
        ("each", 0, (1, False)),
        ("group_4", 0, (4, True)),
        ("group_4", 4 * 202_383_360, (4, False)),
        ("group_4", 4 * 202_383_360 - 1, (4, True)),
        ("contiguous", 10**9, (32, True)),
    ],
)
def test_large_recompute_groups_are_gathered_again(checkpoint, live, expected):
    kept = {"activations": {"checkpoint": checkpoint}, "sdp_max_live_parameters": live}
    found = planned("llama2-7b", **kept)
    assert (found.recompute_group, found.regathers_group) == expected
    alone = dataclasses.replace(found, resident_blocks=0, micro_batches=1)
    done = step_time(alone, parse_cluster("p4d.24xlarge:8"), FITTED)
    backward = 31 + (not found.keeps_last_block)
    third = backward * (1 - 1 / found.recompute_group) if found.regathers_group else 0
    gathers = done.busy["all-gather"] - done.blocks.all_gather(done.blocks.root_parameters)
    assert gathers == pytest.approx((32 + backward + third) * done.blocks.block_all_gather)


def test_early_stop_applies_once_per_group():
    cluster = parse_cluster("p4d.24xlarge:8")
    each, groups = (
        step_time(
            planned("llama2-7b", activations={"checkpoint": way}), cluster, FITTED
        ).blocks.compute
        for way in ("each", "group_4")
    )
    last = each._feed_forward_matmuls[-1]
    assert each.recompute.total == pytest.approx(each.forward.total - last)
    assert groups.recompute.total == pytest.approx(each.forward.total - last / 4)


def test_memory_budget_sets_the_recomputed_share():
    """The budget fits the activations of 16 of 32 blocks and the inputs of the others."""
    config = config_of("llama2-7b")
    whole = planned("llama2-7b")
    rank = RankModel(config, whole.mesh, whole.shape, "llama")
    saves, hidden = rank.block_trace.kept_bytes, rank.sizes.hidden
    budget = 16 * saves + 16 * hidden
    found = planned("llama2-7b", activations={"checkpoint": f"{budget}B"})
    assert (found.recompute, found.recomputed_share) == ("block", 0.5)
    parts = step_time(found, parse_cluster("p4d.24xlarge:8"), FITTED).blocks.compute
    last = parts._feed_forward_matmuls[-1]
    assert parts.recompute.total == pytest.approx((parts.forward.total - last) / 2)
