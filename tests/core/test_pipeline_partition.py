"""Which block lands on which stage, and what cannot be cut or scheduled."""

import logging
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import nearlinear as nl
from nearlinear.parallel.pipeline.partition import Cost, Costs, by_hand, estimate, split
from nearlinear.parallel.pipeline.parts import parts_of
from nearlinear.parallel.pipeline.pieces import pieces
from nearlinear.parallel.pipeline.schedules import SCHEDULES, plan_for
from tests.support import families


def costs(first, blocks, last):
    """Times; memory does not count where its weight is 0."""
    return Costs(
        *(Cost(1, first, 1.0),), tuple(Cost(1, t, 1.0) for t in blocks), Cost(1, last, 1.0)
    )


def test_equal_blocks_are_cut_evenly():
    assert split(costs(0, [1] * 6, 0), 3, 0.0) == [range(0, 2), range(2, 4), range(4, 6)]


def test_a_heavy_head_has_fewer_blocks_beside_it():
    assert split(costs(0, [1] * 7, 3), 2, 0.0) == [range(0, 5), range(5, 7)]


def test_memory_weight_decides_between_time_and_memory():
    """A block that takes all the time, and another that takes all the memory."""
    blocks = [Cost(1, t, m) for t, m in ((9, 0), (1, 0), (0, 1), (0, 9))]
    mixed = Costs(Cost(0, 0, 0), tuple(blocks), Cost(0, 0, 0))
    assert split(mixed, 2, 0.0)[0] == range(0, 1)
    assert split(mixed, 2, 1.0)[0] == range(0, 3)


@settings(max_examples=60, deadline=None)
@given(times=st.lists(st.integers(1, 9), min_size=1, max_size=8), stages=st.integers(1, 4))
def test_no_other_cut_has_a_lighter_heaviest_stage(times, stages):
    stages = min(stages, len(times))
    found = split(costs(0, times, 0), stages, 0.0)
    assert [i for blocks in found for i in blocks] == list(range(len(times)))
    heaviest = max(sum(times[i] for i in blocks) for blocks in found)
    for cut in combinations(range(1, len(times)), stages - 1):
        edges = (0, *cut, len(times))
        assert heaviest <= max(sum(times[a:b]) for a, b in zip(edges, edges[1:], strict=False))


def test_estimates_count_parameters_and_multiplications():
    model = families.build("mixtral")
    found = estimate(model, parts_of(model))
    assert found.first == Cost(97 * 32, 0.0, 97 * 32)  # looked up, not multiplied
    assert found.last == Cost(97 * 32 + 32, 2 * 97 * 32, 97 * 32 + 32)
    block = model.model.layers[0]
    experts = sum(p.numel() for p in block.mlp.experts.parameters())
    rest = sum(p.numel() for p in block.parameters() if p.dim() > 1) - experts
    assert found.blocks[0].time == 2 * (rest + experts * 2 / 4)  # two experts of four per token
    assert sum(c.parameters for c in (found.first, *found.blocks, found.last)) == sum(
        p.numel() for p in model.parameters()
    )


def tables(rank, config, options):
    nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = families.build("gpt2")
    pipe = nl.pipeline(model, **options)
    held = sorted(name for name, _ in pipe.named_parameters())
    return str(pipe), [name for name in held if name.endswith("ln_1.weight")], held


def test_the_table_says_what_landed_where():
    config = {"pipeline_parallel_degree": 2, "microbatches": 4}
    found = nl.spmd.run(tables, 2, args=(config, {"split": [3]}))
    for text, _, _ in found:
        first, second = text.splitlines()[1:3]
        assert first.split()[:2] == ["0", "0"] and first.endswith("embedding, 0 .. 2")
        assert second.split()[:2] == ["1", "1"] and second.endswith("3, norm, head")
        assert text.splitlines()[-1] == "schedule 1f1b, 4 micro-batches of every batch"
    blocks = [[int(name.split(".")[2]) for name in names] for _, names, _ in found]
    assert blocks == [[0, 1, 2], [3]]
    assert "transformer.wte.weight" in found[0][2] and "transformer.wte.weight" in found[1][2]
    assert "transformer.wpe.weight" not in found[1][2] and "transformer.ln_f.bias" in found[1][2]


def test_blocks_that_are_not_named_go_to_the_default_partition():
    config = {"pipeline_parallel_degree": 2, "microbatches": 2}
    config |= {"auto_partition": False, "default_partition": 1}
    found = nl.spmd.run(tables, 2, args=(config, {"split": {0: 0}}))
    assert [len(names) for _, names, _ in found] == [1, 3]


@pytest.mark.parametrize("delayed", [False, True])
def test_a_measured_split_finds_the_heavy_block(delayed):
    """Block 0 is a hundred times as wide as the others: it stays alone. Cut by what was kept, which
    a busy machine does not change."""

    def work(rank):
        nl.init({"pipeline_parallel_degree": 2, "microbatches": 2, "memory_weight": 1.0})
        with nl.delayed_init() if delayed else nl.spmd.one_at_a_time(seed=0):
            model = families.build("gpt2")
            inner = model.transformer.h[0].mlp
            inner.c_fc = type(inner.c_fc)(3200, families.WIDTH)
            inner.c_proj = type(inner.c_proj)(families.WIDTH, 3200)
        pipe = nl.pipeline(model, measure=True)
        engine = pipe._nearlinear_pipeline
        kept = [cost.memory for cost in engine.costs.blocks]
        times = [cost.time for cost in engine.costs.blocks]
        return engine.split, kept, times

    found = nl.spmd.run(work, 2)
    assert found[0] == found[1]  # all ranks cut alike
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
def test_splits_by_hand(asked, default, expected):
    assert [list(blocks) for blocks in by_hand(asked, 4, 3, default)] == expected


@pytest.mark.parametrize(
    ("asked", "default", "words"),
    [
        ([2], None, "names the first block of each of the 2 later stages"),
        ([2, 4], None, "rising, in 1 .. 3"),
        ([3, 2], None, "rising, in 1 .. 3"),
        ([0, 2], None, "rising, in 1 .. 3"),
        ({0: 0, 1: 0, 2: 2, 3: 2}, None, "every stage of 0 .. 2 needs blocks"),
        ({0: 0, 1: 1}, None, "says nothing of block 2: name it, or set default_partition"),
        ({0: 2, 1: 1, 2: 0, 3: 0}, None, "neighbours together and in order"),
        ({0: 0, 1: 1, 2: 2, 3: 2, 9: 2}, None, "blocks 0 .. 3"),
    ],
)
def test_splits_by_hand_that_cannot_be(asked, default, words):
    with pytest.raises(nl.ConfigError, match=words):
        by_hand(asked, 4, 3, default)


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
         "at least as many microbatches as stages, 4"),
        ({"pipeline_parallel_degree": 2, "pipeline": "interleaved_1f1b", "microbatches": 5},
         "use a multiple of pipeline_parallel_degree = 2"),
        ({"pipeline_parallel_degree": 2, "auto_partition": False}, "says nothing of block 0"),
    ],
)  # fmt: skip
def test_impossible_pipelines_are_refused(config, words):
    def work(rank):
        nl.init(config)
        with nl.spmd.one_at_a_time(seed=0):
            model = families.build("gpt2")
        with pytest.raises(nl.ConfigError, match=words):
            nl.pipeline(model)

    nl.spmd.run(work, config["pipeline_parallel_degree"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pipeline": "pipedream"}, "'interleaved_1f1b'"),
        ({"memory_weight": 1.5}, "must be in 0 .. 1"),
        ({"optimize": "both"}, "'memory', 'speed'"),
        ({"active_microbatches": -1}, "must be 0 or more"),
        ({"prescaled_batch": False, "tensor_parallel_degree": 2}, "as nl.Loader does"),
    ],
)
def test_settings_that_cannot_be_are_refused(config, words):
    with pytest.raises(nl.ConfigError, match=words):
        nl.Config(**config)


def test_models_that_cannot_be_cut_are_refused():
    nl.init({})
    with pytest.raises(nl.ConfigError, match="Linear is not a Hugging Face causal"):
        nl.pipeline(nn.Linear(2, 2))
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(nl.ConfigError, match="BloomForCausalLM does not say how it can be cut"):
        nl.pipeline(bloom)
    with pytest.raises(nl.ConfigError, match="no stage of BloomForCausalLM would hold"):
        nl.pipeline(bloom, parts={"first": ["word_embeddings"], "blocks": "h", "last": ["ln_f"]})
    mixtral = families.build("mixtral")
    mixtral.config.output_router_logits = True
    with pytest.raises(nl.ConfigError, match="one loss over the routers"):
        nl.pipeline(mixtral)


def test_order_of_calls():
    nl.init({})
    pipe = nl.pipeline(families.build("gpt2"))
    with pytest.raises(nl.ConfigError, match="a pipeline already"):
        nl.pipeline(pipe)
    with pytest.raises(nl.NearlinearError, match="not sharded yet: call nl.shard"):
        pipe.step(families.batch(0, 2))
    nl.shard(pipe)
    with pytest.raises(nl.ConfigError, match="sharded already"):
        nl.shard(pipe)
    with pytest.raises(nl.ConfigError, match="call nl.pipeline before nl.shard"):
        nl.pipeline(nl.shard(families.build("gpt2")))
    with pytest.raises(nl.NearlinearError, match="call pipe.step"):
        pipe(**families.batch(0, 2))
    with pytest.raises(
        nl.NearlinearError, match="returned no loss: give pipe.step a batch with la"
    ):
        pipe.step({"input_ids": torch.zeros(2, 4, dtype=torch.long)})


def test_a_pipeline_that_was_asked_for_is_not_forgotten():
    def work(rank):
        nl.init({"pipeline_parallel_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = families.build("gpt2")
        with pytest.raises(nl.ConfigError, match="the model is whole: call nl.pipeline"):
            nl.shard(model)

    nl.spmd.run(work, 2)


def test_batches_that_do_not_divide_are_refused():
    cpu = torch.device("cpu")
    with pytest.raises(nl.DataError, match="has 6 rows along dim 0, which microbatches = 4 do not"):
        pieces({"input_ids": torch.zeros(6, 3)}, 4, cpu)
    with pytest.raises(nl.DataError, match="labels has 3 rows where the batch has 6"):
        pieces({"input_ids": torch.zeros(6, 3), "labels": torch.zeros(3, 3)}, 2, cpu)
    parts = pieces(
        {"input_ids": torch.arange(6)[:, None], "position_ids": torch.zeros(1, 3)}, 2, cpu
    )
    assert [part["input_ids"].flatten().tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]
    assert all(part["position_ids"].shape == (1, 3) for part in parts)


def test_what_cannot_take_effect_is_said(caplog):
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
    assert sum("schedule 1f1b itself decides how many are in flight" in text for text in said) == 1


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_stage_is_on_one_rank(name, ranks):
    plan = plan_for(name, ranks, 0, 2 * ranks)
    stages = [plan.stages_of(rank) for rank in range(ranks)]
    assert sorted(stage for of_rank in stages for stage in of_rank) == list(range(plan.stages))
    assert {len(of_rank) for of_rank in stages} == {plan.per_rank}
    if plan.schedule.v:
        assert stages[0] == [0, plan.stages - 1]  # there and back
