"""Stall of a save of 10 GB of weights and AdamW states, by nearlinear and by PyTorch's DCP."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import nearlinear as nl
from ci.benchmarks import checkpoint as benchmark

from .measure import GIB, Recorder, Refused, significant, synchronize
from .models import TINY_GPT2, leave, start, train_config, training_step

Save = Callable[[Path, Any, torch.optim.Optimizer], Any]
ROUNDS = 2


def run(recorder: Recorder) -> None:
    config = train_config(
        "gpt2-30b", {"n_embd": 2048, "n_head": 16, "n_layer": 14, "vocab_size": 50257}, 1024, 1
    )
    if recorder.rehearse:
        config = train_config("gpt2-tiny", TINY_GPT2, 32, 1)
    device = recorder.device
    with recorder.check("state") as figures:
        model, optimizer = start(config, device)
        step = training_step(config, model, optimizer, device)
        step()
        saved = {k: v.clone() for k, v in benchmark.local_state(model, optimizer).items()}
        size = sum(tensor.nbytes for tensor in saved.values())
        root = _folder(3 * size)
        figures |= {"gigabytes": significant(size / 1e9), "folder": str(root)}
    if recorder.checks[-1].status != "passed":
        return
    saves: dict[str, Save] = {
        "nearlinear, asynchronous": benchmark.save_async,
        "nearlinear, overlapped copies": benchmark.save_overlapped,
        "nearlinear, waiting": benchmark.save,
        "DCP, asynchronous": dcp_async_save,
        "DCP, waiting": benchmark.dcp_save,
    }
    try:
        for name, save in saves.items():
            with recorder.check(name) as figures:
                figures |= time_saves(save, root, model, optimizer, step, device, recorder.rehearse)
                current = benchmark.local_state(model, optimizer)
                changed = [key for key, value in saved.items() if not current[key].equal(value)]
                if changed:
                    raise AssertionError(f"saving changed {changed[0]}")
        with recorder.check("load what nearlinear saved") as figures:
            nl.save(root / "again", model, optimizer, wait=True)
            for tensor in benchmark.local_state(model, optimizer).values():
                tensor.zero_()
            begin = time.perf_counter()
            nl.load(root / "again", model, optimizer)
            synchronize(device)
            figures["seconds"] = significant(time.perf_counter() - begin)
            current = benchmark.local_state(model, optimizer)
            for key, value in saved.items():
                if not current[key].equal(value):
                    raise AssertionError(f"{key} differs after loading")
    finally:
        shutil.rmtree(root, ignore_errors=True)
        leave()


def _folder(needed: int) -> Path:
    """Return a new folder in memory, or on the disk, with ``needed`` bytes free.

    Raises Refused if there is none.
    """
    for parent in ("/dev/shm", tempfile.gettempdir()):
        if Path(parent).is_dir() and shutil.disk_usage(parent).free > needed:
            return Path(tempfile.mkdtemp(prefix="checkpoints-", dir=parent))
    raise Refused(f"neither /dev/shm nor the folder of temporary files has {needed / GIB:.0f} GiB")


def dcp_async_save(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Start DCP's asynchronous save, which plans its collectives on a group for host memory."""
    state = benchmark.dcp_state(model, optimizer)
    group = dist.new_group(backend="gloo")
    return dcp.async_save(state, checkpoint_id=folder / "dcp-async", process_group=group)  # pyright: ignore[reportArgumentType] a new group, this rank is a member


def time_saves(
    save: Save,
    root: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    step: Callable[[], Any],
    device: torch.device,
    rehearse: bool,
) -> dict[str, Any]:
    """Save several times; round 0 touches the memory first and is not counted.

    The stall is the time until the caller may continue, plus the wait of the next update for
    copies that overlap with its forward and backward pass.
    """
    stalls, totals = [], []
    for number in range(2 if rehearse else ROUNDS + 1):
        folder = root / str(number)
        folder.mkdir()
        synchronize(device)
        begin = time.perf_counter()
        pending = save(folder, model, optimizer)
        stall = time.perf_counter() - begin
        waited = time.perf_counter()
        optimizer.step()  # without gradients it changes nothing, and waits for staging copies
        synchronize(device)
        stall += time.perf_counter() - waited
        if hasattr(pending, "wait"):
            pending.wait()
        elif hasattr(pending, "result"):
            pending.result()
        if number:
            stalls.append(stall)
            totals.append(time.perf_counter() - begin)
        shutil.rmtree(folder)
    return {
        "stall_seconds": significant(statistics.median(stalls)),
        "total_seconds": significant(statistics.median(totals)),
    }
