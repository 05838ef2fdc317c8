"""Layout search, scaling curves, and suggested changes for configs that do not fit."""

import contextlib
import dataclasses
import json
import math

import pytest

import nearlinear as nl
from nearlinear.cli import main
from nearlinear.config import train as train_config
from nearlinear.errors import ConfigError
from nearlinear.planner import api, search
from nearlinear.planner.api import parse_cluster
from nearlinear.planner.explain import suggest_fit
from nearlinear.planner.result import extrapolations
from nearlinear.planner.step_time import least_seconds, step_time_of

GIB = 2**30
GPT2 = {
    "model": {"preset": "gpt2-30b"},
    "parallel": {"hybrid_shard_degree": 128, "bf16": True},
    "batch": {"micro_batch_size": 6},
    "activations": {"checkpoint": "each"},
}
MIXTRAL = {
    "model": {"preset": "mixtral-tiny"},
    "parallel": {"bf16": True},
    "batch": {"micro_batch_size": 2},
}


def loaded(data: dict, *settings: str):
    return train_config.load(data, settings, environment={})


@pytest.fixture
def few(monkeypatch):
    """Reduce the search space, for speed."""
    monkeypatch.setattr(search, "TENSOR", (1, 4))
    monkeypatch.setattr(search, "PIPELINE", (1, 8))
    monkeypatch.setattr(search, "MAX_MICRO_BATCH", 6)


def test_search_ranks_fitting_layouts(few):
    config, cluster = loaded(GPT2), parse_cluster("p4d.24xlarge:32")
    found = search.search(config, cluster, most=5)
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert found[0].seconds <= search.evaluate(config, cluster).seconds
    for each in found:
        assert search.global_batch(each.config, cluster) == 1536
        assert each.memory <= 40 * GIB
    again = api.plan(found[0].config, cluster)
    assert again.seconds == pytest.approx(found[0].seconds)


def test_changes_of_a_candidate_reproduce_its_config(few):
    """The keys of `changes` also override a fixed global batch."""
    fixed = "batch.sequences=1536", "batch.micro_batch_size=3"
    found = search.search(loaded(GPT2, *fixed), parse_cluster("p4d.24xlarge:32"), most=1)
    keys = [f"{key}={json.dumps(value)}" for key, value in found[0].changes.items()]
    assert loaded(GPT2, *fixed, *keys) == found[0].config


def test_search_finds_the_same_as_exhaustive_evaluation(few, monkeypatch):
    """The search estimates the memory of few layouts; this test estimates all."""
    monkeypatch.setattr(search, "SCHEDULES", {("interleaved_1f1b", 2): 0.5})
    config, cluster = loaded(GPT2), parse_cluster("p4d.24xlarge:32")
    found = search.search(config, cluster, most=5)
    fastest: dict = {}
    for each, _ in search._Layouts(config, cluster, None, math.inf).fastest_first():
        layout = search.evaluate(each.config, cluster)
        batch = each.degrees, each.size
        if layout.memory <= cluster.gpu.memory_gib * GIB:
            fastest[batch] = min(layout.seconds, fastest.get(batch, layout.seconds))
    assert [each.seconds for each in found] == pytest.approx(sorted(fastest.values())[:5])


def test_micro_batch_sizes_divide_the_batch():
    assert search.micro_batch_sizes(1280, 32) == [1, 2, 4, 5, 8, 10, 20, 40]
    assert search.micro_batch_sizes(10, 4) == []


def test_search_raises_if_nothing_fits(few):
    alone = loaded(GPT2 | {"parallel": {"bf16": True}})
    with pytest.raises(ConfigError, match="no layout .* fits"):
        search.search(alone, parse_cluster("p4d.24xlarge:1"))


@pytest.mark.parametrize("data", [GPT2, MIXTRAL])
@pytest.mark.parametrize(
    "more", [{}, {"shard_optimizer_state": True}, {"offload_optimizer": True}], ids=str
)
def test_no_layout_needs_less_memory_than_its_states(few, data, more):
    config = loaded(data | {"parallel": data["parallel"] | more, "batch": {"sequences": 192}})
    cluster = parse_cluster("p4d.24xlarge:4")
    whole = search._Layouts(config, cluster, None, math.inf)
    totals, bounds = [], []
    for layout, _ in whole.with_most_memory():
        for each in (layout, *(other for other, _ in whole.with_less_memory(layout))):
            totals.append(search._memory(each.config, cluster, None))
            bounds.append(search.least_total(each.config, cluster.world, 0))
    assert all(bound <= total for bound, total in zip(bounds, totals, strict=True))
    limit = sorted(bounds)[len(bounds) // 2]
    kept = [*search._Layouts(config, cluster, None, limit).with_most_memory()]
    assert 0 < len(kept) <= len([*whole.with_most_memory()])
    assert (len(kept) < len([*whole.with_most_memory()])) == (max(bounds) > limit)


def test_activation_settings_are_ordered_by_speed_and_memory():
    config, cluster = loaded(GPT2), parse_cluster("p4d.24xlarge:32")
    degrees = search.ParallelDegrees(sharing=128, tensor=1, context=1, pipeline=1, expert=1)
    found = [
        search.evaluate(search.with_layout(config, degrees, 2, 3, kept), cluster)
        for kept in search.ACTIVATION_SETTINGS
    ]
    seconds, memory = ([getattr(each, of) for each in found] for of in ("seconds", "memory"))
    assert seconds == sorted(seconds)
    assert memory == sorted(memory, reverse=True)


def test_search_tries_expert_parallelism_for_moe():
    cluster = parse_cluster("a100-80gb:1")
    tried = {each.expert for each in search.parallel_degrees(loaded(MIXTRAL), cluster)}
    assert {1, 2, 4} <= tried
    assert {each.expert for each in search.parallel_degrees(loaded(GPT2), cluster)} == {1}
    found = search.search(loaded(MIXTRAL), cluster)
    assert found[0].changes["parallel.expert_parallel_degree"] in tried


def test_search_skips_configs_that_the_trainer_rejects(few, monkeypatch):
    """48 layers cannot form 64 stages; the search continues with other layouts."""
    monkeypatch.setattr(search, "PIPELINE", (1, 64))
    found = search.search(loaded(GPT2), parse_cluster("p4d.24xlarge:32"))
    assert {each.changes["parallel.pipeline_parallel_degree"] for each in found} == {1}


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("tensor_parallel_degree=64", "does not divide n_head"),
        ("pipeline_parallel_degree=64", "only 48 layers"),
        ("expert_parallel_degree=2", "has no experts"),
    ],
)
def test_plan_rejects_invalid_degrees(setting, word):
    data = GPT2 | {"parallel": {"bf16": True}, "batch": {"micro_batch_size": 64}}
    settings = (f"parallel.{setting}", "parallel.microbatches=64")
    odd = ("model.overrides.n_head=56",)
    with pytest.raises(ConfigError, match=word):
        nl.plan(data, "p4d.24xlarge:32", settings=settings + odd)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (["parallel.bf16=false", "parallel.fp16=true", "parallel.gather_dtype=bf16"], "fp16"),
        (["activations.checkpoint=1KiB"], "with every block recomputed"),
        (["parallel.expert_parallel_degree=2", "moe.smp_moe=false"], "smp_moe = false"),
        (["moe.moe_load_balancing=aux_loss", "parallel.context_parallel_degree=2"], "context"),
        (["moe.moe_z_loss_coeff=0.1", "parallel.context_parallel_degree=2"], "router losses"),
        (["model.overrides.output_router_logits=true", "parallel.pipeline_parallel_degree=2"],
         "pipeline_parallel_degree > 1"),
        (["moe.moe_load_balancing=sinkhorn", "parallel.pipeline_parallel_degree=2"], "all layers"),
    ],
)  # fmt: skip
def test_plan_rejects_invalid_moe_settings_and_budgets(settings, word):
    with pytest.raises(ConfigError, match=word):
        nl.plan(MIXTRAL, "a100-80gb:1", settings=settings)
    without = ["moe.moe_load_balancing=none", "moe.moe_z_loss_coeff=0",
               "parallel.gather_dtype=same",
               "model.overrides.output_router_logits=false", "moe.smp_moe=true",
               "activations.checkpoint=1GiB"]  # fmt: skip
    assert nl.plan(MIXTRAL, "a100-80gb:1", settings=[*settings, *without]).fits


def test_interleaved_schedule_accepts_uneven_rounds():
    """Ten micro-batches on eight ranks form one round of ten."""
    settings = ("parallel.pipeline_parallel_degree=8", "parallel.microbatches=10",
                "parallel.pipeline=interleaved_1f1b", "batch.micro_batch_size=10",
                "parallel.hybrid_shard_degree=0")  # fmt: skip
    assert nl.plan(GPT2, "p4d.24xlarge:32", settings=settings).seconds > 0


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"tokens": float("nan")}, "tokens"),
        ({"tokens": float("inf")}, "tokens"),
        ({"tokens": -1.0}, "tokens"),
        ({"usd_per_hour": -3.0}, "price"),
        ({"usd_per_hour": float("nan")}, "price"),
        ({"straggler": float("nan")}, "straggler"),
        ({"tokens": "5"}, "tokens = '5': expected a number"),
        ({"straggler": "0.1"}, "straggler = '0.1': expected a number"),
        ({"usd_per_hour": "7"}, "price per hour = '7': expected a number"),
        ({"vocabulary": -1}, "vocabulary = -1"),
    ],
)
def test_invalid_numbers_raise(more, word):
    with pytest.raises(ConfigError, match=word):
        nl.plan(GPT2, "p4d.24xlarge:32", **more)


def test_settings_require_a_file_or_dict():
    with pytest.raises(ConfigError, match="settings change a config read"):
        nl.plan(loaded(GPT2), "p4d.24xlarge:32", settings=("batch.micro_batch_size=3",))


def test_reference_plan_applies_to_search_and_scaling(few):
    plain, slow = (
        nl.plan(GPT2, "p4d.24xlarge:16", straggler=x, vocabulary=60000) for x in (0.0, 0.2)
    )
    for plan in (plain, slow):
        again = search.evaluate(plan.config, plan.cluster, reference=plan)
        assert (again.seconds, again.memory) == (plan.seconds, plan.memory)
        first = api.scaling_curve(plan.config, plan.cluster, most=128, reference=plan)[0]
        assert first.tokens_per_second_per_gpu == pytest.approx(plan.tokens_per_second_per_gpu)
    found = [
        search.search(plan.config, plan.cluster, 1, reference=plan)[0] for plan in (plain, slow)
    ]
    assert found[1].seconds > 1.2 * found[0].seconds


def test_scaling_curve_is_limited():
    with pytest.raises(ConfigError, match="16,384"):
        api.scaling_curve(loaded(GPT2), parse_cluster("p4d.24xlarge:4096"))


def test_replicas_scale_better_than_full_sharding():
    """The claim of MiCS (Zhang et al. 2022), extrapolated to 16,384 GPUs."""
    cluster = parse_cluster("p4d.24xlarge:16")
    small = ("batch.micro_batch_size=2",)
    mics = api.scaling_curve(loaded(GPT2, *small), cluster)
    assert mics[-1].gpus == 16384
    assert mics[-1].efficiency > 0.95
    flat = []
    for nodes in (16, 128, 1024):
        place = cluster.resized(nodes)
        whole = loaded(GPT2, *small, f"parallel.hybrid_shard_degree={place.world}")
        flat.append(api.plan(whole, place).tokens_per_second_per_gpu)
    assert flat[0] > flat[1] > flat[2]
    assert flat[2] < 0.8 * flat[0]


def test_suggest_fit_names_one_or_two_changes():
    one = nl.plan(GPT2 | {"batch": {"micro_batch_size": 32}}, "p4d.24xlarge:32")
    assert suggest_fit(one).startswith("cheapest change that makes it fit: ")
    assert " with activations" not in suggest_fit(one)
    two = nl.plan(
        GPT2 | {"batch": {"micro_batch_size": 7}, "activations": {}},
        "p4d.24xlarge:32",
        settings=("parallel.hybrid_shard_degree=8",),
    )
    said = suggest_fit(two)
    assert said.startswith("cheapest change")
    assert " with " in said


PIPELINE = ("parallel.pipeline_parallel_degree=4", "parallel.microbatches=16",
            "parallel.hybrid_shard_degree=64", "activations.checkpoint=")  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        (["batch.micro_batch_size=32", "parallel.shard_optimizer_state=true"], "batch"),
        (["batch.micro_batch_size=32", "optimizer.kind=adamw_8bit"], "batch"),
        (["batch.micro_batch_size=33"], "batch.micro_batch_size = 11 with batch.accumulation = 3"),
        (["batch.micro_batch_size=32", "batch.sequences=16384"], "batch.micro_batch_size = 8;"),
        ([*PIPELINE, "batch.micro_batch_size=64", "model.preset=llama2-7b"],
         "parallel.microbatches = "),
    ],
)  # fmt: skip
def test_suggested_change_fits_with_the_same_batch(settings, change):
    """Includes keys that exclude many other keys."""
    plan = nl.plan(GPT2, "p4d.24xlarge:32", settings=settings)
    said = suggest_fit(plan)
    words = said.removeprefix("cheapest change that makes it fit: ").split(";")[0]
    changed = [each.replace(" = ", "=") for each in words.split(" with ")]
    found = nl.plan(GPT2, "p4d.24xlarge:32", settings=[*settings, *changed])
    assert change in said
    assert found.fits and not plan.fits
    assert found.work.step_tokens == plan.work.step_tokens


def test_suggest_fit_reports_missing_memory():
    large = {"model": {"preset": "llama2-70b"}, "parallel": {"fp16": True}}
    found = nl.plan(large, "p3dn.24xlarge:1")
    assert "no change of one or two keys" in suggest_fit(found)
    # sixteen micro-batches of one sequence cannot be reduced
    found = nl.plan(GPT2, "p4d.24xlarge:32", settings=(*PIPELINE, "batch.micro_batch_size=16"))
    assert "no change of one or two keys" in suggest_fit(found)


@pytest.mark.parametrize(
    "preset, cluster", [("gpt2-xl", "p4d.24xlarge:4"), ("mixtral-8x7b", "h100:4")]
)
def test_layouts_are_visited_in_order_of_their_step_time(few, preset, cluster):
    data = {"model": {"preset": preset}, "parallel": {"bf16": True}, "batch": {"sequences": 192}}
    config, cluster = loaded(data), parse_cluster(cluster)
    layouts = search._Layouts(config, cluster, None, math.inf)
    exact = []
    for first in layouts.with_most_memory():
        settings = [first]
        while slower := [*layouts.with_less_memory(settings[-1][0])]:
            settings += slower
        bounds = [least_seconds(blocks) for _, blocks in settings]
        assert bounds == pytest.approx(sorted(bounds))
        for layout, blocks in settings:
            variants = [blocks]
            for schedule in search.SCHEDULES if layout.degrees.pipeline > 1 else ():
                with contextlib.suppress(ConfigError):
                    variants.append(layouts.blocks(search._with_schedule(layout, schedule)))
            seconds = [step_time_of(each).seconds for each in variants]
            assert least_seconds(blocks) <= min(seconds) * (1 + 1e-9)
            exact += seconds
    found = list(layouts.fastest_first())
    assert [seconds for _, seconds in found] == sorted(exact)
    schedules = {layout.schedule for layout, _ in found if layout.degrees.pipeline > 1}
    assert schedules == {None, *search.SCHEDULES}


def test_search_starts_from_a_layout_that_does_not_divide_the_batch(few, capsys, tmp_path):
    file, best = tmp_path / "run.toml", tmp_path / "best.toml"
    file.write_text(
        'model.preset = "gpt2-xl"\nparallel.bf16 = true\n'
        "batch = { sequences = 64, micro_batch_size = 3 }\n"
    )
    asked = ["plan", str(file), "--cluster", "p4d.24xlarge:1"]
    assert main(asked) == 2
    assert main([*asked, "--search", "--write", str(best)]) == 0
    said = capsys.readouterr().out
    assert "the config's own layout cannot be planned: batch.sequences = 64 is not a multi" in said
    assert nl.plan(str(best)).work.step_tokens == 64 * 1024


def test_json_is_written_if_a_search_fails(few, capsys, tmp_path):
    file, numbers = tmp_path / "run.json", tmp_path / "plan.json"
    file.write_text(json.dumps(GPT2 | {"parallel": {"bf16": True}}))
    asked = ["--cluster", "p4d.24xlarge:1", "--search", "--json", str(numbers)]
    assert main(["plan", str(file), *asked]) == 2
    assert "no layout" in capsys.readouterr().err
    assert json.loads(numbers.read_text())["gpus"] == 8


def test_plan_names_extrapolations():
    known = nl.plan(GPT2, "p4d.24xlarge:32")
    assert extrapolations(known.work, known.cluster) == []
    assert "published runs like it (dense, bf16, A100, several nodes), each predicted" in str(known)
    offloaded = ("parallel.offload_optimizer=true", "parallel.tensor_parallel_degree=2",
                 "parallel.hybrid_shard_degree=64")  # fmt: skip
    far = nl.plan(GPT2, "p6-b200.48xlarge:1024", settings=offloaded)
    gpu = dataclasses.replace(far.cluster.gpu, name="R100-288GB")
    unknown = dataclasses.replace(far.cluster, node=dataclasses.replace(far.cluster.node, gpu=gpu))
    said = " ".join(extrapolations(far.work, unknown))
    for word in ("R100", "GPUs", "host memory", "replicate, shard, tensor"):
        assert word in said
    assert "extrapolated" in str(far)
