"""The command line, run as a person runs it."""

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
    """``config`` as a JSON file in ``folder``."""
    path = folder / "run.json"
    path.write_text(json.dumps(config))
    return path


def end_after(running, metrics, steps, patience=120):
    """SIGTERM for ``running`` once the file ``metrics`` tells of ``steps``; what it said."""
    deadline = time.monotonic() + patience
    while running.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= steps:
            running.send_signal(signal.SIGTERM)
            break
        time.sleep(0.05)
    out, err = running.communicate(timeout=patience)
    return out + (err or "")
