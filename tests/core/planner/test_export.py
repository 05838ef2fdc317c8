"""`nearlinear plan --export`: layouts for torchtitan, Megatron-LM and DeepSpeed."""

import json
import shlex

import pytest

import nearlinear as nl
from nearlinear.errors import ConfigError
from nearlinear.planner.export import export

PIPELINE = {
    "hybrid_shard_degree": 8,
    "tensor_parallel_degree": 8,
    "pipeline_parallel_degree": 2,
    "pipeline": "interleaved_1f1b",
    "virtual_pipeline_degree": 2,
    "microbatches": 8,
}


def planned(preset="llama3-70b", parallel=None, cluster="h100:32", **tables):
    batch = {"micro_batch_size": (parallel or {}).get("microbatches", 2)}
    data = {"model": {"preset": preset}, "parallel": {"bf16": True, **(parallel or {})},
            "batch": batch} | tables  # fmt: skip
    return nl.plan(data, cluster)


def flags_of(text):
    """Return the options of a command by name; "" for those without a value."""
    command = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    words = shlex.split(command.replace("\\\n", " "))
    names = [place for place, word in enumerate(words) if word.startswith("--")]
    ends = [*names[1:], len(words)]
    return {
        words[begin][2:]: " ".join(words[begin + 1 : end])
        for begin, end in zip(names, ends, strict=True)
    }


def test_megatron_trains_the_same_batch_in_the_same_layout():
    found = flags_of(export(planned(parallel=PIPELINE), "megatron"))
    expected = {
        "tensor-model-parallel-size": "8",
        "pipeline-model-parallel-size": "2",
        "num-virtual-stages-per-pipeline-rank": "2",
        "sequence-parallel": "",
        "micro-batch-size": "1",
        "global-batch-size": "128",  # 16 data ranks x 8 micro-batches
        "use-distributed-optimizer": "",
        "num-distributed-optimizer-instances": "2",
        "num-layers": "80",
        "hidden-size": "8192",
        "ffn-hidden-size": "28672",
        "num-query-groups": "8",
        "bf16": "",
    }
    assert expected.items() <= found.items()
    assert "recompute-granularity" not in found and "fp16" not in found


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ("selective", {"recompute-granularity": "selective"}),
        ("group_4", {"recompute-method": "uniform", "recompute-num-layers": "4"}),
        ("contiguous", {"recompute-method": "uniform", "recompute-num-layers": "80"}),
    ],
)
def test_recomputation_of_megatron(checkpoint, expected):
    result = planned(activations={"checkpoint": checkpoint})
    assert expected.items() <= flags_of(export(result, "megatron")).items()


def test_experts_of_megatron():
    result = planned("mixtral-8x22b", {"expert_parallel_degree": 8})
    expected = {"num-experts": "8", "moe-router-topk": "2", "moe-ffn-hidden-size": "16384",
                "expert-model-parallel-size": "8"}  # fmt: skip
    assert expected.items() <= flags_of(export(result, "megatron")).items()


def test_flags_of_torchtitan():
    found = flags_of(export(planned(parallel=PIPELINE), "torchtitan"))
    assert found["config"] == "llama3_70b"
    assert found["training.local_batch_size"] == "8"
    assert found["training.global_batch_size"] == "128"
    assert found["parallelism.data_parallel_replicate_degree"] == "2"
    assert found["parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"


@pytest.mark.parametrize("parallel", [PIPELINE, {"hybrid_shard_degree": 8}, {}])
def test_torchtitan_accepts_its_flags(parallel):
    titan = pytest.importorskip("torchtitan.config")
    flags = flags_of(export(planned(parallel=parallel), "torchtitan"))
    words = [word for name, value in flags.items() for word in (f"--{name}", value) if word]
    config = titan.ConfigManager().parse_args(words)
    assert config.training.global_batch_size == int(flags["training.global_batch_size"])
    assert config.parallelism.tensor_parallel_degree == parallel.get("tensor_parallel_degree", 1)


@pytest.mark.parametrize(
    ("parallel", "stage"),
    [({"hybrid_shard_degree": 0}, 3), ({"hybrid_shard_degree": 1, "offload_optimizer": True}, 0)],
)
def test_deepspeed_accepts_its_config(monkeypatch, parallel, stage):
    deepspeed = pytest.importorskip("deepspeed.runtime.config")
    monkeypatch.setattr(deepspeed.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed.dist, "get_world_size", lambda: 256)
    document = json.loads(export(planned(parallel=parallel), "deepspeed"))
    config = deepspeed.DeepSpeedConfig(document)
    assert config.train_batch_size == 512 and config.train_micro_batch_size_per_gpu == 2
    assert config.zero_optimization_stage == stage and config.bfloat16_config.enabled


@pytest.mark.parametrize(
    ("tool", "parallel", "message"),
    [
        ("deepspeed", PIPELINE, "parallel.pipeline_parallel_degree = 2: its pipelines are modules"),
        ("deepspeed", {"context_parallel_degree": 2, "hybrid_shard_degree": 8},
         "context_parallel_degree = 2"),
        ("deepspeed", {"hybrid_shard_degree": 8}, "hybrid_shard_degree = 8: .* has no MiCS"),
        ("megatron", PIPELINE | {"pipeline": "zbv_zero_bubble", "virtual_pipeline_degree": 0},
         "parallel.pipeline = 'zbv_zero_bubble': its schedule is 1F1B"),
        ("torchtitan", {"offload_optimizer": True}, "parallel.offload_optimizer = true"),
        ("tensorflow", {}, "choose one of torchtitan, megatron, deepspeed"),
    ],
)  # fmt: skip
def test_layouts_without_an_equivalent_are_refused(tool, parallel, message):
    with pytest.raises(ConfigError, match=f"--export {tool}: .*{message}"):
        export(planned(parallel=parallel), tool)
