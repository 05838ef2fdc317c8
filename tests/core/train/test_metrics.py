"""The reporter's outputs: text lines read back by patterns, JSON lines, TensorBoard events."""

import json
import math
import re
import time

import pytest

from nearlinear.train.metrics import (
    INTRODUCTION_PATTERN,
    METRIC_PATTERNS,
    Reporter,
    format_line,
)

METRICS = {
    "step": 12,
    "loss": 6.03124,
    "lr": 3e-4,
    "grad_norm": 1.5,
    "tokens_per_s": 12345.6,
    "tflops_per_gpu": 0.0071,
    "mfu": 0.355,
    "mem_gib": 11.9,
    "batch_id": "0123456789ab",
}


def read(folder):
    """Return the rows of metrics.jsonl in ``folder``."""
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def test_line_has_the_documented_fields_in_order():
    assert format_line(METRICS) == (
        "step=12 loss=6.0312 lr=3.00e-04 grad_norm=1.500 tokens_per_s=12346 "
        "tflops_per_gpu=0.0071 mfu=0.355 mem_gib=11.90"
    )


@pytest.mark.parametrize("name", sorted(METRICS.keys() & METRIC_PATTERNS.keys()))
def test_patterns_read_the_line_back(name):
    found = re.findall(
        METRIC_PATTERNS[name], f"[rank0] {format_line(METRICS | {'eval_loss': 1.0})}"
    )
    assert len(found) == 1
    assert float(found[0]) == pytest.approx(METRICS[name], rel=1e-3)


def test_reporter_writes_all_outputs(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reporter = Reporter(tmp_path, 20, active=True, tensorboard=True)
    reporter.log_step(METRICS)
    reporter.log_step(METRICS | {"step": 13, "eval_loss": 5.5})
    reporter.close()
    assert capsys.readouterr().out.splitlines()[1].endswith("eval_loss=5.5000")
    rows = read(tmp_path)
    times = [row.pop("time") for row in rows]
    assert rows == [METRICS, METRICS | {"step": 13, "eval_loss": 5.5}]
    assert 0 <= times[1] - times[0] and abs(times[1] - time.time()) < 3600
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("learning/loss")] == [12, 13]
    assert events.Scalars("learning/eval_loss")[0].value == 5.5
    learning = {"learning/loss", "learning/eval_loss", "learning/lr", "learning/grad_norm"}
    machine = {"tokens_per_s", "tflops_per_gpu", "mfu", "mem_gib"}
    assert set(events.Tags()["scalars"]) == learning | {f"machine/{name}" for name in machine}


def test_reporter_flushes_every_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reporter = Reporter(tmp_path, 20, active=True, tensorboard=True)
    for step in (1, 2):
        reporter.log_step(METRICS | {"step": step})
        assert read(tmp_path)[-1]["step"] == step
        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        assert events.Scalars("learning/loss")[-1].step == step
    reporter.close()


def test_non_finite_numbers_are_null_in_json(tmp_path, capsys):
    reporter = Reporter(tmp_path, 20, active=True, tensorboard=False)
    reporter.log_step(METRICS | {"loss": math.inf, "mfu": math.nan})
    reporter.close()
    assert "loss=inf" in (out := capsys.readouterr().out) and "mfu=nan" in out
    (row,) = read(tmp_path)
    assert row["loss"] is None and row["mfu"] is None and row["lr"] == 3e-4


@pytest.mark.parametrize("hosts", [["a"] * 4, ["a", "a", "b", "b"]])
def test_introduction_is_read_back(tmp_path, capsys, hosts):
    reporter = Reporter(tmp_path, 20, active=True, tensorboard=False)
    reporter.introduce(200, 524288, hosts)
    reporter.close()
    out = capsys.readouterr().out
    steps, tokens = re.search(INTRODUCTION_PATTERN, out).groups()
    assert (int(steps), int(tokens.replace(",", ""))) == (200, 524288)
    assert out.endswith("by 4 ranks on a\n" if hosts[-1] == "a" else "by 4 ranks on 2 hosts\n")
    about = json.loads((tmp_path / "about.json").read_text())
    assert about == {"steps": 200, "tokens_per_step": 524288, "hosts": hosts}


def test_inactive_reporter_writes_nothing(tmp_path, capsys):
    reporter = Reporter(tmp_path / "run", 20, active=False, tensorboard=True)
    reporter.log_step(METRICS)
    reporter.print("hello")
    reporter.close()
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()


def test_resumed_run_replaces_repeated_steps(tmp_path):
    """The first run was killed in the middle of a line, three steps after its checkpoint."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = Reporter(tmp_path, 20, active=True, tensorboard=True)
    for step in range(1, 16):
        first.log_step(METRICS | {"step": step, "loss": 1.0})
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 16, "lo')
    second = Reporter(tmp_path, 20, active=True, tensorboard=True, first_step=12)
    second.log_step(METRICS | {"step": 13, "loss": 2.0})
    second.close()
    expected = [(step, 1.0 if step <= 12 else 2.0) for step in range(1, 14)]
    assert [(row["step"], row["loss"]) for row in read(tmp_path)] == expected
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("learning/loss")] == expected


def test_new_run_in_the_same_folder_discards_old_rows(tmp_path):
    for step in (1, 2):
        reporter = Reporter(tmp_path, 20, active=True, tensorboard=False)
        reporter.log_step(METRICS | {"step": step})
        reporter.close()
    assert [row["step"] for row in read(tmp_path)] == [2]


def test_progress_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    reporter = Reporter(tmp_path, 20, active=True, tensorboard=False)
    assert reporter._bar is not None
    reporter.log_step(METRICS)
    reporter.close()
    assert "step=12 loss=6.0312" in capsys.readouterr().out
