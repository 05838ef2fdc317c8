"""The screen of ``nearlinear watch``: curves follow the numbers, lines fit the terminal."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nearlinear.cli.watch import screen
from nearlinear.cli.watch.history import History
from nearlinear.output import format_duration, format_rate
from tests.support.runs import ROW, history, ranks_at

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def shown(found, width=100, height=40, silence=0.0):
    """Return the rendered screen as lines of text."""
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(screen.render_screen(found, "runs/a", console, silence))
    return console.file.getvalue().splitlines()


def about(lines, label):
    (line,) = (line for line in lines if line.startswith(label))
    return line


# ---- curves -----------------------------------------------------------------------------------


def test_sparkline_goes_from_low_to_high():
    assert screen.draw_sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert screen.draw_sparkline([8, 1], 8) == "█▁"
    assert screen.draw_sparkline([1, math.nan, 2], 8) == "▁ █"
    assert screen.draw_sparkline([5, 5], 8) == "▄▄"
    assert screen.draw_sparkline([], 8) == screen.draw_sparkline([math.nan], 8) == ""


def test_sparkline_averages_values_per_column():
    assert screen.draw_sparkline([0, 2, 8, 8, 4, 5], 3) == screen.draw_sparkline([1, 8, 4.5], 3)


def test_chart_stacks_lines():
    assert screen.draw_chart([0, 23], 2, 3) == [" █", " █", "▁█"]


@given(st.lists(FLOATS, max_size=50), st.integers(1, 30), st.integers(1, 5))
def test_chart_fits_for_any_numbers(values, width, height):
    rows = screen.draw_chart(values, width, height)
    assert len(rows) == height and max(map(len, rows)) <= width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (65, "1 min 05 s"),
        (7510, "2 h 05 min"),
        (200000, "2 d 07 h"),
        (math.nan, "-"),
    ],
)
def test_duration_is_formatted_in_two_units(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        (12345.6, "12.3k"),
        (4.56e6, "4.56M"),
        (999.9e9, "1T"),
        (15e12, "15T"),
        (2.345e15, "2,345T"),
        (math.nan, "-"),
    ],
)
def test_rate_is_formatted_with_a_prefix(value, text):
    assert format_rate(value) == text


def test_levels_are_ascii_for_encodings_without_blocks():
    assert screen.choose_levels("utf-8") == screen.EIGHTHS
    assert (
        screen.choose_levels("ascii")
        == screen.choose_levels("latin-1")
        == screen.choose_levels("?")
        == screen.ASCII
    )


# ---- screen ------------------------------------------------------------------------------------


def test_screen_shows_every_section():
    found = history(
        30,
        loss=lambda s: 10 - 0.1 * s,
        eval_loss=lambda s: 10.5 - 0.1 * s if s % 10 == 0 else None,
        mem_gib_by_rank=[1.0, 2.0, 1.5, 1.25],
        **ranks_at([0.1] * 4, [0.3, 0.3, 0.3, 0.9]),
    )
    found.steps, found.hosts = 120, ["algo-1", "algo-1", "algo-2", "algo-2"]
    lines = shown(found)
    assert lines[0].startswith("runs/a") and lines[0].endswith("step 30 of 120   ETA 3 min 00 s")
    assert lines[1].endswith(" 25%") and lines[1].count("█") == 24  # in 96 columns
    assert lines[2] == "slow: rank 3 on algo-2 computes 0.6 s longer a step (2.5x the median)"
    assert "9.9000" in about(lines, "loss")
    assert "7.0000 now, lowest 7.0000 at step 30" in "\n".join(lines)
    assert about(lines, "held out").split() == ["held", "out", "7.5000", "█▅▁", "at", "step", "30"]
    assert about(lines, "tokens/s").split()[1] == "1k"
    assert about(lines, "lr").split()[1] == "1.00e-05"
    assert "MFU 40.0%" in about(lines, "TFLOP/s") and "1e-06" in about(lines, "TFLOP/s")
    memory = lines[lines.index(about(lines, "memory")) :]
    assert [line.split()[-5:][-4:] for line in memory] == [
        ["rank", str(rank), "on", host] for rank, host in enumerate(found.hosts)
    ]
    assert [line.count("█") for line in memory] == [15, 30, 22, 19]


def test_memory_of_many_ranks_lists_the_fullest():
    found = history(5, mem_gib_by_rank=[10 + rank / 128 for rank in range(256)])
    lines = shown(found)
    memory = about(lines, "memory")
    assert "11.00  median of 256 ranks, 10.00 to 11.99" in memory
    fullest = lines[lines.index(memory) + 1 :]
    assert [line.split()[-1] for line in fullest] == ["255", "254", "253"]


def test_stragglers_take_few_lines():
    slow = [0.3] * 17 + [0.9] * 15
    found = history(5, **ranks_at([0.1] * 32, slow))
    found.hosts = [f"algo-{rank // 8}" for rank in range(32)]
    lines = [line for line in shown(found) if line.startswith("slow: ")]
    assert len(lines) == 4 and lines[-1] == "slow: and 12 more ranks, on algo-2, algo-3"


def test_screen_renders_a_plain_log():
    """Log lines carry no times, no hosts, no other ranks and no total number of steps."""
    found = History()
    for step in (1, 2, 3):
        found.read(f"step={step} loss=5.0000 lr=1.00e-03 tokens_per_s=1000 mfu=nan mem_gib=1.50")
    lines = shown(found)
    assert lines[0].endswith("step 3") and "MFU unknown" in about(lines, "TFLOP/s")
    assert about(lines, "memory").split()[-2:] == ["rank", "0"] and "1.50" in about(lines, "memory")


def test_screen_before_the_first_step_and_with_a_nan_loss():
    assert shown(History()) == ["no step has been reported yet: runs/a"]
    (line,) = (text for text in shown(history(3, loss=math.nan)) if text.startswith("!"))
    assert line == "! the loss of step 3 is not finite: the run has diverged"


def test_silence_alarm_stops_when_the_run_is_done():
    found = history(10)
    assert any("the run may hang" in line for line in shown(found, silence=99))
    found.steps = 10
    lines = shown(found, silence=99)
    assert lines[0].endswith("step 10 of 10   done") and not any("hang" in text for text in lines)


@pytest.mark.parametrize("width", [40, 63, 100, 200])
@pytest.mark.parametrize("height", [10, 24, 60])
def test_screen_fits_the_terminal(width, height):
    found = history(500, mem_gib_by_rank=[1.0] * 4, **ranks_at([0.1] * 4, [0.3] * 4))
    found.steps, found.hosts = 1000, ["a-host-with-a-long-name.example.com"] * 4
    lines = shown(found, width, height)
    assert max(map(len, lines)) <= width
    if height >= 24:
        assert len(lines) <= height
    assert len(lines[-1]) <= width and about(lines, "tokens/s")


def test_long_title_leaves_room_for_the_step():
    found = history(7)
    console = Console(file=io.StringIO(), width=50, height=24, color_system=None)
    console.print(
        screen.render_screen(found, "/mnt/fsx/a/very/long/name/of/a/folder/of/runs", console)
    )
    first = console.file.getvalue().splitlines()[0]
    assert first.startswith("/mnt/fsx/a/") and first.endswith("…  step 7") and len(first) == 50


def test_screen_renders_rows_with_few_metrics():
    found = History()
    found.add({"step": 1, "loss": ROW["loss"]})
    assert shown(found)


def test_mixture_shows_epochs_per_source():
    found = history(1)
    assert not [line for line in shown(found) if line.startswith("epochs")]
    found.add(ROW | {"step": 2, "epochs": {"data/books": 0.5, "s3://bucket/code": 1.25}})
    lines = shown(found)
    first = lines.index(about(lines, "epochs"))
    assert lines[first].split() == ["epochs", "1.250", "of", "s3://bucket/code"]
    assert lines[first + 1].split() == ["0.500", "of", "data/books"]
    found.add(ROW | {"step": 3, "epochs": {f"data/{n}": n / 10 for n in range(12)}})
    assert sum(" of data/" in line for line in shown(found)) == 8
    assert any("and 4 sources read less often" in line for line in shown(found))
