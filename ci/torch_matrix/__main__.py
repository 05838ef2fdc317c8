"""Test releases of torch and Python: ``python -m ci.torch_matrix 2.12.1 2.14.1``.

The wheels of the package index are CUDA builds, and libraries loaded on import are necessary even
without a GPU. Other dependencies (GPU compilers, bindings) would double the download and are left
out. A version with a suffix, such as 2.13.0+cpu, selects a smaller build of an additional index.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ci import new_user
from ci.environment import ROOT, SetupError, check_interpreter, side_environment

COLUMNS = ("torch", "version", "package", "glue", "compiled", "python")
TITLES = ("torch", "Python", "nearlinear", "glue compiled in", "compiled glue",
          "without a compiler")  # fmt: skip
TIMEOUT = 1800  # seconds of one release, on a slow machine
# Requirements of torch that neither `import torch` nor CPU code loads.
UNNECESSARY = {
    "cuda-bindings",
    "cuda-pathfinder",
    "cuda-toolkit",
    "nvidia-cuda-cccl",
    "triton",
}
ADDITIONAL = ["numpy"]  # used by the tests


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.torch_matrix",
        description="Install releases of torch from the package index into temporary environments "
        "(about 3 GB each, 1 GB for CPU builds), compile the collectives' glue, and compare every "
        "operation and FSDP2 with gloo on 2 ranks.",
    )
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="for example 2.14.1")
    parser.add_argument(
        "--python",
        action="append",
        metavar="COMMAND",
        help="interpreter, such as python3.12; repeatable (default: this one)",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="FOLDER",
        help="install both wheels of python -m ci.wheels, and train with nearlinear; "
        "without it, the sources of the collectives are tested",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="keep the environments in this folder and reuse them",
    )
    args = parser.parse_args(argv)
    rows, failures = [], []
    interpreters = args.python or [sys.executable]
    with tempfile.TemporaryDirectory(prefix="torch-matrix-") as cache:  # one engine build for all
        for interpreter, version in itertools.product(interpreters, args.versions):
            row = check_release(version, interpreter, args.wheels, args.keep, Path(cache))
            rows.append([row.get(column, "-") for column in COLUMNS])
            if row["failed"]:
                failures.append(f"torch {version}, {interpreter}: {row['failed']}")
    print(table(rows))
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


def check_release(
    version: str, interpreter: str, wheels: Path | None, keep: Path | None, cache: Path
) -> dict[str, str]:
    name = f"torch {version}, {interpreter}"
    print(f"{name}: installing ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="torch-matrix-") as scratch:
        folder = (keep or Path(scratch)) / f"{Path(interpreter).name}-torch-{version}"
        try:
            packages = required(interpreter, version, wheels)
            # --no-cache-dir avoids a second copy of every wheel.
            options = ("--no-deps", "--no-cache-dir")
            python = side_environment(folder, packages, interpreter, *options)
        except (SetupError, new_user.StepError) as error:
            (last,) = str(error).strip().splitlines()[-1:]
            row = {"torch": version, "version": interpreter}
            return {**row, "package": "not installed", "failed": f"cannot be installed: {last}"}
        print(f"{name}: checking ...", file=sys.stderr, flush=True)
        return run_checks(python, cache, wheels is not None)


def required(interpreter: str, version: str, wheels: Path | None) -> list[str]:
    """Return the pinned requirements of ``import torch`` and of the wheels.

    Raises:
        SetupError: There is no such interpreter, or pip finds no such release for it.
    """
    check_interpreter(interpreter)
    files = new_user.wheels_of(wheels) if wheels else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
        wanted = [f"torch=={version}", *ADDITIONAL, *map(str, files)]
        command = [interpreter, "-m", "pip", "install", *options, *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SetupError((done.stderr or done.stdout).strip()[-2000:])
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    ours = {file.name.split("-")[0].replace("_", "-") for file in files}
    pinned = {each["name"].lower(): f"{each['name']}=={each['version']}" for each in found}
    others = [pin for name, pin in pinned.items() if name not in UNNECESSARY | ours]
    return [*others, *map(str, files)]


def run_checks(python: Path, cache: Path, installed: bool) -> dict[str, str]:
    """Run the checks with the installed packages, or with the sources of the collectives."""
    command = [str(python), "-m", "ci.torch_matrix.checks"]
    done = subprocess.run(
        command + ["--package"] * installed,
        env=variables(cache, [ROOT] if installed else [ROOT / "packages/collectives/src", ROOT]),
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


def variables(cache: Path, folders: list[Path]) -> dict[str, str]:
    """Return the environment variables of a program with ``folders`` on Python's path."""
    prefixes = ("PYTHON", "VIRTUAL_ENV", "NEARLINEAR_COLLECTIVES")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "NEARLINEAR_COLLECTIVES_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def table(rows: list[list[str]]) -> str:
    """Return a Markdown table for the page on the collectives."""
    lines = [TITLES, [":--"] * len(TITLES), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n2 ranks on one machine."


if __name__ == "__main__":
    sys.exit(main())
