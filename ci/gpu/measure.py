"""Records of a stage, timers, memory and the device, shared by the stages.

A stage is a function of one `Recorder`. It opens `Recorder.check` once per row of its table; a
failing check is recorded with its reason and does not end the stage. On a machine without a GPU the
same code runs on the CPU with tiny shapes (``recorder.rehearse``).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

GIB = 2**30
PASSED, FAILED, REFUSED = "passed", "failed", "refused"
PACKAGES = ("torch", "triton", "transformers", "numpy", "torchao", "deepspeed", "megatron-fsdp",
            "torchtitan")  # fmt: skip
MAX_REASON = 1500  # characters of an error that are kept
T = TypeVar("T")


class Refused(Exception):
    """A check cannot run here; the message states the reason. Refused checks are not failures."""


@dataclass
class Check:
    """One row of a stage's table."""

    name: str
    status: str = PASSED
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Recorder:
    """Checks of a running stage, written to its file after each of them.

    Args:
        path: JSON file of the stage.
        head: Entries that describe the run, see `ci.gpu.runner`.
        rehearse: Use tiny shapes on the CPU.
        carried: Folder of wheels that were carried here, or None.
    """

    def __init__(self, path: Path, head: dict[str, Any], rehearse: bool, carried: Path | None):
        self.path, self.head, self.rehearse, self.carried = path, head, rehearse, carried
        self.checks: list[Check] = []
        self.begin = time.perf_counter()
        self.device = torch.device("cpu" if rehearse else "cuda")
        if rehearse:
            torch.set_num_threads(1)  # threads of tiny operations would only wait for each other

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Record one check; the body fills in the yielded figures. Never raises."""
        check, begin = Check(name), time.perf_counter()
        try:
            yield check.figures
        except Refused as error:
            check.status, check.reason = REFUSED, str(error)
        except Exception as error:
            trace = traceback.format_exc()
            check.status = FAILED
            check.reason = f"{type(error).__name__}: {error}"[:MAX_REASON]
            print(trace, flush=True)
        check.seconds = round(time.perf_counter() - begin, 2)
        self.checks.append(check)
        self.write("running")
        facts = ", ".join(f"{key} {value}" for key, value in check.figures.items()
                          if not isinstance(value, (dict, list)))  # fmt: skip
        print(
            f"  {check.status:8}{name} ({check.seconds:.1f} s) {check.reason or facts}", flush=True
        )
        free_memory()

    def write(self, status: str, reason: str = "") -> None:
        """Write the file of the stage, replacing it at once."""
        record = self.head | {
            "status": status,
            "reason": reason,
            "seconds": round(time.perf_counter() - self.begin, 1),
            "checks": [asdict(check) for check in self.checks],
        }
        write_json(self.path, record)

    def finish(self) -> None:
        """Write the final status: failed if a check failed, refused if none could run."""
        states = [check.status for check in self.checks]
        failed = [check.name for check in self.checks if check.status == FAILED]
        if failed:
            self.write(FAILED, f"{len(failed)} of {len(states)} checks: {'; '.join(failed)}")
        elif PASSED in states:
            self.write(PASSED)
        else:
            self.write(REFUSED, "no check could run here")


def write_json(path: Path, record: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    partial.replace(path)


def versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the packages that are installed or carried."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def describe_device(rehearse: bool) -> dict[str, Any]:
    """Return the name and the size of the device. Initializes CUDA unless ``rehearse``."""
    if rehearse:
        return {"name": f"CPU ({platform.machine()})", "cores": os.cpu_count()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "gpus": torch.cuda.device_count(),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory() -> None:
    """Release unused memory, so that the next check starts from the same state."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Return the allocator's peak since `reset_peak`; 0 on the CPU, which counts nothing."""
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def device_gib(device: torch.device) -> float:
    """Return the memory of the GPU, or the small limit that a rehearsal plans for."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    return 80.0


def seconds_per_call(
    function: Callable[[], Any], device: torch.device, repeat: int, warm_up: int = 2
) -> float:
    """Return the median seconds of ``function``, which includes the kernels that it started."""
    times = []
    for number in range(warm_up + repeat):
        synchronize(device)
        begin = time.perf_counter()
        function()
        synchronize(device)
        if number >= warm_up:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def seconds_per_kernel(function: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Return the mean seconds of ``function`` in a queue of ``repeat`` calls.

    The host runs ahead, so that launch times do not count as long as kernels are longer.
    """
    function()
    if device.type != "cuda":
        return seconds_per_call(function, device, repeat, warm_up=0)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(repeat):
        function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat


def significant(value: float, digits: int = 4) -> float:
    """Return ``value`` rounded to ``digits`` significant digits, for results that people read."""
    return float(f"{value:.{digits}g}")
