"""PyTorch's own tests run on the backend, and differences from gloo are reported."""

import pytest

from ci import c10d_tests


@pytest.mark.slow
def test_tests_of_torch_run_on_the_backend(capsys):
    words = ["unequal_split_group", "barrier_timeout_global", "scatter_object", "coalesced_max"]
    assert c10d_tests.main(["--backends", "nearlinear", "--only", *words]) == 0
    row = capsys.readouterr().out.splitlines()[2]
    passed, failed, _ = map(int, row.split("|")[2:5])
    assert (passed, failed) == (5, 0), row


def test_unknown_tests_are_an_error(capsys):
    assert c10d_tests.main(["--backends", "gloo", "--only", "no_such_test"]) == 2
    assert "no test has such a name" in capsys.readouterr().err


def test_differences_are_listed_and_unexplained_failures_counted():
    named = next(iter(c10d_tests.INTENDED))
    outcome = {kind: {"outcome": kind, "reason": ""} for kind in c10d_tests.OUTCOMES}
    ours = {"a": outcome["failed"], "b": outcome["passed"], "c": outcome["failed"],
            named: outcome["failed"]}  # fmt: skip
    gloo = {"a": outcome["passed"], "b": outcome["passed"], "c": outcome["failed"],
            named: outcome["passed"]}  # fmt: skip
    found = {"nearlinear": ours, "gloo": gloo}
    assert c10d_tests.unexplained(found) == ["a"]
    shown = c10d_tests.render(found)
    assert "| nearlinear | 1 | 3 | 0 |" in shown and "| `a` | failed | passed |  |" in shown
    assert "`b`" not in shown and c10d_tests.INTENDED[named] in shown


def test_backends_count_as_gloo_and_mpi():
    name = c10d_tests.CpuBackend("nearlinear")
    assert name == "gloo" and name == "mpi" and name == "nearlinear" and name != "nccl"
    assert name in {"gloo", "nccl"} and name not in {"nccl"} and str(name) == "nearlinear"
