"""What a config's keys become in the planner's step, as the trainer goes about them."""

import dataclasses

import pytest

from nearlinear.plan import hardware, parameters, search, workload
from nearlinear.plan.hardware import parse_cluster
from nearlinear.plan.step import step
from nearlinear.train import config as train_config

FITTED = parameters.load()
BATCH = {"micro_batch_size": 2, "accumulation": 2}


def planned(preset="gpt2-30b", world=64, on_cpu=False, **tables):
    """``tables``: keys of [parallel], or whole tables by their names."""
    data = {name: tables.pop(name) for name in ("activations", "data") if name in tables}
    batch = tables.pop("batch", BATCH)
    data |= {"model": {"preset": preset}, "batch": batch, "parallel": {"bf16": True} | tables}
    return workload.from_config(train_config.load(data, environment={}), world, 8, on_cpu=on_cpu)


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
