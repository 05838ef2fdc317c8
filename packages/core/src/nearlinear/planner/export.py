"""Export of a planned layout to other libraries, as flags or a file that their parsers accept.

Batch, degrees, precision, recomputation and the pipeline's schedule are exported, and for
Megatron-LM also the shape of the model. The learning rate, data and checkpoints are not. A layout
that a library cannot train is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from ..config import activation_strategy
from ..errors import ConfigError
from ..pipeline_parallel.schedules import SCHEDULES
from .model_shape import ModelShape
from .result import PlanResult

TORCHTITAN_MODELS = {
    "llama3-8b": ("llama3", "llama3_8b"),
    "llama3-70b": ("llama3", "llama3_70b"),
    "llama3-405b": ("llama3", "llama3_405b"),
}
"""Module and config function in torchtitan of the presets that it has, too."""

Flags = dict[str, Any]
"""Values of options by name; True: an option without a value."""


def export(result: PlanResult, tool: str) -> str:
    """Return the layout of ``result`` for a library.

    Args:
        result: The plan.
        tool: One of `TOOLS`: "torchtitan" (0.3), "megatron" (options of Megatron-LM's
            ``pretrain_gpt.py``) or "deepspeed" (its JSON config).

    Raises ConfigError, with the setting, for a layout that the library cannot train.
    """
    check_tool(tool)
    return TOOLS[tool](result)


def check_tool(tool: str) -> None:
    """Raise ConfigError unless ``tool`` is one of `TOOLS`."""
    if tool not in TOOLS:
        raise ConfigError(f"--export {tool}: choose one of {', '.join(TOOLS)}")


def _refuse(tool: str, setting: str, reason: str) -> ConfigError:
    return ConfigError(f"--export {tool}: {setting}: {reason}")


def _format_flags(command: str, flags: Flags) -> str:
    lines = [command]
    lines += [f"--{name}" if value is True else f"--{name} {value}"
              for name, value in flags.items() if value is not False]  # fmt: skip
    return " \\\n    ".join(lines)


def _recomputation(result: PlanResult) -> activation_strategy.ActivationStrategy | None:
    """Return the strategy of activation checkpointing; None without."""
    checkpoint = result.config.activations.checkpoint
    return activation_strategy.parse_strategy(checkpoint) if checkpoint else None


# --- torchtitan ----------------------------------------------------------------------------------


def _torchtitan(result: PlanResult) -> str:
    tool, work, mesh = "torchtitan", result.work, result.work.mesh
    config = result.config
    if config.parallel.fp16:
        raise _refuse(tool, "parallel.fp16 = true", "it trains in bfloat16 or float32 only")
    if work.offload:
        raise _refuse(tool, "activations.offload = true", "it has no option for it")
    if config.parallel.offload_optimizer:
        raise _refuse(tool, "parallel.offload_optimizer = true", "it offloads parameters as well")
    pipelined = mesh.pipeline > 1
    flags: Flags = {}
    comments = []
    if config.model.preset in TORCHTITAN_MODELS and not config.model.init_from:
        module, function = TORCHTITAN_MODELS[config.model.preset]
        flags |= {"module": module, "config": function}
    else:
        comments.append("# Add --module and --config of the model.")
    recomputation = _recomputation(result)
    if recomputation is None:
        wanted = "no activation checkpointing: set activation_checkpoint to None"
    else:
        kind = "SelectiveAC" if recomputation.selective else "FullAC"
        wanted = f"activation_checkpoint={kind}.Config()"
    comments.append(f"# The config function, not an option, selects recomputation. Use {wanted}.")
    flags |= {
        "training.local_batch_size": work.micro_batch * (work.micro_batches if pipelined else 1),
        "training.global_batch_size": work.micro_batch * work.micro_batches * mesh.data_ranks,
        "training.seq_len": work.sequence,
        "training.mixed_precision_param": _torchtitan_dtype(work.precision),
        "parallelism.data_parallel_replicate_degree": mesh.replicate,
        "parallelism.data_parallel_shard_degree": mesh.shard,
        "parallelism.fsdp_reshard_after_forward": (
            "always" if work.reshard_after_forward else "never"
        ),
        "parallelism.tensor_parallel_degree": mesh.tensor,
        "parallelism.context_parallel_degree": mesh.context,
        "parallelism.expert_parallel_degree": mesh.expert,
        "parallelism.pipeline_parallel_degree": mesh.pipeline,
    }
    if pipelined:
        flags |= {
            "training.disable_cuda_graphs": True,  # its pipelines do not support them
            "parallelism.pipeline_parallel_schedule": (
                SCHEDULES[work.schedule].torch_class.removeprefix("Schedule")
            ),
            "parallelism.pipeline_parallel_microbatch_size": work.micro_batch,
        }
        if work.virtual_stages > 1:  # it counts the embedding and the head as one layer each
            layers = math.ceil((work.shape.layers + 2) / (mesh.pipeline * work.virtual_stages))
            flags["parallelism.pipeline_parallel_layers_per_stage"] = layers
    flags["compile.enable" if work.compiled else "compile.no-enable"] = True
    return "\n".join([*comments, _format_flags("torchrun -m torchtitan.train", flags)])


def _torchtitan_dtype(precision: str) -> str:
    return "float32" if precision == "fp32" else "bfloat16"


# --- Megatron-LM ---------------------------------------------------------------------------------


def _megatron(result: PlanResult) -> str:
    tool, work, mesh = "megatron", result.work, result.work.mesh
    parallel = result.config.parallel
    if work.schedule not in ("1f1b", "interleaved_1f1b"):
        raise _refuse(tool, f"parallel.pipeline = {work.schedule!r}", "its schedule is 1F1B")
    if work.offload:
        raise _refuse(tool, "activations.offload = true", "its offloading needs other settings")
    flags: Flags = {
        "tensor-model-parallel-size": mesh.tensor,
        "pipeline-model-parallel-size": mesh.pipeline,
        "context-parallel-size": mesh.context,
        "expert-model-parallel-size": mesh.expert,
        "sequence-parallel": mesh.tensor > 1,
        "micro-batch-size": work.micro_batch,
        "global-batch-size": work.micro_batch * work.micro_batches * mesh.data_ranks,
        "bf16": work.precision == "bf16",
        "fp16": work.precision == "fp16",
        "overlap-grad-reduce": mesh.data_ranks > 1,
    }
    if work.virtual_stages > 1:
        flags["num-virtual-stages-per-pipeline-rank"] = work.virtual_stages
    if work.fp8:
        flags["fp8-format"] = "hybrid"
    if mesh.shard * mesh.context > 1:
        # Optimizer states are divided over the ranks of an instance, as over a shard group;
        # parameters and gradients are not.
        flags |= {"use-distributed-optimizer": True, "overlap-param-gather": True}
        if mesh.replicate > 1:
            flags["num-distributed-optimizer-instances"] = mesh.replicate
    if parallel.offload_optimizer:
        flags |= {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}
    recomputation = _recomputation(result)
    if recomputation is not None and recomputation.selective:
        flags["recompute-granularity"] = "selective"
    elif recomputation is not None:
        held = math.ceil(work.stage_layout.most_blocks)
        by_budget = recomputation.budget is not None
        recomputed = max(1, round(held * work.recomputed_share))
        flags |= {
            "recompute-granularity": "full",
            "recompute-method": "block" if by_budget else "uniform",
            "recompute-num-layers": recomputed if by_budget else recomputation.group_size or held,
        }
    flags |= _megatron_model(work.shape, work.sequence)
    return _format_flags("torchrun pretrain_gpt.py", flags)


def _megatron_model(shape: ModelShape, sequence: int) -> Flags:
    """Return the options of the shape of a model."""
    gated = shape.gated
    flags: Flags = {
        "num-layers": shape.layers,
        "hidden-size": shape.width,
        "ffn-hidden-size": shape.inner,
        "num-attention-heads": shape.heads,
        "seq-length": sequence,
        "max-position-embeddings": shape.positions or sequence,
        "swiglu": gated,
        "normalization": "RMSNorm" if gated else "LayerNorm",
        "position-embedding-type": "learned_absolute" if shape.positions else "rope",
        "disable-bias-linear": gated,
        "untie-embeddings-and-output-weights": not shape.tied,
    }
    if shape.head_dim:
        flags["kv-channels"] = shape.head_dim
    if shape.latent is not None:
        flags |= {
            "multi-latent-attention": True,
            "kv-lora-rank": shape.latent.rank,
            "qk-head-dim": shape.head_width - shape.latent.rotary,
            "qk-pos-emb-head-dim": shape.latent.rotary,
            "v-head-dim": shape.latent.value,
        }
        if shape.latent.query_rank:
            flags["q-lora-rank"] = shape.latent.query_rank
    elif shape.kv_heads and shape.kv_heads != shape.heads:
        flags |= {"group-query-attention": True, "num-query-groups": shape.kv_heads}
    if shape.experts > 1:
        flags |= {
            "num-experts": shape.experts,
            "moe-router-topk": shape.experts_per_token,
            "moe-ffn-hidden-size": shape.inner,
        }
        if shape.dense_blocks:
            mixtures = shape.layers - shape.dense_blocks
            flags["moe-layer-freq"] = f'"([0]*{shape.dense_blocks}+[1]*{mixtures})"'
        if shape.shared_inner:
            flags["moe-shared-expert-intermediate-size"] = shape.shared_inner
    return flags


# --- DeepSpeed -----------------------------------------------------------------------------------


def _deepspeed(result: PlanResult) -> str:
    tool, work, mesh = "deepspeed", result.work, result.work.mesh
    parallel = result.config.parallel
    for axis, reason in (
        ("pipeline", "its pipelines are modules of the model, not settings"),
        ("context", "its sequence parallelism is a change of the model, not a setting"),
        ("expert", "its experts are layers of the model, not settings"),
    ):
        if (degree := getattr(mesh, axis)) > 1:
            raise _refuse(tool, f"parallel.{axis}_parallel_degree = {degree}", reason)
    if work.fp8:
        raise _refuse(tool, "parallel.fp8 = true", "it has no setting for float8 layers")
    sharing = mesh.shard
    if 1 < sharing < mesh.data_ranks:
        raise _refuse(
            tool,
            f"parallel.hybrid_shard_degree = {sharing}",
            f"it shards over all {mesh.data_ranks} data ranks or none; since version 0.19 it has "
            "no MiCS",
        )
    zero: dict[str, Any] = {"stage": 3 if sharing > 1 else 0, "overlap_comm": True}
    if sharing > 1:
        zero |= {
            "stage3_max_live_parameters": parallel.live_parameters,
            "reduce_bucket_size": parallel.sdp_reduce_bucket_size,
        }
    if parallel.offload_optimizer:
        zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.micro_batches,
        "train_batch_size": work.micro_batch * work.micro_batches * mesh.data_ranks,
        "bf16": {"enabled": work.precision == "bf16"},
        "fp16": {"enabled": work.precision == "fp16"},
        "gradient_clipping": result.config.optimizer.clip,
        "zero_optimization": zero,
    }
    if mesh.tensor > 1:
        found["tensor_parallel"] = {"autotp_size": mesh.tensor}
    if _recomputation(result) is not None:
        found["activation_checkpointing"] = {"cpu_checkpointing": work.offload}
    elif work.offload:
        raise _refuse(tool, "activations.offload = true", "it offloads checkpointed inputs only")
    return json.dumps(found, indent=1)


TOOLS: dict[str, Callable[[PlanResult], str]] = {
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "deepspeed": _deepspeed,
}
"""Exporting function of each library."""
