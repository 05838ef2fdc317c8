"""Save and load checkpoints with nearlinear and PyTorch's Distributed Checkpoint (DCP).

    python -m ci.benchmarks.checkpoint                 # 2 ranks on this machine, about 700 MB
    python -m ci.benchmarks.checkpoint --ranks 4 --width 1024 --folder /fsx/tmp

All methods run in turn within a round, on the same state. The output is the median of the rounds
and ratios. Every loaded state is compared with the saved one element by element.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM, GPT2Config

import nearlinear as nl
from nearlinear.checkpoint.async_writer import PendingSave
from nearlinear.fsdp.model_state import local_tensor

STALL, OVERLAPPED_STALL, SAVE, DCP_SAVE, LOAD, DCP_LOAD = (
    "stall of an asynchronous save", "stall with overlapped staging copies",
    "save", "save by DCP", "load", "load by DCP",
)  # fmt: skip
STEPS, STEPS_AROUND_SAVE = "3 training steps", "3 training steps around an overlapped save"
PASS, OVERLAPPED_PASS = "forward and backward pass", "pass overlapped with copies and writes"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.benchmarks.checkpoint")
    for name, default in (("ranks", 2), ("width", 768), ("layers", 6), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--folder", help="folder for temporary files (default: in /tmp)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(argv)
    folder = tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder)
    try:
        arguments = (folder, options.width, options.layers, options.rounds)
        results = nl.spmd.run(measure, options.ranks, args=arguments, processes=True, timeout=3600)
    finally:
        shutil.rmtree(folder)
    seconds = {
        method: statistics.median(
            map(max, zip(*(of_rank[method] for of_rank in results), strict=True))
        )
        for method in results[0]
        if method != "bytes"
    }
    ratios = {
        "stall / save": seconds[STALL] / seconds[SAVE],
        "stall with overlap / save": seconds[OVERLAPPED_STALL] / seconds[SAVE],
        "slowdown of the overlapped pass / save": (seconds[OVERLAPPED_PASS] - seconds[PASS])
        / seconds[SAVE],
        "stall with overlap / DCP's save": seconds[OVERLAPPED_STALL] / seconds[DCP_SAVE],
        "slowdown of 3 steps / DCP's save": (seconds[STEPS_AROUND_SAVE] - seconds[STEPS])
        / seconds[DCP_SAVE],
        "DCP's save / save": seconds[DCP_SAVE] / seconds[SAVE],
        "DCP's load / load": seconds[DCP_LOAD] / seconds[LOAD],
    }
    size = sum(of_rank["bytes"] for of_rank in results)
    if options.json:
        print(json.dumps({"bytes": size, "seconds": seconds, "ratios": ratios}))
        return 0
    print(f"{size / 1e6:.0f} MB of weights and AdamW states, {options.ranks} ranks")
    for method, median in seconds.items():
        speed = "" if method in NO_SPEED else f"{size / median / 1e6:9.0f} MB/s"
        print(f"  {method:44}{median:8.3f} s{speed}")
    for label, ratio in ratios.items():
        print(f"  {label:44}{ratio:8.2f}")
    return 0


def measure(rank: int, folder: str, width: int, layers: int, rounds: int) -> dict:
    """Return the seconds of each method in each round, and the bytes of this rank's state."""
    nl.init({"hybrid_shard_degree": dist.get_world_size()})
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64, n_positions=128)
    model = nl.shard(AutoModelForCausalLM.from_config(config))
    optimizer = torch.optim.AdamW(model.parameters())
    forward_and_backward(model)
    optimizer.step()
    optimizer.zero_grad()
    saved = {name: tensor.clone() for name, tensor in local_state(model, optimizer).items()}
    times: dict = {method: [] for method in [*METHODS, *NO_SPEED]}
    for number in range(rounds + 1):  # round 0 is a warm-up, in which memory is first touched
        target, found = Path(folder, str(number)), {}
        found[PASS] = seconds_of(forward_and_backward, model)
        for method, run in METHODS.items():
            if method in (LOAD, DCP_LOAD):
                for tensor in local_state(model, optimizer).values():
                    tensor.zero_()
            dist.barrier()
            begin = time.perf_counter()
            pending = run(target, model, optimizer)
            found[method] = time.perf_counter() - begin
            if method == OVERLAPPED_STALL:
                found[OVERLAPPED_PASS] = seconds_of(forward_and_backward, model)
                optimizer.zero_grad()
                found[method] += seconds_of(
                    optimizer.step
                )  # without gradients, only waits for copies
            if pending is not None:
                pending.wait()
            current = local_state(model, optimizer)
            assert all(current[name].equal(tensor) for name, tensor in saved.items()), method
            dist.barrier()
        found |= measure_steps(target, model, optimizer)
        with torch.no_grad():
            for name, tensor in local_state(model, optimizer).items():
                tensor.copy_(saved[name])
        for label, seconds in found.items():
            times[label] += [seconds] if number else []
        if rank == 0:
            shutil.rmtree(target)
    return times | {"bytes": sum(tensor.nbytes for tensor in saved.values())}


def measure_steps(target: Path, model, optimizer) -> dict[str, float]:
    """Return the seconds of 3 training steps alone, and with a save before the first of them.

    Which of the two runs first alternates with the rounds.
    """
    found = {}
    labels = [STEPS, STEPS_AROUND_SAVE]
    for label in labels if int(target.name) % 2 else reversed(labels):
        dist.barrier()
        begin = time.perf_counter()
        pending = None
        if label == STEPS_AROUND_SAVE:
            pending = nl.save(target / "steps", model, optimizer, overlap=True)
        for _ in range(3):
            forward_and_backward(model)
            optimizer.step()
            optimizer.zero_grad()
        found[label] = time.perf_counter() - begin
        if pending is not None:
            pending.wait()
    return found


def forward_and_backward(model) -> None:
    ids = torch.arange(32)[None]
    model(input_ids=ids, labels=ids).loss.backward()


def seconds_of(work: Callable, *args) -> float:
    begin = time.perf_counter()
    work(*args)
    return time.perf_counter() - begin


def local_state(model, optimizer) -> dict[str, torch.Tensor]:
    """Return this rank's shards of the weights and the optimizer state."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = local_tensor(parameter.data)
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = local_tensor(value)
    return found


def save_async(folder: Path, model, optimizer) -> PendingSave:
    return nl.save(folder / "asynchronous", model, optimizer)


def save_overlapped(folder: Path, model, optimizer) -> PendingSave:
    return nl.save(folder / "overlapped", model, optimizer, overlap=True)


def save(folder: Path, model, optimizer) -> None:
    nl.save(folder / "nearlinear", model, optimizer, wait=True)


def load(folder: Path, model, optimizer) -> None:
    nl.load(folder / "nearlinear", model, optimizer)


def dcp_state(model, optimizer) -> dict:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def dcp_save(folder: Path, model, optimizer) -> None:
    dcp.save(dcp_state(model, optimizer), checkpoint_id=folder / "dcp")


def dcp_load(folder: Path, model, optimizer) -> None:
    states = dcp_state(model, optimizer)
    dcp.load(states, checkpoint_id=folder / "dcp")
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )


METHODS = {
    STALL: save_async,
    OVERLAPPED_STALL: save_overlapped,
    SAVE: save,
    DCP_SAVE: dcp_save,
    LOAD: load,
    DCP_LOAD: dcp_load,
}
NO_SPEED = (PASS, OVERLAPPED_PASS, STEPS, STEPS_AROUND_SAVE)
"""Durations of training, without a speed in bytes per second."""

if __name__ == "__main__":
    sys.exit(main())
