"""`ci.fault_injection`: a killed run reaches the same result, and deviations are detected."""

import re

import pytest

from ci.fault_injection import __main__ as command


@pytest.mark.slow
def test_killed_run_equals_the_undisturbed_run(capfd):
    code = command.main("--kills 2 --ranks 2 --steps 14".split())
    output = capfd.readouterr().out
    assert re.search(r"\d ranks killed in \d starts, 0 faulty checkpoints, 0 tensors", output)
    assert code == 0 or "Raise --steps" in output


@pytest.mark.slow
def test_different_result_is_reported(capfd, monkeypatch):
    """The second run uses another seed."""
    run_config, configs = command.run_config, []

    def with_another_seed(*arguments):
        configs.append(run_config(*arguments))
        return configs[-1] | {"data": configs[-1]["data"] | {"seed": len(configs)}}

    monkeypatch.setattr(command, "run_config", with_another_seed)
    assert command.main("--kills 0 --ranks 1 --steps 2".split()) == 1
    output = capfd.readouterr().out
    assert "differs by at most" in output and " 0 tensors differ" not in output
