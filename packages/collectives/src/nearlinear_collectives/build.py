"""Compile the engine and the torch glue: at install time, or once into a cache on first use.

The engine is plain C++20 and takes seconds; its library is shipped in the wheel. The glue sees
torch's headers, which change with every minor release, so it is compiled (half a minute) for the
torch that is installed and kept under a name that holds torch's version and the sources' hash.
Standard library only: the package's build backend imports this file before anything is installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENGINE = HERE / "engine"
GLUE = HERE / "glue"
SHIPPED = HERE / "lib" / "libnearlinear_engine.so"

COMMON_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=off"]


class BuildError(RuntimeError):
    """The compiler is missing or failed; the text says what to do."""


def compiler() -> str:
    """The C++ compiler: CXX, or g++, or clang++."""
    for candidate in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if candidate and shutil.which(shlex.split(candidate)[0]):
            return candidate
    raise BuildError(
        "no C++ compiler was found: install one (Debian, Ubuntu: apt-get install g++; "
        "Red Hat, Amazon Linux: yum install gcc-c++) or name it in CXX"
    )


def cache_folder() -> Path:
    """Where libraries compiled on first use are kept."""
    chosen = os.environ.get("NEARLINEAR_COLLECTIVES_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nearlinear_collectives"


def sources_hash(sources: Iterable[Path]) -> str:
    """Changes with the sources, the flags and the machine's architecture."""
    digest = hashlib.sha256(" ".join([*COMMON_FLAGS, platform.machine()]).encode())
    for path in sorted(sources):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def engine_sources() -> list[Path]:
    return [*ENGINE.glob("*.cc"), *ENGINE.glob("*.h")]


def glue_sources() -> list[Path]:
    return [*GLUE.glob("*.cc"), *GLUE.glob("*.h"), ENGINE / "nearlinear_collectives.h"]


def compile_library(target: Path, sources: Sequence[Path], flags: Sequence[str] = (),
                    link: Sequence[str] = ()) -> None:
    """Compile sources side by side, link them, and put the library in place in one step."""
    command = shlex.split(compiler())
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nearlinear-build-") as scratch:

        def compile_one(source: Path) -> str:
            made = f"{scratch}/{source.stem}.o"
            run([*command, *COMMON_FLAGS, *flags, "-c", str(source), "-o", made])
            return made

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, sources))
        made = f"{target}.{os.getpid()}"
        try:
            run([*command, "-shared", "-o", made, *objects, *link])
            os.replace(made, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made)


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(
            f"the C++ compiler failed:\n  {shlex.join(command)}\n{(done.stderr or done.stdout)[-4000:]}"
        )


@contextlib.contextmanager
def only_one(target: Path) -> Iterator[None]:
    """Of many ranks that start at once, one compiles and the others wait for it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def engine_library() -> Path:
    """The engine's library: the shipped one, or one compiled from changed sources.

    ``NEARLINEAR_COLLECTIVES_ENGINE`` names another, a sanitized build say.
    """
    if chosen := os.environ.get("NEARLINEAR_COLLECTIVES_ENGINE"):
        return Path(chosen)
    wanted = sources_hash(engine_sources())
    stamp = SHIPPED.with_suffix(".hash")
    if SHIPPED.exists() and stamp.exists() and stamp.read_text() == wanted:
        return SHIPPED
    target = cache_folder() / f"libnearlinear_engine-{wanted}.so"
    if not target.exists():
        with only_one(target):
            if not target.exists():
                build_engine(target)
    return target


def build_engine(target: Path) -> None:
    compile_library(target, sorted(ENGINE.glob("*.cc")), link=["-lpthread", "-ldl"])


def ship_engine() -> Path:
    """Compile the engine into the package; called by the build backend."""
    build_engine(SHIPPED)
    SHIPPED.with_suffix(".hash").write_text(sources_hash(engine_sources()))
    return SHIPPED


def glue_library(build: bool = True) -> Path | None:
    """The glue for the torch and Python at hand; ``None`` if it is not there and may not be built."""
    import torch

    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    kind = hashlib.sha256(str(torch._C._GLIBCXX_USE_CXX11_ABI).encode() + torch.__version__.encode())
    name = f"torch{torch.__version__}-{python}-{sources_hash(glue_sources())}-{kind.hexdigest()[:6]}"
    target = cache_folder() / name / "nearlinear_glue.so"
    if target.exists() or not build:
        return target if target.exists() else None
    with only_one(target):
        if not target.exists():
            print(f"nearlinear_collectives: compiling its torch glue for torch {torch.__version__}, "
                  "once (about half a minute)", file=sys.stderr, flush=True)
            build_glue(target)
    return target


def build_glue(target: Path) -> None:
    import sysconfig

    import torch
    from torch.utils import cpp_extension

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    flags = [
        "-DTORCH_EXTENSION_NAME=nearlinear_glue",
        f"-DNEARLINEAR_TORCH={major * 100 + minor}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        "-fvisibility=hidden",
        "-O1",
        "-Wno-unused-parameter",
        *(f"-isystem{folder}" for folder in cpp_extension.include_paths()),
        f"-isystem{sysconfig.get_paths()['include']}",
    ]
    folder = Path(torch.__file__).parent / "lib"
    libraries = ["c10", "torch_cpu", "torch", "torch_python"]
    link = [f"-L{folder}", *(f"-l{library}" for library in libraries)]
    compile_library(target, sorted(GLUE.glob("*.cc")), flags, link)


def main() -> None:
    """``python -m nearlinear_collectives.build``: compile now what the first import would."""
    print(f"engine  {engine_library()}")
    print(f"glue    {glue_library()}")


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        sys.exit(str(error))
