"""`ci.faults.elastic`: a lost replica leaves the bits of a run unchanged."""

import re

import pytest

from ci.faults import elastic

pytestmark = pytest.mark.slow


def test_bits_are_those_of_an_undisturbed_run(capfd):
    code = elastic.main("--trials 2 --layout 4x1 --only stop,flip".split())
    output = capfd.readouterr().out
    assert code == 0, output
    assert re.search(r"4x1: compared \d+ steps, 0 differences", output)
    for kind in ("stop", "flip"):
        assert re.search(rf"\| 4x1 \| {kind} \| 1 \| 1 \|", output)
