"""The race: its arithmetic, its refusals, and one small race of all that can run here."""

import json
import os
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.cluster import why_not
from ci.race import __main__ as race
from ci.race import course, figures, model, peers, spans, sweep, table, theory
from ci.race.contestants import ENTRIES, LADDERS, zero
from ci.race.plan import Plan
from ci.race.teams import teams_of


def turn(contestant, step, seconds, loss=2.0, timed=True):
    return {
        "contestant": contestant,
        "step": step,
        "seconds": seconds,
        "sent_bytes": 3 * 2**20,
        "loss": loss,
        "timed": timed,
    }


def test_the_table_holds_medians_and_their_ratios():
    turns = [turn("fsdp2", 0, 90.0, timed=False)]
    turns += [turn("fsdp2", step, seconds) for step, seconds in enumerate((4.0, 6.0, 5.0), 1)]
    turns += [turn("ours", step, seconds) for step, seconds in enumerate((2.0, 9.0, 2.5), 1)]
    _, _, fsdp2, ours = table.render(Plan(contestants=()), turns).splitlines()
    assert fsdp2.split(" | ")[1:] == ["5.00", "4.00-6.00", "3.0", "560.5", "1.00x |"]
    assert ours.split(" | ")[1:] == ["2.50", "2.00-9.00", "3.0", "199.0", "2.00x |"]


def test_a_build_that_was_killed_holds_nobody_up(tmp_path, monkeypatch):
    old, young, other = (tmp_path / name for name in ("deepspeed_shm", "deepspeed_adam", "mine"))
    for folder in (old, young, other):
        folder.mkdir()
        (folder / "lock").touch()
    monkeypatch.setattr(zero, "BUILD", 0.5)
    for folder in (old, other):
        os.utime(folder / "lock", (0, 0))
    begin = time.monotonic()
    zero.forget_killed_builds(str(tmp_path))
    assert time.monotonic() - begin > 0.3  # a build may have been under way
    assert not any((folder / "lock").exists() for folder in (old, young))
    assert (other / "lock").exists()


def test_a_contestant_that_trains_something_else_is_named():
    turns = [turn(name, 1, 1.0) for name in ("fsdp2", "hybrid", "ours")]
    assert table.astray(turns) == []
    turns += [turn("compute", 1, 1.0, loss=3.0)]  # trains alone, and may differ
    turns += [turn("ours_nl", 1, 1.0, loss=2.001)]
    assert table.astray(turns) == ["ours_nl"]


def test_a_plan_travels_as_json():
    plan = Plan(contestants=("ours", "fsdp2"), nodes=3, rate="200mbit")
    assert Plan.from_json(plan.to_json()) == plan


def test_contestants_of_one_default_backend_share_processes():
    assert teams_of(["ours", "zero3", "fsdp2", "mics"]) == [["ours", "fsdp2"], ["zero3"], ["mics"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--contestants", "hare"], "no contestants hare"),
        (["--contestants", "ours", "--shard", "3"], "--shard 3 does not divide 4 ranks"),
        (["--contestants", "ours", "--json", "/nowhere/x.json"], "no folder /nowhere"),
        (["--contestants", "ours", "--steps", "0"], "steps: 0; at least 1"),
        (["--quick", "--steps", "0", "--figures", "/dev/null/no"], "steps: 0; at least 1"),
        (["--contestants", "ours", "--nodes", "0"], "nodes: 0; at least 1"),
    ],
)
def test_wrong_requests_are_refused(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr("ci.cluster.command.why_not", lambda: None)
    assert race.main(arguments) == 2
    assert words in capsys.readouterr().err


SMALL = {"layers": 2, "width": 48, "heads": 2, "vocabulary": 128, "sequence": 16, "micro_batch": 1}
SMOKE = ("compute", "zero3", "fsdp2", "fsdp2_nl", "hybrid", "two_hop", "ours", "ours_nl_lean")


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_everybody_trains_the_same():
    names = tuple(name for name in SMOKE if peers.is_here(ENTRIES[name].requires))
    plan = Plan(contestants=names, rate="1gbit", steps=1, **SMALL)
    turns = course.race(plan, timelines=True)
    assert len(turns) == 3 * len(names)
    assert table.astray(turns) == []
    sent = {t["contestant"]: t["sent_bytes"] for t in turns if t["timed"]}
    assert sent["compute"] < sent["ours_nl_lean"] < sent["fsdp2_nl"] < sent["fsdp2"]
    for turn in turns:
        if turn["step"] == 2:
            kinds = {kind for kind, of in turn["spans"].items() if of}
            expected = set() if turn["contestant"] == "compute" else {"gather", "reduce"}
            assert expected | {"compute"} <= kinds, turn


def test_units_are_those_of_the_model():
    plan = Plan(contestants=())
    built = model.build(plan)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks(built)]
    root = sum(p.numel() for p in built.parameters()) - sum(blocks)
    assert theory.units(plan) == (root, *blocks)


def test_the_least_bytes_agree_with_those_counted_by_hand():
    """4 nodes x 1, shards of 2: see the sums; GPT-2 of 17.4M parameters, P bytes."""
    plan = Plan(contestants=())
    root, *blocks = theory.units(plan)
    model_bytes = 4 * (root + sum(blocks))
    full = theory.least_bytes(plan, theory.full_shard(plan))
    assert full == pytest.approx(0.75 * (3 * 4 * model_bytes - 4 * 4 * root))
    hybrid, two_hop = (theory.least_bytes(plan, f(plan)) for f in (theory.hybrid, theory.two_hop))
    # replicas all-reduce half the model each: 2 * (2 - 1) / 2 of it, four times or once
    assert hybrid - two_hop == pytest.approx(3 * model_bytes / 2)
    kept = theory.least_bytes(plan, theory.kept(plan))
    assert kept == pytest.approx((1 + 4) * model_bytes / 2 + model_bytes / 2)


def test_on_one_node_only_replicas_send_nothing():
    plan = Plan(contestants=(), nodes=2, ranks_per_node=2, shard=2)
    _, *blocks = theory.units(plan)
    assert theory.least_bytes(plan, theory.kept(plan)) == 4 * sum(theory.units(plan))
    alone = Plan(contestants=(), nodes=1, ranks_per_node=4, shard=2)
    assert theory.least_bytes(alone, theory.two_hop(alone)) == 0


class Event:
    """Of the profiler: times in microseconds."""

    def __init__(self, name, begin, end, thread=1):
        self.name, self.thread = name, thread
        self.time_range = SimpleNamespace(start=begin, end=end)


STEP = Event("the step", 1_000_000, 9_000_000)


def test_what_gloo_does_on_its_threads():
    found = spans.of_events(
        [
            STEP,
            Event("aten::mm", 1_000_000, 2_000_000),
            Event("aten::mm", 1_000_000, 2_000_000, thread=2),
            Event("c10d::_reduce_scatter_base_", 2_000_000, 2_000_100),
            Event("c10d::allreduce_", 2_000_200, 2_000_300),
            Event("gloo:all_gather", 1_500_000, 2_500_000, thread=3),
            Event("gloo:all_reduce", 3_000_000, 4_000_000, thread=3),
            Event("gloo:all_reduce", 4_000_000, 6_000_000, thread=3),
        ]
    )
    assert found == {
        "compute": [(0, 1)],
        "gather": [(0.5, 1.5)],
        "reduce": [(2, 3)],
        "second_hop": [(3, 5)],
    }


def test_what_blocks_the_caller_beside_a_call_of_gloo():
    found = spans.of_events(
        [
            STEP,
            Event("c10d::_allgather_base_", 2_000_000, 3_000_000),
            Event("c10d::_reduce_scatter_base_", 4_000_000, 5_000_000),
            Event("c10d::allreduce_", 5_000_000, 5_000_100),
            Event("gloo:all_reduce", 6_000_000, 7_000_000, thread=3),
        ]
    )
    assert found == {
        "compute": [],
        "gather": [(1, 2)],
        "reduce": [(3, 4)],
        "second_hop": [(5, 6)],
    }


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 1)), max_size=30))
def test_tidied_spans_neither_overlap_nor_leave_their_bounds(pieces):
    raw = [(begin, begin + length) for begin, length in pieces]
    found = spans.tidied(raw)
    assert all(b < e for b, e in found)
    assert all(one[1] < other[0] for one, other in zip(found, found[1:], strict=False))
    for begin, end in raw:
        inside = any(b - 1e-3 <= begin and end <= e + 1e-3 for b, e in found)
        assert inside or end - begin <= spans.SHORT + 1e-6


def test_quick_takes_fewer_steps_unless_told(tmp_path, monkeypatch):
    monkeypatch.setattr(race, "QUICK_FOLDER", tmp_path)

    def steps(*arguments):
        return race._plan(race._parser().parse_args(arguments)).steps

    assert steps("--quick") == race.QUICK_STEPS < steps() == Plan.steps
    assert steps("--quick", "--steps", "7") == steps("--steps", "7") == 7


def test_both_ladders_are_one_race_of_everybody_on_them():
    options = race._parser().parse_args(["--ladder"])
    names = race._plan(options).contestants
    assert names[0] == "compute" and len(set(names)) == len(names)
    assert set(names) == {"compute", *(name for rungs in LADDERS.values() for name in rungs)}


def test_a_ladder_says_what_each_part_adds():
    rungs = list(LADDERS["the backend last"])
    turns = [turn(name, 1, 2.0**-place) for place, name in enumerate(rungs)]
    *_, last = table.attribution(turns).splitlines()
    assert last.split(" | ")[1:] == [f"{2.0**-6:.2f}", "2.00x", "64.00x |"]
    assert table.attribution(turns[:-1]) == ""


def test_every_rung_is_a_contestant():
    assert {name for rungs in LADDERS.values() for name in rungs} <= set(ENTRIES)


def test_efficiency_is_computation_over_the_step():
    races = [
        {"plan": {"nodes": n, "rate": "1500mbit"},
         "results": [turn("compute", 1, 1.0), turn("ours_nl", 1, s)]}
        for n, s in ((1, 1.0), (4, 1.25))
    ]  # fmt: skip
    assert sweep.points(races, over_nodes=True) == {"ours_nl": [(1, 1.0), (4, 0.8)]}
    assert sweep.points(races, over_nodes=False)["ours_nl"][1] == (1.5, 0.8)
    assert sweep.render(races).splitlines()[-1] == "| 4 | 1500mbit | 80% |"


def test_a_sweep_races_on_every_cluster(tmp_path, monkeypatch, capsys):
    plans = []

    def raced(plan):
        plans.append(plan)
        return [turn(name, 1, 1.0 + plan.nodes) for name in plan.contestants]

    monkeypatch.setattr("ci.cluster.command.why_not", lambda: None)
    monkeypatch.setattr(sweep, "race", raced)
    kept = tmp_path / "scaling.json"
    words = ["--nodes", "1", "8", "--contestants", "ours_nl", "--json", str(kept)]
    assert sweep.main([*words, "--figures", str(tmp_path)]) == 0
    assert [(p.nodes, p.shard, p.contestants) for p in plans] == [
        (1, 1, ("compute", "ours_nl")),
        (8, 2, ("compute", "ours_nl")),
    ]
    assert "| 8 | 1gbit | 100% |" in capsys.readouterr().out
    assert (tmp_path / "scaling.svg").exists()
    assert [one["plan"]["nodes"] for one in json.loads(kept.read_text())["races"]] == [1, 8]
    assert sweep.main(["--nodes", "3", "--shard", "2"]) == 2
    assert sweep.main(["--rates", "1000"]) == 2


def test_a_rate_without_a_unit_is_refused():
    with pytest.raises(ValueError, match="write it as 200mbit"):
        sweep.gigabits("1000")


def test_figures_are_drawn(tmp_path):
    turns = [turn("fsdp2", 1, 2.0), turn("ours", 1, 1.0)]
    traced = {"spans": {"compute": [(0.0, 0.5)], "gather": [(0.1, 0.2)]}, "timed": False}
    turns += [{**one, **traced} for one in turns]
    for figure in (
        figures.step_times(turns),
        figures.timelines(turns),
        figures.efficiencies({"ours": [(1, 1.0), (4, 0.8)]}, "nodes"),
    ):
        path = tmp_path / "figure.svg"
        figures.save(figure, path)
        assert path.stat().st_size > 5000
