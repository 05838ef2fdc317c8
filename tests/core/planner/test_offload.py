"""Activation offloading in the planner's time and memory model."""

import dataclasses

import pytest

from nearlinear.config import train as train_config
from nearlinear.distributed.mesh import Mesh
from nearlinear.pipeline_parallel.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS
from nearlinear.planner import memory
from nearlinear.planner.api import parse_cluster
from nearlinear.planner.fitted_constants import load_constants
from nearlinear.planner.memory.report import MemoryEstimate
from nearlinear.planner.model_shape import ModelShape
from nearlinear.planner.pipeline_time import PipelineTimes
from nearlinear.planner.step_time import step_time
from nearlinear.planner.timeline import StepTime
from nearlinear.planner.workload import Workload, workload_from_config
from tests.support.planner_models import GPT2, config

FITTED = load_constants()
SHAPE = ModelShape(layers=8, width=4096, heads=32, inner=16384, vocabulary=50000)
HIDDEN = 4 * 2048 * SHAPE.width * 2
PIPE = Mesh(pipeline=4, shard=8, ranks_per_node=8)
HOST = 32e9 * FITTED.link_share  # bytes per second of an A100, by its data sheet


def run(**changes) -> StepTime:
    asked = {
        "micro_batch": 4,
        "micro_batches": 1,
        "mesh": Mesh(shard=32, ranks_per_node=8),
    } | changes
    return step_time(Workload(SHAPE, 2048, **asked), parse_cluster("p4d.24xlarge:4"), FITTED)


def offloaded(checkpoint: str, **parallel) -> float:
    """Return the offloaded bytes per block of GPT-2 30B, for micro-batches of one sequence."""
    data = {
        "model": {"preset": "gpt2-30b"},
        "parallel": {"bf16": True} | parallel,
        "batch": {"micro_batch_size": parallel.get("microbatches", 1)},
        "activations": {"checkpoint": checkpoint, "offload": True},
    }
    return workload_from_config(train_config.load(data, environment={}), 64, 8).offloaded_bytes


@pytest.mark.parametrize("parallel", [{}, {"pipeline_parallel_degree": 4, "microbatches": 8}])
@pytest.mark.parametrize(
    ("checkpoint", "blocks"), [("each", 1.0), ("group_4", 0.25), ("contiguous", None)]
)
def test_checkpointed_blocks_offload_only_their_inputs(checkpoint, blocks, parallel):
    row = 2048 * 7168 * 2  # bytes of an input; 48 blocks, 12 per pipeline rank
    share = blocks or (4 / 48 if parallel else 1 / 48)
    assert offloaded(checkpoint, **parallel) == pytest.approx(share * row)


def test_time_and_memory_agree_on_offloaded_bytes():
    asked = config(GPT2, hybrid_shard_degree=4)
    moved = dataclasses.replace(
        asked, activations=dataclasses.replace(asked.activations, offload=True)
    )
    kept = memory.estimate(asked, 4).parts["kept"]
    assert workload_from_config(moved, 4, 4).offloaded_bytes == pytest.approx(kept / 5, rel=0.01)


def test_offload_copies_are_exposed_only_if_slow():
    block = run(offloaded_bytes=HIDDEN, recompute="block")
    assert block.blocks.offload_copy == pytest.approx(HIDDEN / HOST)
    assert block.seconds == pytest.approx(run(recompute="block").seconds, rel=0.02)
    everything = run(offloaded_bytes=17 * HIDDEN)
    assert everything.exposed["offload"] > 0
    assert everything.seconds > run().seconds


def test_synchronous_offload_exposes_every_copy():
    beside, in_line = (
        run(offloaded_bytes=HIDDEN, recompute="block", synchronous_copies=each)
        for each in (False, True)
    )
    assert in_line.busy["offload"] == pytest.approx(16 * in_line.blocks.offload_copy)
    assert in_line.exposed["offload"] > 100 * beside.exposed.get("offload", 1e-9)
    asked = {"mesh": PIPE, "micro_batches": 16, "offloaded_bytes": HIDDEN}
    waits = run(**asked, synchronous_copies=True)
    assert waits.exposed["offload"] == waits.busy["offload"]
    assert waits.busy["offload"] == pytest.approx(
        16 * 2 * 2 * waits.blocks.offload_copy
    )  # 2 blocks per rank


def test_pipeline_overlaps_offload_copies():
    asked = {"mesh": PIPE, "micro_batches": 16, "reshard_after_forward": False}
    here, little, much = (run(**asked, offloaded_bytes=n * HIDDEN) for n in (0, 1, 40))
    assert little.seconds == pytest.approx(here.seconds)
    assert little.busy["offload"] == pytest.approx(16 * 2 * 2 * little.blocks.offload_copy)
    assert "offload" not in little.exposed
    line = PipelineTimes(much.work, much.blocks)
    forward, backward = (line.seconds[kind][1] for kind in (FORWARD, BACKWARD))
    assert forward == backward == pytest.approx(2 * much.blocks.offload_copy)
    together = much.busy["compute"] + sum(much.exposed.values())
    assert much.exposed["offload"] > 0 and together == pytest.approx(much.seconds, rel=0.02)


def test_split_backward_passes_recompute_twice():
    asked = {"mesh": PIPE, "micro_batches": 16, "schedule": "zbv_zero_bubble", "virtual_stages": 2}
    asked |= {"reshard_after_forward": False, "recompute": "block"}
    found = run(**asked)
    parts, line = found.blocks, PipelineTimes(found.work, found.blocks)
    again = sum(piece.compute for piece in parts.recompute)
    whole = sum(piece.compute for piece in parts.backward)
    of = line.seconds
    for stage in (1, 5):  # two of eight stages with one block each
        assert of[BACKWARD][stage] == pytest.approx(again + whole)
        assert of[WEIGHTS][stage] == pytest.approx(again + parts.weight_gradients)
        assert of[INPUTS][stage] + of[WEIGHTS][stage] == pytest.approx(2 * again + whole)
    assert (of[INPUTS][0], of[WEIGHTS][0]) == (0.0, of[BACKWARD][0])  # tokens have no gradients
    assert line.split_share == pytest.approx(7 / 8)
    passes = 16 * 2 * (sum(piece.compute for piece in parts.forward) + whole + again * 15 / 8)
    assert found.busy["compute"] == pytest.approx(passes + 16 * sum(parts.head))


def staged(schedule: str, horizon: int, **parallel) -> MemoryEstimate:
    """Estimate two stages of eight blocks, with eight micro-batches of one sequence."""
    asked = config((GPT2[0], {**GPT2[1], "n_layer": 16}), micro_batch=8, microbatches=8,
                   pipeline_parallel_degree=2, pipeline=schedule,
                   activation_loading_horizon=horizon, **parallel)  # fmt: skip
    moved = dataclasses.replace(asked.activations, offload=True)
    return memory.estimate(dataclasses.replace(asked, activations=moved), 2)


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_pipeline_offload_keeps_few_blocks_on_the_device(horizon):
    """Count blocks in transfer, as `nl.activation_offload_stats` does.

    With alternating passes, blocks copied back early for the next backward pass count, too."""
    block = 256 * 256 * 2 * 28 + 256 * 8 * 4  # 28 hidden sizes in 16 bits, and attention's log-sums
    plan = staged("simple", horizon)
    assert plan.parts["kept"] == (horizon + 1) * block
    assert "backward" in plan.moment
    plan = staged("1f1b", horizon)
    assert plan.parts["kept"] == 2 * horizon * block  # without the block that is computed
    assert "forward" in plan.moment


def test_synchronous_offload_keeps_one_block_on_the_device():
    plan = staged("simple", 3, sm_activation_offloading=False)
    assert plan.parts["kept"] == staged("simple", 3).parts["kept"] / 4
