"""Run the stages one after another, each in its own process with a time limit.

The processes are forks of this one, which has imported torch and the models but has not used the
GPU: ten stages pay for one import. Every stage writes one JSON file and keeps the checks that it
has completed if it fails or is stopped. A stage that has passed with the same sources is skipped.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "ci" / "gpu" / "results"
SOURCES = ("packages/core/src", "packages/collectives/src", "ci", "tests", "data_prep")
PATH = ("packages/core/src", "packages/collectives/src", ".")
SUFFIXES = (".py", ".cc", ".h", ".toml")
PRELOADED = (
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
    "nearlinear.train.trainer", "nearlinear.planner.memory",
)  # fmt: skip
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
MODES = ("gpu", "rehearsal")


@dataclass(frozen=True)
class Stage:
    """One part of the checklist."""

    name: str
    minutes: float
    """Time limit."""
    proves: str
    function: str
    """Module and function, as in ``ci.gpu.memory:run``."""


STAGES = (
    Stage("correctness", 8, "training on CUDA equals the CPU: every kind of parallelism with "
          "several ranks on the GPU, every precision, offloading, compilation, checkpoints; and "
          "every test marked gpu", "ci.gpu.correctness:run"),
    Stage("memory", 8, "the planner's peak equals the allocator's within 5 % for 30 "
          "configurations, or the category that differs", "ci.gpu.memory:run"),
    Stage("speed", 8, "MFU and peak memory of GPT-2 blocks of width 7168 and Llama-3-8B blocks "
          "beside plain FSDP2", "ci.gpu.speed:run"),
    Stage("peers", 8, "the same models with DeepSpeed ZeRO-3, Megatron-FSDP and torchtitan, where "
          "their wheels are carried", "ci.gpu.speed:run_peers"),
    Stage("activation-offload", 6, "step time with offloaded activations at horizon 1 to 4 beside "
          "save_on_cpu and no offloading, and a picture of the overlap",
          "ci.gpu.offload:run_activations"),
    Stage("optimizers", 6, "step time and memory of fused, offloaded, sliced and 8-bit AdamW",
          "ci.gpu.offload:run_optimizers"),
    Stage("codecs", 4, "time of the all-gather codecs as a share of a block's step, and their "
          "bandwidth beside a copy", "ci.gpu.collectives:run_codecs"),
    Stage("collectives", 6, "collectives on CUDA tensors by backend, CUDA graphs, and a "
          "copy-engine all-gather between processes", "ci.gpu.collectives:run"),
    Stage("checkpoint", 8, "stall of an asynchronous save of 10 GB from GPU memory, beside DCP",
          "ci.gpu.checkpoint:run"),
    Stage("profile", 5, "kernels, idle share and the three largest losses of one training step",
          "ci.gpu.profile:run"),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Options of a run."""

    results: Path
    rehearse: bool = False
    again: bool = False
    carried: Path | None = None
    commit: str = ""


def find_stages(names: str) -> list[Stage]:
    """Return the stages of a comma-separated list, in the order of `STAGES`; "" = all.

    Raises ValueError for an unknown name.
    """
    known = {stage.name: stage for stage in STAGES}
    asked = [name.strip() for name in names.split(",") if name.strip()]
    for name in asked:
        if name not in known:
            raise ValueError(f"--stages {name}: no such stage; allowed are {', '.join(known)}")
    return [stage for stage in STAGES if not asked or stage.name in asked]


def set_paths(carried: Path | None, rehearse: bool = False) -> None:
    """Make the checkout and the carried packages importable, here and in child processes.

    Call it before torch is imported.
    """
    from .carry import unpack

    folders = [str((ROOT / path).resolve()) for path in PATH]
    if carried is not None:
        folders.append(str(unpack(carried)))
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, inherited]))
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() survives a fork
        "DS_BUILD_OPS": "0",
    } | ({"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} if rehearse else {})


def source_hash() -> str:
    """Return a hash of all sources, which identifies a state of a checkout without git."""
    digest = hashlib.sha256()
    paths = (path for folder in SOURCES for path in (ROOT / folder).rglob("*"))
    for path in sorted(path for path in paths if path.suffix in SUFFIXES):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def commit_of_checkout() -> str:
    """Return the commit of the checkout, with "+" if files are changed; "" without git."""
    with suppress(OSError):
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        if head.returncode == 0:
            status = [*git, "status", "--porcelain", "--untracked-files=no"]
            changed = subprocess.run(status, capture_output=True, text=True).stdout
            return head.stdout.strip() + ("+" if changed else "")
    return ""


def read_result(path: Path) -> dict[str, Any]:
    """Return the result in ``path``, or {} if there is none that can be read."""
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return {}


def run(stages: list[Stage], settings: Settings) -> int:
    """Run ``stages`` and return the number of those that failed. Requires `set_paths`."""
    settings.results.mkdir(parents=True, exist_ok=True)
    source, failures = source_hash(), 0
    imported = time.monotonic()
    for name in PRELOADED:
        import_module(name)
    print(f"imports: {time.monotonic() - imported:.0f} s", flush=True)
    for number, stage in enumerate(stages, 1):
        path = settings.results / f"{stage.name}.json"
        earlier = read_result(path)
        same = earlier.get("source") == source and earlier.get("mode") == MODES[settings.rehearse]
        if same and earlier.get("status") == "passed" and not settings.again:
            print(f"[{number}/{len(stages)}] {stage.name}: passed before; --again repeats it",
                  flush=True)  # fmt: skip
            continue
        print(f"[{number}/{len(stages)}] {stage.name}, at most {stage.minutes:g} min", flush=True)
        status, reason = run_stage(stage, path, settings, source)
        failures += status == "failed"
        print(f"  {stage.name}: {status}{f' ({reason})' if reason else ''}", flush=True)
    return failures


def run_stage(stage: Stage, path: Path, settings: Settings, source: str) -> tuple[str, str]:
    """Run one stage in a process of its own and return its status and reason."""
    path.unlink(missing_ok=True)
    head = {
        "stage": stage.name,
        "mode": MODES[settings.rehearse],
        "proves": stage.proves,
        "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": settings.commit or commit_of_checkout(),
        "source": source,
    }
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_child, args=(stage, path, settings, head))
    process.start()
    stopped = False
    try:
        process.join(stage.minutes * 60)
        stopped = process.is_alive()
    finally:
        _end_session(process)
    found = read_result(path)
    if found.get("status") in ("passed", "failed", "refused"):
        return found["status"], found["reason"]
    if stopped:
        reason = f"stopped at its limit of {stage.minutes:g} min"
    else:
        reason = f"its process ended with code {process.exitcode}"
    from .measure import write_json

    write_json(path, {**head, "device": {}, "versions": {}, "seconds": 0, "checks": []} | found
               | {"status": "failed", "reason": reason})  # fmt: skip
    return "failed", reason


def _child(stage: Stage, path: Path, settings: Settings, head: dict[str, Any]) -> None:
    """Run a stage in this process, the leader of a new session."""
    with suppress(OSError):
        os.setsid()
    from . import measure

    try:
        head |= {"device": measure.describe_device(settings.rehearse),
                 "versions": measure.versions()}  # fmt: skip
        recorder = measure.Recorder(path, head, settings.rehearse, settings.carried)
        recorder.write("running")
        module, _, name = stage.function.partition(":")
        getattr(import_module(module), name)(recorder)
        recorder.finish()
        code = 0
    except BaseException as error:
        print(traceback.format_exc(), flush=True)
        found = read_result(path) or {**head, "seconds": 0, "checks": []}
        reason = f"{type(error).__name__}: {error}"[: measure.MAX_REASON]
        measure.write_json(path, found | {"status": measure.FAILED, "reason": reason})
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # process groups and threads that a failed stage left do not delay the next


def _end_session(process: Any) -> None:
    """End the stage's process and all that it left in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        if not process.is_alive():
            break
        process.join(GRACE)
    process.join()
