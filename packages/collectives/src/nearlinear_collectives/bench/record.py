"""A measurement as a file: the command, versions, machine and every number; no host names."""

import json
import shlex
from pathlib import Path

from . import machine


def header(module: str, arguments: list[str], *packages: str) -> dict:
    """What every record begins with."""
    return {
        "command": shlex.join(["python", "-m", module, *arguments]),
        "versions": machine.versions(*packages),
        "machine": machine.facts(),
    }


def write(path: Path, record: dict) -> None:
    """JSON with one line per result, so that two records can be compared line by line."""
    lines = []
    for key, value in record.items():
        if isinstance(value, list):
            rows = ",\n  ".join(json.dumps(item) for item in value)
            lines.append(f"{json.dumps(key)}: [\n  {rows}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")
