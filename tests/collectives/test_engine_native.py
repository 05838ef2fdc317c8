"""C++ tests of the engine, run with the shipped library and under sanitizers.

Every `engine/*_test.cc` is linked with the engine; PROGRAMS lists further requirements.
"""

import dataclasses
import fcntl
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nearlinear_collectives import build

TESTS = Path(__file__).parent / "engine"
PACKAGE = importlib.util.find_spec("nearlinear_collectives")
ENGINE = Path(PACKAGE.origin).parent / "engine"
COMPILER = next(filter(shutil.which, ("g++", "clang++")), None)
# Line tables for the sanitizers' reports only: variable names double the size of the objects.
FLAGS = ["-std=c++20", "-g1", "-Wall", "-Wextra", "-Winvalid-pch", "-pthread", "-ffp-contract=off"]
LIBFABRIC = f"-isystem{ENGINE / 'third_party' / 'libfabric'}"
CANNOT_HERE = 77  # exit code of a program whose feature is not available on this machine

FLAVOURS = {
    "plain": ["-O1"],  # of the program; the engine is the shipped library
    "address": ["-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-O1", "-fsanitize=thread"],
}
WEAKENED = "NLC_WEAKENED_FENCE"  # counters are published without ordering
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",  # the engine keeps some memory until the process ends
    "TSAN_OPTIONS": "halt_on_error=0:exitcode=66",
}
TSAN_REPORTED = 66
REDUCTIONS = ("reduce_baseline", "reduce_avx2", "reduce_avx512")
# Without optimization they compile in half the time, and the sanitizer checks the same accesses.
UNOPTIMIZED = {("address", name) for name in REDUCTIONS}
# Programs of this flavour reduce in loops whose accesses do not depend on the processor.
REPLACED = {"thread": {"baseline_only": REDUCTIONS[1:]}}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler on this machine"),
]


@dataclasses.dataclass(frozen=True)
class Program:
    """A test program: engine sources, build flavours, and arguments."""

    sources: tuple[str, ...] = ("*",)
    flavours: tuple[str, ...] = ("plain", "address")
    calls: tuple[str, ...] = ("",)


PROGRAMS = {
    "copy_test": Program(sources=("copy", "slot_writer")),
    "hmac_test": Program(sources=("base",)),
    "queue_test": Program(sources=("queue",), flavours=("plain", "address", "thread")),
    "topology_test": Program(sources=("topology", "base")),
    "reduce_test": Program(sources=("reduce", "reduce_[ab]*")),
    # libfabric 1.20's tcp provider sometimes dereferences a stray pointer when the other end of a
    # message in flight is killed.
    "transport_test": Program(
        sources=("transport", "tcp", "ofi", "base"), calls=("tcp", "ofi -killed_while_busy")
    ),
    "ranks_as_threads_test": Program(
        flavours=("plain", "address", "thread"), calls=("1 20", "2 60 1", "3 60 2", "5 40 3")
    ),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Folder of compiled programs, shared by all concurrent test processes."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    shared = base / "engine-tests"
    shared.mkdir(exist_ok=True)
    return shared


def make(target: Path, flavour: str, *arguments: str) -> str:
    """Compile or link ``target`` unless it exists."""
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = f"{target}.partial"
            command = [COMPILER, *FLAGS, *FLAVOURS[flavour], *arguments, "-o", partial]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0 and not done.stderr, f"{shlex.join(command)}\n{done.stderr}"
            os.rename(partial, target)
    return str(target)


def standard_headers(folder: Path, flavour: str) -> str:
    """Precompile a header with all standard headers of the engine.

    Compiling the library itself shows that every source includes the headers it needs.
    """
    header = folder / f"standard-{flavour}.h"
    includes = re.compile(r"^#include <\w+>$", re.MULTILINE)
    lines = {line for path in build.engine_sources() for line in includes.findall(path.read_text())}
    header.write_text("\n".join(sorted(lines)))
    make(header.with_suffix(".h.gch"), flavour, "-x", "c++-header", str(header))
    return str(header)


def compiled(
    folder: Path, flavour: str, source: Path, define: str = "", libfabric: bool = False
) -> str:
    target = folder / f"{source.stem}-{flavour}{define}{'-libfabric' * libfabric}.o"
    if target.exists():
        return str(target)
    options = [f"-I{ENGINE}", LIBFABRIC if libfabric else ""]
    if define:
        options.append(f"-D{define}")
    if (flavour, source.stem) in UNOPTIMIZED:
        options.append("-O0")
    else:
        options += ["-include", standard_headers(folder, flavour)]
    return make(target, flavour, *filter(None, options), "-c", str(source))


def sources_of(name: str, flavour: str) -> list[Path]:
    wanted = PROGRAMS.get(name, Program()).sources
    sources = {path.stem: path for part in wanted for path in ENGINE.glob(f"{part}.cc")}
    for substitute, replaced in REPLACED.get(flavour, {}).items():
        if [sources.pop(stem) for stem in replaced if stem in sources]:
            sources[substitute] = TESTS / f"{substitute}.cc"
    return [TESTS / f"{name}.cc", *sources.values()]


def program(
    folder: Path, name: str, flavour: str, define: str = "", libfabric: bool = False
) -> str:
    """Build the test program ``name``; ``define`` is set for the sources that use it.

    Without ``libfabric`` the transport over it is the short one that refuses to work.
    """
    target = folder / f"{name}-{flavour}{define}{'-libfabric' * libfabric}"
    if flavour == "plain":  # the shipped library has all transports
        engine = [f"-I{ENGINE}", str(TESTS / f"{name}.cc"), str(build.engine_library()), "-ldl"]
        return make(folder / f"{name}-plain", flavour, *engine)
    sources = sources_of(name, flavour)

    def compiled_one(source: Path) -> str:
        asks = define and define in source.read_text()
        uses = libfabric and "rdma/" in source.read_text()
        return compiled(folder, flavour, source, define if asks else "", uses)

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        parts = list(threads.map(compiled_one, sources))
    return make(target, flavour, *parts, "-ldl")


def run(
    folder: Path, name: str, flavour: str, call: str, define: str = "", **settings: str
) -> subprocess.CompletedProcess:
    libfabric = call.startswith("ofi ")
    command = [program(folder, name, flavour, define, libfabric), *call.split()]
    if flavour == "thread":  # its shadow memory does not support random addresses
        if not shutil.which("setarch"):
            pytest.skip("a thread sanitizer needs setarch here")
        command = ["setarch", "-R", *command]
    environment = {**os.environ, **ENVIRONMENT, **settings}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace", timeout=570
    )


def skip_if_unavailable(done: subprocess.CompletedProcess) -> None:
    if done.returncode == CANNOT_HERE:
        pytest.skip(done.stdout.strip().splitlines()[-1])


CASES = [
    pytest.param(path.stem, flavour, call, id=f"{path.stem}-{flavour}-{call or 'all'}")
    for path in sorted(TESTS.glob("*_test.cc"))
    for flavour in PROGRAMS.get(path.stem, Program()).flavours
    for call in PROGRAMS.get(path.stem, Program()).calls
]


@pytest.mark.parametrize("name, flavour, call", CASES)
def test_native_program_passes(folder, name, flavour, call):
    if call.startswith("ofi ") and flavour != "plain":  # compile nothing that cannot run
        skip_if_unavailable(run(folder, name, "plain", "ofi no-such-scenario"))
    done = run(folder, name, flavour, call)
    output = done.stdout[-4000:] + done.stderr[-8000:]
    skip_if_unavailable(done)
    assert done.returncode == 0, output
    assert "runtime error" not in output and "WARNING: ThreadSanitizer" not in output, output


def test_every_listed_program_exists():
    assert {path.stem for path in TESTS.glob("*_test.cc")} >= PROGRAMS.keys()


def test_thread_sanitizer_detects_a_weakened_fence(folder):
    """Prove that the runs above can fail: counters published without ordering are races."""
    first = {
        "TSAN_OPTIONS": f"halt_on_error=1:exitcode={TSAN_REPORTED}"
    }  # a single report is enough
    done = run(folder, "ranks_as_threads_test", "thread", "4 60 1", WEAKENED, **first)
    assert done.returncode == TSAN_REPORTED, done.stdout[-2000:] + done.stderr[-4000:]
    assert "data race" in done.stderr
