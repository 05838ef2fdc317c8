"""Counting of useful steps by the benchmark of goodput. Its runs are measured by hand."""

import pytest

from ci.benchmarks import goodput


def test_steps_that_a_restarted_job_repeats_count_once():
    steps = [1, 2, 3, 4, 5, 4, 5, 6]  # lost after step 5, and resumed after step 3
    rows = [{"step": step} for step in steps]
    assert goodput.useful_steps(rows, 2) == 4
    assert goodput.useful_steps(rows[:6], 2) == 2


def test_steps_with_fewer_samples_count_by_their_share():
    rows = [{"step": step, "replicas": 4 - (step == 5)} for step in range(1, 7)]
    assert goodput.useful_steps(rows, 2, shares=True) == 3.75


def test_table_compares_medians_with_the_undisturbed_run():
    rates = {"undisturbed": (20, 22, 21), "elastic": (18, 19, 21)}
    windows = [
        {"way": way, "steps": steps, "seconds": 60.0, "kills": int(way == "elastic"), "losses": {}}
        for way, found in rates.items()
        for steps in found
    ]
    table = goodput.format_table(windows, 1.0).splitlines()
    assert table[2] == "| undisturbed | 3 | 0 | 21.0 (20.0 to 22.0) | 100% |"
    assert table[3] == "| elastic | 3 | 3 | 19.0 (18.0 to 21.0) | 90% |"


def test_losses_of_equal_steps_are_compared():
    windows = [{"losses": {1: 2.0, 2: 1.0}}, {"losses": {2: 1.25}}, {"losses": {}}]
    assert goodput.largest_difference(windows) == pytest.approx(0.25)


def test_unknown_ways_are_refused(capsys):
    with pytest.raises(SystemExit):
        goodput.main(["--ways", "elastic,hope"])
    assert "--ways hope: allowed are undisturbed, elastic, restart" in capsys.readouterr().err
