"""What the channel ``sm_drivers`` brings into the container: the script that the request starts."""

from __future__ import annotations

from pathlib import Path

SCRIPT = "sm_train.sh"
TEXT = """\
#!/bin/bash
# Started by the training job; where it lies tells where the service has laid out the rest.
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


def write(folder: Path) -> None:
    """The channel's files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCRIPT).write_text(TEXT)
    (folder / SCRIPT).chmod(0o755)
