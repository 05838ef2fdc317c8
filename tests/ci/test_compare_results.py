"""`ci.benchmarks.compare.results`: files, ratios and spreads, and the repository's own results."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.benchmarks.compare import results
from ci.benchmarks.compare.config import CompareConfig
from ci.benchmarks.compare.report import deviating_systems
from ci.benchmarks.compare.results import Comparison, Spread
from ci.benchmarks.compare.traffic import unit_sizes

COMMAND = "python -m ci.benchmarks.compare"
HEADER = {"command": COMMAND, "machine": {"cpu": "x", "cores": 2}, "versions": {}}
FILES = sorted(results.FOLDER.glob("*.json"))
SECONDS = st.floats(0.01, 1e4)


def records_of(system, seconds, warm_up=99.0):
    """Return the records of a system: a warm-up step and timed steps."""
    return [
        {"system": system, "step": step, "seconds": time, "sent_bytes": 100 * step,
         "loss": 2.0, "timed": step > 0}
        for step, time in enumerate([warm_up, *seconds])
    ]  # fmt: skip


def comparison(**seconds):
    found = [record for name, times in seconds.items() for record in records_of(name, times)]
    return Comparison("4x1", HEADER, {"nodes": 4, "systems": []}, found)


def test_medians_and_extremes_exclude_the_warm_up():
    one = comparison(compute=[4.0, 6.0, 5.0])
    assert one.seconds("compute") == Spread(5.0, 4.0, 6.0)
    assert one.seconds("compute").show() == "5.00 (4.00-6.00)"
    assert one.sent_bytes("compute") == 200
    assert one.names == ["compute"] and one.command == COMMAND


def test_speed_up_compares_steps_of_the_same_round():
    one = comparison(compute=[2.0, 4.0], fsdp2=[4.0, 8.0])  # other load in the second round
    assert one.speed_up("fsdp2", "compute") == Spread(2.0, 2.0, 2.0)
    assert one.efficiency("fsdp2") == Spread(0.5, 0.5, 0.5)
    assert one.efficiency("compute") == Spread(1.0, 1.0, 1.0)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=9))
def test_speed_ups_lie_within_their_extremes_and_multiply(rounds):
    first, second, third = zip(*rounds, strict=True)
    one = comparison(a=first, b=second, c=third)
    ab, bc, ac = one.speed_up("a", "b"), one.speed_up("b", "c"), one.speed_up("a", "c")
    for spread in (ab, bc, ac):
        assert spread.low * (1 - 1e-9) <= spread.median <= spread.high * (1 + 1e-9)
    assert ab.median * bc.median == pytest.approx(ac.median)
    assert one.speed_up("b", "a").median == pytest.approx(1 / ab.median)


def test_fastest_considers_measured_systems_only():
    one = comparison(zero3=[5.0], zero3_default=[4.0])
    assert one.fastest(["zero3", "zero3_default"]) == "zero3_default"
    assert one.fastest(["zero3", "mics"]) == "zero3"
    assert one.fastest(["mics"]) is None


def test_fastest_within_a_budget_of_memory():
    one = comparison(fsdp2=[5.0], ours=[4.0], ours_once=[3.0])
    size = 4 * sum(unit_sizes(CompareConfig.from_fields(one.config)))
    peaks = {"fsdp2": 3 * size, "ours": 4 * size, "ours_once": 5 * size}
    one.records.extend(
        {**record, "timed": False, "peak_bytes": peaks[record["system"]]}
        for record in list(one.records)[::2]
    )
    assert one.peak("ours") == 4.0
    names = ["fsdp2", "ours", "ours_once"]
    found = [one.fastest(names, within=budget) for budget in (2, 3, 4.5, 5)]
    assert found == [None, "fsdp2", "ours", "ours_once"]


def test_ratio_to_a_system_of_a_heat_spans_all_rounds():
    one = comparison(fsdp2=[6.0], ours=[4.0, 3.0, 5.0])
    for record in one.records:
        record["heat"] = record["system"] == "fsdp2"
    assert one.speed_up("fsdp2", "ours") == (1.5, 6.0 / 5.0, 2.0)


def test_missing_systems_and_rounds_are_named():
    one = comparison(fsdp2=[5.0, 6.0], ours=[4.0])
    with pytest.raises(KeyError, match="mics was not measured"):
        one.seconds("mics")
    with pytest.raises(ValueError, match="fsdp2 and ours were measured in different rounds"):
        one.speed_up("fsdp2", "ours")


def test_files_hold_one_comparison_or_several(tmp_path):
    part = {"config": {"nodes": 2}, "results": records_of("ours", [1.0])}
    (tmp_path / "a.json").write_text(json.dumps({**HEADER, "runs": [part, part]}))
    (tmp_path / "b.json").write_text(json.dumps({**HEADER, **part}))
    found = results.read_folder(tmp_path)
    assert list(found) == ["b", "a"]  # single comparisons first
    assert [len(kept) for kept in found.values()] == [1, 2]
    assert found["a"][1].seconds("ours").median == 1.0
    assert results.read_folder(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"command": "x", "runs": 3}'])
def test_other_files_are_rejected_with_the_command(tmp_path, text):
    (tmp_path / "2x4.json").write_text(text)
    path = "ci/benchmarks/compare/results/2x4.json"
    words = rf"2x4.json does not hold a comparison .* --nodes 2 --ranks 4 --json {path}"
    with pytest.raises(ValueError, match=words):
        results.read_folder(tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_repository_results_hold_their_command_and_equal_losses(path):
    for found in results.read_file(path):
        command = found.command.split()
        assert command[:2] == ["python", "-m"]
        assert not any(word.startswith("/") for word in command)
        assert {"cpu", "cores"} <= found.origin["machine"].keys()
        assert {"nodes", "ranks_per_node", "shard", "rate", "steps"} <= found.config.keys()
        assert deviating_systems(found.records) == []
