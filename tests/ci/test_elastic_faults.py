"""`ci.faults.elastic`: lost replicas leave the bits of a run unchanged."""

import re

import pytest

from ci.faults import elastic

pytestmark = pytest.mark.slow


def test_bits_are_those_of_an_undisturbed_run(capfd):
    code = elastic.main("--trials 2 --layout 2x2 --only kill,stop".split())
    output = capfd.readouterr().out
    assert code == 0, output
    assert re.search(r"2x2: compared \d+ steps, 0 differences", output)
    assert re.search(r"\| 2x2 \| stop \| 1 \| 1 \|", output)


def test_different_bits_are_reported(capfd, monkeypatch):
    run_config, made = elastic.run_config, []

    def with_another_seed(*arguments):
        made.append(arguments)
        config = run_config(*arguments)
        return config | {"parallel": config["parallel"] | {"random_seed": len(made)}}

    monkeypatch.setattr(elastic, "run_config", with_another_seed)
    assert elastic.main("--trials 1 --layout 2x2 --only kill".split()) == 1
    output = capfd.readouterr().out
    assert re.search(r"step \d+: loss [\d.]+ instead of", output)
