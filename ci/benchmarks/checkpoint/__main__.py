"""The command line: ways to save and to load, round by round."""

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
from nearlinear.checkpoint.saving import Saving
from nearlinear.parallel.layout import local

STALL, COPY_BESIDE, SAVE, DCP_SAVE, LOAD, DCP_LOAD = (
    "asynchronous save, until training goes on", "the same, copied beside a pass",
    "save", "save by DCP", "load", "load by DCP",
)  # fmt: skip
PASS, SLOWED = "a forward and backward pass", "a pass beside which is copied and written"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.benchmarks.checkpoint")
    for name, default in (("ranks", 2), ("width", 768), ("layers", 6), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--folder", help="where files are written and removed (default: in /tmp)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(argv)
    folder = tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder)
    try:
        arguments = (folder, options.width, options.layers, options.rounds)
        found = nl.spmd.run(measure, options.ranks, args=arguments, processes=True, timeout=3600)
    finally:
        shutil.rmtree(folder)
    seconds = {
        way: statistics.median(map(max, zip(*(of_rank[way] for of_rank in found), strict=True)))
        for way in found[0]
        if way != "bytes"
    }
    ratios = {
        "stall / save": seconds[STALL] / seconds[SAVE],
        "stall / save, copied beside a pass": seconds[COPY_BESIDE] / seconds[SAVE],
        "what such a pass takes longer / save": (seconds[SLOWED] - seconds[PASS]) / seconds[SAVE],
        "DCP's save / save": seconds[DCP_SAVE] / seconds[SAVE],
        "DCP's load / load": seconds[DCP_LOAD] / seconds[LOAD],
    }
    size = sum(of_rank["bytes"] for of_rank in found)
    if options.json:
        print(json.dumps({"bytes": size, "seconds": seconds, "ratios": ratios}))
        return 0
    print(f"{size / 1e6:.0f} MB of weights and AdamW states, {options.ranks} ranks")
    for way, median in seconds.items():
        speed = "" if way in (PASS, SLOWED) else f"{size / median / 1e6:9.0f} MB/s"
        print(f"  {way:44}{median:8.3f} s{speed}")
    for what, ratio in ratios.items():
        print(f"  {what:44}{ratio:8.2f}")
    return 0


def measure(rank: int, folder: str, width: int, layers: int, rounds: int) -> dict:
    """Seconds of each way in each round on this rank, and the bytes of its state."""
    nl.init({"hybrid_shard_degree": dist.get_world_size()})
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=width // 64, n_positions=128)
    model = nl.shard(AutoModelForCausalLM.from_config(config))
    optimizer = torch.optim.AdamW(model.parameters())
    forward_and_backward(model)
    optimizer.step()
    optimizer.zero_grad()
    saved = {name: tensor.clone() for name, tensor in state_of(model, optimizer).items()}
    times: dict = {way: [] for way in [*WAYS, PASS, SLOWED]}
    for number in range(rounds + 1):  # the first is a warm-up: memory is touched for once
        place, found = Path(folder, str(number)), {}
        found[PASS] = seconds_of(forward_and_backward, model)
        for way, run in WAYS.items():
            if way in (LOAD, DCP_LOAD):
                for tensor in state_of(model, optimizer).values():
                    tensor.zero_()
            dist.barrier()
            begin = time.perf_counter()
            under_way = run(place, model, optimizer)
            found[way] = time.perf_counter() - begin
            if way == COPY_BESIDE:
                found[SLOWED] = seconds_of(forward_and_backward, model)
                optimizer.zero_grad()
                found[way] += seconds_of(optimizer.step)  # without gradients it only waits
            if under_way is not None:
                under_way.wait()
            there = state_of(model, optimizer)
            assert all(there[name].equal(tensor) for name, tensor in saved.items()), way
            dist.barrier()
        for what, seconds in found.items():
            times[what] += [seconds] if number else []
        if rank == 0:
            shutil.rmtree(place)
    return times | {"bytes": sum(tensor.nbytes for tensor in saved.values())}


def forward_and_backward(model) -> None:
    ids = torch.arange(32)[None]
    model(input_ids=ids, labels=ids).loss.backward()


def seconds_of(work: Callable, *args) -> float:
    begin = time.perf_counter()
    work(*args)
    return time.perf_counter() - begin


def state_of(model, optimizer) -> dict[str, torch.Tensor]:
    """What this rank has of the weights and the optimizer's states."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = local(parameter.data)
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = local(value)
    return found


def begin_to_save(folder: Path, model, optimizer) -> Saving:
    return nl.save(folder / "asynchronous", model, optimizer)


def begin_to_save_beside(folder: Path, model, optimizer) -> Saving:
    return nl.save(folder / "beside", model, optimizer, overlap=True)


def save(folder: Path, model, optimizer) -> None:
    nl.save(folder / "ours", model, optimizer, wait=True)


def load(folder: Path, model, optimizer) -> None:
    nl.load(folder / "ours", model, optimizer)


def states_for_dcp(model, optimizer) -> dict:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def dcp_save(folder: Path, model, optimizer) -> None:
    dcp.save(states_for_dcp(model, optimizer), checkpoint_id=folder / "dcp")


def dcp_load(folder: Path, model, optimizer) -> None:
    states = states_for_dcp(model, optimizer)
    dcp.load(states, checkpoint_id=folder / "dcp")
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )


WAYS = {
    STALL: begin_to_save,
    COPY_BESIDE: begin_to_save_beside,
    SAVE: save,
    DCP_SAVE: dcp_save,
    LOAD: load,
    DCP_LOAD: dcp_load,
}

if __name__ == "__main__":
    sys.exit(main())
