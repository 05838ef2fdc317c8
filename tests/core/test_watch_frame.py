"""What is drawn of a run: curves that are as high as the numbers, and lines as wide as there is."""

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nearlinear.watch import draw
from nearlinear.watch.frame import frame
from nearlinear.watch.history import History
from tests.support.runs import ROW, history, ranks_at

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def shown(found, width=100, height=40, silence=0.0):
    """The picture as lines of text."""
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(frame(found, "runs/a", console, silence))
    return console.file.getvalue().splitlines()


def about(lines, label):
    (line,) = (line for line in lines if line.startswith(label))
    return line


# ---- draw --------------------------------------------------------------------------------------


def test_a_sparkline_goes_from_low_to_high():
    assert draw.sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert draw.sparkline([8, 1], 8) == "█▁"
    assert draw.sparkline([1, math.nan, 2], 8) == "▁ █"
    assert draw.sparkline([5, 5], 8) == "▄▄"
    assert draw.sparkline([], 8) == draw.sparkline([math.nan], 8) == ""


def test_more_values_than_columns_are_averaged():
    assert draw.sparkline([0, 2, 8, 8, 4, 5], 3) == draw.sparkline([1, 8, 4.5], 3)


def test_a_chart_stacks_lines():
    assert draw.chart([0, 23], 2, 3) == [" █", " █", "▁█"]


@given(st.lists(FLOATS, max_size=50), st.integers(1, 30), st.integers(1, 5))
def test_a_chart_fits_whatever_the_numbers(values, width, height):
    rows = draw.chart(values, width, height)
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
def test_durations(seconds, text):
    assert draw.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.5"), (12345.6, "12.3k"), (4.56e6, "4.56M"), (math.nan, "-")]
)
def test_short_numbers(value, text):
    assert draw.short(value) == text


def test_terminals_without_blocks_get_ascii():
    assert draw.levels("utf-8") == draw.EIGHTHS
    assert draw.levels("ascii") == draw.levels("latin-1") == draw.levels("?") == draw.ASCII


# ---- frame -------------------------------------------------------------------------------------


def test_everything_is_there():
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
    assert lines[1].endswith(" 25%") and lines[1].count("█") == 24  # of 96 columns
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


def test_of_many_ranks_the_extremes():
    found = history(5, mem_gib_by_rank=[10 + rank / 128 for rank in range(256)])
    lines = shown(found)
    words = about(lines, "memory")
    assert "11.00  median of 256 ranks, which take 10.00 to 11.99" in words
    fullest = lines[lines.index(words) + 1 :]
    assert [line.split()[-1] for line in fullest] == ["255", "254", "253"]


def test_many_slow_ranks_take_few_lines():
    slow = [0.3] * 17 + [0.9] * 15
    found = history(5, **ranks_at([0.1] * 32, slow))
    found.hosts = [f"algo-{rank // 8}" for rank in range(32)]
    lines = [line for line in shown(found) if line.startswith("slow: ")]
    assert len(lines) == 4 and lines[-1] == "slow: and 12 more ranks, on algo-2, algo-3"


def test_a_log_alone_is_enough():
    """Of text there are no times, no hosts, no other ranks, and no end of the run."""
    found = History()
    for step in (1, 2, 3):
        found.read(f"step={step} loss=5.0000 lr=1.00e-03 tokens_per_s=1000 mfu=nan mem_gib=1.50")
    lines = shown(found)
    assert lines[0].endswith("step 3") and "MFU unknown" in about(lines, "TFLOP/s")
    assert about(lines, "memory").split()[-2:] == ["rank", "0"] and "1.50" in about(lines, "memory")


def test_before_the_first_step_and_without_a_number():
    assert shown(History()) == ["no step has been reported yet: runs/a"]
    (line,) = (text for text in shown(history(3, loss=math.nan)) if text.startswith("!"))
    assert line == "! the loss of step 3 is no number: the run has diverged"


def test_done_and_silent():
    found = history(10)
    assert any("the run may hang" in line for line in shown(found, silence=99))
    found.steps = 10
    lines = shown(found, silence=99)
    assert lines[0].endswith("step 10 of 10   done") and not any("hang" in text for text in lines)


@pytest.mark.parametrize("width", [40, 63, 100, 200])
@pytest.mark.parametrize("height", [10, 24, 60])
def test_it_fits_the_terminal(width, height):
    found = history(500, mem_gib_by_rank=[1.0] * 4, **ranks_at([0.1] * 4, [0.3] * 4))
    found.steps, found.hosts = 1000, ["a-host-with-a-long-name.example.com"] * 4
    lines = shown(found, width, height)
    assert max(map(len, lines)) <= width
    if height >= 24:
        assert len(lines) <= height
    assert len(lines[-1]) <= width and about(lines, "tokens/s")


def test_a_long_name_leaves_room_for_the_step():
    found = history(7)
    console = Console(file=io.StringIO(), width=50, height=24, color_system=None)
    console.print(frame(found, "/mnt/fsx/a/very/long/name/of/a/folder/of/runs", console))
    first = console.file.getvalue().splitlines()[0]
    assert first.startswith("/mnt/fsx/a/") and first.endswith("…  step 7") and len(first) == 50


def test_a_row_of_another_kind_of_run_is_drawn_too():
    found = History()
    found.add({"step": 1, "loss": ROW["loss"]})
    assert shown(found)


def test_a_blend_says_how_often_each_source_has_been_read():
    found = history(1)
    assert not [line for line in shown(found) if line.startswith("epochs")]
    found.add(ROW | {"step": 2, "epochs": {"data/books": 0.5, "s3://bucket/code": 1.25}})
    lines = shown(found)
    first = lines.index(about(lines, "epochs"))
    assert lines[first].split() == ["epochs", "1.250", "of", "s3://bucket/code"]
    assert lines[first + 1].split() == ["0.500", "of", "data/books"]
    found.add(ROW | {"step": 3, "epochs": {f"data/{n}": n / 10 for n in range(12)}})
    assert sum(" of data/" in line for line in shown(found)) == 8
    assert any("and 4 sources that were read less" in line for line in shown(found))
