"""Everything a training run can be told, in one file: what a flag does, a key does.

Read from TOML or JSON by `load`, changed by ``--set table.key=value``, printed with every key's
meaning by ``nearlinear train --print-config``. No torch here: `--help` and errors are quick.
"""

from dataclasses import dataclass, field, fields

from .. import config as parallel_config
from .. import schema
from ..config import Config
from ..errors import ConfigError
from ..moe import MoEConfig
from .tables import (
    ActivationsConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    PlanConfig,
    RunConfig,
)


@dataclass(frozen=True)
class TrainConfig:
    """A whole training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: Config = field(default_factory=Config)
    moe: MoEConfig = field(default_factory=MoEConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self):
        if self.model.init_from and self.model.preset != ModelConfig.preset:
            raise ConfigError(
                f"model.preset = {self.model.preset!r} and model.init_from name two models: drop "
                "model.preset, the folder's config.json says what the model is"
            )
        for key, least in _LEAST.items():
            table, name = key.split(".")
            value = getattr(getattr(self, table), name)
            if not value >= least:  # NaN too
                raise ConfigError(f"{key} = {value}: must be at least {least}")
        for name in ("min_lr_ratio", "beta1", "beta2"):
            value = getattr(self.optimizer, name)
            if not 0 <= value <= 1 or (name != "min_lr_ratio" and value == 1):
                raise ConfigError(f"optimizer.{name} = {value}: must be from 0 to 1")
        if self.optimizer.kind == "adamw_8bit":
            self._check_8bit()
        if self.batch.micro_batch_size * self.batch.accumulation > 2**31:
            raise ConfigError("batch.micro_batch_size x batch.accumulation: more than 2^31 samples")
        if self.parallel.pipeline_parallel_degree > 1:
            self._check_microbatches()
        if self.model.is_here and self.sequence_length > self.model.longest_sequence:
            raise ConfigError(
                f"data.sequence_length = {self.data.sequence_length} is longer than the model's "
                f"context of {self.model.longest_sequence} tokens: lower it, or raise model.context"
            )

    def _check_8bit(self) -> None:
        for key, value, other, why in (
            ("checkpoint.folder", self.checkpoint.folder, "", "its states cannot be saved"),
            ("optimizer.implementation", self.optimizer.implementation, "fused", "it has its own"),
            ("parallel.offload_optimizer", self.parallel.offload_optimizer, False,
             "it is compiled for the accelerator that has the parameters"),
        ):  # fmt: skip
            if value != other:
                raise ConfigError(
                    f'optimizer.kind = "adamw_8bit" and {key} = {value!r}: {why}; set {key} = '
                    f'{other!r}, or optimizer.kind = "adamw"'
                )

    def _check_microbatches(self) -> None:
        size, parts = self.batch.micro_batch_size, self.parallel.microbatches
        if size % parts:
            raise ConfigError(
                f"batch.micro_batch_size = {size} is what a pipeline cuts into "
                f"parallel.microbatches = {parts} equal parts: make it a multiple"
            )

    @property
    def sequence_length(self) -> int:
        """Tokens per training sequence."""
        return self.data.sequence_length or self.model.longest_sequence


# Now, while there is one thread: CPython 3.11's ast fails where several parse at once (gh-106905).
for _table in (TrainConfig, *(each.default_factory for each in fields(TrainConfig))):
    schema.field_docs(_table)


_LEAST = {
    "model.context": 0,
    "data.sequence_length": 0,
    "data.cache_gib": 0.0,
    "data.vocab_size": 0,
    "data.eos_id": -1,
    "data.shuffle_block_mib": 0,
    "data.shuffle_blocks": 1,
    "data.read_ahead": 0,
    "batch.micro_batch_size": 1,
    "batch.accumulation": 1,
    "batch.sequences": 0,
    "optimizer.lr": 0.0,
    "optimizer.eps": 0.0,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip": 0.0,
    "train.steps": 1,
    "train.stop_after": 0,
    "train.eval_every": 0,
    "train.eval_sequences": 0,
    "train.sample_tokens": 0,
    "train.bad_steps_in_a_row": 0,
    "train.spike_factor": 0.0,
    "train.rank_timeout": 0.0,
    "checkpoint.every": 0,
    "checkpoint.every_minutes": 0.0,
    "checkpoint.keep": 1,
    "run.nproc": 0,
    "run.log_every": 1,
    "run.peak_tflops": 0.0,
}


def load(source=None, settings=(), environment=None) -> TrainConfig:
    """The config from a path, a dict or None, then ``settings`` ("a.b=value"), then the launcher.

    ``SM_HP_MP_PARAMETERS`` wins over the table ``[parallel]``, key by key. The table ``[job]`` is
    for `launch`. Raises ConfigError.
    """
    data = dict(source) if isinstance(source, dict) else schema.read(source) if source else {}
    changes: dict = {}
    for setting in settings:
        schema.assign(changes, setting)
    for table in (data, changes):
        if not isinstance(table.get("parallel", {}), dict):
            raise ConfigError(
                f"parallel = {table['parallel']!r}: expected a table of keys and values"
            )
    data.pop("job", None)
    file, flags = data.pop("parallel", {}), changes.pop("parallel", {})
    parallel = parallel_config.canonical(file) | parallel_config.canonical(flags)
    data = merged(data, changes)
    data["parallel"] = parallel_config.load(parallel, environment)
    return schema.build(TrainConfig, data)


def merged(data: dict, changes: dict) -> dict:
    """``data`` with the leaves of ``changes`` put in, table by table."""
    result = dict(data)
    for key, value in changes.items():
        below = result.get(key)
        nested = isinstance(value, dict) and isinstance(below, dict)
        result[key] = merged(below, value) if nested else value
    return result
