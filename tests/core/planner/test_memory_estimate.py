"""Memory model of the planner: closed form, dry run, and real steps."""

import functools
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import nearlinear as nl
from ci.planner_validation.memory import CASES, MAX_ERROR
from nearlinear._torch import all_gather, reduce_scatter
from nearlinear.config.schema import to_toml
from nearlinear.config.train import TrainConfig, load
from nearlinear.errors import ConfigError, NearlinearError
from nearlinear.planner import dry_run, memory
from nearlinear.planner.dry_run.__main__ import main
from nearlinear.planner.dry_run.step import BACKEND
from nearlinear.planner.memory.report import FRAGMENTATION
from nearlinear.train.model import build_model, parallelize
from nearlinear.train.optimizer import build_optimizer
from tests.support.allocations import step_of
from tests.support.planner_models import (
    GPT2,
    LLAMA,
    MIXTRAL,
    NEOX,
    WORDS,
    config,
    off,
)
from tests.support.processes import in_turn

QUICK = [
    case
    for case in CASES
    if case.name == "llama 13b" and not case.checkpoint and case.pipeline == 1
]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.name} on {case.gpus}")
def test_estimate_matches_dry_run_for_large_configs(case):
    """All cases run in `python -m ci.planner_validation.memory`; some take a minute."""
    plan, found = memory.estimate(case.config, case.gpus), dry_run.measure(case.config, case.gpus)
    assert plan.persistent == found.persistent
    assert off(plan, found.peak) < MAX_ERROR


def test_estimate_of_30_billion_parameters_on_256_gpus():
    """torch's memory tracker reports 22.7 GiB, of which 2.6 GiB remain between steps."""
    case = next(case for case in CASES if case.name == "gpt2 30b" and case.tensor == 1)
    plan = memory.estimate(case.config, case.gpus)
    assert plan.peak / 2**30 == pytest.approx(22.7, rel=0.01)
    assert plan.persistent / 2**30 == pytest.approx(2.617, rel=0.001)
    assert plan.moment == "in the backward pass: block 47 of 48"
    assert plan.total > plan.reserved > plan.peak == sum(plan.parts.values())
    page = Path(__file__).parents[3] / "packages/core/docs/howto/fit_a_model.md"
    assert str(plan) in page.read_text(encoding="utf-8")


def test_reserve_has_the_gradients_and_logits_that_are_freed_too_early():
    given = load(
        {
            "model": {"preset": "llama2-7b", "overrides": {"vocab_size": 256000}},
            "parallel": {"bf16": True},
            "batch": {"micro_batch_size": 8},
            "data": {"sequence_length": 512},
            "activations": {"checkpoint": "each"},
        }
    )
    plan = memory.estimate(given, 8)
    assert plan.moment == "in the backward pass: the loss"
    gradients, logits = plan.parts["parameters"], 8 * 512 * 256000 * 2
    unusable = plan.reserved / (1 + FRAGMENTATION) - plan.peak
    assert unusable == pytest.approx(gradients + logits, rel=0.01)


LAYOUTS = {
    "everything kept": (8, config(GPT2, hybrid_shard_degree=4)),
    "few gathered": (8, config(LLAMA, "each", sdp_max_live_parameters=0)),
    "some gathered": (8, config(GPT2, "each", accumulation=2, sdp_max_live_parameters=3 * 10**6)),
    "two replicas": (8, config(LLAMA, "each", accumulation=2, hybrid_shard_degree=4)),
    "no sharding": (4, config(LLAMA, "each", hybrid_shard_degree=1)),
    "tensor ranks": (8, config(NEOX, "each", tensor_parallel_degree=2)),
    "context ranks": (8, config(LLAMA, context_parallel_degree=2)),
    "four context ranks": (8, config(GPT2, "each", context_parallel_degree=4)),
    "keys at once": (
        8,
        config(GPT2, "each", context_parallel_degree=4, cp_comm_type="all_gather"),
    ),
    "slices": (8, config(LLAMA, "each", hybrid_shard_degree=2, shard_optimizer_state=True)),
    "selective": (8, config(GPT2, "selective")),
    "groups": (8, config(LLAMA, "group_2")),
    "a budget": (8, config(LLAMA, "40MiB")),
    "float32": (8, config(GPT2, bf16=False, tensor_parallel_degree=2)),
    "slices of experts": (
        32,
        config(MIXTRAL, "each", hybrid_shard_degree=16, shard_optimizer_state=True),
    ),
    "nothing ahead": (8, config(LLAMA, "each", prefetch_depth=0, sdp_max_live_parameters=0)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_estimate_matches_dry_run_by_layout(layout):
    world, asked = LAYOUTS[layout]
    plan, found = memory.estimate(asked, world), dry_run.measure(asked, world)
    assert plan.persistent == found.persistent
    assert off(plan, found.peak) < MAX_ERROR


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_experts_are_shared_by_all_ranks_evenly(ranks):
    asked = load({"model": {"preset": "mixtral-8x7b"}, "data": {"sequence_length": 512}})
    states = 46.7e9 * 12  # float32 parameters and AdamW's two states
    assert memory.estimate(asked, ranks).persistent == pytest.approx(states / ranks, rel=0.1)


def test_estimate_matches_dry_run_with_fewer_experts_than_ranks():
    """A copy of the experts after each all-gather is 17 % of the peak."""
    asked = load(
        {
            "model": {"preset": "mixtral-8x7b", "overrides": {"num_hidden_layers": 2}},
            "data": {"sequence_length": 512},
            "parallel": {"bf16": True},
            "batch": {"micro_batch_size": 1},
            "activations": {"checkpoint": "each"},
        }
    )
    plan, found = memory.estimate(asked, 64), dry_run.measure(asked, 64)
    assert plan.persistent == found.persistent
    assert off(plan, found.peak) < 0.01


# Few tokens: products in bfloat16 are slow on processors without instructions for it.
small = functools.partial(config, sequence=128)
REAL = {
    "kept": small(GPT2, micro_batch=2, bf16=False),
    "recomputed": small(LLAMA, "each", 1, sdp_max_live_parameters=0, overlap_communication=False),
    "beside": small(GPT2, "each", 1, accumulation=2),
    "tensor ranks": small(LLAMA, micro_batch=2, tensor_parallel_degree=2),
    "replicas": small(NEOX, "each", 1, hybrid_shard_degree=1, accumulation=2),
    "a pipeline": small(GPT2, micro_batch=4, pipeline_parallel_degree=2, microbatches=4),
    "experts": small(MIXTRAL, "each", 2, expert_parallel_degree=2),
}


@pytest.mark.slow
def test_estimate_matches_the_allocator():
    """Two CPU processes train and compare their memory report with the estimate."""
    runs = in_turn(step_of, 2, [(asked, WORDS) for asked in REAL.values()])
    for (name, asked), ranks in zip(REAL.items(), runs, strict=True):
        plan = memory.estimate(asked, 2)
        between, most = ranks[plan.pipeline_rank or 0]
        if plan.pipeline_rank is None:  # pipeline ranks that wait hold more
            most = min(each for _, each in ranks)
        assert plan.persistent == between, name
        assert off(plan, most) < 0.1, name
        assert off(dry_run.measure(asked, 2), most) < 0.1, name


def report_of(rank: int, asked: TrainConfig):
    nl.init(asked.parallel)
    with nl.spmd.one_at_a_time(seed=0):
        model = build_model(asked.model, WORDS)
    model, _ = parallelize(model, asked)
    optimizer = build_optimizer(model, asked.optimizer)
    ids = torch.zeros(asked.batch.micro_batch_size, asked.sequence_length, dtype=torch.long)
    with nl.memory_report(model, optimizer) as found:
        for batch in nl.accumulate(model, [{"input_ids": ids, "labels": ids}]):
            model(**batch).loss.backward()
        optimizer.step()
    return found.report.mine


@pytest.mark.parametrize("layout", [{"hybrid_shard_degree": 2}, {"tensor_parallel_degree": 2}])
def test_estimate_matches_the_memory_report(layout):
    asked = small(GPT2, micro_batch=2, **layout)
    plan, report = memory.estimate(asked, 4), nl.spmd.run(report_of, 4, args=(asked,))[0]
    for part in ("parameters", "optimizer"):
        assert plan.parts[part] == report[part]
    assert plan.parts["kept"] == pytest.approx(report["activations"], rel=0.1)
    assert plan.parts["gathered"] == pytest.approx(report["gathered"], rel=0.1)


def test_mirror_group_simulates_identical_ranks():
    dist.init_process_group(BACKEND, rank=1, world_size=4, store=dist.HashStore())
    try:
        total, mine = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0, 6.0])
        dist.all_reduce(total)
        assert total.tolist() == [4.0, 8.0]
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        assert total.tolist() == [4.0, 8.0]
        gathered, part = torch.empty(16), torch.empty(1)
        all_gather(gathered, mine)
        assert gathered.tolist() == mine.tolist() * 4
        reduce_scatter(part, mine)
        assert part.tolist() == [16.0]
        exchanged = torch.empty(4)
        dist.all_to_all_single(exchanged, mine)
        assert exchanged.tolist() == [4.0] * 4
    finally:
        dist.destroy_process_group()


def test_dry_run_cleans_up():
    dry_run.measure(config(GPT2), 2)
    assert not dist.is_initialized()
    assert not nl.spmd.run(lambda rank: dist.get_world_size() - 2, 2)[0]


def test_dry_run_inside_a_job_raises():
    dist.init_process_group(BACKEND, rank=0, world_size=2, store=dist.HashStore())
    try:
        with pytest.raises(NearlinearError, match="needs its own process"):
            dry_run.measure(config(GPT2), 2)
    finally:
        dist.destroy_process_group()


def test_dry_run_rejects_offloading():
    with pytest.raises(ConfigError, match="offload_optimizer"):
        dry_run.measure(config(GPT2, offload_optimizer=True), 2)
    with pytest.raises(ConfigError, match="does not divide"):
        dry_run.measure(config(GPT2, hybrid_shard_degree=3), 4)


def test_unknown_family_is_modelled_as_a_known_one(tmp_path):
    keys = {"model_type": "qwen2", "vocab_size": WORDS, "hidden_size": 256, "num_hidden_layers": 5}
    keys |= {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 704}
    keys |= {"max_position_embeddings": 256, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    asked = load({"model": {"init_from": str(tmp_path)}, "parallel": {"bf16": True}})
    plan, like = memory.estimate(asked, 2), memory.estimate(config(LLAMA, micro_batch=8), 2)
    assert "modelled as llama" in plan.rough and plan.rough in str(plan)
    assert plan.as_dict()["rough"] == plan.rough and not like.rough
    assert plan.peak == pytest.approx(like.peak, rel=0.02)


def test_offloading_reduces_the_estimate():
    kept = config(GPT2)
    moved = load({**_tables(kept), "activations": {"offload": True}})
    assert memory.estimate(moved, 2).parts["kept"] < memory.estimate(kept, 2).parts["kept"]
    offloaded = memory.estimate(config(GPT2, offload_optimizer=True), 2)
    assert offloaded.persistent == 0 and offloaded.parts["optimizer"] == 0


def _tables(asked: TrainConfig) -> dict:
    return {
        "model": {"preset": asked.model.preset, "overrides": asked.model.overrides},
        "data": {"sequence_length": 256},
        "parallel": {"bf16": True},
        "batch": {"micro_batch_size": asked.batch.micro_batch_size},
    }


def test_estimate_does_not_import_torch():
    program = (
        "import sys; from nearlinear.planner import memory; "
        "plan = memory.estimate({'model': {'preset': 'gpt2-30b'}}, 256); "
        "print(plan); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the peak is in the" in done.stdout


def test_dry_run_command(tmp_path, capsys):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config(GPT2)), encoding="utf-8")
    command = [str(path), "--gpus", "4", "--set", "parallel.hybrid_shard_degree=2"]
    earlier_peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of other tests
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"] == sum(found["parts"].values())
    assert earlier_peak <= found["host_memory"] < earlier_peak + 2**30
    assert main([*command, "--set", "parallel.offload_optimizer=true"]) == 2
    assert "offload_optimizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tables", "word"),
    [
        ({"train": {"compile_blocks": True}}, "compiled"),
        ({"parallel": {"bf16": True, "fp8": True}}, "float8"),
        ({"activations": {"offload": True}}, "horizon"),
        (
            {
                "parallel": {"bf16": True, "context_parallel_degree": 2},
                "activations": {"checkpoint": "selective"},
            },
            "a tenth",
        ),
        ({}, ""),
    ],
)
def test_unchecked_features_are_marked_rough(tables, word):
    plan = memory.estimate(load(_tables(config(LLAMA)) | tables), 8)
    assert word in plan.rough if word else not plan.rough
