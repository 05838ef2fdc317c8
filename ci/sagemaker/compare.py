"""Two requests for one job, field by field: what we send, and what the SDK sends.

Nothing is left out. Where the two must differ, the difference is named here, and what remains after
it has been taken away must be equal.
"""

import contextlib
import io
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ci.sagemaker import jobs
from nearlinear import cli

TIME = r"\d{14}$"
NAMED = {
    r"TrainingJobName": "the time of the request",
    r"InputDataConfig\[\d+\]\.DataSource\.S3DataSource\.S3Uri": (
        "the SDK keeps jobs of one base name in a folder"
    ),
}


@dataclass(frozen=True)
class Field:
    """One value of the request."""

    path: str
    ours: object
    theirs: object
    equal: bool
    """but for a named difference"""
    reason: str = ""
    """of the difference, where there is one"""


def ours(name: str, source: str) -> dict:
    """What ``nearlinear launch`` would send for one of `jobs`, as its dry run prints it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
        path = Path(folder, "run.json")
        path.write_text(json.dumps(jobs.JOBS[name]))
        settings = [f"--set=job.source={source}"] if name in jobs.WITH_CODE else []
        if cli.main(["launch", str(path), "--dry-run", *settings]):
            raise RuntimeError(f"nearlinear refuses the job {name!r}; what it says is above")
    return json.loads(said.getvalue())


def fields(mine: dict, other: dict) -> list[Field]:
    """Every field that either has."""
    left, right = dict(_flat(mine)), dict(_flat(other))
    rows = []
    for path in sorted(left | right):
        one, two = left.get(path, "(none)"), right.get(path, "(none)")
        pattern = next((it for it in NAMED if re.fullmatch(it, path)), None)
        same = type(one) is type(two) and one == two
        if same or pattern is None:
            rows.append(Field(path, one, two, same))
        else:
            equal = _bare(one, mine) == _bare(two, other)
            rows.append(Field(path, one, two, equal, NAMED[pattern] if equal else ""))
    return rows


def table(rows: list[Field]) -> str:
    """For people: equal fields with their value, others with both."""
    lines = []
    for row in rows:
        if row.ours == row.theirs and row.equal:
            lines.append(f"  =  {row.path}: {_short(row.ours)}")
        else:
            mark, why = ("~", f"  ({row.reason})") if row.equal else ("!", "")
            lines.append(f"  {mark}  {row.path}: {_short(row.ours)} | {_short(row.theirs)}{why}")
    return "\n".join(lines)


def _bare(value: object, request: dict) -> object:
    """``value`` without what `NAMED` names: the time in names, and the folder of the base name."""
    if not isinstance(value, str):
        return value
    name = request["TrainingJobName"]
    base = re.sub("-" + TIME, "", name)
    value = re.sub(TIME, "TIME", value.replace(f"/{base}/{name}/", f"/{name}/"))
    return value.replace(name, f"{base}-TIME")


def _flat(value: object, path: str = ""):
    """Paths and values of the leaves; an empty table or list is one."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{index}]")
    else:
        yield path, value


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 90 else f"{text[:87]}..."
