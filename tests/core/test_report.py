"""The reporter's three sinks: a line that its own patterns read, JSON lines, TensorBoard events."""

import json
import re

import pytest

from nearlinear.train.report import METRIC_PATTERNS, Reporter, line

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


def test_the_line_has_the_documented_fields_in_order():
    assert line(METRICS) == (
        "step=12 loss=6.0312 lr=3.00e-04 grad_norm=1.500 tokens_per_s=12346 "
        "tflops_per_gpu=0.0071 mfu=0.355 mem_gib=11.90"
    )


@pytest.mark.parametrize("name", sorted(METRICS.keys() & METRIC_PATTERNS.keys()))
def test_patterns_read_the_line_back(name):
    found = re.findall(METRIC_PATTERNS[name], f"[rank0] {line(METRICS | {'eval_loss': 1.0})}")
    assert len(found) == 1
    assert float(found[0]) == pytest.approx(METRICS[name], rel=1e-3)


def test_sinks(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reporter = Reporter(tmp_path, 20, active=True, tensorboard=True)
    reporter.step(METRICS)
    reporter.step(METRICS | {"step": 13, "eval_loss": 5.5})
    reporter.close()
    assert capsys.readouterr().out.splitlines()[1].endswith("eval_loss=5.5000")
    rows = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [METRICS, METRICS | {"step": 13, "eval_loss": 5.5}]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("loss")] == [12, 13]
    assert events.Scalars("eval_loss")[0].value == 5.5


def test_other_ranks_are_silent(tmp_path, capsys):
    reporter = Reporter(tmp_path / "run", 20, active=False, tensorboard=True)
    reporter.step(METRICS)
    reporter.say("hello")
    reporter.close()
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()


def test_a_continued_run_appends(tmp_path):
    for first in (0, 12):
        reporter = Reporter(tmp_path, 20, active=True, tensorboard=False, first_step=first)
        reporter.step(METRICS | {"step": first + 1})
        reporter.close()
    rows = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 13]


def test_a_progress_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    reporter = Reporter(tmp_path, 20, active=True, tensorboard=False)
    assert reporter._bar is not None
    reporter.step(METRICS)
    reporter.close()
    assert "step=12 loss=6.0312" in capsys.readouterr().out
