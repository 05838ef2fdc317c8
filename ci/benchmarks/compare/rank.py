"""Rank process of a `run.WorkerGroup`: build its systems and run steps on request.

    python -m ci.benchmarks.compare.rank CONFIG SYSTEM...

Rank 0 reads one JSON line per step from stdin, ``{"system": "ours", "step": 3, "mode": "timed"}``,
and answers with one line: seconds and processor time of the slowest rank, mean loss, and bytes sent
by the busiest NIC. The mode ``traced`` adds the timeline of rank 0, ``memory`` the peak of its
allocated tensors.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from time import perf_counter, process_time

import torch
import torch.distributed as dist

from .config import CompareConfig
from .memory import live_tensor_bytes, peak_growth
from .systems import SYSTEMS
from .trace import run_traced
from .training import ADAPTERS, make_batches

SENT = Path("/sys/class/net") / os.environ.get("GLOO_SOCKET_IFNAME", "eth0") / "statistics/tx_bytes"


def main(config_text: str, names: list[str]) -> None:
    config = CompareConfig.from_json(config_text)
    torch.set_num_threads(1)
    backend = SYSTEMS[names[0]].default_backend  # equal for all systems of a worker group
    if backend == "nearlinear":
        import nearlinear_collectives  # noqa: F401 (registers the backend)
    dist.init_process_group(backend)
    live = live_tensor_bytes if config.memory else lambda: 0
    adapters, held = {}, {}
    for name in names:
        system = SYSTEMS[name]
        before = live()
        adapters[name] = ADAPTERS[system.library](config, **system.options)
        held[name] = live() - before
        dist.barrier()
    answer({"ready": names})
    while (request := next_request()) is not None:
        name = request["system"]
        before = live()
        answer(run_step(adapters[name], config, request, held[name]))
        held[name] += live() - before
    dist.barrier()
    dist.destroy_process_group()


def next_request() -> dict | None:
    """Return the next request of rank 0 on every rank, or None at the end."""
    lines = [sys.stdin.readline() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(lines)
    return json.loads(lines[0]) if lines[0].strip() else None


def run_step(adapter, config: CompareConfig, request: dict, held: int) -> dict:
    """Run one optimizer step. Collective over all ranks.

    Args:
        adapter: The system.
        config: The comparison.
        request: System, step and mode.
        held: Bytes of the system's tensors between steps.
    """
    peak = 0
    batches = make_batches(config, request["step"], dist.get_rank())
    dist.barrier()
    sent, begin, busy, spans = sent_bytes(), perf_counter(), process_time(), {}
    if request["mode"] == "memory" and dist.get_rank() == 0:
        loss, growth = peak_growth(lambda: adapter.step(batches))
        peak = held + growth
    elif request["mode"] == "traced" and dist.get_rank() == 0:
        loss, spans = run_traced(adapter, batches)
    else:
        loss = adapter.step(batches)
    seconds, busy = perf_counter() - begin, process_time() - busy
    dist.barrier()
    sent = sent_bytes() - sent
    slowest = torch.tensor([seconds, sent, busy], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    mean = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(mean)
    release_memory()
    return {
        "system": request["system"],
        "step": request["step"],
        "seconds": slowest[0].item(),
        "sent_bytes": int(slowest[1].item()),
        "cpu_seconds": slowest[2].item(),
        **({"peak_bytes": peak} if peak else {}),
        "loss": mean.item() / dist.get_world_size(),
        **({"spans": spans} if spans else {}),
    }


def release_memory() -> None:
    """Return freed memory to the system, because many systems share one machine."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in glibc
    if trim is not None:
        trim(0)


def sent_bytes() -> int:
    """Return the bytes sent by this node's NIC, or 0 without a readable counter."""
    return int(SENT.read_text()) if SENT.exists() else 0


def answer(message: dict) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
