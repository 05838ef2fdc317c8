"""`ci.faults`: a disturbed run reaches the same result, and broken promises are detected."""

import dataclasses
import re

import pytest

from ci.faults import __main__ as command
from ci.faults import kinds

pytestmark = pytest.mark.slow


def test_disturbed_run_equals_the_undisturbed_run(capfd, tmp_path):
    page = tmp_path / "faults.md"
    arguments = f"--trials 4 --only exit,rot,outage,memory --write {page}"
    code = command.main(arguments.split())
    output = capfd.readouterr().out
    assert code == 0, output
    assert re.search(r"4 kept every promise. .* 0 tensors", output)
    assert page.read_text() in output


def test_unnamed_cause_and_different_result_are_reported(capfd, monkeypatch):
    """The undisturbed run uses another seed, and the cause of a kill is expected to be another."""
    run_config = command.run_config

    def with_another_seed(*arguments, stop_after=0):
        config = run_config(*arguments, stop_after=stop_after)
        return config | {"data": config["data"] | {"seed": 1 + bool(stop_after)}}

    wrong = dataclasses.replace(kinds.KINDS["kill"], cause="bored")
    monkeypatch.setitem(kinds.KINDS, "kill", wrong)
    monkeypatch.setattr(command, "run_config", with_another_seed)
    assert command.main("--trials 1 --only kill".split()) == 1
    output = capfd.readouterr().out
    assert "kill: reported: " in output
    assert "differs by at most" in output and " 0 tensors" not in output
