"""Interface between the request and the container: channels, launcher script, hyperparameters.

The channel ``sm_drivers`` brings the launcher script into the container, and the request's entry
point starts it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CODE_CHANNEL, DRIVER_CHANNEL = "code", "sm_drivers"
OWN_CHANNELS = (CODE_CHANNEL, DRIVER_CHANNEL)
RANKS_VARIABLE = "NEARLINEAR_RANKS_PER_NODE"
"""Environment variable with the number of ranks per host; `container` reads it."""
CONTAINER_ROOT = "/opt/ml"
SCRIPT_NAME = "sm_train.sh"
SCRIPT_PATH = f"{CONTAINER_ROOT}/input/data/{DRIVER_CHANNEL}/{SCRIPT_NAME}"
START_COMMAND = f"chmod +x {SCRIPT_PATH} && {SCRIPT_PATH}"
SCRIPT = """\
#!/bin/bash
# Started by the training job. The script finds the other inputs relative to its own path.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
code=$root/input/data/code
if [ -f "$code/requirements.txt" ]; then
  python -m pip install --quiet -r "$code/requirements.txt"
fi
if [ -d "$code" ]; then
  cd "$code"
  export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}"
fi
exec python -m nearlinear.launch.sagemaker.container "$root"
"""


def write_script(folder: Path) -> None:
    """Write the launcher script to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCRIPT_NAME).write_text(SCRIPT)
    (folder / SCRIPT_NAME).chmod(0o755)


def encode_hyperparameter(value: Any) -> str:
    """Encode ``value`` like the SageMaker SDK: JSON, but plain strings that are not valid JSON."""
    is_plain = isinstance(value, str) and decode_hyperparameter(value) == value
    return value if is_plain else json.dumps(value)


def decode_hyperparameter(value: str) -> Any:
    """Decode the result of `encode_hyperparameter`."""
    try:
        return json.loads(value)
    except ValueError:
        return value
