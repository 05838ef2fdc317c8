"""Test the collectives on torch releases: ``python -m ci.torch_matrix 2.12.1 2.14.1``."""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from ci.torch_matrix import environments

ROOT = Path(__file__).resolve().parent.parent.parent
COLUMNS = ("torch", "glue", "compiled", "python")
TITLES = ("torch", "glue compiled in", "compiled glue", "without a compiler")
TIMEOUT = 1800  # seconds of one release, on a slow machine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.torch_matrix",
        description="Install releases of torch from the package index into temporary environments "
        "(about 3 GB each), compile the collectives' glue, and compare every operation and FSDP2 "
        "with gloo on 2 ranks.",
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="for example 2.14.1")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep the environments in this folder and reuse them",
    )
    args = parser.parse_args(argv)
    rows, failures = [], []
    with tempfile.TemporaryDirectory(prefix="torch-matrix-") as cache:  # one engine build for all
        for version in args.versions:
            row = check_release(version, args.keep, Path(cache))
            rows.append([row.get(column, "-") for column in COLUMNS])
            if row["failed"]:
                failures.append(f"torch {version}: {row['failed']}")
    print(table(rows))
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


def check_release(version: str, keep: Path | None, cache: Path) -> dict[str, str]:
    print(f"torch {version}: installing ...", file=sys.stderr, flush=True)
    try:
        with environments.environment(version, keep) as python:
            print(f"torch {version}: checking ...", file=sys.stderr, flush=True)
            return run_checks(python, cache)
    except environments.InstallError as error:
        return {"torch": version, "failed": f"cannot be installed: {error}"}


def run_checks(python: Path, cache: Path) -> dict[str, str]:
    done = subprocess.run(
        [str(python), "-m", "ci.torch_matrix.checks"],
        env=environments.variables(python, ROOT, cache),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    *_, last = done.stdout.strip().splitlines() or [""]
    try:
        return json.loads(last)
    except json.JSONDecodeError:
        return {"torch": "?", "failed": f"ended with {done.returncode}: {done.stderr[-4000:]}"}


def table(rows: list[list[str]]) -> str:
    """Return a Markdown table for the page on the collectives."""
    lines = [TITLES, [":--"] * len(TITLES), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\nPython {platform.python_version()}, 2 ranks on one machine."


if __name__ == "__main__":
    sys.exit(main())
