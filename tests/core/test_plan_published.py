"""The planner against published runs: every row is accounted for, and errors stay in bounds."""

import csv
import dataclasses
import tomllib

import pytest

from nearlinear.plan import parameters, published, validate
from nearlinear.plan.hardware import DATA


@pytest.fixture(scope="module")
def found() -> validate.Validation:
    return validate.validate()


@pytest.mark.parametrize(
    ("file", "rows"), [("llm_foundry.csv", 139), ("vtrain.csv", 55), ("framework_posts.csv", 92)]
)
def test_every_row_is_modelled_or_listed_with_a_reason(file, rows):
    with open(DATA / file, encoding="utf-8", newline="") as lines:
        assert len(list(csv.DictReader(lines))) == rows
    each = [row for row in published.everything() if row.row.file == file]
    assert [row.row.line for row in each] == list(range(2, rows + 2))
    assert all(row.reason for row in each if isinstance(row, published.Listed))


def test_most_rows_are_modelled():
    assert len(published.runs()) == 243
    assert len(published.listed()) == 43
    assert {run.source for run in published.runs()} == set(parameters.left_out())


def test_step_times_are_in_bounds(found):
    assert found.all.median <= 0.05
    assert found.all.ninetieth <= 0.18


@pytest.mark.parametrize("source", sorted({run.source for run in published.runs()}))
def test_a_source_that_was_not_fitted_is_still_near(found, source):
    unknown_micro_batch = source == "AWS, SMDDP"  # two rows, of which the post leaves it out
    assert found.left_out[source].median <= (0.17 if unknown_micro_batch else 0.12)


def test_of_two_layouts_the_faster_one_is_told(found):
    assert found.ranked[1] > 300
    assert found.ranking >= 0.82


def test_wrong_pairs_come_from_few_runs(found):
    few = validate.misplaced(found.scored)
    assert 0 < len(few) <= 8
    others = [each for each in found.scored if all(each is not one for one in few)]
    right, total = validate.rank(others)
    assert right / total >= 0.97
    wrong, left = found.ranked[1] - found.ranked[0], total - right
    assert left <= (1 - validate.NEARLY) * wrong
    assert "most of the others have one of" in str(found)
    in_order = [dataclasses.replace(each, predicted=each.run.seconds) for each in found.scored]
    assert validate.misplaced(in_order) == []


def test_runs_that_were_never_fitted(found):
    held = validate.errors(found.held_out)
    assert held.count == 62
    assert held.median <= 0.09
    assert held.ninetieth <= 0.20


def test_what_a_plan_says_of_its_error_is_what_is_found(found):
    said = parameters.errors()
    assert said["runs"] == found.all.count
    assert said["median"] == pytest.approx(found.all.median, abs=1e-3)
    assert said["ninetieth"] == pytest.approx(found.all.ninetieth, abs=1e-3)
    never, held_out = parameters.errors("held_out"), validate.errors(found.held_out)
    assert never["median"] == pytest.approx(held_out.median, abs=1e-3)
    assert never["ninetieth"] == pytest.approx(held_out.ninetieth, abs=1e-3)


def test_parameters_are_few_and_possible():
    fitted = vars(parameters.load())
    assert list(fitted) == [*parameters.BOUNDS, "fresh_seconds"]
    assert fitted["fresh_seconds"] == 0.0  # measured on the CPU, never fitted
    for each in (fitted, *map(vars, parameters.left_out().values())):
        for name, (low, high) in parameters.BOUNDS.items():
            assert low <= each[name] <= high, name


def test_the_parameters_file_is_written_as_it_is_read():
    fitted, without = parameters.load(), parameters.left_out()
    never = parameters.errors("held_out")
    read = tomllib.loads(parameters.to_toml(fitted, without, parameters.errors(), never))
    assert read["held_out"] == never
    assert read["parameters"] == vars(fitted)
    assert set(read["left_out"]) == set(without)
    assert read["errors"]["runs"] == 243


def test_the_report_names_sources_rows_and_reasons(found):
    text = str(found)
    for source in found.sources:
        assert source in text
    assert "framework_posts.csv" in text
    assert f"{found.ranked[1]} pairs" in text
    assert len(found.as_dict()["not_modelled"]) == 43


def test_pairs_differ_in_layout_alone():
    runs = published.runs()
    megatron = [run for run in runs if run.row.file == "vtrain.csv"]
    assert validate.alike(megatron[0], megatron[1])  # 175B at other degrees
    assert not validate.alike(megatron[0], megatron[2])  # another model
    zero = [run for run in runs if run.source.startswith("ZeRO")]
    assert not validate.alike(zero[0], zero[8])  # another network


def test_the_figure_has_a_mark_for_every_run(found):
    from nearlinear import plots

    ax = plots.predicted_against_published(found)
    marks = sum(len(line.get_xdata()) for line in ax.lines if line.get_linestyle() == "None")
    assert marks == 243 + 62
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_pairs_of_a_ranking_differ_in_layout_alone():
    """Not in the library that ran them; those of all sources are the ranking."""
    found = validate.validate()
    of_sources = [validate.rank(scored) for scored in found.sources.values()]
    assert tuple(map(sum, zip(*of_sources, strict=True))) == found.ranked
    run = found.scored[0].run
    for change in ({"direct": not run.work.direct}, {"prefetch": run.work.prefetch + 1}):
        other = dataclasses.replace(run, work=dataclasses.replace(run.work, **change))
        assert not validate.alike(run, other) and validate.alike(run, run)
