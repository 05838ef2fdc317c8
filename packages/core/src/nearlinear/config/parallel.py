"""Parallel layout of a run, in the keys of SageMaker's model parallel library (SMP).

`ParallelConfig` has the keys of SMP v2 and accepts those of v1 as aliases (source: the public SMP
documentation). Precedence, lowest first: defaults, the dict or file passed to `nl.init`, the
launcher's parameters in the environment variable ``SM_HP_MP_PARAMETERS`` (JSON).
`ParallelConfig.degrees` divides a number of ranks among the mesh axes.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from ..errors import ConfigError
from . import schema

HOST_MEMORY_BACKEND = "nearlinear"
"""Value of ``communication_backend`` that selects nearlinear-collectives."""

ALIASES = {
    "sharded_data_parallel_degree": "hybrid_shard_degree",
    "offload_activations": "sm_activation_offloading",
    "partitions": "pipeline_parallel_degree",
    "tensor_parallel_seed": "random_seed",
}
"""SMP v1 names (and one of the v2 launch notes) for keys of `ParallelConfig`."""

IGNORED_V1_KEYS = frozenset(
    "checkpoint_attentions contiguous ddp ddp_dist_backend "
    "ddp_port deterministic_server fast_mode fp16_params horovod load_partition "
    "overlapping_allreduce partition_file sdp_param_persistence_threshold skip_tracing "
    "static_mode _fp32_grad_accumulation _match_weights".split()
)
"""Keys of SMP v1 without an equivalent: accepted, and logged as having no effect."""

PARAMETER_COUNTS = ("sdp_max_live_parameters", "sdp_reduce_bucket_size")
"""Keys that count parameters and may be written as floats, e.g. 1e9."""

ALLOWED_VALUES = {
    "hierarchical_all_gather": ("auto", "on", "off"),
    "gradient_reduction": ("auto", "micro_batch"),
    "gather_dtype": ("same", "bf16", "fp8"),
    "cp_comm_type": ("p2p", "all_gather"),
    "pipeline": (
        "simple",
        "interleaved",
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipev",
    ),
    "optimize": ("memory", "speed"),
    "pipeline_batch": ("every_rank", "first_stage"),
}

KEYS_BY_DEGREE = {
    "pipeline_parallel_degree": "pipeline virtual_pipeline_degree active_microbatches optimize "
    "memory_weight default_partition pipeline_batch",
    "context_parallel_degree": "cp_comm_type",
}
"""Keys that have an effect only with a degree above 1."""

FP16_KEYS = (
    "init_scale scale_factor scale_window min_scale delayed_shift consecutive_hysteresis".split()
)
"""Keys of the loss scaler, SMP's ``dynamic_loss_args``."""

PLACEMENTS = {"cluster": "DPT", "spread": "TPD"}
"""SMP's names of two placements; any order of the three letters is a placement."""


log = logging.getLogger(__name__)

LAUNCHER_VARIABLE = "SM_HP_MP_PARAMETERS"


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel layout of a run. Degrees count ranks.

    Example::

        config = nl.ParallelConfig(hybrid_shard_degree=4, tensor_parallel_degree=2, bf16=True)
        nl.init(config)
    """

    hybrid_shard_degree: int | Literal["auto"] = 0
    """number of ranks that share one copy of the model states; 0 = all data ranks, 1 = none, auto =
    the fewest that the memory allows, in nearlinear train and plan"""
    tensor_parallel_degree: int = 1
    """number of ranks that split the matrices of every layer"""
    context_parallel_degree: int = 1
    """number of ranks that split every sequence; part of the shard group"""
    expert_parallel_degree: int = 1
    """number of ranks that split the experts of a mixture; part of the shard group"""
    pipeline_parallel_degree: int = 1
    """number of pipeline stages"""
    placement_strategy: str = "PDT"
    """order of pipeline (P), data (D) and tensor (T) ranks, from far apart to neighbors;
    cluster = DPT, spread = TPD"""
    cp_comm_type: str = "p2p"
    """exchange of keys and values between context ranks: p2p = ring, or all_gather"""
    pipeline: str = "interleaved"
    """pipeline schedule: simple (gpipe), interleaved (1f1b), or with several stages per rank
    interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv_zero_bubble, dualpipev"""
    virtual_pipeline_degree: int = 0
    """pipeline stages per rank; 0 = minimum of the schedule"""
    microbatches: int = 1
    """number of micro-batches per batch in a pipeline or an SMP v1 step function"""
    active_microbatches: int = 0
    """limit of micro-batches in flight in schedules that run forward passes first; 0 = number of
    stages + 2"""
    pipeline_batch: str = "every_rank"
    """ranks of a pipeline that read the batch: every_rank alike, or the first_stage, which sends it
    to the others"""
    prescaled_batch: bool = True
    """tensor ranks are given the same batch; false = each its part of it, in an SMP v1 step
    function only"""
    auto_partition: bool = True
    """assign blocks to stages automatically; false = by nl.pipeline(model, split=...)"""
    default_partition: int | None = None
    """stage of the blocks that split does not name"""
    optimize: str = "memory"
    """objective of balancing the stages: memory or speed, see memory_weight"""
    memory_weight: float | None = None
    """weight of memory against time in balancing, 0 .. 1; memory = 0.8, speed = 0.2"""
    bf16: bool = False
    """compute in bfloat16 with float32 master weights and gradient reduction"""
    fp16: bool = False
    """compute in float16 with float32 master weights, gradient reduction and a loss scale"""
    fp8: bool = False
    """multiply the matrices of blocks in float8; needs bf16 = true and CUDA capability 8.9"""
    init_scale: float = 2.0**32
    """initial loss scale; overflows lower it, and 65536 wastes fewer steps"""
    scale_factor: float = 2.0
    """divisor of the loss scale after an overflow, and its factor after scale_window steps"""
    scale_window: int = 1000
    """consecutive steps without overflow before the loss scale grows"""
    min_scale: float = 1.0
    """minimum loss scale; further overflows at the minimum end the run"""
    delayed_shift: int = 1
    """number of overflows before the loss scale shrinks"""
    consecutive_hysteresis: bool = False
    """reset the count of delayed_shift after a step without overflow; false = after scale_window"""
    delayed_parameter_initialization: bool = False
    """create parameters sharded, so that no rank holds the whole model"""
    sm_activation_offloading: bool = True
    """prefetch offloaded activations; false = PyTorch's save_on_cpu, which waits for every copy"""
    activation_loading_horizon: int = 2
    """number of layers ahead of the backward pass to prefetch offloaded activations for"""
    random_seed: int = 0
    """base seed of parameter initialization and dropout"""
    fsdp_cache_flush_warnings: bool = True
    """accepted for SMP compatibility; has no effect"""
    communication_backend: str = "auto"
    """auto = nccl on GPUs, gloo on CPUs; nearlinear = nearlinear-collectives for host memory"""
    overlap_communication: bool = True
    """overlap communication with computation on CPUs; FSDP2 always does on accelerators"""
    hierarchical_all_gather: str = "auto"
    """gather between nodes first, then inside each node; auto = if measured to be faster"""
    prefetch_depth: int = 1
    """number of blocks to all-gather ahead of the computing block"""
    sdp_max_live_parameters: int = 10**9
    """limit of gathered parameters on a rank; blocks within the limit stay gathered for the whole
    step; 0 = minimum of the prefetch schedule"""
    memory_budget: str = "auto"
    """limit of gathered parameters and unreduced gradients that a rank keeps between micro-batches,
    e.g. 12GiB; auto = the size of sdp_max_live_parameters in the compute dtype"""
    gradient_reduction: str = "auto"
    """reduction of gradients in a shard group: auto = once per step for the units whose unreduced
    gradients fit in memory_budget; micro_batch = after every micro-batch"""
    sdp_reduce_bucket_size: int = 5 * 10**8
    """limit of parameters whose gradients are in flight in reduce-scatters, besides one unit;
    0 = one unit at a time, as always on accelerators"""
    sdp_gradient_clipping: float = 0.0
    """maximum L2 norm of an optimizer's gradients, clipped in every optimizer.step(); 0 = no
    clipping there (SMP v1: 1.0 unless set)"""
    shard_optimizer_state: bool = False
    """shard the optimizer states over replicas, which update a slice each; nl.shard_optimizer"""
    offload_optimizer: bool = False
    """keep optimizer states and float32 master weights in host memory and update them there"""
    gather_dtype: str = "same"
    """dtype of parameters in all-gathers: same, bf16 or fp8; does not change the compute dtype"""
    allow_empty_shards: bool = False
    """accepted for SMP compatibility; has no effect"""

    def __post_init__(self) -> None:
        schema.check_ranges(self, {})
        at_least_one = (
            "tensor_parallel_degree context_parallel_degree expert_parallel_degree "
            "pipeline_parallel_degree microbatches activation_loading_horizon scale_window "
            "delayed_shift"
        )
        for name in at_least_one.split():
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")
        if not 0 <= (self.memory_weight or 0.0) <= 1:
            raise ConfigError(f"memory_weight = {self.memory_weight}: must be in 0 .. 1")
        if self.hybrid_shard_degree != "auto" and self.hybrid_shard_degree < 0:
            raise ConfigError(
                f"hybrid_shard_degree = {self.hybrid_shard_degree}: must be 0 (all data ranks) or "
                "more"
            )
        zero_or_more = ("prefetch_depth", "virtual_pipeline_degree", "active_microbatches")
        for name in (*zero_or_more, *PARAMETER_COUNTS):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be 0 or more")
        if not 0 <= self.sdp_gradient_clipping < math.inf:
            raise ConfigError(
                f"sdp_gradient_clipping = {self.sdp_gradient_clipping}: must be 0 (no clipping) or "
                "a positive finite norm"
            )
        for name, allowed in ALLOWED_VALUES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} = {getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}"
                )
        if sorted(self.placement) != ["D", "P", "T"]:
            raise ConfigError(
                f"placement_strategy = {self.placement_strategy!r}: allowed are 'cluster', "
                "'spread', and the letters D, P and T in any order, neighbors last"
            )
        if self.memory_budget != "auto":
            if schema.parse_bytes(self.memory_budget) is None:
                raise ConfigError(
                    f"memory_budget = {self.memory_budget!r}: allowed are 'auto' and sizes such as "
                    "'12GiB' or '500MiB'"
                )
            if self.sdp_max_live_parameters != ParallelConfig.sdp_max_live_parameters:
                raise ConfigError(
                    f"memory_budget = {self.memory_budget!r} and sdp_max_live_parameters = "
                    f"{self.sdp_max_live_parameters} limit the same memory. Keep one of them."
                )
        if self.bf16 and self.fp16:
            raise ConfigError("bf16 = true and fp16 = true: choose one of the two")
        if self.offload_optimizer and self.shard_optimizer_state:
            raise ConfigError(
                "offload_optimizer = true and shard_optimizer_state = true: offloaded gradients "
                "reach host memory before replicas could scatter them; choose one of the two"
            )
        if self.fp8 and not self.bf16:
            raise ConfigError("fp8 = true needs bfloat16 for all other operations: set bf16 = true")
        if not 0 < self.min_scale <= self.init_scale < math.inf:
            raise ConfigError(
                f"min_scale = {self.min_scale:g} and init_scale = {self.init_scale:g}: min_scale "
                "must be above 0 and at most init_scale"
            )
        if not 1 < self.scale_factor < math.inf:
            raise ConfigError(f"scale_factor = {self.scale_factor:g}: must be above 1")

    @property
    def precision(self) -> str:
        """Compute dtype of blocks: fp32, bf16 or fp16."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def compute_bytes(self) -> int:
        """Bytes of a gathered parameter."""
        return 4 if self.precision == "fp32" else 2

    @property
    def budget_bytes(self) -> int:
        """``memory_budget`` in bytes."""
        size = schema.parse_bytes(self.memory_budget)
        return self.sdp_max_live_parameters * self.compute_bytes if size is None else size

    @property
    def live_parameters(self) -> int:
        """Limit of gathered parameters on a rank."""
        return self.budget_bytes // self.compute_bytes

    @property
    def placement(self) -> str:
        """``placement_strategy`` as three letters, slowest axis first."""
        return PLACEMENTS.get(self.placement_strategy, self.placement_strategy)

    @property
    def sharing(self) -> int:
        """``hybrid_shard_degree`` as a number. Raises ConfigError for "auto"."""
        if self.hybrid_shard_degree == "auto":
            raise ConfigError(
                "hybrid_shard_degree = 'auto' is chosen by nearlinear train and nl.plan, which "
                "know model and memory; give a number here"
            )
        return self.hybrid_shard_degree

    @property
    def widest(self) -> ParallelConfig:
        """This config; with all data ranks sharing in place of "auto"."""
        return replace(self, hybrid_shard_degree=0) if self.hybrid_shard_degree == "auto" else self

    def check_possible(self) -> None:
        """Raise ConfigError for combinations that are not supported."""
        if self.fp16 and self.gather_dtype == "bf16":
            raise ConfigError(
                "gather_dtype = 'bf16' with fp16 = true moves as many bytes at lower precision; "
                "set it to 'same' or 'fp8'"
            )

    def check_supported(self) -> None:
        """Raise ConfigError for unsupported combinations and log keys that have no effect."""
        self.check_possible()
        for name in () if self.fp16 else FP16_KEYS:
            if getattr(self, name) != getattr(ParallelConfig, name):
                log.warning("%s = %s has no effect without fp16", name, getattr(self, name))
        for name in ("allow_empty_shards", "fsdp_cache_flush_warnings"):
            if getattr(self, name) != getattr(ParallelConfig, name):
                log.warning("%s = %s has no effect in this release", name, getattr(self, name))
        for degree, names in KEYS_BY_DEGREE.items():
            for name in names.split() if getattr(self, degree) == 1 else ():
                if getattr(self, name) != getattr(ParallelConfig, name):
                    value = getattr(self, name)
                    log.warning("%s = %s has no effect with %s = 1", name, value, degree)

    def degrees(self, world: int) -> dict[str, int]:
        """Divide ``world`` ranks: the size of every mesh axis, slowest first.

        ``hybrid_shard_degree`` counts the ranks that share one copy of the model states, which
        includes the context axis: shard x context = hybrid_shard_degree.

        Raises:
            ConfigError: A degree does not divide the ranks; the message lists the allowed values.
        """
        for name in ("pipeline_parallel_degree", "tensor_parallel_degree"):
            _divides(name, getattr(self, name), world, "the number of ranks")
        model_ranks = self.pipeline_parallel_degree * self.tensor_parallel_degree
        _divides(
            "pipeline_parallel_degree x tensor_parallel_degree", model_ranks, world, "the ranks"
        )
        data_ranks = world // model_ranks
        rest = "the ranks left beside tensor and pipeline parallelism"
        divided = "the number of ranks" if model_ranks == 1 else rest
        sharing = self.sharing or data_ranks
        _divides("hybrid_shard_degree", sharing, data_ranks, divided)
        for name in ("context_parallel_degree", "expert_parallel_degree"):
            _divides(name, getattr(self, name), sharing, "hybrid_shard_degree")
        return {
            "pipeline": self.pipeline_parallel_degree,
            "replicate": data_ranks // sharing,
            "shard": sharing // self.context_parallel_degree,
            "context": self.context_parallel_degree,
            "tensor": self.tensor_parallel_degree,
        }


def load(
    config: ParallelConfig | dict | str | os.PathLike | None = None,
    environment: Mapping[str, str] | None = None,
) -> ParallelConfig:
    """Load a `ParallelConfig` and apply the launcher's parameters.

    Args:
        config: A dict, a path to a ``.json`` or ``.toml`` file with the keys at its top level or in
            a table ``[parallel]``, a `ParallelConfig`, or None for the defaults.
        environment: Environment variables; defaults to those of this process.

    Raises:
        ConfigError: A key or value is invalid.
    """
    environment = os.environ if environment is None else environment
    if isinstance(config, ParallelConfig):
        asked = {f.name: getattr(config, f.name) for f in fields(ParallelConfig)}
    elif config is None or isinstance(config, dict):
        asked = dict(config or {})
    elif isinstance(config, str | os.PathLike):
        asked = schema.read(config)
        if "parallel" in asked:  # the file of a whole run, whose other tables are read elsewhere
            stray = next((key for key, value in asked.items() if not isinstance(value, dict)), None)
            if stray is not None:
                raise ConfigError(
                    f"{config}: key {stray!r} stands outside [parallel] in a file that has that "
                    "table. Move it there."
                )
            asked = asked["parallel"]
    else:
        raise ConfigError(
            f"the config is a {type(config).__name__}: expected a dict, or a .toml or .json path"
        )
    return parse(canonical(asked) | canonical(launcher_parameters(environment)))


def allow_value(key: str, value: str) -> None:
    """Add ``value`` to the allowed values of the config key ``key``."""
    ALLOWED_VALUES[key] = (*ALLOWED_VALUES[key], value)


def parse(data: dict, where: str = "") -> ParallelConfig:
    """Build a `ParallelConfig` from plain data with the keys of SMP v1 or v2."""
    return schema.build(ParallelConfig, canonical(data), where, nearby=[*ALIASES, *IGNORED_V1_KEYS])


def canonical(data: dict) -> dict:
    """Translate SMP v1's keys to v2's. Keys without an equivalent are dropped with a log line."""
    result, given = {}, {}
    for key, value in data.items():
        if key in IGNORED_V1_KEYS:
            log.info(
                "config key %s = %r is accepted for compatibility with SMP v1 and has no effect",
                key,
                value,
            )
            continue
        if key == "sdp_hierarchical_allgather":
            key, value = "hierarchical_all_gather", "auto" if value else "off"
        if key in PARAMETER_COUNTS and isinstance(value, float) and value.is_integer():
            value = int(value)  # users of v1 write 1e9
        name = ALIASES.get(key, key)
        if name in result and result[name] != value:
            raise ConfigError(
                f"{given[name]} = {result[name]!r} and {key} = {value!r} are two names for one "
                "setting. Keep one of them."
            )
        result[name], given[name] = value, key
    return result


def launcher_parameters(environment: Mapping[str, str]) -> dict:
    """Return the keys in the launcher's environment variable. Raises ConfigError."""
    text = environment.get(LAUNCHER_VARIABLE, "").strip()
    if not text:
        return {}
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{LAUNCHER_VARIABLE} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{LAUNCHER_VARIABLE} = {text}: expected a JSON object")
    return data


def whole_number(variable: str, default: int = 0) -> int:
    """Read a whole number from an environment variable. Raises ConfigError for other values."""
    text = os.environ.get(variable, str(default)).strip()
    if not text.isdigit():
        raise ConfigError(f"{variable} = {text!r} in the environment: expected a whole number")
    return int(text)


def _divides(name: str, degree: int, total: int, what: str) -> None:
    if degree > total or total % degree:
        raise ConfigError(
            f"{name} = {degree} does not divide {what}, {total}: allowed are {divisors(total)}"
        )


def divisors(total: int) -> str:
    """The degrees that divide ``total``, for an error."""
    return ", ".join(str(d) for d in range(1, total + 1) if total % d == 0)
