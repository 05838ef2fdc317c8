"""Compile the engine and the torch glue: at install time, or once into a cache on first use.

The engine is plain C++20 and takes seconds; its library is shipped in the wheel. The glue sees
torch's headers, which change with every minor release, so it is compiled (half a minute) for the
torch that is installed and kept under a name that holds torch's version and the sources' hash.
Standard library only: the package's build backend loads this file before anything is installed.
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
SHIPPED = HERE / "lib" / "libnearlinear_engine.so"

COMMON_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=off"]


class BuildError(RuntimeError):
    """A library is missing and cannot be compiled; the text says what to do."""


# --- the compiler --------------------------------------------------------------------------------


def compiler() -> str:
    """The C++ compiler: CXX, or g++, or clang++."""
    for candidate in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if candidate and shutil.which(shlex.split(candidate)[0]):
            return candidate
    raise BuildError(
        "no C++ compiler was found: install one (Debian, Ubuntu: apt-get install g++; "
        "Red Hat, Amazon Linux: yum install gcc-c++) or name it in CXX"
    )


def compile_library(
    target: Path, sources: Sequence[Path], flags: Sequence[str] = (), link: Sequence[str] = ()
) -> None:
    """Compile sources side by side, link them, and put the library in place in one step."""
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
        write(target, made.read_bytes())


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(
            "the C++ compiler failed (it must know C++20: g++ 11, clang++ 14 or newer):\n"
            f"  {shlex.join(command)}\n{(done.stderr or done.stdout)[-4000:]}"
        )


def write(path: Path, content: bytes) -> None:
    """All or nothing: who reads the path meanwhile sees the old file."""
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
    """Where libraries compiled on first use may be, in the order they are looked for.

    The last resort is a folder for this user alone beside other temporary files.
    """
    if chosen := os.environ.get("NEARLINEAR_COLLECTIVES_CACHE"):
        return [Path(chosen)]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folders = [Path(home) / "nearlinear_collectives"] if os.path.isabs(home) else []
    return [*folders, Path(tempfile.gettempdir()) / f"nearlinear_collectives-{os.getuid()}"]


def writable(folder: Path) -> bool:
    """Whether libraries can be put there and will be taken from there; makes the folder."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return trusted(folder) and os.access(folder, os.W_OK | os.X_OK)


def cached(name: str, make: Callable[[Path], None] | None) -> Path | None:
    """The intact library ``name`` of the cache; made first where it is missing or damaged."""
    for folder in cache_folders():
        if trusted(folder) and intact(folder / name):
            return folder / name
    if make is None:
        return None
    folder = next(filter(writable, cache_folders()), None)
    if folder is None:
        raise BuildError(
            "no folder for compiled libraries can be written to, of "
            f"{', '.join(map(str, cache_folders()))}: name one in NEARLINEAR_COLLECTIVES_CACHE"
        )
    target = folder / name
    with only_one(target):
        if not intact(target):
            make(target)
            write(stamp_of(target), digest_of(target))
    return target


def trusted(folder: Path) -> bool:
    """Code is loaded from a folder of this user or root only, unless it was named."""
    if os.environ.get("NEARLINEAR_COLLECTIVES_CACHE"):
        return True
    with contextlib.suppress(OSError):
        return folder.stat().st_uid in (0, os.getuid())
    return False


def stamp_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def digest_of(library: Path) -> bytes:
    return hashlib.sha256(library.read_bytes()).hexdigest().encode()


def intact(library: Path) -> bool:
    """Loading a library that a full disk or a broken copy cut short would kill the process."""
    with contextlib.suppress(OSError):
        return stamp_of(library).read_bytes() == digest_of(library)
    return False


@contextlib.contextmanager
def only_one(target: Path) -> Iterator[None]:
    """Of many ranks that start at once, one compiles and the others wait for it."""
    import fcntl  # not on every platform that should be told it is the wrong one

    with open(target.with_suffix(".lock"), "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: each compiles its own
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sources_hash(sources: Iterable[Path]) -> str:
    """Changes with the sources, the flags and the machine's architecture."""
    digest = hashlib.sha256(" ".join([*COMMON_FLAGS, platform.machine()]).encode())
    for path in sorted(sources):
        digest.update(str(path.relative_to(HERE)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# --- the engine ----------------------------------------------------------------------------------


def engine_sources() -> list[Path]:
    return [*ENGINE.rglob("*.cc"), *ENGINE.rglob("*.h")]


def engine_library(shipped: bool = True, build: bool = True) -> Path | None:
    """The engine's library: the shipped one, or one compiled from changed sources.

    ``NEARLINEAR_COLLECTIVES_ENGINE`` names another, a sanitized build say.
    """
    if chosen := os.environ.get("NEARLINEAR_COLLECTIVES_ENGINE"):
        return Path(chosen)
    wanted = sources_hash(engine_sources())
    stamp = SHIPPED.with_suffix(".hash")
    if shipped and SHIPPED.exists() and stamp.exists() and stamp.read_text() == wanted:
        return SHIPPED
    return cached(f"libnearlinear_engine-{wanted}.so", build_engine if build else None)


def build_engine(target: Path) -> None:
    headers = ENGINE / "third_party" / "libfabric"  # the library itself is loaded where it is used
    compile_library(
        target, sorted(ENGINE.glob("*.cc")), [f"-isystem{headers}"], ["-lpthread", "-ldl"]
    )


# --- the glue ------------------------------------------------------------------------------------


def glue_sources() -> list[Path]:
    return [*GLUE.glob("*.cc"), *GLUE.glob("*.h"), ENGINE / "nearlinear_collectives.h"]


def glue_library(build: bool = True) -> Path | None:
    """The glue for the torch and Python at hand; ``None``: not there, and not to be built."""
    import torch

    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    kind = " ".join([torch.version.git_version, str(abi), *pybind_abi()])
    parts = [
        f"torch{torch.__version__}",
        str(sysconfig.get_config_var("SOABI")),
        hashlib.sha256(kind.encode()).hexdigest()[:6],
        sources_hash(glue_sources()),
    ]
    return cached(f"nearlinear_glue-{'-'.join(parts)}.so", build_glue if build else None)


def pybind_abi() -> list[str]:
    """Flags that make this compiler's glue share types with a torch that another one built.

    Up to torch 2.8 pybind11 shares them only where the compilers' names and ABI versions are equal,
    and torch says what to claim; later ones say nothing, for they do not compare them.
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
    compiler()  # says what is missing before the line below promises something
    print(
        f"nearlinear_collectives: compiling its torch glue for torch {torch.__version__}, "
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
