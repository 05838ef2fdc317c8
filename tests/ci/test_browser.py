"""`ci.browser`: search and installation of Chromium; its absence does not fail a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci import browser

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Empty PATH; yields a function that adds a program to it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def put(name, script="exit 0"):
        path = programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return put


def test_find_returns_a_browser_that_runs(machine):
    assert browser.find() is None
    machine("chromium", "echo 'install it from the store' >&2; exit 1")
    assert browser.find() is None
    path = machine("google-chrome")
    assert browser.find() == path


def test_install_without_root_prints_the_remedy(machine, monkeypatch, capsys):
    machine("apt-get")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert browser.install() is None
    assert "Install the package chromium" in capsys.readouterr().out


def test_install_falls_back_to_the_second_package(machine, monkeypatch, tmp_path):
    """The distribution has no headless package."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    target, log = tmp_path / "bin" / "chromium", tmp_path / "log"
    machine(
        "apt-get",
        f'echo "$*" >> {log}\n'
        'case "$*" in *headless-shell) exit 100;;\n'
        f"*chromium) /bin/cp /bin/true {target};; esac",
    )
    assert browser.install() == str(target)
    install = "install --yes --no-install-recommends"
    calls = ["update", f"{install} chromium-headless-shell", f"{install} chromium"]
    assert log.read_text().splitlines() == calls


def test_install_prints_the_error_of_apt(machine, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    machine("apt-get", "echo 'E: Unable to locate package chromium'; exit 100")
    assert browser.install() is None
    assert "Unable to locate package" in capsys.readouterr().out


def test_command_without_a_browser_prints_that_tests_are_skipped(machine):
    """.ci/run continues."""
    done = subprocess.run(
        [sys.executable, "-c", "import os; os.geteuid = lambda: 1000; import runpy; "
         "runpy.run_module('ci.browser', run_name='__main__')"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "will be skipped" in done.stderr
    assert "python3 -m ci.browser || true" in (ROOT / ".ci" / "run").read_text()
