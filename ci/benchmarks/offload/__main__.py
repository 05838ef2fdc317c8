"""The command line: one way after the other, medians of their steps and ratios to the first."""

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch
from transformers import AutoModelForCausalLM, GPT2Config

import nearlinear as nl

WAYS = ("kept", "offload", "save_on_cpu")
WARM_UP = 2  # steps that are not timed


@dataclass(frozen=True)
class Measured:
    """Of one way."""

    way: str
    step_seconds: float
    """median of forward and backward passes"""
    ratio: float
    """to the first way's"""
    peak_gib: float
    """memory of the device at most; 0 on the CPU"""
    host_gib: float
    """host memory that offload took"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.benchmarks.offload")
    for name, default in (("width", 7168), ("heads", 64), ("layers", 12), ("sequence", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed (default: %(default)s)")
    parser.add_argument("--horizon", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--strategy", default="each", help="of recomputation; 'none' for nothing")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per way")
    options = parser.parse_args(argv)
    found: list[Measured] = []
    for way in WAYS:
        seconds, peak, host = measure(way, options)
        ratio = seconds / found[0].step_seconds if found else 1.0
        found.append(Measured(way, seconds, ratio, peak, host))
        print(json.dumps(asdict(found[-1])) if options.json else line(found[-1]), flush=True)
    return 0


def line(of: Measured) -> str:
    return (
        f"{of.way:12} {of.step_seconds * 1e3:9.1f} ms a step  {of.ratio:6.3f} x  "
        f"device {of.peak_gib:6.2f} GiB  host {of.host_gib:6.2f} GiB"
    )


def measure(way: str, options) -> tuple[float, float, float]:
    """Seconds of a step, the median; GiB of device and of host memory at most."""
    nl.init({"sm_activation_offloading": way != "save_on_cpu"})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(options, device)
    if options.strategy != "none":
        nl.checkpoint_activations(model, options.strategy)
    if way != "kept":
        nl.offload_activations(model, options.horizon)
    ids = torch.randint(0, model.config.vocab_size, (options.batch, options.sequence))
    ids = ids.to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for step in range(WARM_UP + options.steps):
        begin = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if step >= WARM_UP:
            times.append(time.perf_counter() - begin)
        model.zero_grad()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    host = nl.offload_peak(model).host_nbytes if way == "offload" else 0
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return statistics.median(times), peak / 2**30, host / 2**30


def build(options, device: torch.device) -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=50257,
        n_positions=options.sequence,
        n_embd=options.width,
        n_head=options.heads,
        n_layer=options.layers,
        use_cache=False,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.train()


if __name__ == "__main__":
    sys.exit(main())
