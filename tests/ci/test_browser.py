"""A browser is found if it runs, installed if it can be, and never the reason of a failed run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci import browser

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with nothing on it; returns what puts a program there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def put(name, script="exit 0"):
        path = programs / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return put


def test_one_that_runs_is_found(machine):
    assert browser.find() is None
    machine("chromium", "echo 'install it from the store' >&2; exit 1")
    assert browser.find() is None
    path = machine("google-chrome")
    assert browser.find() == path


def test_without_root_it_says_what_to_do(machine, monkeypatch, capsys):
    machine("apt-get")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert browser.install() is None
    assert "install the package chromium" in capsys.readouterr().out


def test_apt_installs_what_it_has(machine, monkeypatch, tmp_path):
    """The small package is not known to this distribution, the other one is."""
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


def test_what_apt_said_is_passed_on(machine, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    machine("apt-get", "echo 'E: Unable to locate package chromium'; exit 100")
    assert browser.install() is None
    assert "Unable to locate package" in capsys.readouterr().out


def test_without_a_browser_it_ends_with_a_word(machine):
    """And .ci/run goes on."""
    done = subprocess.run(
        [sys.executable, "-c", "import os; os.geteuid = lambda: 1000; import runpy; "
         "runpy.run_module('ci.browser', run_name='__main__')"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "will be skipped" in done.stderr
    assert "python3 -m ci.browser || true" in (ROOT / ".ci" / "run").read_text()
