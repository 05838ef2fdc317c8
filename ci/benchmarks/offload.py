"""Time and memory of activation offloading: ``python -m ci.benchmarks.offload``.

Runs forward and backward passes of GPT-2 blocks with activation checkpointing, whose block inputs
are kept on the device, offloaded with a loading horizon, or offloaded by PyTorch's ``save_on_cpu``.
The default shape is that of the published 30-billion-parameter runs: width 7168, 64 heads, 2048
tokens, bfloat16.
"""

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

METHODS = ("kept", "offload", "save_on_cpu")
WARM_UP = 2  # untimed steps


@dataclass(frozen=True)
class Result:
    """Result of one method."""

    way: str
    """Method, one of `METHODS`."""
    step_seconds: float
    """Median of forward and backward passes."""
    ratio: float
    """Step time relative to the first method."""
    peak_gib: float
    """Peak device memory; 0 on the CPU."""
    host_gib: float
    """Peak host memory of offloaded activations."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.benchmarks.offload")
    for name, default in (("width", 7168), ("heads", 64), ("layers", 12), ("sequence", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument(
        "--vocabulary", type=int, default=50257, help="token ids (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default: %(default)s)")
    parser.add_argument(
        "--horizon", type=int, default=2, help="blocks loaded ahead (default: %(default)s)"
    )
    parser.add_argument(
        "--strategy",
        default="each",
        help="activation checkpointing strategy, or 'none' (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON per way")
    options = parser.parse_args(argv)
    found: list[Result] = []
    for way in METHODS:
        seconds, peak, host = measure(way, options)
        ratio = seconds / found[0].step_seconds if found else 1.0
        found.append(Result(way, seconds, ratio, peak, host))
        print(
            json.dumps(asdict(found[-1])) if options.json else format_result(found[-1]), flush=True
        )
    return 0


def format_result(result: Result) -> str:
    return (
        f"{result.way:12} {result.step_seconds * 1e3:9.1f} ms a step  {result.ratio:6.3f} x  "
        f"device {result.peak_gib:6.2f} GiB  host {result.host_gib:6.2f} GiB"
    )


def measure(way: str, options) -> tuple[float, float, float]:
    """Return the median seconds of a step, and the peak GiB of device and host memory."""
    nl.init({"sm_activation_offloading": way != "save_on_cpu"})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(options, device)
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
    host = nl.activation_offload_stats(model).host_nbytes if way == "offload" else 0
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return statistics.median(times), peak / 2**30, host / 2**30


def build_model(options, device: torch.device) -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=options.vocabulary,
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
