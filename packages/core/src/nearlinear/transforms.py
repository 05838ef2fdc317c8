"""`nl.transform`: apply tensor, context and expert parallelism to an untouched Hugging Face model.

Call `nearlinear.shard` afterwards: it also installs the reduction of gradients that several ranks
compute in parts.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .config.moe import MoEConfig
from .context_parallel.parallelize import apply_context_parallel
from .distributed import runtime
from .errors import ConfigError
from .expert_parallel.parallelize import apply_expert_parallel
from .fsdp.accumulate import guard_optimizers
from .fsdp.deferred_init import broadcast_initial_values, require_built
from .fsdp.forward_transforms import BatchCheck, forward_transforms
from .fsdp.model_state import label_parameters, model_state
from .spmd import seed_generators
from .tensor_parallel.parallelize import apply_tensor_parallel


def transform(
    model: nn.Module,
    config: MoEConfig | dict[str, Any] | None = None,
    *,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str | None = None,
    batch_is_split: bool = False,
) -> nn.Module:
    """Split ``model`` by the config of `nl.init`, in place. A collective call.

    Example::

        nl.init({"tensor_parallel_degree": 2})
        model = nl.shard(nl.transform(model))

    All ranks must hold equal parameter values, or none: a model built under `deferred_init` gets
    its values in `shard`. If the config splits anything, the random generator of each rank (for
    dropout) is seeded with ``random_seed`` and the rank. With labels, the ``logits`` of the model
    are those of this rank's part of the vocabulary and the sequence; without labels, they are
    complete.

    Args:
        model: A Hugging Face causal language model.
        config: Settings of mixtures of experts, see `MoEConfig`.
        load_state_dict_from_rank0: Use the values of rank 0 on all ranks; `shard` distributes them.
        cp_comm_type: Overrides the config's key.
        batch_is_split: With context parallelism, every rank passes its own part of each batch
            instead of the whole: of 2 C chunks on dim 1, for C context ranks, rank r has the
            chunks r and 2 C - 1 - r. Losses are those of whole sequences; logits are of the part.

    Returns:
        ``model``.

    Raises:
        ConfigError: The model cannot be split, or the call order is wrong.
    """
    require_built("nl.transform")
    now = runtime.current()
    axes = {axis for axis in ("tensor", "context", "expert") if getattr(now.mesh, axis) > 1}
    if model_state(model).layout.axes:
        raise ConfigError("the model is transformed already: call nl.transform once")
    if model_state(model).activations is not None:
        raise ConfigError(
            "call nl.transform before nl.checkpoint_activations, and offload likewise"
        )
    if model_state(model).pipeline is not None:
        raise ConfigError("the model is a pipeline already: call nl.transform before nl.pipeline")
    if hasattr(model, "_get_fsdp_state"):
        raise ConfigError("the model is sharded already: call nl.transform before nl.shard")
    if load_state_dict_from_rank0:
        broadcast_initial_values(model, now)
    if "tensor" in axes:
        apply_tensor_parallel(model, now)
    if "context" in axes:
        apply_context_parallel(model, now, cp_comm_type or now.config.cp_comm_type, batch_is_split)
    if axes & {"tensor", "context"}:
        together = ("tensor",) if batch_is_split else ("tensor", "context")
        forward_transforms(model).before.insert(0, BatchCheck(now, *together))
    routed = "tensor" in axes and getattr(model.config, "output_router_logits", False)
    if "expert" in axes or config is not None or routed:  # tensor ranks share the router loss
        apply_expert_parallel(model, now, config)
    if axes:
        label_parameters(model)
        guard_optimizers()
        seed_generators(now.config.random_seed + now.rank)
    return model
