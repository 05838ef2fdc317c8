"""Contenders of the MPI benchmark: installation, compilation and launch.

Settings were chosen by experiment. If the best one depends on operation and size, each is a
contender of its own, and "best MPI" in the table is the fastest at every size.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nearlinear_collectives import build

HERE = Path(__file__).resolve().parent
C = ["-std=gnu11", "-O2", "-Wall", "-Wextra"]


class Unavailable(Exception):
    """A contender is not available on this machine; the message states the remedy."""


@dataclass(frozen=True)
class Setting:
    """Launcher arguments and environment variables; {folder} stands for the library's prefix."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Library:
    """An MPI library on PyPI."""

    title: str
    packages: tuple[str, ...]
    launcher: str
    always: Setting
    """Setting for every run."""
    oversubscribed: Setting
    """Additional setting for more ranks than cores: waiting ranks yield."""
    settings: Mapping[str, Setting]


# UCX is Open MPI's fastest transport over shared memory (with CMA), but is enabled for InfiniBand
# only unless set to "any". HAN's reduce-scatter and all-reduce are faster for large messages, those
# of "tuned" for small ones.
_UCX = ("--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any")
_HAN = ("--mca", "coll_han_priority", "100", "--mca", "coll_adapt_priority", "90")
# MPICH's shared-memory all-reduce never yields: with more ranks than cores a call takes
# milliseconds at any size. Its message-based algorithms yield.
_MPICH_POSIX = {
    f"MPIR_CVAR_{name}_POSIX_INTRA_ALGORITHM": "mpir"
    for name in ("ALLREDUCE", "BARRIER", "BCAST", "REDUCE")
}

LIBRARIES = {
    "openmpi": Library(
        "Open MPI",
        ("openmpi",),
        "mpirun",
        Setting(
            ("--oversubscribe",),
            {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
        ),
        Setting(("--mca", "mpi_yield_when_idle", "1")),
        {"ucx": Setting(_UCX), "han": Setting(_UCX + _HAN)},
    ),
    "mpich": Library(
        "MPICH",
        ("mpich",),
        "mpiexec.hydra",
        Setting(),
        Setting((), {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", **_MPICH_POSIX}),
        {"": Setting()},
    ),
    "impi": Library(
        "Intel MPI",
        ("impi-rt", "impi-devel"),
        "mpiexec.hydra",
        Setting(
            (),
            {
                "I_MPI_ROOT": "{folder}",
                "LD_LIBRARY_PATH": "{folder}/lib",
                "FI_PROVIDER_PATH": "{folder}/lib",
                "I_MPI_FABRICS": "shm",
            },
        ),
        Setting((), {"I_MPI_THREAD_YIELD": "2"}),
        {"": Setting()},
    ),
}
OWN = {
    "engine": "the engine on private memory, as MPI",
    "engine:pool": "the engine on its shared memory pool, which MPI does not offer",
    "memcpy": "lower bound: each rank copies all_gather's output out of shared memory",
    "memcpy:stream": "lower bound with non-temporal stores",
}
_OWN_ARGUMENTS = {
    "engine": "private",
    "engine:pool": "pool",
    "memcpy": "plain",
    "memcpy:stream": "stream",
}


@dataclass(frozen=True)
class Contender:
    """A compiled program with its launch settings."""

    name: str
    program: Path
    library: Library | None = None
    setting: Setting = Setting()
    folder: Path = Path()

    def command(self, ranks: int, arguments: list[str]) -> list[str]:
        if self.library is None:  # own programs fork their ranks
            return [str(self.program), str(ranks), *self.setting.arguments, *arguments]
        options = [a for setting in self._settings(ranks) for a in setting.arguments]
        launcher = self.folder / "bin" / self.library.launcher
        return [str(launcher), *options, "-n", str(ranks), str(self.program), *arguments]

    def environment(self, ranks: int) -> dict[str, str]:
        found = dict(os.environ)
        for setting in self._settings(ranks):
            for name, value in setting.environment.items():
                found[name] = value.replace("{folder}", str(self.folder))
        return found

    def _settings(self, ranks: int) -> list[Setting]:
        if self.library is None:
            return []
        oversubscribed = ranks > len(os.sched_getaffinity(0))
        extra = [self.library.oversubscribed] if oversubscribed else []
        return [self.library.always, *extra, self.setting]

    def record(self) -> dict:
        """Return the launch settings for a published file, without folders of this machine."""
        if self.library is None:
            return {"what": OWN[self.name]}
        parts = {
            "always": self.library.always,
            "more ranks than cores": self.library.oversubscribed,
        }
        return {"what": self.library.title} | {
            when: {"arguments": list(s.arguments), "environment": dict(s.environment)}
            for when, s in {**parts, "setting": self.setting}.items()
        }

    @property
    def is_mpi(self) -> bool:
        return self.library is not None


def prepare_library(name: str, folder: Path) -> list[Contender]:
    """Install a library in ``folder`` if necessary, compile, and return its contenders."""
    library, prefix = LIBRARIES[name], folder / name
    if not (prefix / "bin" / library.launcher).exists():
        say(f"installing {' and '.join(library.packages)} into {prefix}")
        run([sys.executable, "-m", "venv", str(prefix)], f"a virtual environment for {name}")
        pip = [str(prefix / "bin/python"), "-m", "pip", "install", "--quiet"]
        run([*pip, "--disable-pip-version-check", *library.packages], f"installing {name}")
    program = prefix / "mpi_bench"
    environment = {**os.environ, "I_MPI_ROOT": str(prefix)}
    sources = [str(HERE / "measure.c"), str(HERE / "mpi_bench.c")]
    command = [str(prefix / "bin/mpicc"), *C, *sources, "-o", str(program), "-lm"]
    run(command, f"compiling for {name}", environment)
    return [
        Contender(f"{name}:{label}" if label else name, program, library, setting, prefix)
        for label, setting in library.settings.items()
    ]


def prepare_own(names: list[str], folder: Path) -> list[Contender]:
    """Compile the own programs and the packaged engine, and return the named contenders."""
    kinds = {name.split(":")[0] for name in names}
    link = []
    if "engine" in kinds:
        try:
            library = build.engine_library()
        except build.BuildError as error:
            raise Unavailable(f"the engine: {error}") from None
        link = [f"-I{build.ENGINE}", str(library), f"-Wl,-rpath,{library.parent}"]
    for kind in sorted(kinds):
        sources = [str(HERE / name) for name in ("measure.c", "ranks.c", f"{kind}_bench.c")]
        program = ["-o", str(folder / f"{kind}_bench"), "-pthread", "-lm"]
        needs = link if kind == "engine" else []
        run(["cc", *C, *sources, *needs, *program], f"compiling {kind}_bench.c")
    return [
        Contender(
            name,
            folder / f"{name.split(':')[0]}_bench",
            setting=Setting((_OWN_ARGUMENTS[name],)),
        )
        for name in names
    ]


def versions(folder: Path, names: list[str]) -> dict[str, str]:
    """Return the versions of the libraries installed in ``folder``."""
    found = {}
    for name in names:
        for package in LIBRARIES[name].packages:
            pattern = f"lib/python*/site-packages/{package.replace('-', '_')}-*.dist-info"
            for path in (folder / name).glob(pattern):
                found[package] = path.name.removesuffix(".dist-info").rpartition("-")[2]
    return found


def run(command: list[str], task: str, environment: dict | None = None) -> None:
    if shutil.which(command[0]) is None:
        raise Unavailable(
            f"{task}: the program {command[0]!r} was not found. Install it and try again."
        )
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        tail = "\n".join("    " + line for line in done.stdout.splitlines()[-15:])
        raise Unavailable(f"{task} failed. Last lines of its output:\n{tail}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
