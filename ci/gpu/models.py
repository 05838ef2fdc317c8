"""Models and training steps of the measured stages, built on the device itself.

The trainer draws initial values on the CPU, so that they do not depend on the layout. For billions
of parameters that takes minutes; here the values come from the device's own generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

import nearlinear as nl
from nearlinear.activation.api import checkpoint_activations, offload_activations
from nearlinear.config.architecture import context_key, layers_key
from nearlinear.config.train import ModelConfig, TrainConfig, load
from nearlinear.distributed import runtime
from nearlinear.fsdp.model_state import find_blocks
from nearlinear.planner import memory
from nearlinear.train.optimizer import build_optimizer

from .measure import GIB, device_gib

Step = Callable[[], Any]
LLAMA3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
TINY_GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 101}
TINY_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "vocab_size": 101,
}


def build_model(config: ModelConfig, device: torch.device) -> Any:
    """Return the float32 model of ``config`` on ``device``, in training mode.

    ``config.overrides`` must contain the vocabulary size.
    """
    architecture = config.architecture
    arguments = {
        **architecture["shape"],
        context_key(architecture["family"]): config.longest_sequence,
        "use_cache": False,
        **config.overrides,
    }
    last = arguments["vocab_size"] - 1
    family: Any = transformers.CONFIG_MAPPING[architecture["family"]]
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            family(**arguments, bos_token_id=last, eos_token_id=last),
            attn_implementation="sdpa",
            dtype=torch.float32,
        )
    model.loss_type = "ForCausalLM"  # the default of transformers, set here to avoid its warning
    return model.train()


def random_batch(config: TrainConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Return one micro-batch of random tokens, (B, S), on ``device``."""
    size = (config.batch.micro_batch_size, config.sequence_length)
    generator = torch.Generator().manual_seed(0)
    words = config.model.overrides["vocab_size"]
    ids = torch.randint(words, size, generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def start(config: TrainConfig, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    """Join the job, and return the sharded model and the optimizer of ``config``."""
    nl.init(config.parallel)
    torch.manual_seed(0)
    model = nl.transform(build_model(config.model, device))
    blocks = find_blocks(model)
    if config.train.compile_blocks:
        model = nl.compile_blocks(model)
    model = nl.shard(model, blocks=blocks)
    if config.activations.checkpoint:
        checkpoint_activations(model, config.activations.checkpoint)
    if config.activations.offload:
        offload_activations(model)
    return model, build_optimizer(model, config.optimizer)


def training_step(
    config: TrainConfig, model: Any, optimizer: torch.optim.Optimizer, device: torch.device
) -> Step:
    """Return a function that runs one step as the trainer does."""
    batch = random_batch(config, device)
    batches = [batch] * config.batch.accumulation
    norm = config.optimizer.clip

    def step() -> torch.Tensor:
        loss = torch.zeros(())
        for micro_batch in nl.accumulate(model, batches):
            loss = model(**micro_batch).loss
            loss.backward()
        if norm:
            nl.clip_grad_norm_(model, norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def train_config(
    preset: str,
    overrides: dict[str, Any],
    sequence: int,
    micro_batch: int = 1,
    accumulation: int = 1,
    checkpoint: str = "",
    **parallel: Any,
) -> TrainConfig:
    """Return a config of one GPU; ``overrides`` must contain the vocabulary size."""
    optimizer = {key: parallel.pop(key) for key in ("kind", "implementation", "clip", "lr")
                 if key in parallel}  # fmt: skip
    return load(
        {
            "model": {"preset": preset, "overrides": overrides},
            "data": {"sequence_length": sequence},
            "parallel": {"bf16": True, **parallel},
            "batch": {"micro_batch_size": micro_batch, "accumulation": accumulation},
            "activations": {"checkpoint": checkpoint},
            "optimizer": optimizer,
        },
        environment={},
    )


def most_layers(make: Callable[[int], TrainConfig], device: torch.device, share: float) -> int:
    """Return the largest number of layers that the planner fits into ``share`` of the device."""
    layers, limit = 1, share * device_gib(device) * GIB
    while layers < 256 and memory.estimate(make(layers + 1), 1).total <= limit:
        layers += 1
    return layers


def with_layers(preset: str, overrides: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return ``overrides`` with the number of blocks of the preset's family set."""
    return {**overrides, layers_key(ModelConfig(preset=preset).family): layers}


def leave() -> None:
    """Leave the job, so that the next check starts one of its own."""
    runtime.shutdown()
