"""Kept races: read from files, their ratios and spreads, and the form of the repository's own."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.race import kept as races
from ci.race.kept import Race, Spread
from ci.race.table import astray

HEADER = {"command": "python -m ci.race", "machine": {"cpu": "x", "cores": 2}, "versions": {}}
FILES = sorted(races.FOLDER.glob("*.json"))
SECONDS = st.floats(0.01, 1e4)


def turns(contestant, seconds, warm_up=99.0):
    """A contestant's turns: a warm-up, and those that count."""
    return [
        {"contestant": contestant, "step": step, "seconds": time, "sent_bytes": 100 * step,
         "loss": 2.0, "timed": step > 0}
        for step, time in enumerate([warm_up, *seconds])
    ]  # fmt: skip


def race(**seconds):
    found = [turn for name, times in seconds.items() for turn in turns(name, times)]
    return Race("4x1", HEADER, {"nodes": 4}, found)


def test_medians_and_extremes_leave_the_warm_up_out():
    one = race(compute=[4.0, 6.0, 5.0])
    assert one.seconds("compute") == Spread(5.0, 4.0, 6.0)
    assert one.seconds("compute").show() == "5.00 (4.00-6.00)"
    assert one.sent_bytes("compute") == 200
    assert one.names == ["compute"] and one.command == "python -m ci.race"


def test_a_speed_up_compares_turns_of_a_round():
    one = race(compute=[2.0, 4.0], fsdp2=[4.0, 8.0])  # the machine was busy in the second round
    assert one.speed_up("fsdp2", "compute") == Spread(2.0, 2.0, 2.0)
    assert one.efficiency("fsdp2") == Spread(0.5, 0.5, 0.5)
    assert one.efficiency("compute") == Spread(1.0, 1.0, 1.0)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=9))
def test_ratios_lie_within_their_extremes_and_multiply(rounds):
    first, second, third = zip(*rounds, strict=True)
    one = race(a=first, b=second, c=third)
    ab, bc, ac = one.speed_up("a", "b"), one.speed_up("b", "c"), one.speed_up("a", "c")
    for spread in (ab, bc, ac):
        assert spread.low * (1 - 1e-9) <= spread.median <= spread.high * (1 + 1e-9)
    assert ab.median * bc.median == pytest.approx(ac.median)
    assert one.speed_up("b", "a").median == pytest.approx(1 / ab.median)


def test_the_fastest_is_of_those_that_raced():
    one = race(zero3=[5.0], zero3_default=[4.0])
    assert one.fastest(["zero3", "zero3_default"]) == "zero3_default"
    assert one.fastest(["zero3", "mics"]) == "zero3"
    assert one.fastest(["mics"]) is None


def test_who_did_not_race_or_missed_a_round_is_named():
    one = race(fsdp2=[5.0, 6.0], ours=[4.0])
    with pytest.raises(KeyError, match="mics did not race"):
        one.seconds("mics")
    with pytest.raises(ValueError, match="fsdp2 and ours took different rounds"):
        one.speed_up("fsdp2", "ours")


def test_files_hold_one_race_or_several(tmp_path):
    part = {"plan": {"nodes": 2}, "results": turns("ours", [1.0])}
    (tmp_path / "a.json").write_text(json.dumps({**HEADER, "races": [part, part]}))
    (tmp_path / "b.json").write_text(json.dumps({**HEADER, **part}))
    found = races.read(tmp_path)
    assert list(found) == ["b", "a"]  # single races first
    assert [len(kept) for kept in found.values()] == [1, 2]
    assert found["a"][1].seconds("ours").median == 1.0
    assert races.read(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"command": "x", "races": 3}'])
def test_other_files_are_refused_with_the_command(tmp_path, text):
    (tmp_path / "2x4.json").write_text(text)
    words = r"2x4.json is not a kept race .* --nodes 2 --ranks 4 --json ci/race/results/2x4.json"
    with pytest.raises(ValueError, match=words):
        races.read(tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_kept_race_says_how_it_was_made_and_trained_the_same(path):
    for kept in races.races_of(path):
        command = kept.command.split()
        assert command[:2] == ["python", "-m"]
        assert not any(word.startswith("/") for word in command)
        assert {"cpu", "cores"} <= kept.origin["machine"].keys()
        assert {"nodes", "ranks_per_node", "shard", "rate", "steps"} <= kept.plan.keys()
        assert astray(kept.turns) == []
