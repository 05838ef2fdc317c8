"""What CloudWatch and `nearlinear watch` read in a run's log is what the run wrote to its JSON."""

import json
import math
import re
from decimal import Decimal

import pytest

from nearlinear.launch.sagemaker.request import metric_definitions
from nearlinear.train.report import FORMATS, METRIC_PATTERNS, line
from nearlinear.watch.history import History
from tests.support.command_line import nearlinear, write

DEFINITIONS = {metric["Name"]: metric["Regex"] for metric in metric_definitions()}


def extracted(log):
    """Every metric's values in ``log``, as CloudWatch takes them: by line, the first group."""
    found = {name: [] for name in DEFINITIONS}
    for text in log.splitlines():
        for name, regex in DEFINITIONS.items():
            if match := re.search(regex, text):
                found[name].append(match[1])
    return found


def agree(printed, number):
    """Whether ``printed`` is ``number`` to its last digit."""
    half = Decimal(10) ** Decimal(printed).as_tuple().exponent / 2
    return abs(Decimal(printed) - Decimal(number)) <= half * Decimal("1.0001")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, token_folder):
    """The log of a real run with learning rates from 1e-5 to 0, and the rows of its JSON."""
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


def test_every_metric_of_a_real_run_is_extracted(trained):
    log, rows = trained
    assert DEFINITIONS == METRIC_PATTERNS and DEFINITIONS.keys() == FORMATS.keys()
    for name, texts in extracted(log).items():
        numbers = [row[name] for row in rows if name in row]
        count = {"eval_loss": 3, "loss_scale": 0, "skipped": 0}.get(name, 5)
        assert len(texts) == len(numbers) == count, name
        for text, number in zip(texts, numbers, strict=True):
            assert agree(text, number), (name, text, number)


def test_its_learning_rates_have_the_forms_they_should(trained):
    texts = extracted(trained[0])
    assert texts["lr"][0] == "1.00e-05" and texts["lr"][-1] == "0.00e+00"
    assert texts["mfu"] == ["0.000"] * 5


def test_watching_the_log_shows_what_watching_the_files_does(trained):
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
@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"step"}))
def test_numbers_of_all_forms(name, number):
    others = {other: 7.0 for other in FORMATS} | {"step": 7}
    text = line(others | {name: number})
    found = {key: [float(value) for value in values] for key, values in extracted(text).items()}
    assert found == {key: [7.0] for key in FORMATS} | {name: [float(f"{number:{FORMATS[name]}}")]}
    (nan,) = extracted(line(others | {name: math.nan}))[name]
    assert math.isnan(float(nan))


@pytest.mark.parametrize(
    "text", ["eval_loss=5.5", "train.loss=5.5", "x-loss=5.5", '{"loss": 5.5}', "loss = 5.5"]
)
def test_a_name_is_read_whole(text):
    assert extracted(text)["loss"] == []
