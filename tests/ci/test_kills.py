"""`python -m ci.kills`: a run that is killed loses nothing, and if it did that would be said."""

import re

import pytest

from ci.kills import __main__ as command


@pytest.mark.slow
def test_a_run_that_is_killed_twice_comes_to_the_same_numbers(capfd):
    code = command.main("--kills 2 --ranks 2 --steps 14".split())
    said = capfd.readouterr().out
    assert re.search(r"\d ranks killed in \d starts, 0 checkpoints at fault, 0 tensors", said)
    assert code == 0 or "give it more --steps" in said


@pytest.mark.slow
def test_another_run_is_told_apart(capfd, monkeypatch):
    """The second one has another seed."""
    run_of, runs = command.run_of, []

    def other(*arguments):
        runs.append(run_of(*arguments))
        return runs[-1] | {"data": runs[-1]["data"] | {"seed": len(runs)}}

    monkeypatch.setattr(command, "run_of", other)
    assert command.main("--kills 0 --ranks 1 --steps 2".split()) == 1
    said = capfd.readouterr().out
    assert "differs by at most" in said and " 0 tensors differ" not in said
