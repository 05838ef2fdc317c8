"""`ci.benchmarks.mpi`: measuring program, rounds, tables and settings; without MPI."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.benchmarks.mpi import __main__ as command
from ci.benchmarks.mpi import contenders, measure, table
from ci.benchmarks.mpi.contenders import LIBRARIES, Contender, Setting

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "ci/benchmarks/mpi"
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")

# Collectives over shared memory that are correct, or wrong in a known way.
MODEL = r"""
#include <stdlib.h>
#include <string.h>
#include "measure.h"
#include "ranks.h"

static int argument_count, all_ranks, me, calls;
static char **arguments, *shared;
static const size_t room = 1 << 20;

static float *part(int rank) { return (float *)(shared + rank * room); }

static void run(const struct collective *c) {
  const char *fault = arguments[1];
  const int gathers = c->operation == ALL_GATHER, scatters = c->operation == REDUCE_SCATTER;
  const float *input = c->operation == ALL_REDUCE ? c->output : c->input;
  memcpy(part(me), input, c->count * (scatters ? all_ranks : 1) * sizeof(float));
  ranks_barrier();
  calls++;
  if (!strcmp(fault, "idle") && calls > 1) return ranks_barrier();
  if (gathers) {
    for (int r = 0; r < all_ranks; r++) {
      const int from = !strcmp(fault, "swapped") ? all_ranks - 1 - r : r;
      memcpy(c->output + r * c->count, part(from), c->count * sizeof(float));
    }
  } else {
    const size_t start = scatters ? me * c->count : 0;
    for (size_t i = 0; i < c->count; i++) {
      float sum = !strcmp(fault, "swapped") ? 1 : 0;
      for (int r = 0; r < all_ranks; r++) sum += part(r)[start + i];
      c->output[i] = sum;
    }
  }
  ranks_barrier();
}

static int body(int rank, int ranks, void *memory) {
  shared = memory;
  all_ranks = ranks;
  me = rank;
  if (!strcmp(arguments[1], "crash") && rank == 1) abort();
  const struct contender contender = {.rank = rank, .ranks = ranks, .moves_data = 1,
      .barrier = ranks_barrier, .maximum = ranks_maximum, .run = run};
  return measure(&contender, argument_count - 1, arguments + 1);
}

int main(int count, char **values) {
  argument_count = count;
  arguments = values;
  return run_ranks(3, 3 * room, body);
}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Build the measuring program with model collectives: FAULT OPERATION BYTES ..."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "model.c").write_text(MODEL)
    sources = [folder / "model.c", SOURCES / "measure.c", SOURCES / "ranks.c"]
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", "-pthread"]
    command = ["cc", *flags, *map(str, sources), "-o", str(folder / "model"), "-lm"]
    subprocess.run(command, check=True)
    return folder / "model"


def measured(model: Path, fault: str, operation: str) -> list[list[str]]:
    arguments = [fault, operation, "12,1200,49152", "4", "0.0001", "10"]
    done = subprocess.run([model, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@needs_compiler
@pytest.mark.parametrize("operation", command.OPERATIONS)
def test_correct_collectives_have_no_wrong_elements(model, operation):
    lines = measured(model, "none", operation)
    assert [(line[0], line[1], line[3]) for line in lines] == [
        (operation, size, "0") for size in ("12", "1200", "49152")
    ]
    for line in lines:
        assert len(line) == 4 + 4  # four blocks
        assert all(float(seconds) > 0 for seconds in line[4:])


@needs_compiler
@pytest.mark.parametrize("operation", command.OPERATIONS)
@pytest.mark.parametrize("fault", ["swapped", "idle"])
def test_wrong_elements_are_counted(model, operation, fault):
    """Faults: wrong order or wrong sum, and calls after the first that do nothing."""
    assert all(int(line[3]) > 0 for line in measured(model, fault, operation))


@needs_compiler
def test_crashed_rank_ends_the_other_ranks(model):
    arguments = ["crash", "all_gather", "1200", "4", "0.0001", "10"]
    done = subprocess.run([model, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + 6


@needs_compiler
def test_larger_sizes_are_skipped_once_a_call_exceeds_the_limit(model):
    arguments = ["none", "all_gather", "1200,12000", "1", "0.0001", "0"]
    done = subprocess.run([model, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1


# Rounds


def make_config(**changes) -> measure.MeasureConfig:
    settings = {"operations": ["all_gather", "all_reduce"], "ranks": [2], "sizes": [1024, 65536],
                "rounds": 2, "blocks": 2, "block_seconds": 0.001, "limit_seconds": 1.0}  # fmt: skip
    return measure.MeasureConfig(**settings | changes)


def program(folder: Path, name: str, script: str) -> Contender:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho {name} $2 >> {folder}/calls\n{script}\n")
    path.chmod(0o755)
    return Contender(name, path)


def test_contenders_alternate_and_blocks_of_all_rounds_are_pooled(tmp_path):
    answer = 'echo "$2 1024 7 0 3e-6 1e-6"; echo "$2 65536 2 0 5e-5 6e-5"'
    both = [program(tmp_path, name, answer) for name in ("one", "two")]
    found, failures = {}, []
    measure.measure(both, make_config(), found, failures)
    calls = (tmp_path / "calls").read_text().split("\n")[:-1]
    assert calls == [f"{n} {op}" for op in ("all_gather", "all_reduce") for n in ("one", "two") * 2]
    sample = found[2, "all_reduce", 1024, "two"]
    assert (sample.seconds, sample.calls, sample.minimum) == ([3e-6, 1e-6] * 2, 7, 1e-6)
    assert sample.median == pytest.approx(2e-6)
    assert not failures


def test_failed_contender_is_reported_and_skipped(tmp_path):
    bad = program(tmp_path, "bad", 'echo "no access to shared memory" >&2; exit 3')
    good = program(tmp_path, "good", 'echo "$2 1024 7 0 3e-6"')
    found, failures = {}, []
    measure.measure([bad, good], make_config(operations=["all_gather"]), found, failures)
    assert failures == ["bad, all_gather, 2 ranks: exit status 3: no access to shared memory"]
    assert {key[3] for key in found} == {"good"}
    assert (tmp_path / "calls").read_text().count("bad") == 1


def test_hanging_contender_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(measure.MeasureConfig, "timeout", 0.5)
    stuck = program(tmp_path, "stuck", f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    failures: list[str] = []
    measure.measure([stuck], make_config(operations=["all_gather"]), {}, failures)
    assert failures == ["stuck, all_gather, 2 ranks: timed out after 0.5 s"]
    state = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_leftovers_in_shared_memory_are_removed(tmp_path):
    left, other = Path("/dev/shm/mpich_shm_bench_test"), Path("/dev/shm/bench_test_other")
    messy = program(tmp_path, "messy", f"touch {left} {other}")
    try:
        measure.measure([messy], make_config(operations=["all_gather"]), {}, [])
        assert not left.exists()
        assert other.exists()
    finally:
        other.unlink(missing_ok=True)


# Settings and tables


@pytest.mark.parametrize("name", LIBRARIES)
def test_waiting_ranks_yield_only_if_oversubscribed(name, monkeypatch, tmp_path):
    monkeypatch.setattr(contenders.os, "sched_getaffinity", lambda _: {0, 1})
    library = LIBRARIES[name]
    contender = Contender(name, tmp_path / "mpi_bench", library, Setting(), tmp_path)
    command_line, environment = contender.command(4, ["all_gather"]), contender.environment(4)
    assert set(library.oversubscribed.arguments) <= set(command_line)
    assert library.oversubscribed.environment.items() <= environment.items()
    assert not set(library.oversubscribed.arguments) & set(contender.command(2, [])) - {"--mca"}
    assert not set(library.oversubscribed.environment) & set(contender.environment(2))
    assert command_line[-4:] == ["-n", "4", str(tmp_path / "mpi_bench"), "all_gather"]
    assert "{folder}" not in str(environment)


def test_table_compares_the_engine_with_the_fastest_mpi_of_each_size():
    mpi = Setting()
    chosen = [Contender("engine", Path()), Contender("x", Path(), LIBRARIES["mpich"], mpi),
           Contender("y", Path(), LIBRARIES["impi"], mpi)]  # fmt: skip
    seconds = {"engine": (2e-6, 1e-3), "x": (1e-6, 4e-3), "y": (5e-6, 2e-3)}
    found = {
        (2, "all_gather", size, name): measure.Sample([times[i]], 1, 0)
        for name, times in seconds.items()
        for i, size in enumerate((1024, 65536))
    }
    wanted = make_config(operations=["all_gather"])
    assert table.speed_ratio(found, chosen, 2, "all_gather", 1024) == (0.5, 0.5)
    assert table.speed_ratio(found, chosen, 2, "all_gather", 65536) == (2.0, 2.0)
    text = table.tables(found, chosen, wanted)
    small, large = (line for line in text.splitlines() if "KiB |" in line)
    assert [cell.strip() for cell in small.split("|")[-3:-1]] == ["x", "0.50 (0.50)"]
    assert [cell.strip() for cell in large.split("|")[-3:-1]] == ["y", "2.00 (2.00)"]
    assert "all sizes: geometric mean 1.00" in text
    assert "64 KiB and up: geometric mean 2.00" in text


@needs_compiler
def test_command_measures_the_memcpy_lower_bound(tmp_path):
    arguments = ["--contenders", "memcpy", "memcpy:stream", "--sizes", "1K", "1M", "--ranks", "2",
                 "--rounds", "1", "--json", str(tmp_path / "out.json")]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "ci.benchmarks.mpi", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "all_gather, 2 ranks: microseconds per call, median (minimum)" in done.stdout
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["command"].startswith("python -m ci.benchmarks.mpi --contenders memcpy")
    assert {result["contender"] for result in record["results"]} == {"memcpy", "memcpy:stream"}
    assert all(result["min_us"] > 0 for result in record["results"])


def test_sizes_must_be_divisible_by_the_ranks(capsys):
    assert command.main(["--sizes", "1001", "--contenders", "memcpy"]) == 2
    assert "multiple of 4 bytes" in capsys.readouterr().err
