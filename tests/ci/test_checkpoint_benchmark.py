"""`python -m ci.benchmarks.checkpoint`: its numbers are there, of states that are as they were."""

import json

import pytest

from ci.benchmarks.checkpoint import __main__ as command


@pytest.mark.slow
def test_a_small_one(capsys):
    assert command.main("--width 64 --layers 1 --rounds 1 --json".split()) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line[:1] == "{")
    found = json.loads(line)
    assert found["seconds"].keys() == {*command.WAYS, command.PASS, command.SLOWED}
    assert min(found["seconds"].values()) > 0
    assert found["bytes"] > 3 * 4 * 50257 * 64 and len(found["ratios"]) == 5
