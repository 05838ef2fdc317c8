"""What a config's keys become in the planner's step, as the trainer goes about them."""

import dataclasses

import pytest

from nearlinear.errors import ConfigError
from nearlinear.plan import hardware, parameters, search, workload
from nearlinear.plan.hardware import parse_cluster
from nearlinear.plan.memory.pipeline import stages_of
from nearlinear.plan.memory.rank import Rank
from nearlinear.plan.step import step
from nearlinear.train import config as train_config

FITTED = parameters.load()
BATCH = {"micro_batch_size": 2, "accumulation": 2}


def config_of(preset="gpt2-30b", **tables):
    """``tables``: keys of [parallel], or whole tables by their names."""
    data = {name: tables.pop(name) for name in ("activations", "data") if name in tables}
    batch = tables.pop("batch", BATCH)
    data |= {"model": {"preset": preset}, "batch": batch, "parallel": {"bf16": True} | tables}
    return train_config.load(data, environment={})


def planned(preset="gpt2-30b", world=64, on_cpu=False, **tables):
    return workload.from_config(config_of(preset, **tables), world, 8, on_cpu=on_cpu)


@pytest.mark.parametrize("keys", [{"overlap_communication": False}, {"prefetch_depth": 0}])
def test_on_gpus_fsdp2_overlaps_whatever_the_lanes_are_told(keys):
    cluster = parse_cluster("p4d.24xlarge:8")
    assert planned(**keys) == planned()
    asked = train_config.load({"parallel": {"bf16": True, **keys}}, environment={})
    plain = train_config.load({"parallel": {"bf16": True}}, environment={})
    assert search.tried(asked, cluster).seconds == search.tried(plain, cluster).seconds
    assert planned(prefetch_depth=3).prefetch == 3


def test_on_a_cpu_only_lanes_go_beside():
    assert planned(on_cpu=True).prefetch == 1 and planned(on_cpu=True).overlapped_reduce
    apart = planned(on_cpu=True, overlap_communication=False)
    assert apart.prefetch == 0 and not apart.overlapped_reduce
    assert planned(on_cpu=True, prefetch_depth=0).prefetch == 0


def test_a_cpu_has_one_multiprocessor():
    gpu = hardware.accelerator("A100-40GB")
    assert not gpu.is_cpu and dataclasses.replace(gpu, multiprocessors=1).is_cpu


def test_as_many_blocks_stay_gathered_as_the_trainer_keeps():
    """Llama-2 7B: 32 blocks of 202,383,360 parameters, 262,148,096 at the ends."""
    block, root = 202_383_360, 262_148_096
    many = root + 2 * block + 10 * block  # the root, the block at hand and the next, ten more
    for live, kept in ((many, 10), (many - 1, 9), (0, 0), (root + 32 * block, 32)):
        found = planned("llama2-7b", sdp_max_live_parameters=live)
        assert (found.kept_blocks, found.resharded) == (kept, kept < 32)


@pytest.mark.parametrize(("kept", "gathers"), [(0, 32 + 31 + 31 + 31), (10, 32 + 21 + 22 + 21)])
def test_what_stays_is_not_gathered_again(kept, gathers):
    """Of two passes: all blocks, then backwards all but the last and those that stay; and so on,
    where the first one is there from the pass before."""
    work = dataclasses.replace(planned("llama2-7b"), kept_blocks=kept)
    assert (work.passes, work.resharded) == (2, True)
    found = step(work, parse_cluster("p4d.24xlarge:8"), FITTED)
    expected = found.parts.gather(found.parts.root) + gathers * found.parts.gather_block
    assert found.busy["all-gather"] == pytest.approx(expected)


PIPE = {"pipeline_parallel_degree": 8, "microbatches": 16}


@pytest.mark.parametrize("preset", ["gpt2-30b", "llama2-70b", "mixtral-8x7b"])
@pytest.mark.parametrize("keys", [{}, {"tensor_parallel_degree": 2}, {"memory_weight": 0.3}])
def test_a_pipeline_is_cut_once_for_time_and_for_memory(preset, keys):
    asked = PIPE | keys | {"pipeline": "interleaved_1f1b", "batch": {"micro_batch_size": 16}}
    found, config = planned(preset, **asked), config_of(preset, **asked)
    rank = Rank(config, found.mesh, found.shape, config.model.family)
    assert found.stages == tuple(map(len, stages_of(rank, found.cut.plan)))
    assert sum(found.stages) == found.shape.layers


def test_a_cut_that_the_config_does_not_name_is_refused():
    """The trainer would, too: `nl.pipeline` is what takes stages of one's own."""
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
def test_groups_that_are_too_large_are_gathered_a_third_time(checkpoint, live, expected):
    kept = {"activations": {"checkpoint": checkpoint}, "sdp_max_live_parameters": live}
    found = planned("llama2-7b", **kept)
    assert (found.together, found.gathered_again) == expected
    alone = dataclasses.replace(found, kept_blocks=0, passes=1)
    done = step(alone, parse_cluster("p4d.24xlarge:8"), FITTED)
    third = 31 * (1 - 1 / found.together) if found.gathered_again else 0
    gathers = done.busy["all-gather"] - done.parts.gather(done.parts.root)
    assert gathers == pytest.approx((32 + 31 + third) * done.parts.gather_block)


def test_only_the_last_block_of_a_group_stops_early():
    cluster = parse_cluster("p4d.24xlarge:8")
    each, groups = (
        step(planned("llama2-7b", activations={"checkpoint": way}), cluster, FITTED).parts.compute
        for way in ("each", "group_4")
    )
    last = each._feed_forward_products[-1]
    assert each.again.total == pytest.approx(each.forward.total - last)
    assert groups.again.total == pytest.approx(each.forward.total - last / 4)


def test_a_budget_recomputes_as_few_blocks_as_memory_says():
    """Of 32 blocks that keep as many bytes each, half of what they keep beside their inputs."""
    config = config_of("llama2-7b")
    whole = planned("llama2-7b")
    rank = Rank(config, whole.mesh, whole.shape, "llama")
    saves, hidden = rank.calls.kept_bytes, rank.sizes.hidden
    budget = 16 * saves + 16 * hidden
    found = planned("llama2-7b", activations={"checkpoint": f"{budget}B"})
    assert (found.recompute, found.recomputed_blocks) == ("block", 0.5)
    parts = step(found, parse_cluster("p4d.24xlarge:8"), FITTED).parts.compute
    last = parts._feed_forward_products[-1]
    assert parts.again.total == pytest.approx((parts.forward.total - last) / 2)
