"""Throw-away environments with a release of torch, as small as an import of it allows.

The wheels of the package index are CUDA builds; what they load on import must be there, even where
no GPU is. The rest (compilers for GPUs, their bindings) stays away: it doubles the download.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

# Of what a release of torch asks for: not loaded by `import torch`, nor by anything on a CPU.
NEEDLESS = {
    "cuda-bindings",
    "cuda-pathfinder",
    "cuda-toolkit",
    "nvidia-cuda-cccl",
    "setuptools",
    "triton",
}
ALSO = ["numpy"]  # the tests read bytes of tensors with it


class InstallError(RuntimeError):
    """A release cannot be had here; the text says why."""


@contextlib.contextmanager
def environment(version: str, kept: Path | None = None) -> Iterator[Path]:
    """The Python of an environment with torch ``version``, gone afterwards unless ``kept``."""
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
        packages = [*required(pip, version), *ALSO]
        # Without --no-cache-dir every wheel would be on the disk twice.
        run([*pip, "install", "--no-cache-dir", "--no-deps", *packages])
        stamp.touch()
    return python


def required(pip: list[str], version: str) -> list[str]:
    """What to install for ``import torch``, each with the version that the release asks for."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        asked = ["install", "--dry-run", "--ignore-installed", "--report", str(report)]
        run([*pip, *asked, f"torch=={version}"])
        found = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
    return [f"{it['name']}=={it['version']}" for it in found if it["name"].lower() not in NEEDLESS]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InstallError((done.stderr or done.stdout).strip()[-2000:])


def inside(python: Path, root: Path, cache: Path) -> dict[str, str]:
    """The environment variables of a program that runs there, on this repository's sources."""
    names = ("PYTHON", "VIRTUAL_ENV", "NEARLINEAR_COLLECTIVES")
    variables = {name: it for name, it in os.environ.items() if not name.startswith(names)}
    sources = os.pathsep.join(map(str, [root / "packages" / "collectives" / "src", root]))
    return {
        **variables,
        "PYTHONPATH": sources,
        "NEARLINEAR_COLLECTIVES_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
    }
