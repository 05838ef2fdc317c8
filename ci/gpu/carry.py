"""Wheels to carry to a GPU machine without a network: peers of the comparison and small extras."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from ci.environment import PEERS_SETTINGS, remedy

MAX_MIB = 64
MANIFEST = "manifest.json"
SITE = "site"
WHEELS = (
    "megatron-fsdp==0.6.1",
    "torchtitan==0.2.2",  # the release of torch 2.11's time
    *("torchdata==0.11.0", "tyro==1.0.17", "docstring-parser==0.18.0",
      "typeguard==4.5.2"),  # needs of torchtitan, but for datasets: its tables are too large
    *("hjson==3.1.0", "pydantic==2.14.4", "pydantic-core==2.50.5", "annotated-types==0.8.0",
      "typing-inspection==0.4.5", "einops==0.8.2", "msgpack==1.2.4",
      "py-cpuinfo==9.0.0"),  # needs of DeepSpeed
    *("matplotlib==3.11.2", "contourpy==1.3.3", "kiwisolver==1.5.1", "pillow==13.0.0",
      "fonttools==4.68.0", "cycler==0.12.1", "pyparsing==3.3.3", "python-dateutil==2.9.0.post0",
      "six==1.17.0"),  # pictures of profiles
    "torchao==0.18.0",  # float8 products, 8-bit optimizer states
    "msgspec==0.21.0",  # JSON lines of data_prep, in tests marked gpu
)  # fmt: skip
BUILT = ("deepspeed==0.19.8",)  # released as a source archive
TARGET = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17",
             "manylinux2014")  # fmt: skip


def download(folder: Path) -> int:
    """Download `WHEELS`, build `BUILT`, check the size and write the manifest; return 0 or 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    try:
        target = [*TARGET, *(f"--platform={name}_x86_64" for name in PLATFORMS)]
        _pip(["download", "--no-deps", "-d", str(folder), *target, *WHEELS])
        with tempfile.TemporaryDirectory() as scratch:
            _pip(["wheel", "--no-deps", "--no-build-isolation", "-w", scratch, *BUILT])
            for wheel in Path(scratch).glob("*.whl"):
                if not wheel.name.endswith("-any.whl"):
                    raise RuntimeError(f"{wheel.name} is not pure Python and cannot be carried")
                (folder / wheel.name).write_bytes(wheel.read_bytes())
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from .runner import commit_of_checkout

    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(folder.glob("*.whl"))}
    total = sum(sizes.values())
    manifest = {"commit": commit_of_checkout(), "bytes": total, "wheels": sizes}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    print(f"{len(sizes)} wheels, {total / 2**20:.1f} of {MAX_MIB} MiB, in {folder}")
    if total > MAX_MIB * 2**20:
        largest = max(sizes, key=lambda name: sizes[name])
        print(f"error: too large to carry; the largest is {largest}", file=sys.stderr)
        return 1
    return 0


def _pip(arguments: list[str]) -> None:
    """Run pip, also from an environment without it. Raises RuntimeError with its output."""
    here = [sys.executable, "-m", "pip"]
    if subprocess.run([*here, "--version"], capture_output=True).returncode:
        here = ["python3", "-m", "pip", "--python", sys.executable]
    done = subprocess.run(
        [*here, "--quiet", "--disable-pip-version-check", *arguments],
        env={**os.environ, **PEERS_SETTINGS},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"pip {arguments[0]}: {done.stderr.strip()[-1500:]}\n"
                           f"{remedy(done.stderr)}")  # fmt: skip


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of `download`. Raises ValueError if the folder has none."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"--carried {folder}: there is no {MANIFEST}; make the folder with python -m ci.gpu "
            f"--carry {folder} on a machine with a package registry"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def commit(folder: Path) -> str:
    """Return the commit of the checkout that prepared ``folder``."""
    return read_manifest(folder)["commit"]


def unpack(folder: Path) -> Path:
    """Unpack the wheels once and return the folder to import them from."""
    site, wheels = folder.resolve() / SITE, read_manifest(folder)["wheels"]
    done = site / MANIFEST
    if not (done.is_file() and json.loads(done.read_text(encoding="utf-8")) == wheels):
        site.mkdir(exist_ok=True)
        for name in wheels:
            with zipfile.ZipFile(folder / name) as wheel:
                wheel.extractall(site)
        done.write_text(json.dumps(wheels), encoding="utf-8")
    return site
