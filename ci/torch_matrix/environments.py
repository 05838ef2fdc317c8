"""Temporary environments with a torch release and the minimum of its dependencies.

The wheels of the package index are CUDA builds, and libraries loaded on import are necessary even
without a GPU. Other dependencies (GPU compilers, bindings) would double the download.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

# Requirements of torch that neither `import torch` nor CPU code loads.
UNNECESSARY = {
    "cuda-bindings",
    "cuda-pathfinder",
    "cuda-toolkit",
    "nvidia-cuda-cccl",
    "setuptools",
    "triton",
}
ADDITIONAL = ["numpy"]  # used by the tests


class InstallError(RuntimeError):
    """A release cannot be installed; the message contains pip's output."""


@contextlib.contextmanager
def environment(version: str, kept: Path | None = None) -> Iterator[Path]:
    """Yield the Python of an environment with torch ``version``, removed unless ``kept``."""
    if kept is not None:
        yield installed(version, kept / f"torch-{version}")
        return
    with tempfile.TemporaryDirectory(prefix=f"torch-{version}-") as folder:
        yield installed(version, Path(folder))


def installed(version: str, folder: Path) -> Path:
    python, stamp = folder / "bin" / "python", folder / "complete"
    if not stamp.exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        packages = [*required(pip, version), *ADDITIONAL]
        # --no-cache-dir avoids a second copy of every wheel.
        run([*pip, "install", "--no-cache-dir", "--no-deps", *packages])
        stamp.touch()
    return python


def required(pip: list[str], version: str) -> list[str]:
    """Return the pinned requirements of ``import torch`` for a release."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["install", "--dry-run", "--ignore-installed", "--report", str(report)]
        run([*pip, *options, f"torch=={version}"])
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    pinned = ((each["name"], each["version"]) for each in found)
    return [f"{name}=={version}" for name, version in pinned if name.lower() not in UNNECESSARY]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InstallError((done.stderr or done.stdout).strip()[-2000:])


def variables(python: Path, root: Path, cache: Path) -> dict[str, str]:
    """Return the environment variables of a program there, with this repository on its path."""
    prefixes = ("PYTHON", "VIRTUAL_ENV", "NEARLINEAR_COLLECTIVES")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    sources = os.pathsep.join(map(str, [root / "packages" / "collectives" / "src", root]))
    return {
        **inherited,
        "PYTHONPATH": sources,
        "NEARLINEAR_COLLECTIVES_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
    }
