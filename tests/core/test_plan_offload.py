"""Activations in host memory, as the planner has them in time and in memory."""

import dataclasses

import pytest

from nearlinear.mesh import Mesh
from nearlinear.plan import memory, parameters, pipelines, workload
from nearlinear.plan.hardware import parse_cluster
from nearlinear.plan.orders import BACKWARD, FORWARD, INPUTS, WEIGHTS
from nearlinear.plan.shape import Shape
from nearlinear.plan.step import Step, step
from nearlinear.plan.workload import Workload
from nearlinear.train import config as train_config
from tests.support.planned import GPT2, config

FITTED = parameters.load()
SHAPE = Shape(layers=8, width=4096, heads=32, inner=16384, vocabulary=50000)
HIDDEN = 4 * 2048 * SHAPE.width * 2
PIPE = Mesh(pipeline=4, shard=8, ranks_per_node=8)
HOST = 32e9 * FITTED.link_share  # bytes per second of an A100, by its data sheet


def run(**changes) -> Step:
    asked = {"micro_batch": 4, "passes": 1, "mesh": Mesh(shard=32, ranks_per_node=8)} | changes
    return step(Workload(SHAPE, 2048, **asked), parse_cluster("p4d.24xlarge:4"), FITTED)


def offloaded(checkpoint: str, **parallel) -> float:
    """Bytes of a block of GPT-2 30B, of a micro-batch of one sequence."""
    data = {
        "model": {"preset": "gpt2-30b"},
        "parallel": {"bf16": True} | parallel,
        "batch": {"micro_batch_size": parallel.get("microbatches", 1)},
        "activations": {"checkpoint": checkpoint, "offload": True},
    }
    return workload.from_config(train_config.load(data, environment={}), 64, 8).offloaded


@pytest.mark.parametrize("parallel", [{}, {"pipeline_parallel_degree": 4, "microbatches": 8}])
@pytest.mark.parametrize(
    ("checkpoint", "blocks"), [("each", 1.0), ("group_4", 0.25), ("contiguous", None)]
)
def test_what_is_recomputed_moves_its_inputs_only(checkpoint, blocks, parallel):
    row = 2048 * 7168 * 2  # of 48 blocks, 12 on each of 4 ranks
    share = blocks or (4 / 48 if parallel else 1 / 48)
    assert offloaded(checkpoint, **parallel) == pytest.approx(share * row)


def test_time_moves_the_bytes_that_memory_frees():
    asked = config(GPT2, hybrid_shard_degree=4)
    moved = dataclasses.replace(
        asked, activations=dataclasses.replace(asked.activations, offload=True)
    )
    kept = memory.estimate(asked, 4).parts["kept"]
    assert workload.from_config(moved, 4, 4).offloaded == pytest.approx(kept / 5, rel=0.01)


def test_activations_come_back_in_time_or_are_waited_for():
    block = run(offloaded=HIDDEN, recompute="block")
    assert block.parts.copy == pytest.approx(HIDDEN / HOST)
    assert block.seconds == pytest.approx(run(recompute="block").seconds, rel=0.02)
    everything = run(offloaded=17 * HIDDEN)
    assert everything.exposed["offload"] > 0
    assert everything.seconds > run().seconds


def test_pytorchs_own_offload_waits_for_every_copy():
    beside, in_line = (
        run(offloaded=HIDDEN, recompute="block", copies_in_line=each) for each in (False, True)
    )
    assert in_line.busy["offload"] == pytest.approx(16 * in_line.parts.copy)
    assert in_line.exposed["offload"] > 100 * beside.exposed.get("offload", 1e-9)
    asked = {"mesh": PIPE, "passes": 16, "offloaded": HIDDEN}
    waits = run(**asked, copies_in_line=True)
    assert waits.exposed["offload"] == waits.busy["offload"]
    assert waits.busy["offload"] == pytest.approx(16 * 2 * 2 * waits.parts.copy)  # 2 blocks each


def test_a_pipeline_copies_beside_its_passes():
    asked = {"mesh": PIPE, "passes": 16, "resharded": False}
    here, little, much = (run(**asked, offloaded=n * HIDDEN) for n in (0, 1, 40))
    assert little.seconds == pytest.approx(here.seconds)
    assert little.busy["offload"] == pytest.approx(16 * 2 * 2 * little.parts.copy)
    assert "offload" not in little.exposed
    line = pipelines.Pipeline(much.work, much.parts)
    forward, backward = (line.seconds[kind][1] for kind in (FORWARD, BACKWARD))
    assert forward == backward == pytest.approx(2 * much.parts.copy)
    together = much.busy["compute"] + sum(much.exposed.values())
    assert much.exposed["offload"] > 0 and together == pytest.approx(much.seconds, rel=0.02)


def test_backward_passes_that_are_cut_in_two_compute_again_twice():
    asked = {"mesh": PIPE, "passes": 16, "schedule": "zbv_zero_bubble", "virtual": 2}
    asked |= {"resharded": False, "recompute": "block"}
    found = run(**asked)
    parts, line = found.parts, pipelines.Pipeline(found.work, found.parts)
    again = sum(piece.compute for piece in parts.again)
    whole = sum(piece.compute for piece in parts.backward)
    of = line.seconds
    for stage in (1, 5):  # of eight, each with one block
        assert of[BACKWARD][stage] == pytest.approx(again + whole)
        assert of[WEIGHTS][stage] == pytest.approx(again + parts.weights)
        assert of[INPUTS][stage] + of[WEIGHTS][stage] == pytest.approx(2 * again + whole)
    assert (of[INPUTS][0], of[WEIGHTS][0]) == (0.0, of[BACKWARD][0])  # tokens have no gradients
    assert line.twice == pytest.approx(7 / 8)
    passes = 16 * 2 * (sum(piece.compute for piece in parts.forward) + whole + again * 15 / 8)
    assert found.busy["compute"] == pytest.approx(passes + 16 * sum(parts.head))


def staged(schedule: str, horizon: int, **parallel) -> memory.MemoryPlan:
    """Two stages of eight blocks, with eight micro-batches of a sequence."""
    asked = config((GPT2[0], {**GPT2[1], "n_layer": 16}), micro_batch=8, microbatches=8,
                   pipeline_parallel_degree=2, pipeline=schedule,
                   activation_loading_horizon=horizon, **parallel)  # fmt: skip
    moved = dataclasses.replace(asked.activations, offload=True)
    return memory.estimate(dataclasses.replace(asked, activations=moved), 2)


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_a_pipeline_has_few_blocks_of_all_micro_batches_on_the_device(horizon):
    """As `nl.offload_peak` counts them: those that leave, or come back; and where forward and
    backward passes alternate, those that wait for the next backward pass while others leave."""
    block = 256 * 256 * 2 * 28 + 256 * 8 * 4  # 28 of its width in 16 bits, and attention's sums
    plan = staged("simple", horizon)
    assert plan.parts["kept"] == (horizon + 1) * block
    assert "backward" in plan.moment
    plan = staged("1f1b", horizon)
    assert plan.parts["kept"] == 2 * horizon * block  # the block at work is the one more
    assert "forward" in plan.moment


def test_pytorchs_own_offload_leaves_one_block_on_the_device():
    plan = staged("simple", 3, sm_activation_offloading=False)
    assert plan.parts["kept"] == staged("simple", 3).parts["kept"] / 4
