"""Peak memory of 30 configurations of one GPU: the planner beside the allocator."""

from __future__ import annotations

from typing import Any

import torch

import nearlinear as nl
from nearlinear.config.train import TrainConfig
from nearlinear.planner import memory
from nearlinear.planner.memory import MemoryEstimate

from .measure import (
    GIB,
    Recorder,
    Refused,
    device_gib,
    free_memory,
    peak_gib,
    reset_peak,
    significant,
)
from .models import LLAMA3_8B, TINY_GPT2, TINY_LLAMA, leave, start, train_config, training_step

BOUND = 0.05
SHARE = 0.92  # of the device's memory that a configuration may be planned for
WORDS = {"vocab_size": 50257}
LLAMA_WORDS = {"vocab_size": 32000}
GPT2_30B = {"n_layer": 4, **WORDS}
LLAMA_7B = {"num_hidden_layers": 8, **LLAMA_WORDS}
LLAMA_8B = {**LLAMA3_8B, "num_hidden_layers": 6, "vocab_size": 128256}
LLAMA_13B = {"num_hidden_layers": 5, **LLAMA_WORDS}
MISTRAL = {"num_hidden_layers": 8, **LLAMA_WORDS}
NEOX = {"num_hidden_layers": 4, "vocab_size": 50432}
MIXTRAL = {"num_hidden_layers": 1, **LLAMA_WORDS}

CASES: dict[str, TrainConfig] = {
    "gpt2 124M, batch 8": train_config("gpt2-small", WORDS, 1024, 8),
    "gpt2 124M, batch 32, each": train_config("gpt2-small", WORDS, 1024, 32, checkpoint="each"),
    "gpt2 124M, batch 16, selective": train_config(
        "gpt2-small", WORDS, 1024, 16, checkpoint="selective"),
    "gpt2 124M, float32": train_config("gpt2-small", WORDS, 1024, 4, bf16=False),
    "gpt2 124M, fp16": train_config("gpt2-small", WORDS, 1024, 8, bf16=False, fp16=True,
                                      init_scale=65536.0),
    "gpt2 124M, 4 micro-batches": train_config("gpt2-small", WORDS, 1024, 8, 4),
    "gpt2 1.5B, batch 1": train_config("gpt2-xl", WORDS, 1024, 1),
    "gpt2 1.5B, batch 4, each": train_config("gpt2-xl", WORDS, 1024, 4, checkpoint="each"),
    "gpt2 1.5B, batch 8, groups of 4": train_config(
        "gpt2-xl", WORDS, 1024, 8, checkpoint="group_4"),
    "gpt2 1.5B, least gathered": train_config(
        "gpt2-xl", WORDS, 1024, 2, checkpoint="each", sdp_max_live_parameters=0),
    "gpt2 1.5B, offloaded optimizer": train_config(
        "gpt2-xl", WORDS, 1024, 4, checkpoint="each", offload_optimizer=True),
    "gpt2 1.5B, foreach": train_config(
        "gpt2-xl", WORDS, 1024, 2, checkpoint="each", implementation="foreach"),
    "7168 wide, 4 layers, batch 1": train_config("gpt2-30b", GPT2_30B, 2048, 1),
    "7168 wide, 4 layers, batch 4, each": train_config(
        "gpt2-30b", GPT2_30B, 2048, 4, checkpoint="each"),
    "7168 wide, 3 layers, batch 2, selective": train_config(
        "gpt2-30b", {**GPT2_30B, "n_layer": 3}, 2048, 2, checkpoint="selective"),
    "7168 wide, 2 layers, 2 micro-batches": train_config(
        "gpt2-30b", {**GPT2_30B, "n_layer": 2}, 2048, 2, 2),
    "llama 7B, 8 layers, batch 1": train_config("llama2-7b", LLAMA_7B, 4096, 1),
    "llama 7B, 8 layers, batch 4, each": train_config(
        "llama2-7b", LLAMA_7B, 4096, 4, checkpoint="each"),
    "llama 7B, 8 layers, selective": train_config(
        "llama2-7b", LLAMA_7B, 2048, 2, checkpoint="selective"),
    "llama 7B, 4 layers, float32": train_config(
        "llama2-7b", {**LLAMA_7B, "num_hidden_layers": 4}, 2048, 1, bf16=False),
    "llama 7B, 8 layers, nothing ahead": train_config(
        "llama2-7b", LLAMA_7B, 2048, 1, checkpoint="each", prefetch_depth=0,
        sdp_max_live_parameters=0),
    "llama 3 8B, 6 layers, batch 1": train_config("llama2-7b", LLAMA_8B, 4096, 1),
    "llama 3 8B, 6 layers, batch 2, each": train_config(
        "llama2-7b", LLAMA_8B, 8192, 1, checkpoint="each"),
    "llama 13B, 5 layers, batch 1": train_config("llama2-13b", LLAMA_13B, 4096, 1),
    "llama 13B, 5 layers, batch 2, each": train_config(
        "llama2-13b", LLAMA_13B, 4096, 2, 2, checkpoint="each"),
    "mistral 7B, 8 layers, each": train_config("mistral-7b", MISTRAL, 8192, 1, checkpoint="each"),
    "gpt-neox 20B, 4 layers": train_config("gpt-neox-20b", NEOX, 2048, 1),
    "gpt-neox 20B, 4 layers, each": train_config("gpt-neox-20b", NEOX, 2048, 4, checkpoint="each"),
    "mixtral, 1 layer": train_config("mixtral-8x7b", MIXTRAL, 4096, 1),
    "mixtral, 1 layer, each": train_config("mixtral-8x7b", MIXTRAL, 4096, 1, checkpoint="each"),
}  # fmt: skip
TINY_CASES = {
    "tiny gpt2": train_config("gpt2-tiny", TINY_GPT2, 32, 2, 2),
    "tiny llama, each": train_config("llama-tiny", TINY_LLAMA, 32, 2, checkpoint="each"),
}
PARTS = {
    "parameters": ("parameters",),
    "optimizer": ("optimizer",),
    "gradients": ("gradients",),
    "gathered": ("gathered",),
    "activations": ("kept",),
    "logits": ("logits",),
    "communication": ("communication",),
    "other": ("working", "update", "handed"),
}
"""Parts of `nl.memory_report` and the planner's categories of the same tensors."""


def run(recorder: Recorder) -> None:
    limit = SHARE * device_gib(recorder.device)
    planned: dict[str, MemoryEstimate] = {}
    with recorder.check("plans of all configurations") as figures:
        planned |= {name: memory.estimate(config, 1) for name, config in CASES.items()}
        figures |= {
            "configurations": len(planned),
            "smallest_gib": significant(min(plan.total for plan in planned.values()) / GIB),
            "largest_gib": significant(max(plan.total for plan in planned.values()) / GIB),
        }
    cases = CASES
    if recorder.rehearse:
        cases = TINY_CASES
        planned = {name: memory.estimate(config, 1) for name, config in cases.items()}
    for name, plan in planned.items():
        with recorder.check(name) as figures:
            figures["planned_gib"] = significant(plan.peak / GIB)
            if plan.total / GIB > limit:
                raise Refused(f"planned for {plan.total / GIB:.1f} GiB, more than {limit:.1f}")
            try:
                compare(cases[name], plan, recorder, figures)
            finally:
                leave()


def compare(
    config: TrainConfig, plan: MemoryEstimate, recorder: Recorder, figures: dict[str, Any]
) -> None:
    """Run two steps and measure the peak of the second; a third one is measured by category."""
    device = recorder.device
    model, optimizer = start(config, device)
    step = training_step(config, model, optimizer, device)
    step()
    free_memory()
    reset_peak(device)
    step()
    measured = peak_gib(device)
    with nl.memory_report(model, optimizer) as report:
        step()
    assert report.report is not None
    parts = {name: size / GIB for name, size in report.report.mine.items()}
    if device.type == "cpu":  # no allocator counts there
        measured = report.report.total / GIB
    error = plan.peak / GIB / measured - 1
    differences = {
        part: significant(sum(plan.parts.get(each, 0) for each in categories) / GIB
                          - parts.get(part, 0.0))
        for part, categories in PARTS.items()
    }  # fmt: skip
    largest = max(differences, key=lambda part: abs(differences[part]))
    figures |= {
        "measured_gib": significant(measured),
        "error": round(error, 4),
        "largest_difference": f"{largest} {differences[largest]:+.3g} GiB",
        "rough": plan.rough,
        "planned_minus_measured_gib": differences,
    }
    if device.type == "cuda":
        figures["reserved_gib"] = significant(torch.cuda.max_memory_reserved(device) / GIB)
        if abs(error) > BOUND:
            raise AssertionError(
                f"the plan is {error:+.1%} off; the largest difference is {largest}, "
                f"{differences[largest]:+.2f} GiB"
            )
