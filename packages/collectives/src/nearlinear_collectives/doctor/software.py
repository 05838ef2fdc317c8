"""What is installed: compiler, engine, glue, and what in torch stands beside or in the way."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from nearlinear_collectives import backend, build
from nearlinear_collectives import engine_library as engine
from nearlinear_collectives.doctor.report import BROKEN, OFF, OK, SLOW, Finding

NATIVE = "all_gather, reduce_scatter, all_reduce, broadcast and barrier on CPU tensors"


def findings() -> Iterator[Finding]:
    if sys.platform != "linux":
        yield Finding(
            "platform",
            BROKEN,
            f"{sys.platform} has none of the system calls it stands on",
            "use Linux, in a container or a virtual machine; or the gloo backend",
        )
        return
    yield compiler()
    found = engine_works()
    yield found
    if found.state != BROKEN:
        yield glue()
    yield from torchcomms()


def compiler() -> Finding:
    try:
        command = build.compiler()
    except build.BuildError as error:
        return Finding(
            "compiler",
            OFF,
            str(error).partition(":")[0],
            "only needed where no compiled library fits: " + str(error).partition(": ")[2],
        )
    return Finding("compiler", OK, command)


def engine_works() -> Finding:
    """Loads the engine and reduces with a group of one rank."""
    try:
        path = build.engine_library()
        total = reduce_alone()
    except (build.BuildError, ImportError, OSError) as error:
        return Finding(
            "engine",
            BROKEN,
            f"cannot be loaded: {first_line(error)}",
            "install a C++ compiler, or a wheel that was built with one; "
            "python -m nearlinear_collectives.build shows the compiler's own words",
        )
    except RuntimeError as error:
        return Finding("engine", BROKEN, f"loads, but a group of one rank fails: {error}")
    if total != 2.0:
        return Finding(
            "engine", BROKEN, f"loads, but computes 1.0 * 2.0 = {total}", "please report this"
        )
    kind = "as shipped" if path == build.SHIPPED else "compiled here"
    return Finding("engine", OK, f"{kind} ({path}); runs {NATIVE}")


def reduce_alone() -> float:
    from datetime import timedelta

    from nearlinear_collectives.group import Group

    group = Group(dist.HashStore(), 0, 1, timeout=timedelta(seconds=10), name="doctor")
    try:
        value = ctypes.c_float(1.0)
        group.run(
            engine.Call(
                kind=engine.ALL_REDUCE,
                dtype=engine.DTYPES.index("float32"),
                count=1,
                scale=2.0,
                output=ctypes.addressof(value),
                timeout_ms=engine.OWN_TIMEOUT,
            )
        )
        return value.value
    finally:
        group.close()


def glue() -> Finding:
    wanted = os.environ.get("NEARLINEAR_COLLECTIVES_GLUE", "")
    slower = "calls go through Python, tens of microseconds slower each"
    if wanted == "python":
        return Finding("glue", SLOW, f"NEARLINEAR_COLLECTIVES_GLUE=python: {slower}", "unset it")
    try:
        path = build.glue_library()
        backend.load_glue()
    except (build.BuildError, ImportError) as error:
        return Finding(
            "glue",
            SLOW,
            f"missing for torch {torch.__version__}: {first_line(error)}. {slower}",
            "python -m nearlinear_collectives.build says all; a C++ compiler "
            "and Python's headers are needed once, also if the result is copied to other "
            "machines (NEARLINEAR_COLLECTIVES_CACHE names the folder)",
        )
    return Finding("glue", OK, f"compiled for torch {torch.__version__} ({path})")


def torchcomms() -> Iterator[Finding]:
    if backend.torchcomms_takes_over():
        yield Finding(
            "torchcomms",
            BROKEN,
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS is set and torchcomms "
            "is installed: torch bypasses every plugin, this one too",
            "unset TORCH_DISTRIBUTED_USE_TORCHCOMMS",
        )


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(": ")
