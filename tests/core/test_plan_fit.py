"""The fit of the planner's parameters finds what it should, and stays where it may be."""

import dataclasses

import pytest

from ci.planner import fit
from nearlinear.plan import parameters, published
from nearlinear.plan.step import step


def test_parameters_that_made_the_times_are_found():
    """Of runs whose times were predicted, from a start that is off."""
    made = parameters.load()
    runs = [
        dataclasses.replace(run, seconds=step(run.work, run.cluster, made).seconds)
        for run in published.runs()
        if run.row.file == "llm_foundry.csv" and run.work.shape.layers <= 32
    ][::6]
    start = dataclasses.replace(made, matmul_share=0.75, memory_share=0.95, flash_share=0.7)
    found = fit.fit(runs, start, rounds=5)
    for run in runs:
        assert step(run.work, run.cluster, found).seconds == pytest.approx(run.seconds, rel=0.02)
    assert found.matmul_share == pytest.approx(made.matmul_share, abs=0.05)


def test_places_and_parameters_are_each_others_inverse():
    made = parameters.load()
    again = fit._parameters(fit._places(made))
    for name, (low, high) in parameters.BOUNDS.items():
        assert getattr(again, name) == pytest.approx(getattr(made, name), abs=0.011 * (high - low))
