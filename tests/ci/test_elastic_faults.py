"""`ci.faults.elastic`: a lost replica leaves the bits of a run unchanged."""

import re

import pytest

from ci.faults import elastic

pytestmark = pytest.mark.slow


def test_bits_are_those_of_an_undisturbed_run(capfd):
    code = elastic.main("--trials 1 --layout 2x2 --only stop".split())
    output = capfd.readouterr().out
    assert code == 0, output
    assert re.search(r"2x2: compared \d+ steps, 0 differences", output)
    assert re.search(r"\| 2x2 \| stop \| 1 \| 1 \|", output)
