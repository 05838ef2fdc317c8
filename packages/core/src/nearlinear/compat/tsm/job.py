"""`init`, `state` and `transform` of SMP v2.

Source: the public documentation of SMP v2. The keys of a job come from three places, lowest
precedence first: the argument of `init`, the command line (``--mp_parameters '{...}'``), and
``SM_HP_MP_PARAMETERS``, which `config.parallel.load` reads.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...config import parallel, schema
from ...config.moe import MoEConfig as RouterConfig
from ...distributed import runtime as runtimes
from ...errors import ConfigError
from ...transforms import transform as split_model
from . import fsdp1
from .delayed_param import allocate_buffers
from .distributed.checkpoint.state_dict_utils import warn_without_effect
from .moe.moe_config import MoEConfig

log = logging.getLogger(__name__)

COMMAND_LINE_ARGUMENT = "--mp_parameters"


@dataclass(frozen=True)
class Key:
    """A documented key of the configuration."""

    default: Any
    equivalent: str
    """Key of `ParallelConfig` that it sets; "" = none, so that it has no effect."""
    note: str
    """Difference from SMP, for the migration guide."""


KEYS = {
    "hybrid_shard_degree": Key(
        0,
        "hybrid_shard_degree",
        "0 follows the sharding strategy of the script: all ranks, or with HYBRID_SHARD the ranks "
        "of a node",
    ),
    "sm_activation_offloading": Key(
        True, "sm_activation_offloading", "applies to `offload_wrapper(model)`"
    ),
    "activation_loading_horizon": Key(2, "activation_loading_horizon", "the same"),
    "fsdp_cache_flush_warnings": Key(True, "", "accepted with a warning: no effect"),
    "allow_empty_shards": Key(
        False, "", "accepted with a warning: no effect, since empty shards are always allowed"
    ),
    "tensor_parallel_degree": Key(1, "tensor_parallel_degree", "the same; needs `transform`"),
    "context_parallel_degree": Key(
        1, "context_parallel_degree", "the same; the script splits its batches"
    ),
    "expert_parallel_degree": Key(
        1, "expert_parallel_degree", "the same; needs `transform(config=MoEConfig())`"
    ),
    "random_seed": Key(0, "random_seed", "the same; the rank is added for dropout"),
    "tensor_parallel_seed": Key(0, "random_seed", "older name of `random_seed`"),
}
"""Keys that SMP v2 documents. `init` accepts nearlinear's own keys beside them."""


def init(config: dict[str, Any] | str | os.PathLike[str] | None = None) -> None:
    """Lay out the ranks of the job; torch's FSDP then shards with `nl.shard`.

    Args:
        config: Keys of `KEYS` as a dict, or the path of a ``.json`` file. The launcher's parameters
            take precedence.

    Raises:
        ConfigError: A key or value is invalid, or does not fit the number of ranks.
    """
    asked = dict(schema.read(config)) if isinstance(config, str | os.PathLike) else config or {}
    asked = parallel.canonical(asked) | parallel.canonical(_from_command_line(sys.argv))
    from_launcher = parallel.canonical(parallel.launcher_parameters(os.environ))
    without_effect = [name for name, key in KEYS.items() if not key.equivalent]
    given = [name for name in without_effect if name in asked or name in from_launcher]
    kept = {name: value for name, value in asked.items() if name not in given}
    runtimes.init(kept)
    if given and runtimes.current().rank == 0:
        log.warning("accepted for SMP compatibility, without effect here: %s", ", ".join(given))
    fsdp1.install()


def shutdown() -> None:
    """Give torch's FSDP its own constructor back. The process group stays."""
    fsdp1.uninstall()


def is_initialized() -> bool:
    """Return whether `init` was called on this rank."""
    return fsdp1.is_active()


def _from_command_line(arguments: list[str]) -> dict[str, Any]:
    """Return the value of ``--mp_parameters``, a JSON object. Raises ConfigError."""
    text = ""
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == COMMAND_LINE_ARGUMENT:
            text = value if equals else "".join(arguments[i + 1 : i + 2])
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{COMMAND_LINE_ARGUMENT} {text}: expected a JSON object, as in "
            f"{COMMAND_LINE_ARGUMENT} '{{\"hybrid_shard_degree\": 8}}'"
        )
    return found


class State:
    """``tsm.state``: this rank's place in the job, and settings that scripts may change."""

    SETTINGS = ("sm_activation_offloading", "activation_loading_horizon")
    """Attributes that a script may set before it applies ``offload_wrapper``."""

    @property
    def hybrid_shard_degree(self) -> int:
        """The degree of the configuration; with tensor parallelism 0 becomes the actual one."""
        now = runtimes.current()
        degree = now.config.sharing
        return now.mesh.sharing if degree == 0 and now.mesh.tensor > 1 else degree

    @property
    def rank(self) -> int:
        return runtimes.current().rank

    @property
    def world_size(self) -> int:
        return runtimes.current().mesh.world

    @property
    def world_process_group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    @property
    def rep_rank_process_group(self) -> dist.ProcessGroup:
        """Ranks that share one copy of the model states with this rank."""
        return runtimes.current().group("sharing")

    def _size(self, axis: str) -> int:
        return getattr(runtimes.current().mesh, axis)

    def _rank(self, axis: str) -> int:
        now = runtimes.current()
        return now.mesh.group(axis, now.rank).index(now.rank)

    tensor_parallel_degree = tp_size = property(lambda self: self._size("tensor"))
    tp_rank = property(lambda self: self._rank("tensor"))
    tp_process_group = property(lambda self: runtimes.current().group("tensor"))
    context_parallel_degree = cp_size = property(lambda self: self._size("context"))
    cp_rank = property(lambda self: self._rank("context"))
    cp_process_group = property(lambda self: runtimes.current().group("context"))
    expert_parallel_degree = ep_size = property(lambda self: self._size("expert"))
    ep_rank = property(lambda self: self._rank("expert"))
    ep_process_group = property(lambda self: runtimes.current().group("expert"))

    def __getattr__(self, name: str) -> Any:
        if name in self.SETTINGS:
            return getattr(runtimes.current().config, name)
        raise AttributeError(f"tsm.state has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.SETTINGS:
            now = runtimes.current()
            now.config = dataclasses.replace(now.config, **{name: value})
            return
        if hasattr(type(self), name):
            if value != getattr(self, name):
                raise ConfigError(
                    f"tsm.state.{name} = {value!r}: the layout of the running job is "
                    f"{getattr(self, name)!r}; give the degree to tsm.init"
                )
            return
        log.warning("tsm.state.%s = %r has no effect here", name, value)
        super().__setattr__(name, value)


state = State()


def transform(
    model: nn.Module,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    config: MoEConfig | RouterConfig | dict[str, Any] | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """Split ``model`` by the degrees of `init`, in place. A collective call.

    With context parallelism every rank passes its own part of a batch: of 2 C chunks on dim 1,
    for C context ranks, rank r has the chunks r and 2 C - 1 - r.

    Args:
        model: A Hugging Face model.
        device: Accepted; FSDP places the shards.
        dtype: Dtype of the parameters and buffers; None keeps theirs.
        config: Settings of mixtures of experts.
        load_state_dict_from_rank0: Use the values of rank 0; other ranks may pass a model on the
            meta device.
        cp_comm_type: Exchange of keys and values, ``"p2p"`` or ``"all_gather"``.

    Raises ConfigError.
    """
    if device is not None:
        warn_without_effect("tsm.transform(device=)")
    if dtype is not None:
        model = model.to(dtype)
    if load_state_dict_from_rank0:
        allocate_buffers(model, runtimes.current().device)
    if isinstance(config, dict):
        config = MoEConfig(**config)
    router = config.router() if isinstance(config, MoEConfig) else config
    if router is None and runtimes.current().mesh.expert > 1:
        raise ConfigError(
            "expert_parallel_degree > 1: tsm.transform needs the settings of the mixtures, as in "
            "tsm.transform(model, config=MoEConfig())"
        )
    return split_model(
        model,
        router,
        load_state_dict_from_rank0=load_state_dict_from_rank0,
        cp_comm_type=cp_comm_type,
        batch_is_split=runtimes.current().mesh.context > 1,
    )
