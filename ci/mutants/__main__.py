"""Run a seeded sample of mutants, report the score of each module, and write the table."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from .mutations import Mutation, code_of, sample
from .survivors import EXPLAINED
from .targets import SOURCE, TARGETS, TESTS

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "packages/core/docs/mutants.md"
RESULTS = ROOT / "ci/mutants/results.jsonl"
COPIED = ("packages/core/src", "packages/core/compat/src", "packages/collectives/src",
          "packages/core/docs", "tests", "ci", "data_prep", "pyproject.toml")  # fmt: skip
PRELOADED = ("pytest", "torch.distributed.fsdp", "torch.distributed.tensor", "hypothesis", "moto",
             "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
             "transformers.models.mixtral.modeling_mixtral")  # fmt: skip
"""Modules that many tests import. Each run of tests is a fork that has them."""

KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"
TIMEOUT_FACTOR, TIMEOUT_EXTRA = 3.0, 60.0
"""A mutant may take this many times the seconds of the unchanged module, and more seconds."""


class TestRuns:
    """Test runs in a copy of the repository.

    Args:
        folder: Folder for the copy.
    """

    __test__ = False

    def __init__(self, folder: Path):
        self.copy, self.output = folder / "copy", folder / "output"
        for name in COPIED:
            source, target = ROOT / name, self.copy / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.ipynb")
                shutil.copytree(source, target, ignore=ignored)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)

    def run(self, tests: list[str], timeout: float) -> tuple[str, float]:
        """Return the result of the tests, which stop at the first failure, and the seconds.

        They run in a fork of this process, which has imported the libraries and nothing of ours.
        """
        begin = time.monotonic()
        process = multiprocessing.get_context("fork").Process(target=self._test, args=(tests,))
        process.start()
        assert process.pid
        process.join(timeout)
        code = process.exitcode
        _kill_group(process.pid)
        process.join()
        seconds = time.monotonic() - begin
        return TIMEOUT if code is None else KILLED if code else SURVIVED, seconds

    def _test(self, tests: list[str]) -> None:
        os.setsid()
        output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.chdir(self.copy)
        paths = [str(self.copy / part) for part in (*COPIED[:2], ".")]
        sys.path[:0] = paths
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        import pytest

        arguments = ["-x", "-q", "-p", "no:cacheprovider"]
        os._exit(pytest.main([*arguments, *(f"{TESTS}/{name}" for name in tests)]))

    def run_mutant(
        self, module: str, mutation: Mutation, tests: list[str], timeout: float
    ) -> tuple[str, float]:
        """Return the result of the tests with a mutated module, and the seconds."""
        path = self.copy / SOURCE / module
        original = path.read_bytes()
        path.write_bytes(mutation.apply(original))
        try:
            return self.run(tests, timeout)
        finally:
            path.write_bytes(original)


def _kill_group(process_id: int) -> None:
    """Kill a process that leads its own group, and its children."""
    try:
        os.killpg(process_id, signal.SIGKILL)
    except ProcessLookupError:
        pass


def digests(module: str) -> dict[str, str]:
    """Return the hash of a module's code, and that of its tests."""
    tests = [ROOT / TESTS / name for name in TARGETS[module]]
    files = [file for path in tests for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return {
        "source": _hash(code_of((ROOT / SOURCE / module).read_bytes()).encode()),
        "tests": _hash(*(file.read_bytes() for file in sorted(files))),
    }


def _hash(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def read_results(path: Path) -> dict[tuple[str, str], dict]:
    """Return the valid results of earlier runs by module and mutation.

    They are valid as long as the module does not change. A survivor is run again when tests change.
    """
    if not path.exists():
        return {}
    current, found = {module: digests(module) for module in TARGETS}, {}
    for row in map(json.loads, path.read_text().splitlines()):
        now = current.get(row["module"])
        if now and now["source"] == row["source"]:
            if row["result"] != SURVIVED or now["tests"] == row["tests"]:
                found[row["module"], row["key"]] = row
    return found


def run_module(runs: TestRuns, module: str, count: int, seed: int, path: Path) -> None:
    """Run the mutants of a module that have no result yet, and append their results."""
    source, tests = (ROOT / SOURCE / module).read_bytes(), TARGETS[module]
    known, hashes = read_results(path), digests(module)
    chosen = sample(source, count, f"{seed}/{module}")
    missing = [each for each in chosen if (module, each.key) not in known]
    if not missing:
        return
    result, seconds = runs.run(tests, 1800)
    if result != SURVIVED:
        print(f"{module}: its tests fail without a mutation; skipped", flush=True)
        print(runs.output.read_text(errors="replace")[-2000:], flush=True)
        return
    for mutation in missing:
        limit = TIMEOUT_FACTOR * seconds + TIMEOUT_EXTRA
        result, took = runs.run_mutant(module, mutation, tests, limit)
        row = {
            "module": module, "key": mutation.key, **hashes, "result": result,
            "kind": mutation.kind, "line": mutation.line, "seconds": round(took, 1),
            "before": mutation.before, "after": mutation.after,
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{module}:{mutation.line} {mutation.kind}: {result} ({took:.0f} s)", flush=True)


def format_table(rows: Iterable[dict]) -> str:
    """Return a Markdown page with the score of every module, and all survivors."""
    by_module: dict[str, list[dict]] = {module: [] for module in TARGETS}
    for row in rows:
        by_module[row["module"]].append(row)
    lines = [
        "| module | mutants | killed | timeout | survived | score |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    total = [0, 0, 0, 0]
    for module, found in by_module.items():
        if found:
            counts = [sum(row["result"] == name for row in found)
                      for name in (KILLED, TIMEOUT, SURVIVED)]  # fmt: skip
            total = [a + b for a, b in zip(total, (len(found), *counts), strict=True)]
            lines.append(_table_row(f"`{module}`", len(found), *counts))
    lines += [_table_row("all", *total), ""]
    missing = [f"`{module}`" for module, found in by_module.items() if not found]
    if missing:
        lines += [f"Not run: {', '.join(missing)}.", ""]
    survivors = [r for found in by_module.values() for r in found if r["result"] == SURVIVED]
    if survivors:
        lines += ["Survivors:", ""]
        for row in sorted(survivors, key=lambda row: (row["module"], row["line"])):
            before, after = (" ".join(row[name].split())[:100] for name in ("before", "after"))
            reason = EXPLAINED.get((row["module"], row["key"]), "not explained")
            place = f"`{row['module']}:{row['line']}`"
            lines.append(f"- {place}, {row['kind']}: `{before}` -> `{after}`: {reason}")
    return "\n".join(lines) + "\n"


def _table_row(name: str, mutants: int, killed: int, timeout: int, survived: int) -> str:
    score = f"{(killed + timeout) / mutants:.0%}" if mutants else ""
    return f"| {name} | {mutants} | {killed} | {timeout} | {survived} | {score} |"


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m ci.mutants")
    parser.add_argument("--count", type=int, default=12, help="mutants per module (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of modules")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results (.jsonl)")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    options = parser.parse_args(argv)
    chosen = [m for m in TARGETS if not options.only or any(part in m for part in options.only)]
    if options.count:
        # read when torch is imported, see tests/conftest.py
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        for name in PRELOADED:
            with suppress(ImportError):
                import_module(name)
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            runs = TestRuns(Path(folder))
            for module in chosen:
                run_module(runs, module, options.count, options.seed, options.results)
    table = format_table(read_results(options.results).values())
    print(table)
    if options.write:
        TABLE.write_text(
            "# Mutation scores\n\n"
            "`python -m ci.mutants` changes core modules in small, seeded ways and runs their "
            "tests. A mutant is killed\nif a test fails or runs out of time.\n\n" + table
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
