"""Compile the engine and the torch glue, at install time or once into a cache on first use.

The engine is plain C++20 and compiles in seconds; its library is part of the wheel. The glue
includes torch's headers, which change with every minor release. It is compiled (half a minute) for
the installed torch, and its file name holds torch's version and a hash of the sources. This module
uses the standard library only, because the build backend loads it before anything is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent  # the package
ENGINE = HERE / "engine"
GLUE = HERE / "glue"
EXPORTS = ENGINE / "exports.map"
SHIPPED = HERE / "lib" / "libnearlinear_engine.so"

COMMON_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=off"]


class BuildError(RuntimeError):
    """A library is missing and cannot be compiled. The message names the remedy."""


# --- the compiler --------------------------------------------------------------------------------


def compiler() -> str:
    """Return the command of the C++ compiler: CXX, g++, clang++ or c++."""
    for candidate in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if candidate and shutil.which(shlex.split(candidate)[0]):
            return candidate
    raise BuildError(
        "no C++ compiler found: install one (Debian, Ubuntu: apt-get install g++; "
        "Red Hat, Amazon Linux: yum install gcc-c++) or set CXX"
    )


def compile_library(
    target: Path, sources: Sequence[Path], flags: Sequence[str] = (), link: Sequence[str] = ()
) -> None:
    """Compile sources in parallel, link them, and replace ``target`` atomically."""
    command = shlex.split(compiler())
    with tempfile.TemporaryDirectory(prefix="nearlinear-build-") as scratch:

        def compile_one(source: Path) -> str:
            made = f"{scratch}/{source.stem}.o"
            run([*command, *COMMON_FLAGS, *flags, "-c", str(source), "-o", made])
            return made

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, sources))
        made = Path(scratch) / target.name
        run([*command, "-shared", "-o", str(made), *objects, *link])
        write_atomically(target, made.read_bytes())


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(
            "the C++ compiler failed (C++20 is required: g++ 11, clang++ 14 or newer):\n"
            f"  {shlex.join(command)}\n{(done.stderr or done.stdout)[-4000:]}"
        )


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file atomically; concurrent readers see the old or the new content."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


# --- the cache -----------------------------------------------------------------------------------


def cache_folders() -> list[Path]:
    """Return the folders for libraries compiled on first use, in search order.

    The last one is a per-user folder in the directory of temporary files.
    """
    if chosen := os.environ.get("NEARLINEAR_COLLECTIVES_CACHE"):
        return [Path(chosen)]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folders = [Path(home) / "nearlinear_collectives"] if os.path.isabs(home) else []
    return [*folders, Path(tempfile.gettempdir()) / f"nearlinear_collectives-{os.getuid()}"]


def is_usable(folder: Path) -> bool:
    """Create the folder; return True if it is trusted and writable."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return is_trusted(folder) and os.access(folder, os.W_OK | os.X_OK)


def cached_library(name: str, make: Callable[[Path], None] | None) -> Path | None:
    """Return the library ``name`` from the cache; make it if it is missing or damaged.

    Args:
        name: File name of the library.
        make: Compile the library at a path; None returns None instead of compiling.

    Raises:
        BuildError: The compiler is missing or fails, or no folder is writable.
    """
    for folder in cache_folders():
        if is_trusted(folder) and is_intact(folder / name):
            return folder / name
    if make is None:
        return None
    folder = next(filter(is_usable, cache_folders()), None)
    if folder is None:
        raise BuildError(
            "none of the folders for compiled libraries is writable: "
            f"{', '.join(map(str, cache_folders()))}. Set NEARLINEAR_COLLECTIVES_CACHE to one"
        )
    target = folder / name
    with exclusive_lock(target):
        if not is_intact(target):
            make(target)
            write_atomically(stamp_of(target), digest_of(target))
    return target


def is_trusted(folder: Path) -> bool:
    """Return True for a folder owned by this user or root, or chosen explicitly."""
    if os.environ.get("NEARLINEAR_COLLECTIVES_CACHE"):
        return True
    with contextlib.suppress(OSError):
        return folder.stat().st_uid in (0, os.getuid())
    return False


def stamp_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def digest_of(library: Path) -> bytes:
    return hashlib.sha256(library.read_bytes()).hexdigest().encode()


def is_intact(library: Path) -> bool:
    """Check the digest, because loading a truncated library would kill the process."""
    with contextlib.suppress(OSError):
        return stamp_of(library).read_bytes() == digest_of(library)
    return False


@contextlib.contextmanager
def exclusive_lock(target: Path) -> Iterator[None]:
    """Let one of many starting ranks compile while the others wait for it."""
    import fcntl  # missing on Windows, where importing this module must still work

    with open(target.with_suffix(".lock"), "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: every rank compiles
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sources_hash(sources: Iterable[Path], machine: str | None = None) -> str:
    """Hash the sources, the compiler flags and the architecture, by default this machine's."""
    digest = hashlib.sha256(" ".join([*COMMON_FLAGS, machine or platform.machine()]).encode())
    for path in sorted(sources):
        digest.update(str(path.relative_to(HERE)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# --- the engine ----------------------------------------------------------------------------------


def engine_sources() -> list[Path]:
    return [*ENGINE.rglob("*.cc"), *ENGINE.rglob("*.h"), EXPORTS]


def engine_library(shipped: bool = True, build: bool = True) -> Path | None:
    """Return the engine's library: the shipped one, or one compiled from changed sources.

    ``NEARLINEAR_COLLECTIVES_ENGINE`` overrides it, for example with a sanitizer build.

    Args:
        shipped: Accept the library of the wheel.
        build: Compile a missing library; otherwise return None.
    """
    if chosen := os.environ.get("NEARLINEAR_COLLECTIVES_ENGINE"):
        return Path(chosen)
    wanted = sources_hash(engine_sources())
    stamp = SHIPPED.with_suffix(".hash")
    if shipped and SHIPPED.exists() and stamp.exists() and stamp.read_text() == wanted:
        return SHIPPED
    return cached_library(f"libnearlinear_engine-{wanted}.so", build_engine if build else None)


def build_engine(target: Path, portable: bool = False) -> None:
    """Compile the engine.

    Args:
        target: Path of the library.
        portable: Export the C interface only. A library for other systems contains a C++ library
            of its own, and is loaded with global symbols. Other builds export all: the C++ tests
            link them.
    """
    headers = ENGINE / "third_party" / "libfabric"  # headers only: libfabric is loaded at run time
    link = ["-lpthread", "-ldl"]
    if portable:
        link.append(f"-Wl,--version-script={EXPORTS}")
    compile_library(target, sorted(ENGINE.glob("*.cc")), [f"-isystem{headers}"], link)


# --- the glue ------------------------------------------------------------------------------------


def glue_sources() -> list[Path]:
    return [*GLUE.glob("*.cc"), *GLUE.glob("*.h"), ENGINE / "nearlinear_collectives.h"]


def glue_library(build: bool = True) -> Path | None:
    """Return the glue for the installed torch and Python; None if missing and not ``build``."""
    import torch

    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    kind = " ".join([torch.version.git_version, str(abi), *pybind_abi()])
    parts = [
        f"torch{torch.__version__}",
        str(sysconfig.get_config_var("SOABI")),
        hashlib.sha256(kind.encode()).hexdigest()[:6],
        sources_hash(glue_sources()),
    ]
    return cached_library(f"nearlinear_glue-{'-'.join(parts)}.so", build_glue if build else None)


def pybind_abi() -> list[str]:
    """Return flags that let the glue share pybind11 types with a torch from another compiler.

    Up to torch 2.8 pybind11 compares compiler names and ABI versions, and torch exports the values
    to claim. Later versions neither compare nor export them.
    """
    import torch

    values = {
        name: getattr(torch._C, f"_PYBIND11_{name}", None)
        for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    }
    return [f'-DPYBIND11_{name}="{value}"' for name, value in values.items() if value is not None]


def build_glue(target: Path) -> None:
    import torch
    from torch.utils import cpp_extension

    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        raise BuildError(
            f"Python's headers are not in {include}: install them (Debian, Ubuntu: "
            "apt-get install python3-dev; Red Hat, Amazon Linux: yum install python3-devel)"
        )
    compiler()  # raises before the line below announces a compilation
    print(
        f"nearlinear_collectives: compiling the torch glue for torch {torch.__version__}, "
        "once (about half a minute)",
        file=sys.stderr,
        flush=True,
    )
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    flags = [
        "-DTORCH_EXTENSION_NAME=nearlinear_glue",
        f"-DNEARLINEAR_TORCH={major * 100 + minor}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *pybind_abi(),
        "-fvisibility=hidden",
        "-O1",
        "-Wno-unused-parameter",
        *(f"-isystem{folder}" for folder in cpp_extension.include_paths()),
        f"-isystem{include}",
    ]
    folder = Path(torch.__file__).parent / "lib"
    libraries = ["c10", "torch_cpu", "torch", "torch_python"]
    link = [f"-L{folder}", *(f"-l{library}" for library in libraries)]
    compile_library(target, sorted(GLUE.glob("*.cc")), flags, link)
