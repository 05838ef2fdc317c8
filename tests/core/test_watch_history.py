"""What a run has reported, and what that says of it: its pace, its end, and what is wrong."""

import json
import math

import pytest

from nearlinear.train.report import line
from nearlinear.watch.history import History, parse
from nearlinear.watch.signs import alarms, stragglers
from tests.support.runs import ROW, history, ranks_at

# ---- lines -------------------------------------------------------------------------------------


def test_both_kinds_of_line_say_the_same():
    text, row = f"[algo-1] 12:00 {line(ROW)}", json.dumps(ROW)
    assert parse(row) == ROW
    assert parse(text) == pytest.approx(ROW, rel=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss=5",
        "step=1",
        "step=one loss=2",
        "4 ranks = 2 replicate x 2 shard",
        '{"step": 1, "lo',
        '{"step": 16, "lo{"step": 17, "loss": 1.0}',
        '{"loss": 1.0}',
        '{"step": null}',
        "[1, 2]",
        '"step=1 loss=2',
    ],
)
def test_what_is_no_report_of_a_step(text):
    assert parse(text) is None
    found = History()
    assert found.read(text) is None and len(found) == 0


def test_numbers_that_are_none():
    found = History()
    found.read('{"step": 1, "loss": null, "mfu": "x"}')
    found.read("step=2 loss=inf lr=1.00e-05 mfu=nan")
    assert list(found["step"]) == [1, 2] and math.isnan(found["loss"][0])
    assert found["loss"][1] == math.inf and found["lr"][1] == 1e-5
    assert math.isnan(found["mfu"][1]) and math.isnan(found["mfu"][0])


def test_steps_that_are_taken_again_void_the_first_report():
    found = history(10, mem_gib_by_rank=[1.0, 2.0])
    found.add(ROW | {"step": 7, "loss": 5.0, "mem_gib_by_rank": [3.0, 3.0]})
    assert list(found["step"]) == [1, 2, 3, 4, 5, 6, 7] and found["loss"][-1] == 5.0
    assert [step for step, _ in found.ranks] == [1, 2, 3, 4, 5, 6, 7]


def test_what_a_run_is():
    found = History()
    found.read("[algo-1] 120 steps of 4,096 tokens by 8 ranks on 2 hosts")
    assert (found.steps, found.tokens_per_step) == (120, 4096)
    found.about('{"steps": 60, "tokens_per_step": 1, "hosts": ["a", "b"]}')
    found.about('{"steps": 70, "tok')  # being written
    found.about('{"steps": 70}')
    assert (found.steps, found.tokens_per_step, found.hosts) == (60, 1, ["a", "b"])


# ---- time --------------------------------------------------------------------------------------


def test_the_time_left():
    found = history(10)
    assert found.pace() == 2.0 and math.isnan(found.seconds_left())
    found.steps = 40
    assert found.seconds_left() == 60.0 and not found.done
    found.steps = 10
    assert found.seconds_left() == 0.0 and found.done


def test_a_pause_between_two_parts_of_a_run_is_not_its_pace():
    assert history(10, time=lambda s: 1e9 + 2 * s + 3600 * (s > 5)).pace() == 2.0


def test_evaluations_count():
    """Every fifth step takes 10 s more."""
    assert history(21, time=lambda s: 1e9 + 2 * s + 10 * (s // 5)).pace() == 4.0


def test_lines_that_come_in_batches():
    """Five at once every 10 s, as from CloudWatch; those before the first look have no time."""
    found = history(21, time=lambda s: 1e9 + 2 * (s - s % 5) if s > 5 else math.nan)
    assert found.pace() == pytest.approx(2.0, rel=0.3)


def test_without_times_the_tokens_tell():
    found = history(10, time=math.nan)
    assert math.isnan(found.pace())
    found.tokens_per_step = 3000
    assert found.pace() == 3.0


def test_nothing_is_known_of_a_run_that_has_not_reported():
    found = History()
    found.steps = 10
    assert math.isnan(found.seconds_left()) and not found.done
    assert alarms(found, 1e6) == [] and stragglers(found) == []


# ---- stragglers --------------------------------------------------------------------------------


def test_the_slow_ranks_are_named_the_worst_first():
    found = history(5, **ranks_at([0.1] * 7 + [0.5], [0.3] * 5 + [0.5] + [0.3] * 2))
    found.hosts = [f"algo-{1 + rank // 4}" for rank in range(8)]
    worst, other = stragglers(found)
    assert (worst.rank, worst.host, worst.loading) == (7, "algo-2", True)
    assert (other.rank, other.host, other.loading) == (5, "algo-2", False)
    assert str(worst) == "rank 7 on algo-2 loads its batch 0.4 s longer a step (2.0x the median)"
    assert str(other) == "rank 5 on algo-2 computes 0.2 s longer a step (1.5x the median)"


@pytest.mark.parametrize(
    ("load", "compute"),
    [
        ([0.1] * 4, [0.3] * 4),
        ([0.1] * 4, [0.3, 0.3, 0.3, 0.39]),  # a little
        ([0.0] * 4, [0.01, 0.01, 0.01, 0.05]),  # many times, of next to nothing in a step
        ([0.1], [0.3]),
    ],
)
def test_nobody_is_named_for_little(load, compute):
    assert stragglers(history(5, **ranks_at(load, compute))) == []


def test_of_two_ranks_the_slower_is_named():
    (found,) = stragglers(history(5, **ranks_at([0.1, 0.1], [0.3, 0.9])))
    assert found.rank == 1 and found.host == ""
    assert str(found) == "rank 1 computes 0.6 s longer a step (2.5x the median)"


def test_one_slow_step_is_nothing():
    found = history(9, **ranks_at([0.1] * 4, [0.3] * 4))
    found.add(ROW | {"step": 10} | ranks_at([0.1] * 4, [9.0, 0.3, 0.3, 0.3]))
    assert stragglers(found) == []
    assert stragglers(history(2, **ranks_at([0.1] * 4, [9.0, 0.3, 0.3, 0.3]))) == []


def test_a_run_that_goes_on_with_other_ranks():
    found = history(9, **ranks_at([0.1] * 4, [0.3] * 4))
    for step in (10, 11, 12):
        found.add(ROW | {"step": step} | ranks_at([0.1] * 2, [0.3, 0.9]))
    assert [slow.rank for slow in stragglers(found)] == [1]


# ---- alarms ------------------------------------------------------------------------------------


def kinds(found, silence=0.0):
    return [alarm.kind for alarm in alarms(found, silence)]


def falling(step):
    return 10 - 0.1 * step + 0.02 * (step % 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss": falling}, []),
        ({"loss": lambda s: math.nan if s == 40 else falling(s)}, ["loss"]),
        ({"loss": lambda s: 12.0 if s == 40 else falling(s)}, ["loss"]),
        ({"loss": lambda s: 12.0 if s == 30 else falling(s)}, []),  # it was, and is over
        ({"tokens_per_s": lambda s: 1000 - 300 * (s > 35)}, ["speed"]),
        ({"tokens_per_s": lambda s: 1000 - 100 * (s > 35)}, []),
        ({"tokens_per_s": lambda s: 1000 - 900 * (s == 40)}, []),  # one step
    ],
)
def test_alarms(changes, expected):
    assert kinds(history(40, **changes)) == expected


def test_the_words_of_alarms():
    (text,) = (w.text for w in alarms(history(40, loss=lambda s: 12.0 if s == 40 else 6.0)))
    assert text == "the loss jumped to 12 at step 40, from 6 before"
    (text,) = (w.text for w in alarms(history(40, tokens_per_s=lambda s: 1000 - 300 * (s > 35))))
    assert text == "throughput has dropped to 700 tokens/s, from 1000 (30% less)"


def test_a_run_that_has_gone_silent():
    found = history(10)
    assert kinds(found, 9.9) == [] and kinds(found, 10.5) == ["silence"]  # 5 times the usual 2 s
    assert alarms(found, 75.0)[0].text == (
        "no new line for 1 min 15 s, usually one every 2 s: the run may hang, or be gone; "
        "last step 10"
    )
    found.steps = 10
    assert kinds(found, 1e6) == []  # it is done
    evaluating = history(10, time=lambda s: 1e9 + 2 * s + 60 * (s // 5))
    assert kinds(evaluating, 100.0) == []  # as long as it has been silent before
    assert kinds(evaluating, 130.0) == ["silence"]
    assert kinds(history(2), 1e6) == []  # too early to tell
