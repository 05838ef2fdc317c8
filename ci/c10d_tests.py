"""PyTorch's own tests of torch.distributed, on this backend and on gloo.

The tests come from the installed torch (``torch.testing._internal.distributed.distributed_test``),
which chooses them by the name of the backend. Here each backend counts as gloo and as MPI: whatever
these must pass on CPUs is demanded of it. Ranks are forks of one interpreter per backend, so that a
test takes about a second.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from ci.benchmarks.collectives import record as bench_record
from ci.command_line import make_parser

MODULE = "ci.c10d_tests"
ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ("nearlinear", "gloo")
SOURCE = "torch.testing._internal.distributed.distributed_test"
REPLACED = (
    ('BACKEND = os.environ["BACKEND"]', "BACKEND = _CHOSEN"),
    ("if not check(dist.Backend(BACKEND)):", "if not check(BACKEND):"),
)
"""Lines of the source that read the backend's name, and their replacements."""
TEST_TIMEOUT = 90
"""Seconds of a test."""
OUTCOMES = ("passed", "failed", "skipped")
_BY_NAME = "torch refuses monitored_barrier for other backends; each barrier names the late rank"
INTENDED = {
    "test_ddp_logging_data_cpu": "torch calls every backend of a plugin `custom`",
    "test_monitored_barrier_failure_order": _BY_NAME,
    "test_monitored_barrier_gloo": _BY_NAME,
    "test_monitored_barrier_gloo_rank_0_timeout": _BY_NAME,
    "test_monitored_barrier_gloo_subgroup": _BY_NAME,
    "test_monitored_barrier_wait_all_ranks": _BY_NAME,
}
"""Tests that gloo passes and nearlinear need not pass, with the reason."""
EXAMPLES = f"""\
examples:
  python -m {MODULE}                                  all tests on both backends; 5 minutes
  python -m {MODULE} --only all_to_all reduce_sum     tests whose names contain one of the words
  python -m {MODULE} --backends nearlinear --only ddp
  python -m {MODULE} --json results.json              write every outcome"""


class CpuBackend(str):
    """The name of a backend, equal to gloo and MPI wherever the tests compare it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other in ("gloo", "mpi") or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def load_tests(backend: str) -> type[unittest.TestCase]:
    """Return the test case class, whose ranks are forked processes on ``backend``."""
    found = importlib.util.find_spec(SOURCE)
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text(encoding="utf-8")
    for line, instead in REPLACED:
        if line not in source:
            raise SystemExit(
                f"error: {found.origin} has no line `{line}`, as that of torch 2.13 has"
            )
        source = source.replace(line, instead)
    module = importlib.util.module_from_spec(found)
    sys.modules[SOURCE] = module
    vars(module)["_CHOSEN"] = CpuBackend(backend)
    exec(compile(source, found.origin, "exec", dont_inherit=True), vars(module))

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

    return Tests


class OutcomeLines(unittest.TestResult):
    """Prints the outcome of each test as a line of JSON."""

    def __init__(self, stream):
        super().__init__()
        self.lines = stream
        self.begin = 0.0

    def startTest(self, test):
        super().startTest(test)
        self.begin = time.monotonic()

    def addSuccess(self, test):
        self._print(test, "passed", "")

    def addSkip(self, test, reason):
        self._print(test, "skipped", reason)

    def addFailure(self, test, err):
        self._print(test, "failed", self._exc_info_to_string(err, test))

    addError = addFailure

    def _print(self, test, outcome: str, reason: str) -> None:
        name = test.id().rsplit(".", 1)[-1]
        seconds = round(time.monotonic() - self.begin, 1)
        print(json.dumps({"test": name, "outcome": outcome, "seconds": seconds, "reason": reason}),
              file=self.lines, flush=True)  # fmt: skip


def run_in_this_process(backend: str, words: list[str]) -> None:
    """Run the tests one after the other; print JSON lines to the original standard output."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # tests print to standard output
    tests = load_tests(backend)
    names = [name for name in unittest.TestLoader().getTestCaseNames(tests) if _wanted(name, words)]
    suite = unittest.TestSuite(tests(name) for name in names)
    suite.run(OutcomeLines(lines))


def run(backend: str, words: list[str], ranks: int) -> dict[str, dict]:
    """Run the tests on a backend in a process of its own; return outcomes by the test's name."""
    outcomes: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "BACKEND": "mpi",  # by which torch.testing demands 3 ranks instead of 8
            "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
            "WORLD_SIZE": str(ranks),
            "INIT_METHOD": f"file://{folder}/init",
            "TEMP_DIR": folder,
            "OMP_NUM_THREADS": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_TIMEOUT),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            MODULE,
            "--worker",
            backend,
            "--only",
            *words,
        ]
        log = Path(folder) / "log"
        with (
            log.open("wb") as errors,
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                             stderr=errors, text=True) as process,
        ):  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                outcome = json.loads(line)
                outcomes[outcome.pop("test")] = outcome
                if sys.stderr.isatty():
                    print(f"\r{backend}: {len(outcomes)} tests", end="", file=sys.stderr)
        if sys.stderr.isatty():
            print(file=sys.stderr)
        if process.returncode:
            tail = log.read_text(errors="replace")[-3000:]
            raise SystemExit(
                f"error: the tests on {backend} ended with {process.returncode}\n{tail}"
            )
    return outcomes


def _wanted(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def render(outcomes: dict[str, dict[str, dict]]) -> str:
    """Return a Markdown table of counts, then every test whose outcomes differ."""
    lines = ["| backend | passed | failed | skipped |", "|:--|--:|--:|--:|"]
    for backend, found in outcomes.items():
        counts = [sum(o["outcome"] == outcome for o in found.values()) for outcome in OUTCOMES]
        lines.append(f"| {backend} | " + " | ".join(map(str, counts)) + " |")
    if len(outcomes) == 2:
        lines += ["", "| test | " + " | ".join(outcomes) + " | reason |", "|:--|:--|:--|:--|"]
        ours, gloo = outcomes.values()
        for name in sorted(ours):
            pair = ours[name]["outcome"], gloo[name]["outcome"]
            if pair[0] != pair[1] or name in INTENDED:
                lines.append(f"| `{name}` | {pair[0]} | {pair[1]} | {INTENDED.get(name, '')} |")
    return "\n".join(lines)


def unexplained(outcomes: dict[str, dict[str, dict]]) -> list[str]:
    """Return the tests that fail on nearlinear, except known ones and those that gloo fails."""
    gloo = outcomes.get("gloo", {})
    return [
        name
        for name, found in outcomes.get("nearlinear", {}).items()
        if found["outcome"] == "failed" and name not in INTENDED
        and gloo.get(name, {}).get("outcome") != "failed"
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    options = _parser().parse_args(argv)
    if options.worker:
        run_in_this_process(options.worker, options.only)
        return 0
    outcomes = {name: run(name, options.only, options.ranks) for name in options.backends}
    if not all(outcomes.values()):
        print("error: no test has such a name", file=sys.stderr)
        return 2
    print(render(outcomes))
    if options.json:
        record = bench_record.header(MODULE, argv, "torch", "nearlinear-collectives")
        bench_record.write(options.json, {**record, "ranks": options.ranks, "outcomes": outcomes})
    faults = unexplained(outcomes)
    for name in faults:
        print(f"\n{name}\n{outcomes['nearlinear'][name]['reason']}", file=sys.stderr)
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(MODULE, __doc__, EXAMPLES)
    add = parser.add_argument
    add("--backends", nargs="+", choices=BACKENDS, default=BACKENDS, metavar="NAME",
        help="nearlinear, gloo (default: both)")  # fmt: skip
    add("--only", nargs="*", default=[], metavar="WORD", help="tests whose names contain a WORD")
    add("--ranks", type=int, default=4, metavar="N", help="ranks of a test (default: 4)")
    add("--json", type=Path, metavar="FILE", help="write every outcome")
    add("--worker", choices=BACKENDS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
