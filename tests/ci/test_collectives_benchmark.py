"""Collectives benchmark: sizes, checked data, tables, files and exit status."""

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ci.benchmarks.collectives import measure, options, record, session, training_step
from ci.benchmarks.collectives.backends import Contender
from ci.benchmarks.collectives.options import UsageError
from ci.benchmarks.collectives.patterns import DTYPES, PERIOD, CheckedData, Workload, poison

ROOT = Path(__file__).resolve().parents[2]
LABELLED = ["--backends", "ours=nearlinear", "gloo", "--blocks", "2", "--block-ms", "1"]
FAULTY = ["--import", "tests.ci.faulty_backends", "--blocks", "2", "--block-ms", "1"]


def bench(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    command = [sys.executable, *launcher, "-m", "ci.benchmarks.collectives", *arguments]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


# Sizes


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["4096"], [4096]),
        (["64k", "1KiB"], [1024, 65536]),
        (["1K:256M:4"], [1024 * 4**i for i in range(10)]),
        (["1M:5M"], [2**20, 2**21, 2**22]),
        (["2M:3M:2", "2048K"], [2**21]),
    ],
)
def test_parse_sizes_expands_units_and_ranges(words, found):
    assert options.parse_sizes(words) == found


@pytest.mark.parametrize(
    "word", ["", "0", "-1K", "1.5M", "1T", "1M:1K", "1:2:1", "1:2:x", "1:2:3:4"]
)
def test_parse_sizes_rejects_invalid_sizes_and_names_the_syntax(word):
    with pytest.raises(ValueError, match="FIRST:LAST:FACTOR"):
        options.parse_sizes([word])


def test_format_size_uses_binary_units():
    assert [options.format_size(n) for n in (1, 1020, 65536, 65532, 1536, 2**28, 2**42)] == [
        "1 B", "1020 B", "64 KiB", "64 KiB", "1.5 KiB", "256 MiB", "4096 GiB"
    ]  # fmt: skip


# Data


def inputs(data: CheckedData, count: int, salt: int, reduced: bool) -> list[torch.Tensor]:
    tensors = [torch.empty(count, dtype=data.dtype) for _ in range(data.ranks)]
    for rank, tensor in enumerate(tensors):
        data.fill(tensor, rank, salt, reduced)
    return tensors


DATA = st.builds(
    CheckedData,
    st.sampled_from(list(DTYPES.values())),
    st.sampled_from([1, 2, 3, 8, 200]),
    st.sampled_from(["sum", "min", "max"]),
)
COUNTS = st.sampled_from([1, 2, PERIOD - 1, PERIOD, PERIOD + 1, 5000])


@settings(deadline=None, max_examples=60)
@given(DATA, COUNTS, st.integers(0, 50))
def test_expected_reductions_agree_with_numpy(data, count, salt):
    parts = [tensor.double().numpy() for tensor in inputs(data, count, salt, True)]
    combine = {"sum": np.sum, "min": np.min, "max": np.max}[data.reduce]
    result = torch.from_numpy(np.asarray(combine(parts, axis=0))).to(data.dtype)
    assert data.wrong_reduce(result, salt) == 0
    start = count // 3
    assert data.wrong_reduce(result[start:], salt, start) == 0


@settings(deadline=None, max_examples=60)
@given(DATA, COUNTS, st.integers(0, 50), st.data())
def test_check_counts_one_changed_element(data, count, salt, draw):
    gathered = torch.cat(inputs(data, count, salt, False))
    assert data.wrong_parts(gathered, salt, range(data.ranks)) == 0
    index = draw.draw(st.integers(0, gathered.numel() - 1))
    gathered[index] = 0
    assert data.wrong_parts(gathered, salt, range(data.ranks)) == 1


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_check_counts_stale_poisoned_and_misplaced_data(dtype):
    data = CheckedData(dtype, 2)
    result = torch.cat(inputs(data, 4096, 3, False))
    swapped, moved = result.view(2, -1).flip(0), result.view(-1, 64).roll(1, 0)
    assert data.wrong_parts(result, 4, range(2)) > 4000  # result of another call
    assert data.wrong_parts(swapped.reshape(-1), 3, range(2)) > 4000
    assert data.wrong_parts(moved.reshape(-1), 3, range(2)) > 4000
    poison(result)
    assert data.wrong_parts(result, 3, range(2)) == result.numel()
    assert data.wrong_reduce(result, 3) == result.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_average_check_tolerates_rounding_only(dtype):
    data = CheckedData(dtype, 3, "avg")
    parts = inputs(data, 2000, 1, True)
    average = torch.stack(parts).double().mean(0).to(dtype)
    scaled_after = (torch.stack(parts).sum(0) * torch.tensor(1 / 3, dtype=dtype)).to(dtype)
    assert data.wrong_reduce(average, 1) == 0
    assert data.wrong_reduce(scaled_after, 1) == 0
    average[7] *= 1.1
    average[8] = float("nan")
    assert data.wrong_reduce(average, 1) == 2


# Figures, with nccl-tests' definitions worked out by hand


@pytest.mark.parametrize(
    ("operation", "size", "count", "bus"),
    [
        ("all_gather", 1 << 20, 1 << 16, 0.75),
        ("reduce_scatter", 1 << 20, 1 << 16, 0.75),
        ("all_reduce", 1 << 20, 1 << 18, 1.5),
        ("all_gather", 1, 1, 0.75),
        ("all_to_all", 1 << 20, 1 << 16, 0.75),
        ("reduce", 1 << 20, 1 << 18, 1.0),
    ],
)
def test_workload_has_nccl_tests_size_and_bus_factor(operation, size, count, bus):
    workload = Workload.from_size(operation, size, torch.float32, "sum", 0, 4)
    assert (workload.count, workload.bus_factor, workload.bytes) == (count, bus, max(size, 16))


def sample(label: str, seconds: list[float], operation="all_gather", size=1 << 20):
    workload = Workload.from_size(operation, size, torch.float32, "sum", 0, 4)
    contender = Contender(label, "gloo", None)
    return measure.Sample(contender, "plain", workload, 2, seconds, 0)


def test_bandwidths_use_the_median():
    one = sample("a", [2e-3, 1e-3, 4e-3], "all_reduce")
    assert one.minimum == 1e-3
    assert one.algorithm_bandwidth == pytest.approx(2**20 / 2e-3)
    assert one.bus_bandwidth == pytest.approx(1.5 * 2**20 / 2e-3)


def test_summary_has_geometric_mean_and_smallest_ratio():
    rows = [
        [sample("fast", [1.0]), sample("slow", [2.0])],
        [sample("fast", [1.0], size=1 << 21), sample("slow", [8.0], size=1 << 21)],
    ]
    (entry,) = measure.summary(rows, "slow")
    assert entry["contender"] == "fast"
    assert entry["geometric_mean"] == pytest.approx(4.0)
    assert (entry["smallest"], entry["smallest_at_bytes"]) == (2.0, 1 << 20)


def test_measure_interleaves_blocks_and_takes_the_slowest_rank(monkeypatch):
    order = []

    class Pattern:
        workload = Workload.from_size("all_gather", 1024, torch.float32, "sum", 0, 2)

    monkeypatch.setattr(measure, "_check", lambda pattern, contender, salt: 0)
    largest = measure.dist.ReduceOp.MAX
    monkeypatch.setattr(
        measure.dist, "all_reduce", lambda t, op=None: t.mul_(3) if op == largest else t
    )
    took = {"a": 0.01, "b": 0.02}
    monkeypatch.setattr(
        measure, "_time_block", lambda p, c, calls: order.append(c.label) or took[c.label]
    )
    Pattern.prepare_timing = lambda self: None
    two = [Contender("a", "gloo", None), Contender("b", "gloo", None)]
    samples = measure.measure("plain", Pattern(), two, measure.Blocks(3, 0.03))
    assert order == ["a", "b"] * 4  # the first pair calibrates the number of calls
    assert samples[0].seconds == pytest.approx([0.03] * 3)  # three times this rank's time
    assert samples[1].seconds == pytest.approx([0.06] * 3)


# Wrong requests


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "1Q"], "'1Q' is not a size"),
        (["--ranks", "1"], "at least 2"),
        (["--backends", "glooo", "gloo"], "unknown backend 'glooo'; usable here: gloo"),
        (["--backends", "gloo", "gloo"], "a=gloo b=gloo"),
        (["--backends", "nccl"], "nccl has no CPU tensors"),
        (["--backends", "gloo", "--against", "x"], "--against x"),
        (["--backends", "gloo", "--reduce", "avg", "--dtypes", "int32"], "floating-point"),
        (["--backends", "gloo", "--patterns", "fsdp", "--ops", "all_reduce"], "nothing to measure"),
        (["--backends", "gloo", "--plot", "x.jpg"], ".svg"),
        (["--backends", "gloo", "--json", "no/such/folder.json"], "there is no folder"),
        (["--backends", "gloo", "--import", "no_such_package"], "no_such_package"),
        (["--backends", "gloo", "--sizes", "64G:1024G:4"], "GiB are free"),
    ],
)
def test_check_options_rejects_wrong_request_with_remedy(arguments, words):
    with pytest.raises(UsageError, match=".") as error:
        session.check_options(options.parse(arguments), 2, 2)
    assert words in str(error.value)


def test_memory_check_rejects_sizes_that_do_not_fit(monkeypatch):
    workload = Workload.from_size("all_gather", 1 << 30, torch.float32, "sum", 0, 4)
    needed, largest = session.estimate_memory([("plain", workload)], 4)
    assert largest is workload
    assert needed == 4 * (
        session.PROCESS_BYTES + (1 << 30) + (1 << 28) + session.BACKEND_COPIES * (1 << 30)
    )
    monkeypatch.setattr(record, "memory_bytes", lambda: needed)
    session.check_memory([("plain", workload)], 4)
    monkeypatch.setattr(record, "memory_bytes", lambda: needed - 1)
    with pytest.raises(UsageError, match="sizes up to 512 MiB fit"):
        session.check_memory([("plain", workload)], 4)


# Complete runs


def test_run_covers_patterns_operations_and_dtypes(tmp_path):
    """Compare two backends, odd sizes included. Files agree with the table and name no host."""
    files = [f"--{kind}={tmp_path / 'out'}.{kind}" for kind in ("json", "csv")]
    files.append(f"--plot={tmp_path / 'out.svg'}")
    done = bench(*LABELLED, "--sizes", "4", "10001", "200K", "--patterns", *options.PATTERNS,
                 "--ranks", "3", "--dtypes", "float32", "bfloat16", "int64", *files)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gloo/ours geometric mean" in done.stdout
    assert "# 0 wrong elements in all" in done.stdout
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["command"].startswith("python -m ci.benchmarks.collectives --backends ours")
    assert written["versions"]["torch"] == torch.__version__
    assert set(written["machine"]) == {"cpu", "cores", "memory_gib", "system"}
    assert socket.gethostname() not in json.dumps([written["machine"], written["results"]])
    tables = 3 + 3 + 2 + 2 + 2 + 1  # operations of each pattern
    assert len(written["results"]) == tables * 3 * 3 * 2
    assert {len(r["blocks_us"]) for r in written["results"]} == {2}
    for result in written["results"]:
        algbw = result["bytes"] / result["median_us"] / 1e3
        factor = 4 / 3 if result["operation"] == "all_reduce" else 2 / 3
        assert result["algbw_GBps"] == pytest.approx(algbw, abs=1e-3)
        assert result["busbw_GBps"] == pytest.approx(algbw * factor, abs=1e-3)
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["median_us"] for row in rows] == [str(r["median_us"]) for r in written["results"]]
    assert (tmp_path / "out.svg").read_text().count("<svg") == 1


def test_wrong_data_is_counted_and_gives_exit_status_1():
    done = bench("--backends", "off_by_one", "stale", "gloo", *FAULTY, "--sizes", "1K",
                 "--ops", "all_gather", "all_reduce")  # fmt: skip
    assert done.returncode == 1, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.strip().startswith("1024")]
    for row, elements in zip(rows, (256, 256), strict=True):
        off_by_one, stale, gloo = (int(cell.split()[4]) for cell in row.split("|")[1:4])
        assert off_by_one == 4  # 2 ranks, checked before and after
        assert stale > 1.9 * elements
        assert gloo == 0


def test_killed_rank_ends_the_run_and_is_named():
    done = bench("--backends", "dying", "gloo", *FAULTY, "--ops", "all_gather", "--sizes", "1K",
                 "--timeout", "20")  # fmt: skip
    assert done.returncode == 1
    assert "rank 1 was ended by signal 9" in done.stderr


def test_training_steps_of_all_backends_have_equal_losses_under_torchrun(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    done = bench("--step", "1M", "--ranks", "2", "--blocks", "1", "--block-ms", "1",
                 f"--json={tmp_path / 'step.json'}", launcher=torchrun)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("losses agree") == 1  # from rank 0
    written = json.loads((tmp_path / "step.json").read_text())
    assert written["settings"]["ranks"] == 3  # torchrun's, not the option's
    results = written["results"]
    assert [r["contender"] for r in results] == [
        "nearlinear",
        "nearlinear+pool",
        "nearlinear+shared",
        "gloo",
    ]
    assert {r["parameters"] for r in results} == {1_048_576}


@pytest.mark.parametrize(
    ("losses", "difference"),
    [([2.0, 1.0], 0.0), ([2.0, 1.5, 9.0], 0.5), ([2.0, float("nan")], 9e9)],
)
def test_loss_disagreement_covers_common_steps_and_nan(monkeypatch, losses, difference):
    monkeypatch.setattr(training_step, "slowest", lambda seconds: seconds)
    runs = [
        training_step.TrainingRun(label, training_step.MODEL_SIZES["1M"], None)
        for label in ("a", "b")
    ]
    runs[0].losses, runs[1].losses = [2.0, 1.0], losses
    found = training_step.loss_disagreement(runs)
    assert found == pytest.approx(difference) or found > difference > 1
