"""Configuration keys of SMP v1, and their translation to `ParallelConfig`.

`KEYS` describes every documented key; the migration guide's table is made from it. Keys without a
meaning here are accepted. Settings that would change results are translated or refused.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ...config import parallel, schema
from ...config.parallel import ParallelConfig
from ...errors import ConfigError


@dataclass(frozen=True)
class Key:
    """A configuration key of SMP v1."""

    default: Any
    """Value in v1 if the key is not set."""
    becomes: str
    """Key of `ParallelConfig` or description of the effect, for the documentation."""
    unused: str = ""
    """Reason why the key has no effect; empty if it has one."""
    required: Any = None
    """The only value that is supported, if there is one."""
    reason: str = ""
    """Reason and remedy for another value than ``required``."""

    @property
    def handling(self) -> str:
        """``used``, ``accepted`` or ``checked``."""
        return "accepted" if self.unused else "used" if self.required is None else "checked"


_LAUNCH = "the ranks' process group exists before the model does"
_NO_TRACE = "nothing is traced: stages are cut from the modules of the model"

KEYS: dict[str, Key] = {
    "pipeline_parallel_degree": Key(1, "`pipeline_parallel_degree`"),
    "partitions": Key(1, "`pipeline_parallel_degree`"),
    "microbatches": Key(1, "`microbatches`"),
    "active_microbatches": Key(None, "`active_microbatches`; default: stages + 2, as in v1"),
    "pipeline": Key("interleaved", "`pipeline`: `interleaved` is 1F1B, `simple` is GPipe"),
    "optimize": Key("memory", "`optimize`"),
    "placement_strategy": Key("cluster", "`placement_strategy`"),
    "auto_partition": Key(True, "`auto_partition`; `false` needs `default_partition`"),
    "default_partition": Key(0, "`default_partition`, used with `auto_partition = false`"),
    "memory_weight": Key(None, "`memory_weight`; default: 0.8, or 0.2 with `optimize = speed`"),
    "ddp": Key(False, "must be `true` where several ranks read different batches"),
    "ddp_port": Key(None, "-", unused=_LAUNCH),
    "ddp_dist_backend": Key("auto", "-", unused="set `communication_backend`"),
    "deterministic_server": Key(False, "-", unused="there is no server: schedules are fixed"),
    "offload_activations": Key(False, "`nl.offload_activations(model)`"),
    "activation_loading_horizon": Key(4, "`activation_loading_horizon`"),
    "tensor_parallel_degree": Key(1, "`tensor_parallel_degree`"),
    "fp16": Key(False, "`fp16`"),
    "fp16_params": Key(
        False, "-", required=False, reason="modules in float16 only: set fp16 = true"
    ),
    "bf16": Key(False, "`bf16`"),
    "shard_optimizer_state": Key(False, "`shard_optimizer_state`"),
    "prescaled_batch": Key(
        False, "`prescaled_batch`; sharded data parallelism with tensor parallelism sets `true`"
    ),
    "skip_tracing": Key(False, "-", unused=_NO_TRACE),
    "delayed_parameter_initialization": Key(False, "`nl.deferred_init()` in `smp.model_creation`"),
    "sharded_data_parallel_degree": Key(1, "`hybrid_shard_degree`"),
    "sdp_reduce_bucket_size": Key(5 * 10**8, "`sdp_reduce_bucket_size`"),
    "sdp_param_persistence_threshold": Key(
        10**6, "-", unused="small parameters are sharded with their blocks"
    ),
    "sdp_max_live_parameters": Key(10**9, "`sdp_max_live_parameters`"),
    "sdp_hierarchical_allgather": Key(
        True, "`hierarchical_all_gather`: `true` is `auto`, `false` is `off`"
    ),
    "sdp_gradient_clipping": Key(
        1.0, "`sdp_gradient_clipping`, used with `sharded_data_parallel_degree` above 1"
    ),
    "contiguous": Key(True, "-", unused="stages are always contiguous"),
    "horovod": Key(
        False, "-", required=False, reason="replicas are synchronized by nearlinear: set ddp = true"
    ),
    "load_partition": Key(
        False,
        "-",
        required=False,
        reason="partition files are not read: set auto_partition = false, call smp.set_partition",
    ),
    "partition_file": Key(None, "-", unused="it is read with `load_partition` only"),
    "overlapping_allreduce": Key(True, "-", unused="set `overlap_communication`"),
    "static_mode": Key(False, "-", unused="schedules are always static"),
    "fast_mode": Key(False, "-", unused="schedules are always static"),
    "checkpoint_attentions": Key(
        False, "-", unused="recomputation is chosen by `smp.set_activation_checkpointing`"
    ),
    "_match_weights": Key(False, "-", unused="a check of v1's own tests"),
    "_fp32_grad_accumulation": Key(
        False, "-", unused="gradients are accumulated in float32 in every precision"
    ),
}
"""Documented keys, and keys that public scripts set."""

_ALIASES = {"partitions": "pipeline_parallel_degree"}
_PARALLEL = {field.name for field in fields(ParallelConfig)}
_OWN = _PARALLEL - set(KEYS) - {"hybrid_shard_degree"}
"""Keys of nearlinear that have no namesake in v1."""


@dataclass(frozen=True)
class Settings:
    """Configuration of one `init`."""

    parallel: ParallelConfig
    offload_activations: bool
    deferred: bool
    """``delayed_parameter_initialization``."""
    manual_partition: bool
    """``auto_partition = false``."""
    unused: str
    """Given keys without effect, with the reasons."""


def read(
    config: Mapping[str, Any] | None, world: int, environment: Mapping[str, str] | None = None
) -> Settings:
    """Return the settings of ``world`` ranks from v1's keys.

    The launcher's parameters take precedence over ``config``, which takes precedence over v1's
    defaults.

    Raises:
        ConfigError: A key does not exist, or a value is not supported.
    """
    launched = parallel.launcher_parameters(os.environ if environment is None else environment)
    values = {name: key.default for name, key in KEYS.items() if name not in _ALIASES}
    for given in (dict(config or {}), launched):
        values |= _canonical(given)
    for name, value in values.items():
        key = KEYS.get(name)
        if key is None:
            continue
        if isinstance(key.default, bool) and value in (0, 1):  # scripts pass numbers
            values[name] = bool(value)
        if key.required is not None and value != key.required:
            raise ConfigError(f"smp.init: {name} = {value!r} is not supported: {key.reason}.")
    used = [name for name in KEYS if name in {**(config or {}), **launched} and KEYS[name].unused]
    return Settings(
        _parallel(values, world),
        values["offload_activations"],
        values["delayed_parameter_initialization"],
        not values["auto_partition"],
        "; ".join(f"{name} ({KEYS[name].unused})" for name in used),
    )


def _canonical(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with one name per setting. Raises ConfigError for unknown keys."""
    result: dict[str, Any] = {}
    for name, value in given.items():
        if name not in KEYS and name not in _OWN:
            near = difflib.get_close_matches(name, [*KEYS, *_OWN], 1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"smp.init: there is no configuration key {name!r}.{meant}")
        own = _ALIASES.get(name, name)
        if result.setdefault(own, value) != value:
            raise ConfigError(
                f"smp.init: {name} = {value!r} and {own} = {result[own]!r} are two names for one "
                "setting. Keep one of them."
            )
    return result


def _parallel(values: dict[str, Any], world: int) -> ParallelConfig:
    """Translate the values of `KEYS` for ``world`` ranks."""
    stages, tensor = values["pipeline_parallel_degree"], values["tensor_parallel_degree"]
    sharded, ranks = values["sharded_data_parallel_degree"], world // max(1, stages)
    if not values["ddp"] and ranks > 1:
        raise ConfigError(
            f"smp.init: ddp = false, but {ranks} ranks hold each stage of the model (tensor, "
            "sharded or replicated data parallelism). Set ddp = true, or start "
            f"pipeline_parallel_degree = {stages} ranks."
        )
    if str(values["pipeline"]).endswith("_only_forward"):
        raise ConfigError(
            f"smp.init: pipeline = {values['pipeline']!r} is not supported: evaluate under "
            "torch.no_grad() or after model.eval(), with 'interleaved' or 'simple'."
        )
    result = {name: values[name] for name in values if name in _PARALLEL}
    result |= {
        "hybrid_shard_degree": sharded,
        "pipeline_batch": "first_stage" if stages > 1 else "every_rank",
        "hierarchical_all_gather": "auto" if values["sdp_hierarchical_allgather"] else "off",
        "sdp_gradient_clipping": values["sdp_gradient_clipping"] if sharded > 1 else 0.0,
        "prescaled_batch": values["prescaled_batch"] or tensor == 1 or sharded > 1,
    }
    if values["auto_partition"]:
        result.pop("default_partition")
    for name in parallel.PARAMETER_COUNTS:
        if isinstance(result[name], float) and result[name].is_integer():
            result[name] = int(result[name])  # scripts write 5e8
    known = {name: value for name, value in result.items() if value is not None}
    return schema.build(ParallelConfig, known, "smp.init", nearby=list(KEYS))
