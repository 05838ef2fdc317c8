"""Cost of moving activations and optimizer states off the GPU, and of 8-bit states."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import torch

import nearlinear as nl
from ci.benchmarks import offload as benchmark
from nearlinear.config.train import TrainConfig
from nearlinear.distributed import runtime
from nearlinear.fsdp.model_state import local_tensor
from nearlinear.memory import storage_bytes

from . import ranks, trace
from .measure import (
    GIB,
    Recorder,
    Refused,
    free_memory,
    peak_gib,
    reset_peak,
    seconds_per_call,
    significant,
)
from .models import TINY_GPT2, leave, start, train_config, training_step

HORIZONS = (1, 2, 3, 4)
MAX_OFFLOAD_COST = 0.03


def run_activations(recorder: Recorder) -> None:
    """Time steps of 7168-wide blocks with kept and with offloaded activations."""
    shape = {"width": 7168, "heads": 64, "layers": 8, "sequence": 2048, "batch": 4, "steps": 8}
    words = 50257
    if recorder.rehearse:
        shape = {"width": 64, "heads": 4, "layers": 6, "sequence": 32, "batch": 2, "steps": 2}
        words = 101
    options = SimpleNamespace(**shape, vocabulary=words, horizon=1, strategy="each")
    kept = 0.0
    ways = [("kept", "kept", 1), *((f"horizon {n}", "offload", n) for n in HORIZONS)]
    for name, way, horizon in (*ways, ("save_on_cpu", "save_on_cpu", 1)):
        with recorder.check(name) as figures:
            options.horizon = horizon
            seconds, peak, host = benchmark.measure(way, options)
            runtime.shutdown()
            kept = seconds if way == "kept" else kept
            figures |= {
                "step_seconds": significant(seconds),
                "peak_gib": significant(peak),
                "host_gib": significant(host),
            }
            if not kept:
                raise Refused("the step without offloading failed")
            figures["cost"] = round(seconds / kept - 1, 4)
            late = way == "offload" and horizon >= 2 and figures["cost"] > MAX_OFFLOAD_COST
            if late and not recorder.rehearse:
                raise AssertionError(
                    f"a step takes {figures['cost']:+.1%}; the target is {MAX_OFFLOAD_COST:.0%}"
                )
    with recorder.check("picture of one step, horizon 2") as figures:
        figures |= picture(options, recorder)


def picture(options: SimpleNamespace, recorder: Recorder) -> dict[str, Any]:
    """Profile a step with offloaded activations and draw its kernels and copies."""
    device = recorder.device
    nl.init({})
    model: Any = benchmark.build_model(options, device)
    nl.checkpoint_activations(model, options.strategy)
    nl.offload_activations(model, 2)
    ids = torch.randint(0, model.config.vocab_size, (options.batch, options.sequence)).to(device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    for _ in range(2):
        step()
    folder, name = recorder.path.parent, recorder.path.stem
    found = trace.record(step, device, folder / f"{name}.trace.json.gz")
    trace.draw(found, folder / f"{name}.png", "Step with offloaded activations, horizon 2")
    leave()
    figures = {key: significant(value) for key, value in trace.overlap(found).items()}
    return figures | {"picture": f"{name}.png"}


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW, fused": {},
    "AdamW, foreach": {"implementation": "foreach"},
    "AdamW in host memory": {"offload_optimizer": True},
    "AdamW, 8 bit": {"kind": "adamw_8bit"},
}


def run_optimizers(recorder: Recorder) -> None:
    """Time the update and the whole step, and measure the states, of each optimizer."""
    for name, settings in OPTIMIZERS.items():
        with recorder.check(name) as figures:
            if "kind" in settings and importlib.util.find_spec("torchao") is None:
                raise Refused("torchao is neither installed nor carried")
            try:
                figures |= time_optimizer(optimizer_config(recorder.rehearse, settings), recorder)
            finally:
                leave()
    with recorder.check("AdamW, sliced over 2 replicas") as figures:
        [(replicated, sliced), *_] = ranks.run(state_bytes, 2, recorder.rehearse)
        figures |= {
            "states_of_a_rank_gib": significant(sliced / GIB),
            "replicated_gib": significant(replicated / GIB),
            "ratio": significant(sliced / replicated),
        }
        if not 0.45 < figures["ratio"] < 0.55:
            raise AssertionError("a rank of two should hold half of the states")


def optimizer_config(rehearse: bool, settings: dict[str, Any]) -> TrainConfig:
    if rehearse:
        return train_config("gpt2-tiny", TINY_GPT2, 32, 2, **settings)
    return train_config("gpt2-xl", {"vocab_size": 50257}, 1024, 4, checkpoint="each", **settings)


def time_optimizer(config: TrainConfig, recorder: Recorder) -> dict[str, Any]:
    """Return the time of a step, its update alone, the peak and the size of the states."""
    device, repeat = recorder.device, 2 if recorder.rehearse else 6
    model, optimizer = start(config, device)
    step = training_step(config, model, optimizer, device)
    step()
    free_memory()
    reset_peak(device)
    seconds = seconds_per_call(step, device, repeat, warm_up=1)
    peak = peak_gib(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    update = seconds_per_call(optimizer.step, device, repeat, warm_up=1)
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [value for value in states if isinstance(value, torch.Tensor)]
    here = [t for t in tensors if t.device.type == device.type]
    return {
        "step_seconds": significant(seconds),
        "update_seconds": significant(update),
        "peak_gib": significant(peak),
        "states_on_device_gib": significant(_state_bytes(here) / GIB),
        "states_in_host_memory_gib": significant(
            _state_bytes([t for t in tensors if t.device.type == "cpu"]) / GIB
        ),
    }


def _state_bytes(tensors: list[torch.Tensor]) -> int:
    """Return the bytes of optimizer states, also of those that are made of several tensors."""
    total = 0
    for tensor in map(local_tensor, tensors):
        inner = getattr(tensor, "__tensor_flatten__", None)
        parts = [getattr(tensor, name) for name in inner()[0]] if inner else [tensor]
        total += storage_bytes(parts)
    return total


def state_bytes(rank: int, rehearse: bool) -> list[int]:
    """Return the bytes of this rank's states as one of two replicas, replicated and sliced."""
    found = []
    device = torch.device("cpu" if rehearse else "cuda")
    for sliced in (False, True):
        settings = {"hybrid_shard_degree": 1, "shard_optimizer_state": sliced}
        config = optimizer_config(True, settings)
        if not rehearse:
            config = train_config("gpt2-small", {"vocab_size": 50257}, 1024, 1, **settings)
        model, optimizer = start(config, device)
        step = training_step(config, model, optimizer, device)
        for _ in range(2):
            step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        found.append(_state_bytes([v for v in states if isinstance(v, torch.Tensor)]))
    return found
