"""The race: its arithmetic, its refusals, and one small race of all that can run here."""

import pytest

from ci.cluster import why_not
from ci.race import __main__ as race
from ci.race import course, peers, table
from ci.race.contestants import ENTRIES
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
    _, _, fsdp2, ours = table.render(turns).splitlines()
    assert fsdp2.split(" | ")[1:] == ["5.00", "4.00-6.00", "3.0", "1.00x |"]
    assert ours.split(" | ")[1:] == ["2.50", "2.00-9.00", "3.0", "2.00x |"]


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
    ],
)
def test_wrong_requests_are_refused(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr(race, "why_not", lambda: None)
    assert race.main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_everybody_trains_the_same():
    small = {"layers": 2, "width": 48, "heads": 2, "vocabulary": 128, "sequence": 16}
    names = [name for name in ENTRIES if peers.is_here(ENTRIES[name].requires)]
    plan = Plan(contestants=tuple(names), rate="1gbit", steps=2, micro_batch=1, **small)
    turns = course.race(plan, timelines=True)
    assert len(turns) == 3 * len(names)
    assert table.astray(turns) == []
    sent = {t["contestant"]: t["sent_bytes"] for t in turns if t["step"] == 2}
    assert sent["compute"] < sent["ours_nl"] < sent["fsdp2_nl"] < sent["fsdp2"]
