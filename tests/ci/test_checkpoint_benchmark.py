"""`ci.benchmarks.checkpoint`: a small run reports all methods."""

import json

import pytest

from ci.benchmarks import checkpoint


@pytest.mark.slow
def test_small_run_reports_every_method(capsys):
    assert checkpoint.main("--width 64 --layers 1 --rounds 1 --json".split()) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line[:1] == "{")
    found = json.loads(line)
    assert found["seconds"].keys() == {*checkpoint.METHODS, *checkpoint.NO_SPEED}
    assert min(found["seconds"].values()) > 0
    assert found["bytes"] > 3 * 4 * 50257 * 64 and len(found["ratios"]) == 7
