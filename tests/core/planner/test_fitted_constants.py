"""Fit of the time model's constants: recovery of known constants, and bounds."""

import dataclasses

import pytest

from ci.planner_validation import fit
from nearlinear.planner.fitted_constants import BOUNDS, load_constants
from nearlinear.planner.published.runs import published_runs
from nearlinear.planner.step_time import step_time


def test_fit_recovers_the_constants_of_synthetic_times():
    """The published times are replaced by predictions of perturbed constants."""
    made = load_constants()
    runs = [
        dataclasses.replace(run, value=step_time(run.work, run.cluster, made).seconds)
        for run in published_runs()
        if run.row.file == "llm_foundry.csv" and run.work.shape.layers <= 32
    ][::6]
    start = dataclasses.replace(made, matmul_share=0.75, memory_share=0.95, flash_share=0.7)
    found = fit.fit(runs, start, rounds=5)
    for run in runs:
        assert step_time(run.work, run.cluster, found).seconds == pytest.approx(run.value, rel=0.02)
    assert found.matmul_share == pytest.approx(made.matmul_share, abs=0.05)


def test_logits_round_trip():
    made = load_constants()
    again = fit._parameters(fit._logits(made))
    for name, (low, high) in BOUNDS.items():
        assert getattr(again, name) == pytest.approx(getattr(made, name), abs=0.011 * (high - low))
