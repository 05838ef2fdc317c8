"""Wheels of the packages, built from the repository and from a source distribution."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ci.wheels import release
from nearlinear_collectives import build as engine_build

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "packages" / "core"


def build(source: Path, target: str, out: Path, **variables: str) -> Path:
    """Build ``source`` with hatchling and return the file."""
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    env = os.environ | variables
    subprocess.run(command, cwd=source, env=env, check=True, capture_output=True, timeout=120)
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
    for package in ("core", "core/compat", "collectives"):
        assert (ROOT / "packages" / package / "LICENSE").read_bytes() == text


def test_compat_wheel_runs_and_is_no_part_of_the_core(tmp_path):
    wheel = build(CORE / "compat", "wheel", tmp_path / "wheel")
    metadata, names = release.read(wheel)
    assert metadata["Name"] == "nearlinear-compat" and "complete" in release.check(wheel)
    assert metadata.get_all("Requires-Dist") == ["nearlinear"]
    assert "nearlinear_compat/__main__.py" in names and "nearlinear_compat/py.typed" in names
    command = [sys.executable, "-m", "nearlinear_compat", "--help"]
    env = os.environ | {"PYTHONPATH": str(wheel)}
    shown = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert shown.returncode == 0 and "usage: python -m nearlinear_compat run" in shown.stdout
    sdist = build(CORE, "sdist", tmp_path / "sdist")
    assert not [name for name in release.read(sdist)[1] if "nearlinear_compat" in name]


COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""


@pytest.fixture(scope="module")
def cross_wheel(tmp_path_factory) -> Path:
    """A collectives wheel for aarch64, made with a compiler that writes the same text always."""
    folder = tmp_path_factory.mktemp("cross")
    compiler = folder / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    return build(
        ROOT / "packages" / "collectives",
        "wheel",
        folder / "dist",
        CXX=str(compiler),
        NEARLINEAR_COLLECTIVES_PLATFORM="manylinux_2_28_aarch64",
        NEARLINEAR_REPOSITORY="https://example.org/nearlinear",
    )


def test_cross_compiled_wheel_is_used_on_its_own_machine_only(cross_wheel):
    assert cross_wheel.name.endswith("-py3-none-manylinux_2_28_aarch64.whl")
    with zipfile.ZipFile(cross_wheel) as wheel:
        stamp = wheel.read("nearlinear_collectives/lib/libnearlinear_engine.hash").decode()
        library = wheel.read("nearlinear_collectives/lib/libnearlinear_engine.so")
    sources = engine_build.engine_sources()
    assert stamp == engine_build.sources_hash(sources, "aarch64")
    assert stamp != engine_build.sources_hash(sources, "x86_64")
    assert library == b"compiled\n"


def test_release_has_urls_licences_and_classifiers(cross_wheel, monkeypatch):
    metadata, names = release.read(cross_wheel)
    assert "Repository, https://example.org/nearlinear" in metadata.get_all("Project-URL")
    assert sum(name.endswith("/LICENSE") and ".dist-info/" in name for name in names) == 2
    assert "Programming Language :: Python :: 3.13" in metadata.get_all("Classifier")
    monkeypatch.setattr(release, "check_platform", lambda wheel: "not checked")
    assert "complete" in release.check(cross_wheel)


def test_release_without_a_licence_is_refused(cross_wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(release, "check_platform", lambda wheel: "not checked")
    changed = tmp_path / cross_wheel.name
    with zipfile.ZipFile(cross_wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            if "libfabric/LICENSE" not in name or ".dist-info/" not in name:
                new.writestr(name, old.read(name))
    with pytest.raises(release.ReleaseError, match="the licence src/.*libfabric/LICENSE"):
        release.check(changed)


def test_library_for_a_newer_system_is_refused(monkeypatch, cross_wheel):
    report = '{"overall_tag": "manylinux_2_35_aarch64"}'
    monkeypatch.setattr(release, "run", lambda *arguments: report)
    with pytest.raises(release.ReleaseError, match="is not manylinux_2_28: .* manylinux_2_35"):
        release.check_platform(cross_wheel)
    monkeypatch.setattr(release, "run", lambda *arguments: report.replace("2_35", "2_17"))
    assert "manylinux_2_17_aarch64" in release.check_platform(cross_wheel)


def test_portable_engine_exports_its_c_interface_only(tmp_path, monkeypatch):
    """The linker decides what a library exports, so one source is enough."""
    part = tmp_path / "engine"
    part.mkdir()
    for path in engine_build.ENGINE.iterdir():
        if path.suffix != ".cc" or path.name == "api.cc":
            (part / path.name).symlink_to(path)
    monkeypatch.setattr(engine_build, "ENGINE", part)
    exported = {}
    for portable in (False, True):
        library = tmp_path / f"portable_{portable}.so"
        engine_build.build_engine(library, portable=portable)
        command = ["nm", "-D", "--defined-only", str(library)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        exported[portable] = {line.split()[-1] for line in shown.splitlines()}
    assert "nlc_abi_version" in exported[True]
    assert {name for name in exported[True] if not name.startswith("nlc_")} == set()
    assert exported[False] > exported[True]
