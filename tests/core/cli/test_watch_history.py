"""The history of a watched run: parsing, step rate, remaining time, stragglers and alarms."""

import json
import math

import pytest

from nearlinear.cli.watch.history import History, find_alarms, find_stragglers, parse_row
from nearlinear.train.metrics import format_line
from tests.support.runs import ROW, history, ranks_at

# ---- lines -------------------------------------------------------------------------------------


def test_parse_row_reads_json_and_text():
    text, row = f"[algo-1] 12:00 {format_line(ROW)}", json.dumps(ROW)
    assert parse_row(row) == ROW
    assert parse_row(text) == pytest.approx(ROW, rel=1e-3)


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
def test_parse_row_ignores_other_lines(text):
    assert parse_row(text) is None
    found = History()
    assert found.read(text) is None and len(found) == 0


def test_history_stores_nan_for_invalid_numbers():
    found = History()
    found.read('{"step": 1, "loss": null, "mfu": "x"}')
    found.read("step=2 loss=inf lr=1.00e-05 mfu=nan")
    assert list(found["step"]) == [1, 2] and math.isnan(found["loss"][0])
    assert found["loss"][1] == math.inf and found["lr"][1] == 1e-5
    assert math.isnan(found["mfu"][1]) and math.isnan(found["mfu"][0])


def test_repeated_steps_replace_earlier_reports():
    found = history(10, mem_gib_by_rank=[1.0, 2.0])
    found.add(ROW | {"step": 7, "loss": 5.0, "mem_gib_by_rank": [3.0, 3.0]})
    assert list(found["step"]) == [1, 2, 3, 4, 5, 6, 7] and found["loss"][-1] == 5.0
    assert [step for step, _ in found.ranks] == [1, 2, 3, 4, 5, 6, 7]


def test_introduction_and_about_file_are_read():
    found = History()
    found.read("[algo-1] 120 steps of 4,096 tokens by 8 ranks on 2 hosts")
    assert (found.steps, found.tokens_per_step) == (120, 4096)
    found.read_about('{"steps": 60, "tokens_per_step": 1, "hosts": ["a", "b"]}')
    found.read_about('{"steps": 70, "tok')  # being written
    found.read_about('{"steps": 70}')
    assert (found.steps, found.tokens_per_step, found.hosts) == (60, 1, ["a", "b"])


# ---- time --------------------------------------------------------------------------------------


def test_seconds_left():
    found = history(10)
    assert found.seconds_per_step() == 2.0 and math.isnan(found.seconds_left())
    found.steps = 40
    assert found.seconds_left() == 60.0 and not found.done
    found.steps = 10
    assert found.seconds_left() == 0.0 and found.done


def test_step_rate_excludes_pauses():
    assert history(10, time=lambda s: 1e9 + 2 * s + 3600 * (s > 5)).seconds_per_step() == 2.0


def test_step_rate_includes_evaluations():
    """Every fifth step takes 10 s more."""
    assert history(21, time=lambda s: 1e9 + 2 * s + 10 * (s // 5)).seconds_per_step() == 4.0


def test_step_rate_of_lines_in_batches():
    """CloudWatch delivers five lines every 10 s; lines before the first poll have no time."""
    found = history(21, time=lambda s: 1e9 + 2 * (s - s % 5) if s > 5 else math.nan)
    assert found.seconds_per_step() == pytest.approx(2.0, rel=0.3)


def test_step_rate_without_times_uses_tokens():
    found = history(10, time=math.nan)
    assert math.isnan(found.seconds_per_step())
    found.tokens_per_step = 3000
    assert found.seconds_per_step() == 3.0


def test_empty_history_has_no_estimates():
    found = History()
    found.steps = 10
    assert math.isnan(found.seconds_left()) and not found.done
    assert find_alarms(found, 1e6) == [] and find_stragglers(found) == []


# ---- stragglers ----------------------------------------------------------------------------------


def test_stragglers_are_sorted_by_delay():
    found = history(5, **ranks_at([0.1] * 7 + [0.5], [0.3] * 5 + [0.5] + [0.3] * 2))
    found.hosts = [f"algo-{1 + rank // 4}" for rank in range(8)]
    worst, other = find_stragglers(found)
    assert (worst.rank, worst.host, worst.loading) == (7, "algo-2", True)
    assert (other.rank, other.host, other.loading) == (5, "algo-2", False)
    assert str(worst) == "rank 7 on algo-2 loads its batch 0.4 s longer a step (2.0x the median)"
    assert str(other) == "rank 5 on algo-2 computes 0.2 s longer a step (1.5x the median)"


@pytest.mark.parametrize(
    ("load", "compute"),
    [
        ([0.1] * 4, [0.3] * 4),
        ([0.1] * 4, [0.3, 0.3, 0.3, 0.39]),  # below the factor
        ([0.0] * 4, [0.01, 0.01, 0.01, 0.05]),  # a large factor, but a small share of a step
        ([0.1], [0.3]),
    ],
)
def test_small_delays_are_no_stragglers(load, compute):
    assert find_stragglers(history(5, **ranks_at(load, compute))) == []


def test_straggler_of_two_ranks():
    (found,) = find_stragglers(history(5, **ranks_at([0.1, 0.1], [0.3, 0.9])))
    assert found.rank == 1 and found.host == ""
    assert str(found) == "rank 1 computes 0.6 s longer a step (2.5x the median)"


def test_one_slow_step_is_no_straggler():
    found = history(9, **ranks_at([0.1] * 4, [0.3] * 4))
    found.add(ROW | {"step": 10} | ranks_at([0.1] * 4, [9.0, 0.3, 0.3, 0.3]))
    assert find_stragglers(found) == []
    assert find_stragglers(history(2, **ranks_at([0.1] * 4, [9.0, 0.3, 0.3, 0.3]))) == []


def test_stragglers_after_the_number_of_ranks_changes():
    found = history(9, **ranks_at([0.1] * 4, [0.3] * 4))
    for step in (10, 11, 12):
        found.add(ROW | {"step": step} | ranks_at([0.1] * 2, [0.3, 0.9]))
    assert [slow.rank for slow in find_stragglers(found)] == [1]


# ---- alarms --------------------------------------------------------------------------------------


def kinds(found, silence=0.0):
    return [alarm.kind for alarm in find_alarms(found, silence)]


def falling(step):
    return 10 - 0.1 * step + 0.02 * (step % 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss": falling}, []),
        ({"loss": lambda s: math.nan if s == 40 else falling(s)}, ["loss"]),
        ({"loss": lambda s: 12.0 if s == 40 else falling(s)}, ["loss"]),
        ({"loss": lambda s: 12.0 if s == 30 else falling(s)}, []),  # an earlier spike
        ({"tokens_per_s": lambda s: 1000 - 300 * (s > 35)}, ["speed"]),
        ({"tokens_per_s": lambda s: 1000 - 100 * (s > 35)}, []),
        ({"tokens_per_s": lambda s: 1000 - 900 * (s == 40)}, []),  # a single step
        ({"replicas": lambda s: 3 if s > 30 else 4}, ["replicas"]),
        ({"replicas": lambda s: 3 if 20 < s < 30 else 4}, []),  # it has joined again
    ],
)
def test_alarm_kinds(changes, expected):
    assert kinds(history(40, **changes)) == expected


def test_alarm_messages():
    (text,) = (
        alarm.text for alarm in find_alarms(history(40, loss=lambda s: 12.0 if s == 40 else 6.0))
    )
    assert text == "the loss jumped to 12 at step 40, from 6 before"
    (text,) = (
        w.text for w in find_alarms(history(40, tokens_per_s=lambda s: 1000 - 300 * (s > 35)))
    )
    assert text == "throughput has dropped to 700 tokens/s, from 1000 (30% less)"
    (text,) = (w.text for w in find_alarms(history(40, replicas=lambda s: 4 - 2 * (s > 30))))
    assert text == "2 of 4 replicas are missing since step 30: the others compute their batches"


def test_silence_alarm():
    found = history(10)
    assert kinds(found, 9.9) == [] and kinds(found, 10.5) == ["silence"]  # 5 times the usual 2 s
    assert find_alarms(found, 75.0)[0].text == (
        "no new line for 1 min 15 s, usually one every 2 s: the run may hang or have ended; "
        "last step 10"
    )
    found.steps = 10
    assert kinds(found, 1e6) == []  # the run is done
    evaluating = history(10, time=lambda s: 1e9 + 2 * s + 60 * (s // 5))
    assert kinds(evaluating, 100.0) == []  # shorter than an earlier evaluation
    assert kinds(evaluating, 130.0) == ["silence"]
    assert kinds(history(2), 1e6) == []  # too early to tell
