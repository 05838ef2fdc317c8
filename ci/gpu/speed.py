"""MFU, step time and peak memory of one GPU: nearlinear beside plain FSDP2 and other libraries."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import statistics
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import nearlinear as nl
from nearlinear.config.train import TrainConfig
from nearlinear.fsdp.model_state import find_blocks
from nearlinear.train.model import flops_per_token, peak_tflops

from . import ranks
from .measure import (
    Recorder,
    Refused,
    free_memory,
    peak_gib,
    reset_peak,
    seconds_per_call,
    significant,
)
from .models import (
    LLAMA3_8B,
    TINY_GPT2,
    TINY_LLAMA,
    Step,
    build_model,
    leave,
    most_layers,
    random_batch,
    start,
    train_config,
    training_step,
    with_layers,
)

STEPS, ROUNDS = 8, 2  # timed steps per round; the systems take turns
SHARE = 0.85  # of the memory that the planner may use: other libraries need more
MAX_OVERHEAD = 0.01


@dataclass(frozen=True)
class Shape:
    """A model as deep as the GPU allows."""

    name: str
    preset: str
    overrides: dict[str, Any]
    sequence: int
    micro_batch: int
    tiny: tuple[str, dict[str, Any]]
    """Preset and overrides of the rehearsal."""

    def config(self, recorder: Recorder) -> TrainConfig:
        if recorder.rehearse:
            preset, overrides = self.tiny
            return train_config(preset, overrides, 32, 2, clip=0.0, lr=1e-3)

        def deep(layers: int) -> TrainConfig:
            overrides = with_layers(self.preset, self.overrides, layers)
            return train_config(
                self.preset, overrides, self.sequence, self.micro_batch, clip=0.0, lr=2e-5
            )

        return deep(most_layers(deep, recorder.device, SHARE))


SHAPES = (
    Shape("7168-wide GPT-2", "gpt2-30b", {"vocab_size": 50257}, 2048, 2,
          ("gpt2-tiny", TINY_GPT2)),
    Shape("Llama-3-8B blocks", "llama2-7b", {**LLAMA3_8B, "vocab_size": 128256}, 4096, 1,
          ("llama-tiny", TINY_LLAMA)),
)  # fmt: skip


def run(recorder: Recorder) -> None:
    """Measure nearlinear and FSDP2 in turn on each shape."""
    for shape in SHAPES:
        config = shape.config(recorder)
        found: dict[str, list[dict[str, Any]]] = {"nearlinear": [], "fsdp2": []}
        builders = {"nearlinear": nearlinear, "fsdp2": fsdp2}
        for number in range(1 if recorder.rehearse else ROUNDS):
            for system, builder in builders.items():
                with recorder.check(f"{shape.name}: {system}, round {number + 1}") as figures:
                    figures |= measure(config, builder, recorder.device, recorder.rehearse)
                    found[system].append(dict(figures))
        with recorder.check(f"{shape.name}: overhead over FSDP2") as figures:
            if not all(found.values()):
                raise Refused("one of the two has no result")
            seconds = {system: statistics.median(each["step_seconds"] for each in rounds)
                       for system, rounds in found.items()}  # fmt: skip
            figures["overhead"] = round(seconds["nearlinear"] / seconds["fsdp2"] - 1, 4)
            memory = {system: max(each["peak_gib"] for each in rounds)
                      for system, rounds in found.items()}  # fmt: skip
            figures["extra_gib"] = significant(memory["nearlinear"] - memory["fsdp2"])
            if not recorder.rehearse and figures["overhead"] > MAX_OVERHEAD:
                raise AssertionError(
                    f"a step takes {figures['overhead']:+.1%} compared with FSDP2; the target is "
                    f"{MAX_OVERHEAD:.0%}"
                )


def run_peers(recorder: Recorder) -> None:
    """Measure the carried libraries on each shape."""
    for shape in SHAPES:
        config = shape.config(recorder)
        for system, (module, _) in PEERS.items():
            with recorder.check(f"{shape.name}: {system}") as figures:
                # An installed DeepSpeed compiles for minutes on the CPU: rehearse if asked to.
                asked = recorder.carried is not None or not recorder.rehearse
                if not asked or importlib.util.find_spec(module.partition(".")[0]) is None:
                    raise Refused("not carried")
                backend = "gloo" if recorder.rehearse else "nccl"
                arguments = (system, config, recorder.rehearse)
                [found] = ranks.run(measure_peer, 1, *arguments, backend=backend, timeout=120.0)
                if isinstance(found, str):
                    raise Refused(found)
                figures |= found


def measure_peer(
    rank: int, system: str, config: TrainConfig, rehearse: bool
) -> dict[str, Any] | str:
    """Measure a library in a process of its own, since some keep global state.

    Returns its figures, or the reason for which it cannot run.
    """
    device = torch.device("cpu" if rehearse else "cuda")
    try:
        return measure(config, PEERS[system][1], device, rehearse)
    except Refused as error:
        return str(error)


def measure(
    config: TrainConfig,
    builder: Callable[[TrainConfig, torch.device], tuple[Any, Step]],
    device: torch.device,
    rehearse: bool,
) -> dict[str, Any]:
    """Build a system, time its steps, and return step time, MFU and peak memory."""
    try:
        flops, step = builder(config, device)
        first = float(step())
        step()
        free_memory()
        reset_peak(device)
        seconds = seconds_per_call(step, device, 2 if rehearse else STEPS, warm_up=1)
        last = float(step())
        if not last < first:
            raise AssertionError(f"the loss rose from {first:.3f} to {last:.3f}: it trains wrongly")
        tokens = config.batch.micro_batch_size * config.sequence_length
        tflops = flops * tokens / seconds / 1e12
        return {
            "layers": config.model.overrides.get("n_layer")
            or config.model.overrides.get("num_hidden_layers"),
            "tokens": tokens,
            "step_seconds": significant(seconds),
            "tokens_per_second": significant(tokens / seconds),
            "tflops": significant(tflops),
            "mfu": round(tflops / _peak(device), 4),
            "peak_gib": significant(peak_gib(device)),
        }
    finally:
        leave()
        free_memory()


def _peak(device: torch.device) -> float:
    return peak_tflops(device, "bf16") if device.type == "cuda" else 1.0


def nearlinear(config: TrainConfig, device: torch.device) -> tuple[float, Step]:
    """Build the model as `nearlinear train` does."""
    model, optimizer = start(config, device)
    flops = flops_per_token(model, config.sequence_length)
    return flops, training_step(config, model, optimizer, device)


def fsdp2(config: TrainConfig, device: torch.device) -> tuple[float, Step]:
    """Build the model with ``fully_shard`` on every block, as in PyTorch's documentation."""
    nl.init({})  # the process group
    torch.manual_seed(0)
    model = build_model(config.model, device)
    flops = flops_per_token(model, config.sequence_length)
    _fully_shard(model, find_blocks(model), device)
    return flops, _plain_step(config, model, _adamw(config, model), device)


def _fully_shard(model: Any, blocks: list[torch.nn.Module], device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def _adamw(config: TrainConfig, model: Any) -> torch.optim.Optimizer:
    """Return the optimizer that `nearlinear train` builds."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    settings = config.optimizer
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)


def _plain_step(
    config: TrainConfig, model: Any, optimizer: torch.optim.Optimizer, device: torch.device
) -> Step:
    batch = random_batch(config, device)

    def step() -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# --- other libraries --------------------------------------------------------------------------


def _peer(module: str) -> Any:
    """Import a library of the comparison. Raises Refused if that fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Refused(f"cannot be imported here: {error}") from error


def deepspeed_zero3(config: TrainConfig, device: torch.device) -> tuple[float, Step]:
    """Build the model with DeepSpeed ZeRO-3, with thresholds for one block at a time."""
    deepspeed = _peer("deepspeed")
    os.environ.setdefault("LOCAL_RANK", "0")  # deepspeed.initialize asserts it
    nl.init({})
    torch.manual_seed(0)
    model = build_model(config.model, device)
    flops = flops_per_token(model, config.sequence_length)
    block = sum(p.numel() for p in find_blocks(model)[0].parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)
    settings = {
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_prefetch_bucket_size": block,
            "stage3_max_live_parameters": 10**9,
            "reduce_bucket_size": block,
        },
    }
    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), verbose=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    batch = random_batch(config, device)

    def step() -> torch.Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return flops, step


def megatron_fsdp(config: TrainConfig, device: torch.device) -> tuple[float, Step]:
    """Build the model with Megatron-FSDP, ZeRO-3, one unit per block."""
    library = _peer("megatron_fsdp")
    if device.type != "cuda":
        raise Refused("Megatron-FSDP runs on CUDA only")
    nl.init({})
    torch.manual_seed(0)
    model = build_model(config.model, device)
    flops = flops_per_token(model, config.sequence_length)
    units = [type(find_blocks(model)[0])]
    optimizer = _adamw(config, model)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    arguments: dict[str, Any] = {"fsdp_unit_modules": units, "zero_dp_strategy": 3}
    if "mixed_precision_policy" in inspect.signature(library.fully_shard).parameters:
        arguments["mixed_precision_policy"] = library.MixedPrecisionPolicy(
            main_params_dtype=torch.float32, main_grads_dtype=torch.float32
        )
    model = model.to(torch.bfloat16)
    model, optimizer = library.fully_shard(
        model, optimizer, device_mesh=mesh, dp_shard_dim="dp", device=device, **arguments
    )
    return flops, _plain_step(config, model, optimizer, device)


def _stand_in_for_datasets() -> None:
    """Let torchtitan import its data loader, which this comparison does not use.

    The package datasets needs pandas and pyarrow, 60 MiB that are not carried.
    """
    try:
        importlib.import_module("datasets")
    except ImportError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "datasets"]:
            del sys.modules[name]
        package, distributed = (types.ModuleType(n) for n in ("datasets", "datasets.distributed"))
        package.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
        package.__dict__.update(Dataset=object, load_dataset=None, distributed=distributed)
        distributed.__dict__["split_dataset_by_node"] = None
        sys.modules |= {"datasets": package, "datasets.distributed": distributed}


def torchtitan_llama(config: TrainConfig, device: torch.device) -> tuple[float, Step]:
    """Build torchtitan's Llama with ``fully_shard`` on every block, as torchtitan does."""
    _stand_in_for_datasets()
    llama = _peer("torchtitan.models.llama3")
    overrides = config.model.overrides
    if "num_hidden_layers" not in overrides:
        raise Refused("torchtitan has no GPT-2")
    nl.init({})
    torch.manual_seed(0)
    width, hidden = overrides["hidden_size"], overrides["intermediate_size"]
    arguments = llama.TransformerModelArgs(
        dim=width,
        n_layers=overrides["num_hidden_layers"],
        n_heads=overrides["num_attention_heads"],
        n_kv_heads=overrides["num_key_value_heads"],
        vocab_size=overrides["vocab_size"],
        multiple_of=hidden,  # torchtitan rounds 8/3 of the width up to a multiple
        rope_theta=500000,
        max_seq_len=config.sequence_length,
    )
    with torch.device(device):
        model = llama.Transformer(arguments)
    with torch.no_grad():
        model.init_weights(buffer_device=device)
    mine = sum(p.numel() for p in model.parameters())
    reference = build_model(config.model, torch.device("meta"))
    expected = sum(p.numel() for p in reference.parameters())
    if mine != expected:
        raise Refused(f"torchtitan's model has {mine:,} parameters instead of {expected:,}")
    flops = flops_per_token(reference, config.sequence_length)
    _fully_shard(model, list(model.layers.values()), device)
    optimizer = _adamw(config, model)
    ids = random_batch(config, device)["input_ids"]

    def step() -> torch.Tensor:
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return flops, step


PEERS = {
    "DeepSpeed ZeRO-3": ("deepspeed", deepspeed_zero3),
    "Megatron-FSDP": ("megatron_fsdp", megatron_fsdp),
    "torchtitan": ("torchtitan.models.llama3", torchtitan_llama),
}
"""Module and builder of each library."""
