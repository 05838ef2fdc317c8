"""The command line, run as a person runs it."""

import json
import os
import subprocess
import sys


def nearlinear(*arguments, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "nearlinear.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def write(config, folder):
    """``config`` as a JSON file in ``folder``."""
    path = folder / "run.json"
    path.write_text(json.dumps(config))
    return path
