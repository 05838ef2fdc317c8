"""The engine's own C++ tests, compiled as they are and under sanitizers, and run.

Every `engine/*_test.cc` is linked with the engine; PROGRAMS names what else a program needs.
"""

import dataclasses
import fcntl
import importlib.util
import os
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "engine"
PACKAGE = importlib.util.find_spec("nearlinear_collectives")
ENGINE = Path(PACKAGE.origin).parent / "engine"
COMPILER = next(filter(shutil.which, ("g++", "clang++")), None)
FLAGS = ["-std=c++20", "-g", "-O1", "-Wall", "-Wextra", "-pthread", "-ffp-contract=off"]
INCLUDES = [f"-I{ENGINE}", f"-isystem{ENGINE / 'third_party' / 'libfabric'}"]
CANNOT_HERE = 77  # a program's exit code: what it tests is not to be had on this machine

FLAVOURS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
    "thread-weakened": ["-fsanitize=thread", "-DNLC_WEAKENED_FENCE"],
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",  # the engine keeps some things until the process ends
    "TSAN_OPTIONS": "halt_on_error=0:exitcode=66",
}
TSAN_REPORTED = 66

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler on this machine"),
]


@dataclasses.dataclass(frozen=True)
class Program:
    """A test program: the engine's sources it needs, how it is built, and how it is called."""

    sources: tuple[str, ...] = ("*",)
    flavours: tuple[str, ...] = ("plain", "address")
    calls: tuple[str, ...] = ("",)


PROGRAMS = {
    "copy_test": Program(sources=("copy", "slot_writer")),
    "queue_test": Program(sources=("queue",), flavours=("plain", "address", "thread")),
    "reduce_test": Program(sources=("reduce", "reduce_[ab]*")),
    # libfabric 1.20's own tcp provider now and then follows a stray pointer when the other end of
    # a message that is on its way is killed.
    "transport_test": Program(
        sources=("transport", "tcp", "ofi", "base"), calls=("tcp", "ofi -killed_while_busy")
    ),
    "ranks_as_threads_test": Program(
        flavours=("plain", "address", "thread"), calls=("1 20", "2 60 1", "3 60 2", "5 40 3")
    ),
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """Where everything is compiled to, once for all processes that run tests side by side."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    shared = base / "engine-tests"
    shared.mkdir(exist_ok=True)
    return shared


def make(target: Path, flavour: str, *arguments: str) -> str:
    """Compile or link ``target``, unless that has been done."""
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = f"{target}.partial"
            command = [COMPILER, *FLAGS, *FLAVOURS[flavour], *arguments, "-o", partial]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0 and not done.stderr, f"{shlex.join(command)}\n{done.stderr}"
            os.rename(partial, target)
    return str(target)


def compiled(folder: Path, flavour: str, source: Path) -> str:
    return make(folder / f"{source.stem}-{flavour}.o", flavour, *INCLUDES, "-c", str(source))


def program(folder: Path, name: str, flavour: str) -> str:
    wanted = PROGRAMS.get(name, Program()).sources
    sources = [TESTS / f"{name}.cc", *(p for part in wanted for p in ENGINE.glob(f"{part}.cc"))]
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        parts = list(threads.map(lambda source: compiled(folder, flavour, source), sources))
    return make(folder / f"{name}-{flavour}", flavour, *parts, "-ldl")


def run(
    folder: Path, name: str, flavour: str, call: str, **settings: str
) -> subprocess.CompletedProcess:
    command = [program(folder, name, flavour), *call.split()]
    if flavour.startswith("thread"):  # whose shadow memory does not bear random addresses
        if not shutil.which("setarch"):
            pytest.skip("a thread sanitizer needs setarch here")
        command = ["setarch", "-R", *command]
    environment = {**os.environ, **ENVIRONMENT, **settings}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace", timeout=570
    )


CASES = [
    pytest.param(path.stem, flavour, call, id=f"{path.stem}-{flavour}-{call or 'all'}")
    for path in sorted(TESTS.glob("*_test.cc"))
    for flavour in PROGRAMS.get(path.stem, Program()).flavours
    for call in PROGRAMS.get(path.stem, Program()).calls
]


@pytest.mark.parametrize("name, flavour, call", CASES)
def test_program(folder, name, flavour, call):
    done = run(folder, name, flavour, call)
    output = done.stdout[-4000:] + done.stderr[-8000:]
    if done.returncode == CANNOT_HERE:
        pytest.skip(done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, output
    assert "runtime error" not in output and "WARNING: ThreadSanitizer" not in output, output


def test_every_program_named_here_exists():
    assert {path.stem for path in TESTS.glob("*_test.cc")} >= PROGRAMS.keys()


def test_the_thread_sanitizer_sees_a_weakened_fence(folder):
    """The proof that the runs above can fail: counters published without ordering are races."""
    first = {"TSAN_OPTIONS": f"halt_on_error=1:exitcode={TSAN_REPORTED}"}  # one is enough
    done = run(folder, "ranks_as_threads_test", "thread-weakened", "4 60 1", **first)
    assert done.returncode == TSAN_REPORTED, done.stdout[-2000:] + done.stderr[-4000:]
    assert "data race" in done.stderr
