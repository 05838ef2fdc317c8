"""What was asked: the parallel layout, in the names SageMaker's model parallel users know.

`Config` holds SMP v2's keys and accepts v1's as aliases (source: the public SMP documentation).
Precedence, lowest first: defaults, the dict or file given to `nl.init`, then the launcher's
parameters in the environment variable ``SM_HP_MP_PARAMETERS`` (JSON), as SageMaker promises.
`Config.degrees(world)` says how a given number of ranks is cut up, or why it cannot be.
"""

import json
import logging
import math
import os
from dataclasses import dataclass, fields

from . import schema
from .config_words import (
    ALIASES,
    COUNTS_OF_V1,
    OF_DEGREE,
    OF_FP16,
    PLACEMENTS,
    TUNING_OF_V1,
    WORDS,
)
from .errors import ConfigError

log = logging.getLogger(__name__)

LAUNCHER_VARIABLE = "SM_HP_MP_PARAMETERS"


@dataclass(frozen=True)
class Config:
    """The parallel layout of a run; every degree counts ranks."""

    hybrid_shard_degree: int = 0
    """ranks that share one copy of the model states; 0 = all data ranks, 1 = no sharding"""
    tensor_parallel_degree: int = 1
    """ranks that split every layer's matrices"""
    context_parallel_degree: int = 1
    """ranks that split every sequence; they are part of the shard group"""
    expert_parallel_degree: int = 1
    """ranks that split a mixture's experts; they are part of the shard group"""
    pipeline_parallel_degree: int = 1
    """stages the layers are cut into"""
    placement_strategy: str = "PDT"
    """which of pipeline (P), data (D) and tensor (T) ranks are far apart and, last, neighbours;
    cluster = DPT, spread = TPD"""
    cp_comm_type: str = "p2p"
    """how keys and values reach the other context ranks: p2p = round a ring, or all_gather"""
    pipeline: str = "interleaved"
    """order of a pipeline's work: simple (gpipe), interleaved (1f1b), or with several stages per
    rank interleaved_1f1b, looped_bfs, interleaved_zero_bubble, zbv_zero_bubble, dualpipev"""
    virtual_pipeline_degree: int = 0
    """stages per rank of a pipeline; 0 = as few as its schedule needs"""
    microbatches: int = 1
    """micro-batches a pipeline, or nl.step, cuts each batch into"""
    active_microbatches: int = 0
    """micro-batches in flight at most where forward passes come first; 0 = two more than stages"""
    prescaled_batch: bool = True
    """ranks that split a model are given the same batch; it cannot be otherwise here"""
    auto_partition: bool = True
    """find which blocks go to which stage; false = by nl.pipeline(model, split=...)"""
    default_partition: int | None = None
    """the stage of blocks that split does not name"""
    optimize: str = "memory"
    """what stages are balanced by: memory or speed, see memory_weight"""
    memory_weight: float | None = None
    """how much memory counts beside time, 0 .. 1; memory = 0.8, speed = 0.2"""
    bf16: bool = False
    """compute in bfloat16 with float32 master weights and gradient reduction"""
    fp16: bool = False
    """compute in float16 with float32 master weights, gradient reduction and a loss scale"""
    fp8: bool = False
    """multiply the blocks' matrices in float8, with bf16 = true; GPUs of CUDA capability 8.9"""
    init_scale: float = 2.0**32
    """loss scale of the first step; gradients that overflow lower it, 65536 wastes fewer steps"""
    scale_factor: float = 2.0
    """what the loss scale is divided by after an overflow, and multiplied by after scale_window"""
    scale_window: int = 1000
    """steps in a row without overflow before the loss scale grows"""
    min_scale: float = 1.0
    """least loss scale; overflows that go on there end the run"""
    delayed_shift: int = 1
    """overflows before the loss scale shrinks"""
    consecutive_hysteresis: bool = False
    """a step without overflow begins the count of delayed_shift anew; false = scale_window does"""
    delayed_parameter_initialization: bool = False
    """create parameters already sharded, so that no rank holds the whole model"""
    sm_activation_offloading: bool = True
    """offload with prefetch wherever activation offloading is applied; false = PyTorch's own, which
    waits for every copy"""
    activation_loading_horizon: int = 2
    """layers ahead of the backward pass whose offloaded activations come back to the accelerator"""
    random_seed: int = 0
    """base seed of parameter initialisation and dropout"""
    fsdp_cache_flush_warnings: bool = True
    """warn when the caching allocator flushes"""
    communication_backend: str = "auto"
    """auto = nccl on GPUs, else gloo; nearlinear = nearlinear-collectives for host memory"""
    overlap_communication: bool = True
    """communicate beside computation; on accelerators FSDP2 always does"""
    hierarchical_all_gather: str = "auto"
    """gather across nodes first, then inside them; auto = where that was measured to pay"""
    prefetch_depth: int = 1
    """blocks gathered ahead of the one that computes"""
    sdp_max_live_parameters: int = 10**9
    """parameters that may be gathered at once on a rank; blocks that fit stay gathered for a whole
    step, 0 = as few as the schedule needs"""
    sdp_reduce_bucket_size: int = 5 * 10**8
    """parameters whose gradients may be on their way to the ranks that keep them at once; one
    unit's always may, 0 = no more; accelerators never have more"""
    shard_optimizer_state: bool = False
    """replicas share the optimizer's state and update a slice each; nl.shard_optimizer"""
    offload_optimizer: bool = False
    """keep the optimizer's states and the float32 master values in host memory, and update there"""
    gather_dtype: str = "same"
    """what parameters travel as in gathers: same, bf16 or fp8; they compute as before"""
    allow_empty_shards: bool = False
    """allow shards without elements where a parameter does not divide"""

    def __post_init__(self):
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
        if not self.prescaled_batch and self.tensor_parallel_degree > 1:
            raise ConfigError(
                "prescaled_batch = false: ranks that split a model read the same batch here: set "
                "it to true and read by data rank, as nl.Loader does"
            )
        if self.hybrid_shard_degree < 0:
            raise ConfigError(
                f"hybrid_shard_degree = {self.hybrid_shard_degree}: must be 0 (all data ranks) or "
                "more"
            )
        zero_or_more = ("prefetch_depth", "virtual_pipeline_degree", "active_microbatches")
        for name in (*zero_or_more, *COUNTS_OF_V1):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be 0 or more")
        for name, allowed in WORDS.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} = {getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}"
                )
        if sorted(self.placement) != ["D", "P", "T"]:
            raise ConfigError(
                f"placement_strategy = {self.placement_strategy!r}: allowed are 'cluster', "
                "'spread', and the letters D, P and T in any order, neighbours last"
            )
        if self.bf16 and self.fp16:
            raise ConfigError("bf16 = true and fp16 = true: choose one of the two")
        if self.offload_optimizer and self.shard_optimizer_state:
            raise ConfigError(
                "offload_optimizer = true and shard_optimizer_state = true: offloaded gradients "
                "reach host memory before replicas could share them out: choose one of the two"
            )
        if self.fp8 and not self.bf16:
            raise ConfigError("fp8 = true is for matrix products beside bfloat16: set bf16 = true")
        if not 0 < self.min_scale <= self.init_scale < math.inf:
            raise ConfigError(
                f"min_scale = {self.min_scale:g} and init_scale = {self.init_scale:g}: the first "
                "must be above 0 and not above the second"
            )
        if not 1 < self.scale_factor < math.inf:
            raise ConfigError(f"scale_factor = {self.scale_factor:g}: must be above 1")

    @property
    def precision(self) -> str:
        """What blocks compute in: fp32, bf16 or fp16."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def placement(self) -> str:
        """``placement_strategy`` as three letters, slowest first."""
        return PLACEMENTS.get(self.placement_strategy, self.placement_strategy)

    def check_possible(self) -> None:
        """Refuse what this release cannot do."""
        if self.fp16 and self.gather_dtype == "bf16":
            raise ConfigError(
                "gather_dtype = 'bf16' with fp16 = true: as many bytes, and less of each number; "
                "set it to 'same' or 'fp8'"
            )

    def check_supported(self) -> None:
        """Refuse what this release cannot do, and say what has no effect: nothing is ignored."""
        self.check_possible()
        for name in () if self.fp16 else OF_FP16:
            if getattr(self, name) != getattr(Config, name):
                log.warning("%s = %s has no effect without fp16", name, getattr(self, name))
        for name in ("allow_empty_shards", "fsdp_cache_flush_warnings"):
            if getattr(self, name) != getattr(Config, name):
                log.warning("%s = %s has no effect in this release", name, getattr(self, name))
        for degree, names in OF_DEGREE.items():
            for name in names.split() if getattr(self, degree) == 1 else ():
                if getattr(self, name) != getattr(Config, name):
                    value = getattr(self, name)
                    log.warning("%s = %s has no effect with %s = 1", name, value, degree)

    def degrees(self, world: int) -> dict[str, int]:
        """How ``world`` ranks are cut: the size of every mesh axis, slowest first.

        ``hybrid_shard_degree`` counts the ranks that share one copy of the model states, so the
        context axis is inside it: shard x context = hybrid_shard_degree. Raises ConfigError.
        """
        for name in ("pipeline_parallel_degree", "tensor_parallel_degree"):
            _divides(name, getattr(self, name), world, "the number of ranks")
        model_ranks = self.pipeline_parallel_degree * self.tensor_parallel_degree
        _divides(
            "pipeline_parallel_degree x tensor_parallel_degree", model_ranks, world, "the ranks"
        )
        data_ranks = world // model_ranks
        rest = "the ranks left beside tensor and pipeline parallelism"
        what = "the number of ranks" if model_ranks == 1 else rest
        sharing = self.hybrid_shard_degree or data_ranks
        _divides("hybrid_shard_degree", sharing, data_ranks, what)
        for name in ("context_parallel_degree", "expert_parallel_degree"):
            _divides(name, getattr(self, name), sharing, "hybrid_shard_degree")
        return {
            "pipeline": self.pipeline_parallel_degree,
            "replicate": data_ranks // sharing,
            "shard": sharing // self.context_parallel_degree,
            "context": self.context_parallel_degree,
            "tensor": self.tensor_parallel_degree,
        }


def load(config=None, environment=None) -> Config:
    """The `Config` from a dict, a ``.json``/``.toml`` path, a `Config` or None, and the launcher.

    A file may hold the keys at its top or in a table ``[parallel]``. Raises ConfigError.
    """
    environment = os.environ if environment is None else environment
    if isinstance(config, Config):
        asked = {f.name: getattr(config, f.name) for f in fields(Config)}
    elif config is None or isinstance(config, dict):
        asked = dict(config or {})
    elif isinstance(config, str | os.PathLike):
        asked = schema.read(config)
        if "parallel" in asked:  # a whole run's file: the other tables are not ours to read
            stray = next((key for key, value in asked.items() if not isinstance(value, dict)), None)
            if stray is not None:
                raise ConfigError(
                    f"{config}: {stray!r} stands outside [parallel] in a file that has that table: "
                    "move it there"
                )
            asked = asked["parallel"]
    else:
        raise ConfigError(
            f"the config is a {type(config).__name__}: expected a dict, or a .toml or .json path"
        )
    return parse(canonical(asked) | canonical(_from_launcher(environment)))


def parse(data: dict, where: str = "") -> Config:
    """A `Config` from plain data under the names of SMP v1 or v2. Raises ConfigError."""
    return schema.build(Config, canonical(data), where, nearby=[*ALIASES, *TUNING_OF_V1])


def canonical(data: dict) -> dict:
    """``data`` under v2's names; v1's keys without effect are dropped with a log line."""
    result, given = {}, {}
    for key, value in data.items():
        if key in TUNING_OF_V1:
            log.info("config key %s = %r: accepted for SMP v1's sake, has no effect", key, value)
            continue
        if key == "sdp_hierarchical_allgather":
            key, value = "hierarchical_all_gather", "auto" if value else "off"
        if key in COUNTS_OF_V1 and isinstance(value, float) and value.is_integer():
            value = int(value)  # v1's users write 1e9
        name = ALIASES.get(key, key)
        if name in result and result[name] != value:
            raise ConfigError(
                f"{given[name]} = {result[name]!r} and {key} = {value!r} are two names for one "
                "setting: keep one"
            )
        result[name], given[name] = value, key
    return result


def _from_launcher(environment) -> dict:
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
    """A whole number from the environment. Raises ConfigError for anything else."""
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
