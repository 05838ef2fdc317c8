"""Run the command line in a subprocess."""

import json
import os
import signal
import subprocess
import sys
import time


def nearlinear(*arguments, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "nearlinear.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def write(config, folder):
    """Write ``config`` as a JSON file in ``folder`` and return its path."""
    path = folder / "run.json"
    path.write_text(json.dumps(config))
    return path


def end_after(running, metrics, steps, patience=120):
    """Send SIGTERM to ``running`` after ``steps`` rows in ``metrics`` and return its output."""
    deadline = time.monotonic() + patience
    while running.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= steps:
            running.send_signal(signal.SIGTERM)
            break
        time.sleep(0.05)
    out, err = running.communicate(timeout=patience)
    return out + (err or "")
