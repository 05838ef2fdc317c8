"""The planner against the emulated cluster: its arithmetic, and one small run of all of it."""

import dataclasses

import pytest

from ci.cluster import why_not
from ci.planner import cases, emulated
from ci.planner.cases import PLACES, USUAL, Case, Place
from ci.planner.emulated import Row
from ci.race import theory
from ci.race.contestants import ENTRIES
from nearlinear.plan import workload
from tests.core.test_tune_machine import a_node

FOUR = Place(4, 1, ("1gbit",), USUAL)


@pytest.mark.parametrize("case", [case for place in PLACES for case in place.cases], ids=str)
def test_the_config_gathers_and_reduces_as_the_contestant_does(case):
    plan = case.plan(FOUR)
    config = cases.config_of(case, plan)
    where = plan.world, plan.ranks_per_node
    found = workload.from_config(config, *where, plan.vocabulary, on_cpu=True)
    units = theory.units(plan)
    root = found.shape.root_parameters
    assert abs(root / units[0] - 1) < 1e-3 and found.shape.layers == plan.layers
    assert abs(found.shape.block_parameters / units[1] - 1) < 0.01
    assert found.step_tokens == plan.world * plan.accumulation * plan.micro_batch * plan.sequence
    traffic = ENTRIES[case.contestant].traffic
    if traffic is None:
        assert found.mesh.sharing == 1
        return
    expected = traffic(plan)
    assert found.mesh.sharing == expected.shard
    assert found.passes == expected.reductions
    joins = (1 if found.two_hop else found.passes) * (found.mesh.replicate > 1)
    assert joins == expected.second_hops * (plan.world > expected.shard)
    assert found.resharded == (max(expected.gathers) > plan.accumulation)
    options = ENTRIES[case.contestant].options
    beside = options.get("overlap_communication", "kind" not in options)  # FSDP2's waits
    assert found.overlapped_reduce == beside


def test_a_case_is_predicted_by_the_tuned_machine_alone():
    node = a_node()
    plan = USUAL[1].plan(FOUR)
    before = cases.predicted(USUAL[1], plan, node)
    rows = [dataclasses.replace(row, points=[[s, 2 * t] for s, t in row.points])
            for row in node.collectives]  # fmt: skip
    slower = cases.predicted(USUAL[1], plan, dataclasses.replace(node, collectives=rows))
    compute = cases.predicted(USUAL[0], USUAL[0].plan(FOUR), node)
    assert slower - compute == pytest.approx(2 * (before - compute), rel=0.05)
    with pytest.raises(ZeroDivisionError):  # nothing else knows this network
        cases.predicted(USUAL[1], plan, dataclasses.replace(node, measured={}, network_gbps=0))


def test_cases_that_train_alike_share_processes():
    teams = cases.in_teams(FOUR)
    assert sorted(map(str, (case for team in teams for case in team))) == sorted(map(str, USUAL))
    for team in teams:
        assert len({case.contestant for case in team}) == len(team)
        assert len({str(case.changes) for case in team}) == 1
    assert len(teams) < len(USUAL)


def test_errors_are_of_medians():
    row = Row("4 x 1", "ours", [2.0, 9.0, 2.2], [2.6, 2.4, 2.42])
    assert (row.measured, row.planned) == (2.2, 2.42)
    assert row.error == pytest.approx(0.1)
    worse = Row("4 x 1", "fsdp2", [2.0], [1.0])
    assert "beyond 15 %" in emulated.line(worse) and "beyond" not in emulated.line(row)
    assert emulated.summary([row, worse]).endswith("median error 30.0%, worst 50.0%, 1 within 15%")


def test_the_quietest_try_counts(monkeypatch):
    cores, found = iter([0.9, 0.4, 0.6, 0.5]), iter("abcd")

    class Background:
        def cores(self, own):
            return next(cores)

    monkeypatch.setattr(emulated.machine_facts, "Background", Background)
    monkeypatch.setattr(emulated, "PAUSE", 0.0)
    assert emulated.quietly(lambda: next(found), []) == ("b", 0.4)
    cores, found = iter([0.9, 0.1]), iter("ab")
    assert emulated.quietly(lambda: next(found), []) == ("b", 0.1)


def test_a_wrong_request_is_refused(capsys):
    assert emulated.main(["--json", "/nowhere/x.json"]) == 2
    assert "no folder /nowhere" in capsys.readouterr().err


def test_a_kept_run_is_predicted_again(tmp_path, capsys):
    path, node, (place, *_) = tmp_path / "kept.json", a_node(), PLACES
    where, case = place.where("1gbit"), place.cases[1]
    row = Row(where, case.words(place), [2.0], [9.0])  # as some planner said then
    tunings = [{"place": where, "others": 0.0, "node": dataclasses.asdict(node)}] * 2
    emulated.keep(path, [row], tunings, [])
    (found,) = emulated.again(path)
    now = cases.predicted(case, case.plan(place), node)
    assert found == dataclasses.replace(row, predicted=[now, now])
    assert emulated.main(["--again", str(path)]) == int(abs(found.error) > emulated.AIM)
    assert emulated.line(found) in capsys.readouterr().out
    for text, words in (("{}", "holds no run"), ("{", "not valid JSON")):
        path.write_text(text, encoding="utf-8")
        assert emulated.main(["--again", str(path)]) == 2
        assert words in capsys.readouterr().err


SMALL = {"layers": 2, "width": 48, "heads": 2, "vocabulary": 128, "sequence": 16, "micro_batch": 1}


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_measured_tuned_and_predicted(monkeypatch):
    monkeypatch.setattr(emulated, "TRIES", 1)
    few = tuple(Case(name, SMALL) for name in ("compute", "fsdp2", "ours"))
    rows, tunings = emulated.at_place(Place(2, 1, ("1gbit",), few), steps=1, rounds=1)
    assert [row.layout.split(",")[0] for row in rows] == ["compute", "fsdp2", "ours"]
    for row in rows:
        assert row.seconds and row.measured > 0 and len(row.predicted) == len(tunings) > 0
        assert all(seconds > 0 for seconds in row.predicted)
    kinds = {row["kind"] for row in tunings[0]["node"]["collectives"]}
    assert {"all-gather", "reduce-scatter", "exchange", "all-reduce"} <= kinds
