"""Build and check the files of a release: ``python -m ci.wheels.release FOLDER``.

Runs in the environment of `ci.wheels`, with its tools on PATH. The collectives' engine is compiled
by Zig's clang against the symbols of the C library 2.28, with a static C++ library. Neither torch
nor Python are linked: one wheel per processor serves every version of both. The glue between engine
and torch depends on both versions and stays a source, compiled on first use.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE, COLLECTIVES = (ROOT / "packages" / name for name in ("core", "collectives"))
COMPAT = CORE / "compat"
GLIBC = (2, 28)
MACHINES = ("x86_64", "aarch64")
COMPILER = "{python} -m ziglang c++ -target {machine}-linux-gnu.{glibc} -g0 -Wl,-s"
REQUIRED_FIELDS = ("Summary", "License-Expression", "License-File", "Classifier", "Keywords",
                   "Requires-Python", "Description-Content-Type")  # fmt: skip


class ReleaseError(RuntimeError):
    """A file of the release is incomplete. The message names the file and the fault."""


def main(out: Path) -> int:
    """Build everything into ``out`` and return the exit status."""
    from ci.wheels import sbom  # needs the environment of `ci.wheels`

    try:
        with tempfile.TemporaryDirectory(prefix="nearlinear-release-") as scratch:
            built = build_all(Path(scratch))
            for path in built:
                print(f"{path.name}: {check(path)}", flush=True)
            twine = run(["twine", "check", "--strict", *map(str, built)], os.environ)
            print(f"twine: {twine.count('PASSED')} of {len(built)} files passed")
            built.append(sbom.write(Path(scratch), built, ROOT))
            out.mkdir(parents=True, exist_ok=True)
            for path in built:
                shutil.copy(path, out)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in (out / each.name for each in built):
        print(f"{path}  {path.stat().st_size / 2**10:,.0f} KiB")
    if not os.environ.get("NEARLINEAR_REPOSITORY"):
        print("warning: the metadata has no URLs; name the repository with --repository URL")
    return 0


def build_all(folder: Path) -> list[Path]:
    """Return the built wheels and source distributions."""
    built = [
        build(package, target, folder)
        for package in (CORE, COMPAT)
        for target in ("sdist", "wheel")
    ]
    built.append(build(COLLECTIVES, "sdist", folder))
    for machine in MACHINES:
        begin = time.monotonic()
        major, minor = GLIBC
        variables = {
            "NEARLINEAR_COLLECTIVES_PLATFORM": f"manylinux_{major}_{minor}_{machine}",
            "CXX": COMPILER.format(
                python=sys.executable, machine=machine, glibc=f"{major}.{minor}"
            ),
        }
        built.append(build(COLLECTIVES, "wheel", folder, variables))
        print(f"engine for {machine}: {time.monotonic() - begin:.0f} s", flush=True)
    return built


def build(source: Path, target: str, folder: Path, variables: dict[str, str] | None = None) -> Path:
    """Build a ``wheel`` or ``sdist`` of a package with hatchling and return the file."""
    before = set(folder.iterdir())
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    run(command, os.environ | (variables or {}), source)
    (made,) = set(folder.iterdir()) - before
    return made


def check(path: Path) -> str:
    """Check the metadata of a file, and the platform of a compiled wheel.

    Returns:
        One line for the log.

    Raises:
        ReleaseError: A field or licence is missing, or the library needs a newer system.
    """
    metadata, names = read(path)
    required = [*REQUIRED_FIELDS, *["Project-URL"] * bool(os.environ.get("NEARLINEAR_REPOSITORY"))]
    missing = [field for field in required if not metadata.get_all(field)]
    for licence in metadata.get_all("License-File") or ():
        if not any(name.endswith(f"/{licence}") for name in names):
            missing.append(f"the licence {licence}")
    if missing:
        raise ReleaseError(f"{path.name} lacks {', '.join(missing)}: see its pyproject.toml")
    if path.suffix != ".whl" or path.name.endswith("-any.whl"):
        return f"complete, {len(names)} files"
    return f"complete, {len(names)} files; {check_platform(path)}"


def check_platform(wheel: Path) -> str:
    """Compare the tag of a compiled wheel with the one that auditwheel computes."""
    (machine,) = (each for each in MACHINES if wheel.stem.endswith(each))
    report = json.loads(run(["auditwheel", "show", "--json", str(wheel)], os.environ))
    found = report["overall_tag"]
    match = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{machine}", found)
    if match is None or tuple(map(int, match.groups())) > GLIBC:
        raise ReleaseError(
            f"{wheel.name} is not manylinux_{GLIBC[0]}_{GLIBC[1]}: auditwheel finds {found}\n"
            f"{json.dumps(report, indent=1)}"
        )
    return f"auditwheel: {found}"


def read(path: Path) -> tuple[Message, list[str]]:
    """Return the metadata and the file names of a wheel or source distribution."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            (name,) = (each for each in names if each.endswith(".dist-info/METADATA"))
            text = archive.read(name).decode()
    else:
        with tarfile.open(path) as archive:
            names = archive.getnames()
            (name,) = (each for each in names if each.count("/") == 1 and each.endswith("PKG-INFO"))
            file = archive.extractfile(name)
            assert file is not None
            text = file.read().decode()
    return Parser().parsestr(text), names


def run(command: list[str], variables, folder: Path = ROOT) -> str:
    """Run a tool and return its output. Raises ReleaseError with it."""
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
