"""The wheel of nearlinear, built from the repository and from its source distribution."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "packages" / "core"


def build(source: Path, target: str, out: Path) -> Path:
    """Build ``source`` with hatchling and return the file."""
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (built,) = out.iterdir()
    return built


def test_wheel_contains_the_text_pipeline_and_the_licence(tmp_path):
    wheel = build(CORE, "wheel", tmp_path / "wheel")
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "data_prep/*.py"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert set(tracked) <= names and len(tracked) > 20
    licence = next(name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
    assert zipfile.ZipFile(wheel).read(licence) == (ROOT / "LICENSE").read_bytes()

    path = {"PYTHONPATH": str(wheel)}  # Python imports from a wheel as from any zip file
    command = [sys.executable, "-m", "nearlinear.cli", "data", "--help"]
    shown = subprocess.run(
        command, cwd=tmp_path, env=os.environ | path, capture_output=True, text=True, timeout=120
    )
    assert shown.returncode == 0 and "usage: nearlinear data" in shown.stdout, shown.stderr


def test_source_distribution_builds_the_same_wheel(tmp_path):
    sdist = build(CORE, "sdist", tmp_path / "sdist")
    subprocess.run(["tar", "xf", str(sdist), "-C", str(tmp_path)], check=True)
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    wheels = [
        zipfile.ZipFile(build(source, "wheel", tmp_path / name))
        for name, source in (("here", CORE), ("unpacked", unpacked))
    ]
    here, there = ({each.filename: each.CRC for each in wheel.infolist()} for wheel in wheels)
    assert here == there


def test_packages_carry_the_same_licence():
    text = (ROOT / "LICENSE").read_bytes()
    for package in ("core", "collectives"):
        assert (ROOT / "packages" / package / "LICENSE").read_bytes() == text
