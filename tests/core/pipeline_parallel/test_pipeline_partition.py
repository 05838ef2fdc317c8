"""Partitions of blocks into stages, micro-batches, and errors of `nl.pipeline`."""

import logging
import sys
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nearlinear as nl
from nearlinear.fsdp.model_state import model_state
from nearlinear.pipeline_parallel.microbatch import split_microbatches
from nearlinear.pipeline_parallel.partition import (
    ModelCosts,
    PartitionCost,
    estimate_costs,
    explicit_partition,
    partition_blocks,
)
from nearlinear.pipeline_parallel.schedules import SCHEDULES, find_schedule
from nearlinear.pipeline_parallel.stage import find_model_split
from tests.support import families


def costs(first, blocks, last):
    """Build costs from times; memory is equal."""
    return ModelCosts(
        *(PartitionCost(1, first, 1.0),),
        tuple(PartitionCost(1, t, 1.0) for t in blocks),
        PartitionCost(1, last, 1.0),
    )


@pytest.mark.parametrize("scale", [(1, 1), (1000, 1), (1, 1000), (0, 1), (1, 0)])
def test_weights_are_shares_of_the_whole_model(scale):
    times, memories = (1, 2, 5), (4, 1, 3)
    parts = [PartitionCost(1, t * scale[0], m * scale[1])
             for t, m in zip(times, memories, strict=True)]  # fmt: skip
    model = ModelCosts(parts[0], (parts[1],), parts[2])
    for memory_weight in (0.0, 0.3, 1.0):
        expected = [
            memory_weight * m / 8 * bool(scale[1]) + (1 - memory_weight) * t / 8 * bool(scale[0])
            for t, m in zip(times, memories, strict=True)
        ]
        assert [model.weight(part, memory_weight) for part in parts] == pytest.approx(expected)


def test_equal_blocks_are_partitioned_evenly():
    assert partition_blocks(costs(0, [1] * 6, 0), 3, 0.0) == [range(0, 2), range(2, 4), range(4, 6)]


def test_stage_with_a_heavy_head_gets_fewer_blocks():
    assert partition_blocks(costs(0, [1] * 7, 3), 2, 0.0) == [range(0, 5), range(5, 7)]


def test_memory_weight_trades_time_for_memory():
    """The first block takes most of the time, the last one most of the memory."""
    blocks = [PartitionCost(1, t, m) for t, m in ((9, 0), (1, 0), (0, 1), (0, 9))]
    mixed = ModelCosts(PartitionCost(0, 0, 0), tuple(blocks), PartitionCost(0, 0, 0))
    assert partition_blocks(mixed, 2, 0.0)[0] == range(0, 1)
    assert partition_blocks(mixed, 2, 1.0)[0] == range(0, 3)


@settings(max_examples=60, deadline=None)
@given(times=st.lists(st.integers(1, 9), min_size=1, max_size=8), stages=st.integers(1, 4))
def test_partition_minimizes_the_heaviest_stage(times, stages):
    stages = min(stages, len(times))
    found = partition_blocks(costs(0, times, 0), stages, 0.0)
    assert [i for blocks in found for i in blocks] == list(range(len(times)))
    heaviest = max(sum(times[i] for i in blocks) for blocks in found)
    for cut in combinations(range(1, len(times)), stages - 1):
        edges = (0, *cut, len(times))
        assert heaviest <= max(sum(times[a:b]) for a, b in zip(edges, edges[1:], strict=False))


def test_estimated_costs_count_parameters_and_multiplications():
    model = families.build("mixtral")
    found = estimate_costs(model, find_model_split(model))
    assert found.embedding == PartitionCost(97 * 32, 0.0, 97 * 32)  # looked up, not multiplied
    assert found.head == PartitionCost(97 * 32 + 32, 2 * 97 * 32, 97 * 32 + 32)
    block = model.model.layers[0]
    experts = sum(p.numel() for p in block.mlp.experts.parameters())
    rest = sum(p.numel() for p in block.parameters() if p.dim() > 1) - experts
    assert found.blocks[0].time == 2 * (rest + experts * 2 / 4)  # two experts of four per token
    assert sum(c.parameters for c in (found.embedding, *found.blocks, found.head)) == sum(
        p.numel() for p in model.parameters()
    )


def tables(rank, config, options):
    nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = families.build("gpt2")
    pipe = nl.pipeline(model, **options)
    held = sorted(name for name, _ in pipe.named_parameters())
    return str(pipe), [name for name in held if name.endswith("ln_1.weight")], held


def test_str_of_a_pipeline_is_a_table_of_stages():
    config = {"pipeline_parallel_degree": 2, "microbatches": 4}
    found = nl.spmd.run(tables, 2, args=(config, {"split": [3]}))
    for text, _, _ in found:
        first, second = text.splitlines()[1:3]
        assert first.split()[:2] == ["0", "0"] and first.endswith("embedding, 0 .. 2")
        assert second.split()[:2] == ["1", "1"] and second.endswith("3, norm, head")
        assert text.splitlines()[-1] == "schedule 1f1b, 4 micro-batches per batch"
    blocks = [[int(name.split(".")[2]) for name in names] for _, names, _ in found]
    assert blocks == [[0, 1, 2], [3]]
    assert "transformer.wte.weight" in found[0][2] and "transformer.wte.weight" in found[1][2]
    assert "transformer.wpe.weight" not in found[1][2] and "transformer.ln_f.bias" in found[1][2]


def test_unlisted_blocks_go_to_default_partition():
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    config |= {"auto_partition": False, "default_partition": 1}
    found = nl.spmd.run(tables, 2, args=(config, {"split": {0: 0}}))
    assert [len(names) for _, names, _ in found] == [1, 3]


@pytest.mark.parametrize("delayed", [False, True])
def test_measured_partition_isolates_the_heavy_block(delayed):
    """Block 0 is a hundred times as wide. Balanced by memory, which load does not change."""

    def work(rank):
        nl.init({"pipeline_parallel_degree": 2, "microbatches": 2, "memory_weight": 1.0})
        with nl.deferred_init() if delayed else nl.spmd.one_at_a_time(seed=0):
            model = families.build("gpt2")
            inner = model.transformer.h[0].mlp
            inner.c_fc = type(inner.c_fc)(3200, families.WIDTH)
            inner.c_proj = type(inner.c_proj)(families.WIDTH, 3200)
        pipe = nl.pipeline(model, measure=True)
        pipeline = model_state(pipe).pipeline
        kept = [cost.memory for cost in pipeline.costs.blocks]
        times = [cost.time for cost in pipeline.costs.blocks]
        return pipeline.partition, kept, times

    found = nl.spmd.run(work, 2)
    assert found[0] == found[1]  # the same partition on all ranks
    cut, kept, times = found[0]
    assert cut == [range(0, 1), range(1, 4)]
    assert kept[1] == kept[2] == kept[3] < kept[0] / 10
    assert times[1] == times[2] == times[3] and min(times) > 0


@pytest.mark.parametrize(
    ("asked", "default", "expected"),
    [
        ([2, 3], None, [[0, 1], [2], [3]]),
        ({0: 0, 1: 1, 2: 1, 3: 2}, None, [[0], [1, 2], [3]]),
        ({0: 0, 1: 1}, 2, [[0], [1], [2, 3]]),
    ],
)
def test_explicit_partitions(asked, default, expected):
    assert [list(blocks) for blocks in explicit_partition(asked, 4, 3, default)] == expected


@pytest.mark.parametrize(
    ("asked", "default", "words"),
    [
        ([2], None, "names the first block of each of the 2 later stages"),
        ([2, 4], None, "in ascending order, within 1 .. 3"),
        ([3, 2], None, "in ascending order, within 1 .. 3"),
        ([0, 2], None, "in ascending order, within 1 .. 3"),
        ({0: 0, 1: 0, 2: 2, 3: 2}, None, "every stage of 0 .. 2 needs at least one block"),
        (
            {0: 0, 1: 1},
            None,
            "assigns no stage to block 2. Add the block to split, or set default_partition",
        ),
        ({0: 2, 1: 1, 2: 0, 3: 0}, None, "stages of consecutive blocks must ascend"),
        ({0: 0, 1: 1, 2: 2, 3: 2, 9: 2}, None, "blocks 0 .. 3"),
    ],
)
def test_invalid_explicit_partitions_raise(asked, default, words):
    with pytest.raises(nl.errors.ConfigError, match=words):
        explicit_partition(asked, 4, 3, default)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pipeline_parallel_degree": 8}, "8 stages needs as many blocks, and the model has 4"),
        ({"pipeline_parallel_degree": 2, "pipeline": "zbv_zero_bubble", "microbatches": 2,
          "virtual_pipeline_degree": 3}, "has 2 stages per rank"),
        ({"pipeline_parallel_degree": 2, "virtual_pipeline_degree": 2},
         "interleaved_1f1b and interleaved_zero_bubble take more"),
        ({"pipeline_parallel_degree": 2, "pipeline": "interleaved_1f1b",
          "virtual_pipeline_degree": 1}, "2 or more stages per rank"),
        ({"pipeline_parallel_degree": 2, "pipeline": "dualpipev", "microbatches": 3},
         "at least as many microbatches as stages .4."),
        ({"pipeline_parallel_degree": 2, "pipeline": "interleaved_1f1b", "microbatches": 5},
         "Set microbatches to a multiple of pipeline_parallel_degree = 2"),
        ({"pipeline_parallel_degree": 2, "auto_partition": False}, "assigns no stage to block 0"),
    ],
)  # fmt: skip
def test_invalid_pipeline_config_raises(config, words):
    def work(rank):
        nl.init(config)
        with nl.spmd.one_at_a_time(seed=0):
            model = families.build("gpt2")
        with pytest.raises(nl.errors.ConfigError, match=words):
            nl.pipeline(model)

    nl.spmd.run(work, config["pipeline_parallel_degree"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pipeline": "pipedream"}, "'interleaved_1f1b'"),
        ({"memory_weight": 1.5}, "must be in 0 .. 1"),
        ({"optimize": "both"}, "'memory', 'speed'"),
        ({"active_microbatches": -1}, "must be 0 or more"),
        ({"pipeline_batch": "last_stage"}, "'every_rank', 'first_stage'"),
    ],
)
def test_invalid_config_values_raise(config, words):
    with pytest.raises(nl.errors.ConfigError, match=words):
        nl.ParallelConfig(**config)


def test_unsupported_models_raise():
    nl.init({})
    with pytest.raises(nl.errors.ConfigError, match="Linear is not a Hugging Face causal"):
        nl.pipeline(nn.Linear(2, 2))
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(nl.errors.ConfigError, match="no stage of BloomForCausalLM would hold"):
        nl.pipeline(bloom, parts={"first": ["word_embeddings"], "blocks": "h", "last": ["ln_f"]})
    mixtral = families.build("mixtral")
    mixtral.config.output_router_logits = True
    with pytest.raises(nl.errors.ConfigError, match="one loss over the routers"):
        nl.pipeline(mixtral)


def test_model_that_ignores_the_padding_of_single_rows_is_refused(monkeypatch):
    """As Bamba in transformers 4, whose micro-batches would differ from its batches."""
    model = families.build("llama")
    source = sys.modules[type(model).__module__]
    monkeypatch.setattr(source, "apply_mask_to_padding_states", lambda x, mask: x, raising=False)
    nl.init({})
    with pytest.raises(nl.errors.ConfigError, match="padding of batches of one row"):
        nl.pipeline(model)


def test_wrong_order_of_calls_raises():
    nl.init({})
    pipe = nl.pipeline(families.build("gpt2"))
    with pytest.raises(nl.errors.ConfigError, match="a pipeline already"):
        nl.pipeline(pipe)
    with pytest.raises(nl.errors.NearlinearError, match="not sharded yet: call nl.shard"):
        pipe.step(families.batch(0, 2))
    nl.shard(pipe)
    with pytest.raises(nl.errors.ConfigError, match="sharded already"):
        nl.shard(pipe)
    with pytest.raises(nl.errors.ConfigError, match="call nl.pipeline before nl.shard"):
        nl.pipeline(nl.shard(families.build("gpt2")))
    with pytest.raises(nl.errors.NearlinearError, match="call pipe.step"):
        pipe(**families.batch(0, 2))
    with pytest.raises(
        nl.errors.NearlinearError, match="returned no loss: pass pipe.step a batch with la"
    ):
        pipe.step({"input_ids": torch.zeros(2, 4, dtype=torch.long)})


def test_shard_without_pipeline_raises():
    def work(rank):
        nl.init({"pipeline_parallel_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = families.build("gpt2")
        with pytest.raises(
            nl.errors.ConfigError, match="not divided into stages: call nl.pipeline"
        ):
            nl.shard(model)

    nl.spmd.run(work, 2)


def test_indivisible_batches_raise():
    cpu = torch.device("cpu")
    with pytest.raises(
        nl.errors.DataError, match="has 6 rows along dim 0, not a multiple of microbatches = 4"
    ):
        split_microbatches({"input_ids": torch.zeros(6, 3)}, 4, cpu)
    with pytest.raises(nl.errors.DataError, match="labels has 3 rows, but the batch has 6"):
        split_microbatches({"input_ids": torch.zeros(6, 3), "labels": torch.zeros(3, 3)}, 2, cpu)
    parts = split_microbatches(
        {"input_ids": torch.arange(6)[:, None], "position_ids": torch.zeros(1, 3)}, 2, cpu
    )
    assert [part["input_ids"].flatten().tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]
    assert all(part["position_ids"].shape == (1, 3) for part in parts)


def test_settings_without_effect_are_logged(caplog):
    def work(rank):
        nl.init({"pipeline_parallel_degree": 2, "microbatches": 1, "pipeline": "simple"})
        with nl.spmd.one_at_a_time(seed=0):
            model = families.build("gpt2")
        nl.pipeline(model)
        nl.init({"pipeline_parallel_degree": 2, "microbatches": 8, "active_microbatches": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = families.build("gpt2")
        nl.pipeline(model)

    with caplog.at_level(logging.INFO, logger="nearlinear"):
        nl.spmd.run(work, 2)
    said = [record.getMessage() for record in caplog.records]
    assert sum("microbatches = 1 on 2 ranks of a pipeline" in text for text in said) == 1
    assert (
        sum("schedule 1f1b limits the micro-batches in flight itself" in text for text in said) == 1
    )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_schedule_assigns_every_stage_to_one_rank(name, ranks):
    schedule = find_schedule(name, ranks, 0, 2 * ranks)
    stages = [schedule.stages_of(rank) for rank in range(ranks)]
    assert sorted(stage for of_rank in stages for stage in of_rank) == list(range(schedule.stages))
    assert {len(of_rank) for of_rank in stages} == {schedule.stages_per_rank}
    if schedule.spec.v_shaped:
        assert stages[0] == [0, schedule.stages - 1]  # V-shaped
