"""A full run folder: outputs degrade with one warning each, and the run goes on to its end."""

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest

import nearlinear as nl
from nearlinear.train import metrics
from nearlinear.train.callbacks import Callback


class Full(Callback):
    """Fill a file system before one step, and make room again before another."""

    def __init__(self, folder, fill: int, free: int):
        self.ballast, self.fill, self.free = folder / "ballast", fill, free

    def on_step_begin(self, step):
        if step.number == self.free:
            self.ballast.unlink()
        if step.number == self.fill:
            try:
                with open(self.ballast, "wb", buffering=0) as file:
                    while True:
                        file.write(bytes(512))
            except OSError:
                pass

    def on_step_end(self, step, metrics):
        metrics["long"] = [0.5] * 1500  # more than the rest of a page


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("free", [0, 5], ids=["full to the end", "full for two steps"])
def test_run_ends_with_a_full_run_folder(small_run, small_disk, caplog, free):
    small_run["run"] = {"folder": str(small_disk / "run"), "tensorboard": True}
    small_run["train"] |= {"eval_sequences": 0, "sample_tokens": 0}
    with caplog.at_level(logging.WARNING):
        result = nl.Trainer(small_run, callbacks=[Full(small_disk, 3, free)]).fit()
    assert result.steps == 6
    warned = [r.getMessage() for r in caplog.records if "cannot be written" in r.getMessage()]
    assert len(warned) == len({text.split(" cannot")[0] for text in warned}) >= 2, warned
    assert any(text.startswith("metrics.jsonl cannot be written ([Errno 28]") for text in warned)
    rows = [json.loads(line) for line in open(small_disk / "run" / "metrics.jsonl")]
    steps = [row["step"] for row in rows]
    assert steps == ([1, 2, 5, 6] if free else [1, 2])
    [events] = (small_disk / "run" / "tensorboard").iterdir()
    assert set(read_steps(events)) >= set(steps)


def read_steps(path):
    """Return the steps of a TensorBoard event file, read by tensorboard."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return (event.step for event in EventFileLoader(str(path)).Load() if event.summary.value)


def test_closed_standard_output_does_not_end_a_run(tmp_path):
    program = (
        "import os, sys\n"
        "from nearlinear.train.metrics import Reporter\n"
        "reporter = Reporter(sys.argv[1], 2, active=True, tensorboard=False)\n"
        "os.close(1)\n"
        "reporter.log_step({'step': 1, 'loss': 1.0})\n"
        "reporter.close()\n"
        "os._exit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7, done.stderr
    assert done.stderr.count("the standard output cannot be written") == 1
    assert json.loads((tmp_path / metrics.METRICS_FILE).read_text())["loss"] == 1.0


def test_unusable_run_folder_does_not_end_a_run(small_run, tmp_path, caplog):
    (tmp_path / "file").touch()
    small_run["run"]["folder"] = os.fspath(tmp_path / "file" / "run")
    small_run["train"] |= {"steps": 1, "eval_sequences": 0, "sample_tokens": 0}
    assert nl.Trainer(small_run).fit().steps == 1
    assert "run.folder cannot be written" in caplog.text
