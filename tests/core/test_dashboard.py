"""TensorBoard on a run, by default and without a setting, looked at in a real browser."""

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
from tests.support.browser import open_page
from tests.support.command_line import nearlinear, write

TAGS = pytest.importorskip("nearlinear.train.events").TAGS  # not without tensorboard
SHOTS = Path(__file__).resolve().parents[2] / "artifacts" / "dashboard"
STEPS = 40
SIZE = (1400, 2200)  # high enough for all charts: those out of sight are not drawn
# Charts as SVG, whose lines can be read; TensorBoard draws them by WebGL otherwise.
QUERY = "?forceSVG=true#timeseries"
CARD = """
[...document.querySelectorAll('card-view')].find(c => c.querySelector('.tag')?.title === NAME)
"""
# The lines of a card's chart: points on the screen, and how they are drawn.
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
    """The folder of a run that was told nothing of TensorBoard."""
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
    """Where `nearlinear dashboard` says that the run is to be seen, once it is."""
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
        assert serving.wait(30) == 0  # Ctrl-C is its usual end
        assert _get(url) == b""  # and that of TensorBoard
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
    """The lines of a metric's chart, as they are and smoothed, once they have come to rest."""
    tag, before = json.dumps(TAGS[name]), None
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
def test_the_curve_that_is_shown_is_the_runs(page, run, name):
    """Every point of it: right by its step, and as high as its value."""
    rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    steps, values = np.array([(row["step"], row[name]) for row in rows if name in row]).T
    x, y = np.array(drawn(page, name)[0]["points"]).T
    assert len(x) == len(steps) == (STEPS // 10 if name == "eval_loss" else STEPS)
    for seen, numbers, sign in ((x, steps, 1), (y, values, -1)):  # pixels count downwards
        scale, offset = np.polyfit(numbers, seen, 1)
        assert np.sign(scale) == sign
        assert np.abs(scale * numbers + offset - seen).max() < 0.1  # pixels
    if name == "loss":
        assert y[-1] - y[0] > 50  # it falls, and one can see it
    text = page.evaluate(CARD.replace("NAME", json.dumps(TAGS[name])) + "?.innerText")
    value, step = re.search(r"tensorboard\s+\S+\s+(\S+)\s+(\d+)", text).groups()
    assert float(value) == pytest.approx(values[-1], rel=1e-3, abs=1e-4) and int(step) == STEPS


@pytest.mark.slow
def test_the_loss_curve_is_on_the_screen(page):
    """Its pixels have its colour, in the picture that is left to look at."""
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
def test_every_metric_is_unfolded(page):
    of_float16 = ("loss_scale", "skipped")
    expected = sorted(tag for name, tag in TAGS.items() if name not in of_float16)
    page.until(f"document.querySelectorAll('card-view .tag').length >= {len(expected)}")
    titles = page.evaluate("[...document.querySelectorAll('card-view .tag')].map(tag => tag.title)")
    assert sorted(titles) == expected
