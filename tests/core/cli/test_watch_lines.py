"""CloudWatch and ``nearlinear watch`` read the same numbers from a log as from metrics.jsonl."""

import json
import math
import re
from decimal import Decimal

import pytest

from nearlinear.cli.watch.history import History
from nearlinear.launch.sagemaker.build_request import metric_definitions
from nearlinear.train.metrics import METRIC_FORMATS, METRIC_PATTERNS, SPECIAL_METRICS, format_line
from tests.support.command_line import nearlinear, write

DEFINITIONS = {metric["Name"]: metric["Regex"] for metric in metric_definitions()}


def extracted(log):
    """Return the values of every metric in ``log``: per line the first group, as CloudWatch."""
    found = {name: [] for name in DEFINITIONS}
    for text in log.splitlines():
        for name, regex in DEFINITIONS.items():
            if match := re.search(regex, text):
                found[name].append(match[1])
    return found


def agree(printed, number):
    """Return True if ``printed`` is ``number`` rounded to its last digit."""
    half = Decimal(10) ** Decimal(printed).as_tuple().exponent / 2
    return abs(Decimal(printed) - Decimal(number)) <= half * Decimal("1.0001")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, token_folder):
    """Log of a run with learning rates from 1e-5 to 0, and the rows of its metrics.jsonl."""
    folder = tmp_path_factory.mktemp("trained")
    config = {
        "model": {"preset": "gpt2-tiny", "overrides": {"n_layer": 1, "n_embd": 16, "n_head": 2}},
        "data": {"path": str(token_folder), "sequence_length": 32},
        "batch": {"micro_batch_size": 2},
        "optimizer": {"lr": 1e-5, "warmup_steps": 1, "min_lr_ratio": 0.0},
        "train": {"steps": 5, "eval_every": 2, "eval_sequences": 4, "sample_tokens": 2},
        "run": {"folder": str(folder / "run"), "peak_tflops": 1e6},
    }
    done = nearlinear("train", write(config, folder))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in (folder / "run" / "metrics.jsonl").open()]
    return done.stdout, rows


def test_log_of_a_run_contains_every_metric(trained):
    log, rows = trained
    assert DEFINITIONS == METRIC_PATTERNS and DEFINITIONS.keys() == METRIC_FORMATS.keys()
    for name, texts in extracted(log).items():
        numbers = [row[name] for row in rows if name in row]
        count = 0 if name in SPECIAL_METRICS else 3 if name == "eval_loss" else 5
        assert len(texts) == len(numbers) == count, name
        for text, number in zip(texts, numbers, strict=True):
            assert agree(text, number), (name, text, number)


def test_small_learning_rates_are_printed_in_scientific_form(trained):
    texts = extracted(trained[0])
    assert texts["lr"][0] == "1.00e-05" and texts["lr"][-1] == "0.00e+00"
    assert texts["mfu"] == ["0.000"] * 5


def test_history_of_the_log_equals_history_of_the_files(trained):
    log, rows = trained
    from_log, from_files = History(), History()
    for text in log.splitlines():
        from_log.read(f"[algo-1] {text}\r")
    for row in rows:
        from_files.read(json.dumps(row))
    assert from_log.steps == 5 and from_log.tokens_per_step == 2 * 32
    for name, texts in extracted(log).items():
        for history, numbers in (
            (from_log, [float(text) for text in texts]),
            (from_files, [row[name] for row in rows if name in row]),
        ):
            assert [value for value in history[name] if not math.isnan(value)] == numbers


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e-5, 0.0, 1e12, -2.5])
@pytest.mark.parametrize("name", sorted(METRIC_FORMATS.keys() - {"step"}))
def test_extreme_numbers_are_read_back(name, number):
    others = {other: 7.0 for other in METRIC_FORMATS} | {"step": 7}
    text = format_line(others | {name: number})
    found = {key: [float(value) for value in values] for key, values in extracted(text).items()}
    assert found == {key: [7.0] for key in METRIC_FORMATS} | {
        name: [float(f"{number:{METRIC_FORMATS[name]}}")]
    }
    (nan,) = extracted(format_line(others | {name: math.nan}))[name]
    assert math.isnan(float(nan))


@pytest.mark.parametrize(
    "text", ["eval_loss=5.5", "train.loss=5.5", "x-loss=5.5", '{"loss": 5.5}', "loss = 5.5"]
)
def test_metric_names_match_whole_words(text):
    assert extracted(text)["loss"] == []
