"""Make an untouched Hugging Face model parallel inside: its matrices, its sequences, its experts.

What the config asks for is done in place, by a plan for the model's family; `nearlinear.shard` must
follow: it also installs what sums the gradients that several ranks have parts of.
"""

from __future__ import annotations

import torch
from torch import nn

from .. import runtime
from ..errors import ConfigError
from ..spmd import one_at_a_time
from . import context, expert, from_first, layout, tensor
from .around import around
from .delayed_init import require_built
from .expert import MoEConfig
from .same_batch import SameBatch


def transform(
    model: nn.Module,
    config: MoEConfig | dict | None = None,
    *,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str | None = None,
) -> nn.Module:
    """Split ``model`` as the config asks, in place, and return it.

    All ranks must hold equal values, or none: a model built under `delayed_init` gets its part of
    them from `shard`. With ``load_state_dict_from_rank0`` the values are those of rank 0, whatever
    the others have; `shard` hands them out. ``config`` is for mixtures of experts, see
    `MoEConfig`; ``cp_comm_type`` instead of the config's. Where it changes anything, each rank's
    random numbers (dropout) are seeded anew, by ``random_seed`` and the rank. With labels, a
    model's ``logits`` are afterwards those of this rank's part of vocabulary and sequence; without,
    they are whole. A collective call. Raises ConfigError.
    """
    require_built("nl.transform")
    now = runtime.current()
    asked = {axis for axis in ("tensor", "context", "expert") if getattr(now.mesh, axis) > 1}
    if layout.of(model).axes:
        raise ConfigError("the model is transformed already: call nl.transform once")
    if hasattr(model, "_nearlinear_activations"):
        raise ConfigError(
            "call nl.transform before nl.checkpoint_activations, and offload likewise"
        )
    if hasattr(model, "_nearlinear_pipeline"):
        raise ConfigError("the model is a pipeline already: call nl.transform before nl.pipeline")
    if hasattr(model, "_get_fsdp_state"):
        raise ConfigError("the model is sharded already: call nl.transform before nl.shard")
    if load_state_dict_from_rank0:
        from_first.prepare(model, now)
    if "tensor" in asked:
        tensor.apply(model, now)
    if "context" in asked:
        context.apply(model, now, cp_comm_type or now.config.cp_comm_type)
    if asked & {"tensor", "context"}:
        around(model).before.insert(0, SameBatch(now, "tensor", "context"))
    routed = "tensor" in asked and getattr(model.config, "output_router_logits", False)
    if "expert" in asked or config is not None or routed:  # tensor ranks share the routers' loss
        expert.apply(model, now, config)
    if asked:
        with one_at_a_time():  # ranks that are threads have one generator
            torch.manual_seed(now.config.random_seed + now.rank)
    return model
