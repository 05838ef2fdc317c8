"""TensorBoard shows the metrics of a run with default settings, checked in a browser."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from ci import browser
from nearlinear.train.metrics import SPECIAL_METRICS, TENSORBOARD_TAGS
from tests.support.browser import open_page
from tests.support.command_line import nearlinear, write

pytest.importorskip("tensorboard")
SHOTS = Path(__file__).resolve().parents[3] / "artifacts" / "dashboard"
STEPS = 40
SIZE = (1400, 2200)  # high enough for all charts: hidden charts are not drawn
# Draw charts as SVG, whose paths can be read, instead of WebGL.
QUERY = "?forceSVG=true#timeseries"
CARD = """
[...document.querySelectorAll('card-view')].find(c => c.querySelector('.tag')?.title === NAME)
"""
# Points in screen coordinates and style of each line of a card's chart.
LINES = f"""
[...{CARD}.querySelectorAll('.series-view path')].map(path => {{
  const place = path.getScreenCTM();
  const points = path.getAttribute('d').match(/[^ML]+/g).map(pair => pair.split(',').map(Number));
  return {{
    points: points.map(([x, y]) => [x + place.e, y + place.f]),
    colour: path.style.stroke,
    opacity: Number(path.style.opacity),
  }};
}})
"""


@pytest.fixture(scope="module")
def chromium():
    return browser.find() or pytest.skip(browser.MISSING)


@pytest.fixture(scope="module")
def run(tmp_path_factory, token_folder):
    """Folder of a run whose config does not mention TensorBoard."""
    folder = tmp_path_factory.mktemp("dashboard")
    config = {
        "model": {"preset": "gpt2-tiny", "overrides": {"n_layer": 1, "n_embd": 32, "n_head": 2}},
        "data": {"path": str(token_folder), "sequence_length": 32},
        "batch": {"micro_batch_size": 4},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": STEPS, "eval_every": 10, "eval_sequences": 16, "sample_tokens": 0},
        "run": {"folder": str(folder / "run")},
    }
    done = nearlinear("train", write(config, folder))
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="module")
def address(run):
    """Address printed by ``nearlinear dashboard``, once the server answers."""
    command = [sys.executable, "-m", "nearlinear.cli", "dashboard", str(run)]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    serving = subprocess.Popen(command, env=environment, **options)
    try:
        url = re.fullmatch(r"TensorBoard: (http://127\.0\.0\.1:\d+/)\n", serving.stdout.readline())[
            1
        ]
        deadline = time.monotonic() + 180
        while b"TensorBoard" not in _get(url):
            assert serving.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        yield url
        serving.send_signal(signal.SIGINT)
        assert serving.wait(30) == 0  # Ctrl-C is the usual way to stop it
        assert _get(url) == b""  # TensorBoard has stopped too
    finally:
        serving.kill()
        serving.wait()
        serving.stdout.close()


def _get(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def page(chromium, address, tmp_path_factory):
    with open_page(chromium, tmp_path_factory.mktemp("profile"), SIZE) as opened:
        opened.go(address + QUERY)
        yield opened


def drawn(page, name):
    """Return the raw and the smoothed line of a metric's chart when they stop moving."""
    tag, before = json.dumps(TENSORBOARD_TAGS[name]), None
    page.until(
        f"{CARD}?.querySelectorAll('.series-view path[d]').length === 2".replace("NAME", tag)
    )
    while (lines := page.evaluate(LINES.replace("NAME", tag))) != before:
        before = lines
        time.sleep(0.5)
    raw, smooth = sorted(lines, key=lambda line: line["opacity"])
    return raw, smooth


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss", "eval_loss", "lr"])
def test_dashboard_curve_equals_the_metrics(page, run, name):
    """Every point has the position of its step and value."""
    rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    steps, values = np.array([(row["step"], row[name]) for row in rows if name in row]).T
    x, y = np.array(drawn(page, name)[0]["points"]).T
    assert len(x) == len(steps) == (STEPS // 10 if name == "eval_loss" else STEPS)
    for seen, numbers, sign in ((x, steps, 1), (y, values, -1)):  # pixels count downwards
        scale, offset = np.polyfit(numbers, seen, 1)
        assert np.sign(scale) == sign
        assert np.abs(scale * numbers + offset - seen).max() < 0.1  # pixels
    if name == "loss":
        assert y[-1] - y[0] > 50  # visibly falling
    text = page.evaluate(CARD.replace("NAME", json.dumps(TENSORBOARD_TAGS[name])) + "?.innerText")
    value, step = re.search(r"tensorboard\s+\S+\s+(\S+)\s+(\d+)", text).groups()
    assert float(value) == pytest.approx(values[-1], rel=1e-3, abs=1e-4) and int(step) == STEPS


@pytest.mark.slow
def test_dashboard_screenshot_shows_the_loss_curve(page):
    """Pixels along the curve have its colour in the saved screenshot."""
    from PIL import Image

    line = drawn(page, "loss")[1]
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / "tensorboard.png").write_bytes(shot := page.screenshot())
    pixels = np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)
    colour = np.array([int(part) for part in re.findall(r"\d+", line["colour"])])
    of_line = np.abs(pixels - colour).max(axis=-1) < 40
    x, y = np.array(line["points"]).T
    between = np.linspace(0, len(x) - 1, 300)
    places = [np.interp(between, range(len(x)), along).round().astype(int) for along in (x, y)]
    hits = [of_line[row - 1 : row + 2, column].any() for column, row in zip(*places, strict=True)]
    assert np.mean(hits) > 0.95
    chart = of_line[int(min(y)) : int(max(y)), int(min(x)) : int(max(x))]
    assert chart.mean() < 0.1  # a line, not an area


@pytest.mark.slow
def test_dashboard_shows_every_metric(page):
    expected = sorted(tag for name, tag in TENSORBOARD_TAGS.items() if name not in SPECIAL_METRICS)
    page.until(f"document.querySelectorAll('card-view .tag').length >= {len(expected)}")
    titles = page.evaluate("[...document.querySelectorAll('card-view .tag')].map(tag => tag.title)")
    assert sorted(titles) == expected
