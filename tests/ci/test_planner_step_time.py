"""`ci.planner_validation.step_time`: arithmetic, and one small run of the whole comparison."""

import dataclasses

import pytest

from ci.benchmarks.compare import traffic
from ci.benchmarks.compare.systems import SYSTEMS
from ci.emulation.cluster import unavailable_reason
from ci.planner_validation import cases, step_time
from ci.planner_validation.cases import DEFAULT_CASES, SETUPS, ClusterSetup, LayoutCase
from ci.planner_validation.step_time import PredictionRow
from nearlinear.planner.workload import workload_from_config
from tests.core.planner.test_calibrate import a_node

FOUR_NODES = ClusterSetup(4, 1, ("1gbit",), DEFAULT_CASES)


@pytest.mark.parametrize("case", [case for setup in SETUPS for case in setup.cases], ids=str)
def test_train_config_gathers_and_reduces_as_the_system(case):
    config = case.config(FOUR_NODES)
    trainer = cases.train_config_of(case, config)
    layout = config.world, config.ranks_per_node
    found = workload_from_config(trainer, *layout, config.vocabulary, on_cpu=True)
    units = traffic.unit_sizes(config)
    root = found.shape.root_parameters
    assert abs(root / units[0] - 1) < 1e-3 and found.shape.layers == config.layers
    assert abs(found.shape.block_parameters / units[1] - 1) < 0.01
    tokens = config.world * config.accumulation * config.micro_batch * config.sequence
    assert found.step_tokens == tokens
    count = SYSTEMS[case.system].traffic
    if count is None:
        assert found.mesh.sharing == 1
        return
    expected = count(config)
    assert found.mesh.sharing == expected.shard
    assert found.micro_batches == expected.reductions
    second_hops = (1 if found.two_hop else found.micro_batches) * (found.mesh.replicate > 1)
    assert second_hops == expected.second_hops * (config.world > expected.shard)
    assert found.reshard_after_forward == (max(expected.gathers) > config.accumulation)
    options = SYSTEMS[case.system].options
    overlapped = options.get("overlap_communication", "kind" not in options)  # not in FSDP2
    assert found.overlapped_reduce == overlapped


def test_prediction_depends_on_the_measured_machine_alone():
    node = a_node()
    config = DEFAULT_CASES[1].config(FOUR_NODES)
    before = cases.predict_step(DEFAULT_CASES[1], config, node)
    rows = [dataclasses.replace(row, points=[[s, 2 * t] for s, t in row.points])
            for row in node.collectives]  # fmt: skip
    slow_node = dataclasses.replace(node, collectives=rows)
    slower = cases.predict_step(DEFAULT_CASES[1], config, slow_node)
    compute = cases.predict_step(DEFAULT_CASES[0], DEFAULT_CASES[0].config(FOUR_NODES), node)
    assert slower - compute == pytest.approx(2 * (before - compute), rel=0.05)
    unmeasured = dataclasses.replace(node, measured={}, network_gbps=0)
    with pytest.raises(ZeroDivisionError):  # no other source knows this network
        cases.predict_step(DEFAULT_CASES[1], config, unmeasured)


def test_cases_with_equal_changes_share_processes():
    groups = cases.group_cases(FOUR_NODES)
    grouped = [case for group in groups for case in group]
    assert sorted(map(str, grouped)) == sorted(map(str, DEFAULT_CASES))
    for group in groups:
        assert len({case.system for case in group}) == len(group)
        assert len({str(case.changes) for case in group}) == 1
    assert len(groups) < len(DEFAULT_CASES)


def test_errors_are_computed_from_medians():
    row = PredictionRow("4 x 1", "ours", [2.0, 9.0, 2.2], [2.6, 2.4, 2.42])
    assert (row.measured, row.planned) == (2.2, 2.42)
    assert row.error == pytest.approx(0.1)
    worse = PredictionRow("4 x 1", "fsdp2", [2.0], [1.0])
    assert "above 15 %" in step_time.format_row(worse)
    assert "above" not in step_time.format_row(row)
    summary = step_time.summary([row, worse])
    assert summary.endswith("median error 30.0%, worst 50.0%, 1 within 15%")


def test_run_quietly_returns_the_try_with_the_lowest_other_load(monkeypatch):
    cores, found = iter([0.9, 0.4, 0.6, 0.5]), iter("abcd")

    class BackgroundLoad:
        def cores(self, own):
            return next(cores)

    monkeypatch.setattr(step_time.bench_record, "BackgroundLoad", BackgroundLoad)
    monkeypatch.setattr(step_time, "PAUSE", 0.0)
    assert step_time.run_quietly(lambda: next(found), []) == ("b", 0.4)
    cores, found = iter([0.9, 0.1]), iter("ab")
    assert step_time.run_quietly(lambda: next(found), []) == ("b", 0.1)


def test_invalid_request_is_rejected(capsys):
    assert step_time.main(["--json", "/nowhere/x.json"]) == 2
    assert "no folder /nowhere" in capsys.readouterr().err


def test_saved_run_is_predicted_again(tmp_path, capsys):
    path, node, (setup, *_) = tmp_path / "saved.json", a_node(), SETUPS
    where, case = setup.label("1gbit"), setup.cases[1]
    row = PredictionRow(where, case.label(setup), [2.0], [9.0])  # of another planner
    tunings = [{"place": where, "others": 0.0, "node": dataclasses.asdict(node)}] * 2
    step_time.save(path, [row], tunings, [])
    (found,) = step_time.predict_again(path)
    now = cases.predict_step(case, case.config(setup), node)
    assert found == dataclasses.replace(row, predicted=[now, now])
    status = step_time.main(["--again", str(path)])
    assert status == int(abs(found.error) > step_time.TARGET_ERROR)
    assert step_time.format_row(found) in capsys.readouterr().out
    for text, words in (("{}", "does not hold a run"), ("{", "not valid JSON")):
        path.write_text(text, encoding="utf-8")
        assert step_time.main(["--again", str(path)]) == 2
        assert words in capsys.readouterr().err


SMALL = {"layers": 2, "width": 48, "heads": 2, "vocabulary": 128, "sequence": 16, "micro_batch": 1}


@pytest.mark.slow
@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_steps_are_measured_and_predicted(monkeypatch):
    measured, measure = [], step_time.measure_machine

    def measure_once(*arguments):
        measured.append(measured[0] if measured else measure(*arguments))
        return measured[-1]

    monkeypatch.setattr(step_time, "MAX_TRIES", 1)
    monkeypatch.setattr(step_time, "measure_machine", measure_once)
    few = tuple(LayoutCase(name, SMALL) for name in ("compute", "fsdp2", "ours"))
    setup = ClusterSetup(2, 1, ("1gbit",), few)
    rows, tunings = step_time.measure_setup(setup, steps=1, rounds=1)
    assert [row.layout.split(",")[0] for row in rows] == ["compute", "fsdp2", "ours"]
    for row in rows:
        assert row.seconds and row.measured > 0
        assert len(row.predicted) == len(tunings) == len(measured) > 0
        assert all(seconds > 0 for seconds in row.predicted)
    kinds = {row["kind"] for row in tunings[0]["node"]["collectives"]}
    assert {"all-gather", "reduce-scatter", "exchange", "all-reduce"} <= kinds
