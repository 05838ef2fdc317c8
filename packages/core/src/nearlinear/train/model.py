"""Build a Hugging Face model on the meta device, and apply the parallelism of a config to it.

`nearlinear.shard` initializes the parameters of the model, or `nearlinear.import_hf` loads them.

Model FLOPS follow PaLM (Chowdhery et al. 2022, appendix B): 6 per matrix parameter and token for
forward and backward, plus 12 * layers * width * sequence for attention. Recomputation is not
counted. GPU peaks are dense datasheet numbers; the peak of a CPU is measured with a matrix product.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .. import hardware
from ..activation.api import checkpoint_activations, offload_activations
from ..checkpoint.hf import meta_model
from ..config.architecture import context_key, number_of_experts
from ..config.moe import MoEConfig
from ..config.train import ModelConfig, TrainConfig
from ..data.format import Manifest
from ..errors import ConfigError, DataError
from ..fsdp.compile import compile_blocks
from ..fsdp.deferred_init import deferred_init
from ..fsdp.float8 import convert_to_fp8
from ..fsdp.model_state import find_blocks, model_state
from ..fsdp.shard import COMPUTE_DTYPES, shard
from ..fsdp.targets import UNSHIFTED
from ..pipeline_parallel.api import Pipelined, pipeline
from ..tensor_parallel.loss import Reduction, install_reduction
from ..transforms import transform

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_model(config: ModelConfig, vocabulary: int, eos_id: int = -1) -> PreTrainedModel:
    """Return the language model of ``config`` with ``vocabulary`` ids, on the meta device.

    Its head is that of ``config.trained_objective``. Generation ends at ``eos_id``, the token that
    ends the documents; -1: the last id.

    Raises ConfigError if transformers cannot build the model.
    """
    architecture = config.architecture
    arguments = {
        "vocab_size": vocabulary,
        "bos_token_id": eos_id if eos_id >= 0 else vocabulary - 1,
        "eos_token_id": eos_id if eos_id >= 0 else vocabulary - 1,
        **architecture["shape"],
        context_key(architecture["family"]): config.longest_sequence,
        "use_cache": False,
        **config.overrides,
    }
    transformers = meta_model.import_transformers()
    if architecture["family"] not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"model.init_from = {config.init_from}: this version of transformers has no "
            f"{architecture['family']} models; pip install -U transformers"
        )
    family = transformers.CONFIG_MAPPING[architecture["family"]]
    if keys := {"attn_implementation", "_attn_implementation"} & set(config.overrides):
        raise ConfigError(
            f"model.overrides.{min(keys)} cannot be set: the trainer uses sdpa, which selects a "
            "flash kernel if there is one and supports document masks (transformers' "
            "flash_attention_2 supports them for a single sequence only). Remove the key"
        )
    unknown = sorted(set(config.overrides) - set(family().to_dict()))
    if unknown:
        raise ConfigError(
            f"model.overrides.{unknown[0]}: {family.__name__} has no such key; remove it"
        )
    head = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "span_corruption": transformers.AutoModelForSeq2SeqLM,
    }[config.trained_objective]
    attention = {"attn_implementation": "sdpa"} if config.trained_objective == "causal" else {}
    try:
        # meta device: initializing billions of parameters takes minutes
        with deferred_init(as_without=False, values=not config.init_from):
            model = head.from_config(family(**arguments), **attention)
    except Exception as error:  # any error of the model's own code about invalid sizes
        reason = " ".join(str(error).split())
        raise ConfigError(f"the model cannot be built: {reason}") from error
    if config.trained_objective == "causal":
        model.loss_type = "ForCausalLM"  # transformers' default, set here to avoid its warning
    else:
        model_state(model).target_rule = UNSHIFTED  # verified in the first step
    return model


def import_classes(config: ModelConfig) -> None:
    """Import the modules with the classes of the model that `build_model` would return."""
    meta_model.import_transformers()
    family = config.architecture["family"]
    for module in ("configuration", "modeling"):
        import_module(f"transformers.models.{family}.{module}_{family}")


def describe(config: TrainConfig, rows: Callable[[str], int]) -> tuple[dict, Path | None]:
    """Return the config.json of the model that ``config`` trains, and its tokenizer folder or None.

    Args:
        config: The config of the run.
        rows: Function that returns the number of rows of a parameter by its name. It determines
            the vocabulary size if the token shards are missing.
    """
    folder = Path(config.data.folder)
    vocabulary, eos_id = 0, -1
    with contextlib.suppress(DataError):
        if config.data.folder:
            manifest = Manifest.read(folder)
            vocabulary, eos_id = manifest.vocab_size, manifest.eos_id
    if not vocabulary or config.model.trained_objective != "causal":  # which may add ids
        model = build_model(config.model, 1)
        embeddings = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is embeddings)
        vocabulary = rows(f"{name}.weight")
    tokenizer = folder / "tokenizer"
    has_tokenizer = bool(config.data.folder) and (tokenizer / "tokenizer.json").is_file()
    model = build_model(config.model, vocabulary, eos_id)
    described = meta_model.config_dict(model)
    assert described is not None  # a class of transformers
    return described, tokenizer if has_tokenizer else None


def parallelize(
    model: nn.Module, config: TrainConfig, reduction: Reduction | None = None
) -> tuple[nn.Module, list[nn.Module]]:
    """Return this rank's part of ``model``, and the blocks in it.

    ``reduction``: loss of a batch from the losses of its tokens; default: their mean.

    The order is: tensor, context and expert parallelism, fp8, compilation, pipeline stages,
    sharding, activation checkpointing, activation offloading.
    """
    model = transform(model, None if config.moe == MoEConfig() else config.moe)
    if reduction is not None:
        install_reduction(model, reduction)
    if config.parallel.fp8:
        model = convert_to_fp8(model)
    if config.train.compile_blocks:
        model = compile_blocks(model)
    if config.parallel.pipeline_parallel_degree > 1:
        model = shard(pipeline(model))
        assert isinstance(model, Pipelined)
        blocks = model.blocks()
    else:
        blocks = find_blocks(model)
        model = shard(model, blocks=blocks)
    if config.activations.checkpoint:
        checkpoint_activations(model, config.activations.checkpoint)
    if config.activations.offload:
        offload_activations(model)
    return model, blocks


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> float:
    """Return the model FLOPS of forward and backward per token of a sequence.

    A frozen matrix has no gradient of its own: 4 instead of 6 per parameter. NaN for an
    encoder-decoder, whose halves compute different tokens.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        return float("nan")
    head: Any = model.get_output_embeddings()
    tables = {id(model.get_input_embeddings().weight)}
    tables -= {id(head.weight)}  # tied: the head's matrix
    matrices = sum(
        _flops(p) * (_active_expert_share(config) if ".experts." in name else 1)
        for name, p in model.named_parameters()
        if p.dim() >= 2 and id(p) not in tables
    )
    positions = getattr(getattr(model, "transformer", None), "wpe", None)
    if positions is not None:
        matrices -= _flops(positions.weight)
    attention = 12 * config.num_hidden_layers * config.hidden_size * sequence_length
    return matrices + attention


def _flops(matrix: nn.Parameter) -> float:
    return matrix.numel() * (6.0 if matrix.requires_grad else 4.0)


def _active_expert_share(config) -> float:
    """Return the share of a mixture's experts that compute for each token."""
    return config.num_experts_per_tok / number_of_experts(config)


def peak_tflops(device: torch.device, precision: str) -> float:
    """Return the peak TFLOPS of one rank: known for GPUs, measured on a CPU; NaN if unknown.

    On a CPU all ranks measure at the same time, so that shared cores are counted once, and only for
    the first model of a process. A collective call there.
    """
    if device.type == "cuda":
        peak = hardware.peak_tflops(torch.cuda.get_device_name(device), precision)
        return float("nan") if peak is None else peak
    dist.barrier()
    return _measure_tflops(COMPUTE_DTYPES[precision], dist.get_world_size())


@functools.cache
def _measure_tflops(dtype: torch.dtype, ranks: int) -> float:  # noqa: ARG001  for the cache
    """Return the rate of a square matrix product while ``ranks`` ranks compute it."""
    size, seconds = 512, 0.3
    matrix = torch.full((size, size), 0.5, dtype=dtype)
    matrix @ matrix
    products, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        matrix @ matrix
        products += 1
    return 2 * size**3 * products / elapsed / 1e12
