"""Validation against published runs: rows are accounted for, and errors are bounded."""

import csv
import dataclasses
import tomllib

import pytest

import nearlinear as nl
from nearlinear.errors import ConfigError
from nearlinear.planner import fitted_constants, similar_runs, validate
from nearlinear.planner.fitted_constants import (
    BOUNDS,
    fit_errors,
    leave_one_out_constants,
    load_constants,
)
from nearlinear.planner.memory.block_ops import MicroBatchSizes, trace_block, trace_head
from nearlinear.planner.published import columns
from nearlinear.planner.published import memory as published_memory
from nearlinear.planner.published.models import gpt, llama
from nearlinear.planner.published.runs import (
    DATA,
    SkippedRow,
    all_rows,
    held_out_rows,
    published_runs,
    read_table,
    skipped_rows,
)


@pytest.fixture(scope="module")
def found() -> validate.Validation:
    return validate.validate()


@pytest.mark.parametrize(
    ("file", "rows"),
    [
        ("llm_foundry.csv", 139),
        ("vtrain.csv", 55),
        ("framework_posts.csv", 92),
        ("held_out.csv", 62),
        ("later_posts.csv", 212),
    ],
)
def test_every_row_is_modelled_or_skipped_with_a_reason(file, rows):
    with open(DATA / file, encoding="utf-8", newline="") as lines:
        assert len(list(csv.DictReader(lines))) == rows
    each = [row for row in (*all_rows(), *held_out_rows()) if row.row.file == file]
    assert [row.row.line for row in each] == list(range(2, rows + 2))
    assert all(row.reason for row in each if isinstance(row, SkippedRow))


def test_most_rows_are_modelled():
    assert len(published_runs()) == 243
    assert len(skipped_rows()) == 43
    assert {run.source for run in published_runs()} == set(leave_one_out_constants())


def test_validation_errors_are_within_bounds(found):
    assert found.all.median <= 0.05
    assert found.all.ninetieth <= 0.18


@pytest.mark.parametrize("source", sorted({run.source for run in published_runs()}))
def test_left_out_sources_are_predicted(found, source):
    unknown_micro_batch = source == "AWS, SMDDP"  # two rows; the post does not state it
    error = validate.summarize_errors(found.left_out[source])
    assert error.median <= (0.17 if unknown_micro_batch else 0.12)


def test_ranking_finds_the_faster_layout(found):
    assert found.ranked[1] > 300
    assert found.ranking >= 0.82


def test_misordered_pairs_come_from_few_runs(found):
    few = validate.outliers(found.scored)
    assert 0 < len(few) <= 8
    others = [each for each in found.scored if all(each is not one for one in few)]
    right, total = validate.rank_pairs(others)
    assert right / total >= 0.97
    wrong, left = found.ranked[1] - found.ranked[0], total - right
    assert left <= (1 - validate.MOST_WRONG) * wrong
    assert "most misordered pairs contain one of" in str(found)
    in_order = [dataclasses.replace(each, predicted=each.run.value) for each in found.scored]
    assert validate.outliers(in_order) == []


def test_held_out_runs_are_predicted(found):
    dense, mixtures = (
        validate.summarize_errors([each for each in found.held_out if each.run.work.kind == kind])
        for kind in ("dense", "mixture of experts")
    )
    assert dense.count == 62 + 90
    assert dense.median <= 0.09
    assert dense.ninetieth <= 0.20
    assert mixtures.count == 49
    assert mixtures.median <= 0.32  # their software differs by as much: see the evidence page


def test_runs_without_their_source_are_predicted_by_precision(found):
    assert len(found.unseen) == 243 + 62 + 90 + 49
    by_precision = {
        fp8: validate.summarize_errors([each for each in found.unseen if each.run.work.fp8 is fp8])
        for fp8 in (False, True)
    }
    assert by_precision[False].median <= 0.06
    assert by_precision[True].median <= 0.12
    assert abs(validate.summarize_errors(found.unseen).bias) <= 0.03


def test_published_peaks_of_memory_are_predicted(found):
    assert len(found.peaks) == 15 + 26
    assert validate.summarize_errors(found.peaks).median <= 0.05
    titan = [each for each in found.peaks if each.run.source.startswith("torchtitan")]
    assert validate.summarize_errors(titan).ninetieth <= 0.08


def test_published_runs_are_predicted_to_fit(found):
    runs = [each.run for each in (*found.scored, *found.held_out)]
    # Transformer Engine saves inputs in 8 bits, which are counted in 16.
    others = [run for run in found.too_large if not run.work.fused_casts]
    assert len(others) <= 0.01 * len(runs)
    assert len(found.too_large) <= 0.05 * len(runs)
    foundry = [run for run in runs if run.source.startswith("llm-foundry")]
    larger = [with_micro_batch(run, 4 * run.work.micro_batch) for run in foundry]
    assert sum(map(published_memory.fits, larger)) <= 0.05 * len(larger)  # not everything fits


def with_micro_batch(run, size):
    return dataclasses.replace(run, work=dataclasses.replace(run.work, micro_batch=size))


def test_megatron_saves_what_its_authors_count():
    """Korthikanti et al. 2022: 34 s b h / t bytes per layer with selective recomputation.

    Two of the 34 are masks of dropout, which is not modelled; fused attention adds its log-sums.
    """
    behaviour = columns.find_software("Megatron-LM, Korthikanti et al.").memory
    sizes = MicroBatchSizes(
        gpt(96, 12288, 96, 51200, 2048), tokens=2048, tensor=8, item=2,
        fused=behaviour.fused, regathers=behaviour.regathers,
    )  # fmt: skip
    log_sums = 2048 * 96 // 8 * 4
    assert trace_block("gpt2", sizes).kept_bytes == 32 * 2048 * 12288 // 8 + log_sums


def test_torchtitan_keeps_every_second_product():
    """Per token of Llama-3.1 8B: input, queries, values, attention, gate and down, in bfloat16."""
    [run] = [
        run for run in published_runs() if run.source == "torchtitan, H100" and run.row.line == 13
    ]
    assert run.work.recompute == "alternate"
    found = published_memory.estimate_run(run)
    kept = 4096 + 4096 + 1024 + 4096 + 14336 + 4096
    assert found.parts["kept"] == pytest.approx(32 * kept * 2 * run.work.tokens, rel=0.001)


@pytest.mark.parametrize("loss", ["torch", "fused", "in_place"])
def test_losses_need_as_many_copies_of_the_logits(loss):
    """torch: three in float32; fused: logits and gradient in 16 bits; in place: one in float32, and
    the gradient in 16 bits."""
    sizes = MicroBatchSizes(llama("Llama-3.1 8B"), tokens=8192, tensor=1, item=2, fused=True)
    logits = 8192 * 128256 * 2
    head = trace_head("llama", sizes, loss)
    copies = {"torch": 6, "fused": 2, "in_place": 3}[loss]
    assert head.backward_peak() == pytest.approx(copies * logits, rel=0.05)
    assert head.fragment == (logits if loss == "torch" else 0)


def table_of(path, *changes, names=columns.COLUMNS):
    """Write a table in the documented format, of one row with changed columns per dict."""
    row = dict.fromkeys(names, "") | {
        "source": "somewhere", "model": "Llama-3.1 8B", "seq": "8192", "gpu": "H100-80GB",
        "gpus": "16", "precision": "bf16", "metric": "tokens/s/GPU", "value": "6000",
        "micro_batch": "1",
    }  # fmt: skip
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(row | change for change in changes)
    return path


def test_columns_determine_layout_batch_and_time(tmp_path):
    fsdp, pipeline, megatron, zero = read_table(
        table_of(
            tmp_path / "runs.csv",
            {"dp_replicate": "2", "precision": "float8", "note": "compile", "act_ckpt": "full"},
            {"source": "torchtitan", "pp": "4", "micro_batch": "8", "gpus": "32", "tp": "2"},
            {"source": "Megatron-LM README (vocab 131072)", "model": "GPT", "layers": "24",
             "hidden": "2048", "heads": "16", "pp": "4", "global_batch_seqs": "64",
             "micro_batch": "", "metric": "iteration s", "value": "2"},
            {"source": "ZeRO++", "model": "GPT 18B", "params_b": "18", "precision": "fp16",
             "metric": "TFLOPS/GPU (8*N*tokens)", "value": "50", "seq": "",
             "gpu": "V100-32GB", "note": "2K tokens per GPU", "micro_batch": ""},
        )
    )  # fmt: skip
    work = fsdp.work
    assert (work.mesh.shard, work.mesh.replicate, work.micro_batches) == (8, 2, 1)
    assert (work.fp8, work.compiled, work.recompute, work.shape.layers) == (True, True, "block", 32)
    assert fsdp.value == pytest.approx(8192 / 6000)
    work = pipeline.work
    assert (work.mesh.pipeline, work.mesh.tensor, work.mesh.shard) == (4, 2, 4)
    assert (work.micro_batch, work.micro_batches) == (2, 4)
    assert pipeline.value == pytest.approx(8 * 4 * 8192 / 32 / 6000)
    work = megatron.work
    assert (work.mesh.shard, work.mesh.replicate, work.virtual_stages) == (1, 4, 3)
    assert (work.micro_batch, work.micro_batches, work.shape.vocabulary) == (1, 16, 131072)
    assert megatron.value == 2
    assert not work.shares_states and work.update_replicas == 4
    work = zero.work
    assert (work.sequence, work.micro_batch, work.recompute) == (1024, 2, "block")
    assert zero.value == pytest.approx(8 * 18e9 * 2048 / 50e12)


def test_columns_place_experts_and_the_ends_of_a_pipeline(tmp_path):
    moe = {"model": "Qwen3 30B-A3B", "seq": "4096", "ep": "8", "global_batch_seqs": "64"}
    path = table_of(
        tmp_path / "runs.csv",
        moe | {"source": "NeMo AutoModel", "dp_shard": "16"},
        moe | {"source": "Megatron-Bridge", "note": "virtual stages 1"},
        {"source": "NeMo", "model": "Llama-3.1 405B", "gpus": "128", "tp": "4", "pp": "16",
         "cp": "2", "global_batch_seqs": "32", "note": "virtual stages 4"},
        {"source": "NeMo", "gpus": "32", "pp": "4", "global_batch_seqs": "32"},
        names=[*columns.COLUMNS, "ep"],
    )  # fmt: skip
    sharded, whole, ends, even = (run.work for run in read_table(path))
    assert (sharded.mesh.shard, sharded.mesh.replicate, sharded.mesh.expert) == (16, 1, 8)
    assert sharded.shares_states and sharded.reduced_once_blocks == sharded.shape.layers == 48
    assert (whole.mesh.shard, whole.mesh.replicate, whole.mesh.expert) == (8, 2, 8)
    assert not whole.shares_states and whole.update_replicas == 16 and whole.dispatch == "random"
    assert ends.stage_blocks == (1, *(2,) * 62, 1) and ends.update_replicas == 2
    assert even.stage_blocks == ()  # 32 blocks and two ends do not divide into 16 stages


def test_blind_predictions_do_not_depend_on_values(tmp_path):
    rows = [{}, {"gpus": "64", "value": "5000"}, {"gpus": "9", "tp": "2"}, {"model": "a secret"}]
    filled = validate.score_blind(table_of(tmp_path / "filled.csv", *rows))
    empty = table_of(tmp_path / "empty.csv", *(row | {"value": ""} for row in rows))
    unknown = validate.score_blind(empty)
    assert filled.digest == unknown.digest and len(filled.digest) == 64
    assert (len(filled.scored), unknown.scored, unknown.without_value) == (2, [], 2)
    assert filled.scored[0].run.value == pytest.approx(8192 / 6000)
    reasons = [each.reason for each in filled.skipped]
    assert reasons == [
        "a column cannot be read (9 GPUs in groups of 2)",
        "the shape of its model is not published",
    ]
    other = validate.score_blind(table_of(tmp_path / "other.csv", {"gpus": "32"}, *rows[1:]))
    assert other.digest != filled.digest
    for words in ("bf16 on H100", "somewhere", filled.digest, "not modelled: 2 rows"):
        assert words in str(filled)
    assert "2 runs have no value" in str(unknown)


def test_unusable_tables_are_refused(tmp_path):
    (row,) = read_table(table_of(tmp_path / "zero.csv", {"value": "0"}))
    assert row.reason == "a column cannot be read (value 0 is not above 0)"
    with pytest.raises(ConfigError, match="nowhere.csv cannot be read"):
        validate.score_blind(tmp_path / "nowhere.csv")
    (tmp_path / "x.csv").write_text("source,model\n")
    with pytest.raises(ConfigError, match="has no column params_b, layers"):
        validate.score_blind(tmp_path / "x.csv")


def test_stored_errors_match_the_validation(found):
    said = fit_errors()
    assert said["runs"] == found.all.count
    assert said["median"] == pytest.approx(found.all.median, abs=1e-3)
    assert said["ninetieth"] == pytest.approx(found.all.ninetieth, abs=1e-3)
    never, held_out = fit_errors("held_out"), validate.summarize_errors(found.held_out)
    assert never["median"] == pytest.approx(held_out.median, abs=1e-3)
    assert never["ninetieth"] == pytest.approx(held_out.ninetieth, abs=1e-3)


def test_constants_are_within_bounds():
    fitted = vars(load_constants())
    assert list(fitted) == [*BOUNDS, "fresh_seconds"]
    assert fitted["fresh_seconds"] == 0.0  # measured on CPUs, never fitted
    for each in (fitted, *map(vars, leave_one_out_constants().values())):
        for name, (low, high) in BOUNDS.items():
            assert low <= each[name] <= high, name


def test_parameters_file_round_trips():
    fitted, without = load_constants(), leave_one_out_constants()
    never = fit_errors("held_out")
    read = tomllib.loads(fitted_constants.to_toml(fitted, without, fit_errors(), never))
    assert read["held_out"] == never
    assert read["parameters"] == vars(fitted)
    assert set(read["left_out"]) == set(without)
    assert read["errors"]["runs"] == 243


def test_report_names_sources_and_skipped_rows(found):
    text = str(found)
    for source in found.sources:
        assert source in text
    assert "framework_posts.csv" in text
    assert f"{found.ranked[1]} pairs" in text
    saved = found.as_dict()
    assert len(saved["not_modelled"]) == 43 + 47 + 26 - len(found.peaks)
    assert [each["predicted_without_source_seconds"] for each in saved["runs"]] == [
        *(each.predicted for runs in found.left_out.values() for each in runs),
        *(each.predicted for each in found.held_out),
    ]
    assert "memory: " in text and "later_posts.csv 2, 68-69" in text


def test_comparable_runs_differ_only_in_layout():
    runs = published_runs()
    megatron = [run for run in runs if run.row.file == "vtrain.csv"]
    assert validate.comparable(megatron[0], megatron[1])  # 175B with different degrees
    assert not validate.comparable(megatron[0], megatron[2])  # a different model
    zero = [run for run in runs if run.source.startswith("ZeRO")]
    assert not validate.comparable(zero[0], zero[8])  # a different network


def test_validation_figure_marks_every_run(found):
    from nearlinear import plots

    ax = plots.predicted_against_published(found)
    marks = sum(len(line.get_xdata()) for line in ax.lines if line.get_linestyle() == "None")
    assert marks == 243 + 62 + 90 + 49
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_ranked_pairs_differ_only_in_layout():
    """Runs of different libraries are not compared; the total is the sum over sources."""
    found = validate.validate()
    of_sources = [validate.rank_pairs(scored) for scored in found.sources.values()]
    assert tuple(map(sum, zip(*of_sources, strict=True))) == found.ranked
    run = found.scored[0].run
    for change in (
        {"direct_all_gather": not run.work.direct_all_gather},
        {"prefetch": run.work.prefetch + 1},
    ):
        other = dataclasses.replace(run, work=dataclasses.replace(run.work, **change))
        assert not validate.comparable(run, other) and validate.comparable(run, run)


def test_range_of_a_plan_holds_most_runs_like_it():
    for gpu, features in (
        ("h100:4", ("dense", "bf16", "H100", "several nodes")),
        ("p4d.24xlarge:2", ("dense", "bf16", "A100", "several nodes")),
        ("p6-b200.48xlarge:2", ("dense", "bf16")),  # on B200, dense models were trained in float8
    ):
        data = {"model": {"preset": "llama2-7b"}, "parallel": {"bf16": True}}
        found = nl.plan(data, gpu)
        like = found.similar_runs
        assert like.features == features and like.count >= similar_runs.LEAST
        runs = [each for each in similar_runs._scored_runs()
                if similar_runs._features_of_run(each)[: len(features)] == features]  # fmt: skip
        within = [like.low <= each.run.value / each.predicted <= like.high for each in runs]
        assert like.count == len(within) and sum(within) >= similar_runs.SHARE * len(within)
        assert found.likely_seconds == (like.low * found.seconds, like.high * found.seconds)
    data = {"model": {"preset": "mixtral-8x7b"}, "parallel": {"fp8": True, "bf16": True}}
    mixture = nl.plan(data, "h100:4")
    assert mixture.similar_runs.features == ("mixture of experts", "fp8")
