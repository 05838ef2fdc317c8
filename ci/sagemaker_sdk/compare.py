"""Compare two requests for one job field by field: nearlinear's and the SDK's.

All fields are compared. Necessary differences are listed in `EXPLAINED`; the values must be equal
after their removal.
"""

import contextlib
import io
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ci.sagemaker_sdk import jobs
from nearlinear import cli

TIME = r"\d{14}$"
EXPLAINED = {
    r"TrainingJobName": "the time of the request",
    r"InputDataConfig\[\d+\]\.DataSource\.S3DataSource\.S3Uri": (
        "the SDK stores jobs of one base name in a folder"
    ),
}


@dataclass(frozen=True)
class FieldComparison:
    """A field of both requests."""

    path: str
    ours: object
    theirs: object
    equal: bool
    """True if the values are equal except for an explained difference."""
    reason: str = ""
    """Explanation of the difference."""


def ours(name: str, source: str) -> dict:
    """Return the request of ``nearlinear launch --dry-run`` for one of `jobs`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()) as output,
    ):
        path = Path(folder, "run.json")
        path.write_text(json.dumps(jobs.JOBS[name]))
        settings = [f"--set=job.source={source}"] if name in jobs.WITH_CODE else []
        if cli.main(["launch", str(path), "--dry-run", *settings]):
            raise RuntimeError(f"nearlinear rejects the job {name!r}; its message is above")
    return json.loads(output.getvalue())


def compare_fields(mine: dict, other: dict) -> list[FieldComparison]:
    """Compare every field of either request."""
    left, right = dict(_flat(mine)), dict(_flat(other))
    rows = []
    for path in sorted(left | right):
        one, two = left.get(path, "(none)"), right.get(path, "(none)")
        pattern = next((each for each in EXPLAINED if re.fullmatch(each, path)), None)
        same = type(one) is type(two) and one == two
        if same or pattern is None:
            rows.append(FieldComparison(path, one, two, same))
        else:
            equal = _normalize(one, mine) == _normalize(two, other)
            rows.append(FieldComparison(path, one, two, equal, EXPLAINED[pattern] if equal else ""))
    return rows


def table(rows: list[FieldComparison]) -> str:
    """Format the fields: equal ones with their value, others with both values."""
    lines = []
    for row in rows:
        if row.ours == row.theirs and row.equal:
            lines.append(f"  =  {row.path}: {_short(row.ours)}")
        else:
            mark, why = ("~", f"  ({row.reason})") if row.equal else ("!", "")
            lines.append(f"  {mark}  {row.path}: {_short(row.ours)} | {_short(row.theirs)}{why}")
    return "\n".join(lines)


def _normalize(value: object, request: dict) -> object:
    """Remove the explained differences: the time in names, and the folder of the base name."""
    if not isinstance(value, str):
        return value
    name = request["TrainingJobName"]
    base = re.sub("-" + TIME, "", name)
    value = re.sub(TIME, "TIME", value.replace(f"/{base}/{name}/", f"/{name}/"))
    return value.replace(name, f"{base}-TIME")


def _flat(value: object, path: str = ""):
    """Yield paths and values of the leaves; an empty dict or list is a leaf."""
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
