"""Environment report for bug reports: versions, machine, accelerators and relevant variables."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from types import ModuleType

PACKAGES = (
    "nearlinear nearlinear-collectives torch numpy safetensors transformers tokenizers datasets "
    "tensorboard papermill"
).split()
_PREFIXES = ("NCCL_", "GLOO_", "FI_", "OMP_", "CUDA_", "SM_", "TORCH_", "HF_")
_RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
)  # fmt: skip
_SECRET_WORDS = ("TOKEN", "SECRET", "KEY", "PASSWORD", "CREDENTIAL")


def collect() -> list[tuple[str, str]]:
    """Return (name, value) pairs in display order. Variables that may hold secrets are omitted."""
    return [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("cpus", str(os.cpu_count())),
        ("memory", _memory()),
        *((name, _version(name)) for name in PACKAGES),
        *_accelerators(),
        ("compiler", shutil.which("c++") or shutil.which("g++") or "none on PATH"),
        *sorted((k, v) for k, v in os.environ.items() if _is_reported(k)),
    ]


def format_report() -> str:
    """Format the environment as lines to paste into a bug report."""
    rows = collect()
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join(["Copy the lines below into your bug report.", "", *lines])


def _is_reported(variable: str) -> bool:
    secret = any(word in variable for word in _SECRET_WORDS)
    return (variable.startswith(_PREFIXES) or variable in _RANK_VARIABLES) and not secret


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return "unknown"
    return f"{size / 2**30:.1f} GiB"


def _accelerators() -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError:
        return [("accelerators", "torch is not installed")]
    rows = [
        ("cuda", f"{torch.version.cuda or 'not in this build'}"),
        ("backends", ", ".join(_backends(torch))),
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        size = properties.total_memory / 2**30
        rows.append((f"gpu {index}", f"{properties.name}, {size:.0f} GiB"))
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        rows.append(("driver", driver[0] if driver else "unknown"))
    return rows


def _backends(torch: ModuleType) -> list[str]:
    dist = torch.distributed
    if not dist.is_available():
        return ["torch.distributed is not in this build"]
    return [
        name
        for name in ("gloo", "nccl", "mpi", "ucc")
        if getattr(dist, f"is_{name}_available", lambda: False)()
    ]
