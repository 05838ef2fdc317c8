"""Everything a training run can be told, in one file: what a flag does, a key does.

Read from TOML or JSON by `load`, changed by ``--set table.key=value``, printed with every key's
meaning by ``nearlinear train --print-config``. No torch here: `--help` and errors are quick.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .. import config as parallel_config
from .. import schema
from ..config import Config
from ..errors import ConfigError
from ..moe import MoEConfig
from ..parallel.activations import strategy
from ..schema import coerce
from . import pretrained
from .presets import context_key, preset


@dataclass(frozen=True)
class ModelConfig:
    """Which model to train, and from which values."""

    preset: str = "gpt2-tiny"
    """gpt2-tiny, gpt2-small, gpt2-xl, gpt2-30b, llama-tiny, llama2-7b, llama2-13b, llama2-70b,
    gpt-neox-tiny, gpt-neox-20b, mistral-7b, mixtral-tiny, mixtral-8x7b"""
    context: int = 0
    """longest sequence the model can read, tokens; 0 = the preset's"""
    overrides: dict = field(default_factory=dict)
    """keys of the Hugging Face model config to change, as in n_layer = 2"""
    init_from: str = ""
    """a Hugging Face folder (config.json, safetensors) to start from, in place of a preset; empty =
    from the model's own initialisation"""

    @property
    def architecture(self) -> dict:
        """Family, context and shape: the preset's, or of the folder to start from."""
        return pretrained.architecture(self.init_from) if self.init_from else preset(self.preset)

    @property
    def is_here(self) -> bool:
        """Whether it can be told; a job's folder may be on the machines that will run it."""
        return not self.init_from or Path(self.init_from).is_dir()

    @property
    def name(self) -> str:
        """What to call the model: its preset or folder."""
        return self.init_from or self.preset

    @property
    def family(self) -> str:
        return self.architecture["family"]

    @property
    def longest_sequence(self) -> int:
        """Tokens the model can read at once. Raises ConfigError if that is asked for twice."""
        key = context_key(self.family)
        override = self.overrides.get(key, self.context)
        if self.context and override != self.context:
            raise ConfigError(
                f"model.context = {self.context} and model.overrides.{key} = {override} are two "
                "names for one setting: keep one"
            )
        return coerce(override, int, f"model.overrides.{key}") or self.architecture["context"]


@dataclass(frozen=True)
class DataConfig:
    """Which tokens to train on, and in which order."""

    path: str = ""
    """folder of token shards written by python -m data_prep"""
    sequence_length: int = 0
    """tokens per sequence; 0 = the model's context"""
    seed: int = 0
    """seed of the global shuffle"""
    verify: Literal["auto", "full", "size"] = "auto"
    """check the shards' sha256 (full), sizes only (size), or full up to 2 GiB (auto)"""
    shuffle_block_mib: int = 0
    """MiB of a file that are shuffled and read together, for Lustre; 0 = single sequences"""
    shuffle_blocks: int = 64
    """blocks mixed at a time, at least one per node; no effect without shuffle_block_mib"""
    read_ahead: int = 0
    """steps whose sequences are read before they are needed, by a thread"""
    resume: str = ""
    """a data_state.json of an earlier run: continue with the batches it had not seen"""


@dataclass(frozen=True)
class BatchConfig:
    """How many sequences make an optimizer step."""

    micro_batch_size: int = 8
    """sequences per rank in one forward and backward"""
    accumulation: int = 1
    """micro-batches per optimizer step"""


@dataclass(frozen=True)
class ActivationsConfig:
    """What becomes of activations between the forward and the backward pass."""

    checkpoint: str = ""
    """recompute: each block, group_N blocks together, contiguous (all), selective (all but matrix
    products and attention), or as few as a budget asks for, as in 12GiB; empty = keep everything"""
    offload: bool = False
    """keep in host memory what blocks save; see parallel.activation_loading_horizon"""

    def __post_init__(self):
        if self.checkpoint:
            strategy.parse(self.checkpoint)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay, warm-up and cosine decay."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw, or adamw_8bit: its states in 8 bits, by torchao; they cannot be saved"""
    implementation: Literal["auto", "fused", "foreach", "for_loop"] = "auto"
    """how adamw updates: in one kernel, by lists of tensors, or one by one; auto = fused on GPUs
    and where the optimizer is offloaded, else for_loop"""
    lr: float = 6e-4
    """peak learning rate"""
    min_lr_ratio: float = 0.1
    """final learning rate as a share of the peak"""
    warmup_steps: int = 10
    """steps of linear warm-up"""
    weight_decay: float = 0.1
    """decay of matrices; biases and norms have none"""
    beta1: float = 0.9
    """decay of the gradient's mean"""
    beta2: float = 0.95
    """decay of the gradient's square"""
    eps: float = 1e-8
    """added to the denominator"""
    clip: float = 1.0
    """largest norm of all gradients together; 0 = no clipping"""


@dataclass(frozen=True)
class LoopConfig:
    """How long to train, and what to do along the way."""

    steps: int = 100
    """optimizer steps"""
    stop_after: int = 0
    """stop after this step, with the schedule still laid out for all steps; 0 = at the end"""
    two_hop: bool = True
    """all-reduce across replicas once per step instead of after every micro-batch"""
    bad_steps_in_a_row: int = 10
    """steps that are skipped, one after the other, before the run stops: their loss or gradients
    are not finite, or a spike; 0 = it stops at the first"""
    spike_factor: float = 0.0
    """skip a step whose gradient norm is so many times the usual one; 0 = however large it is"""
    compile_blocks: bool = False
    """have torch.compile make one graph of a block, for all of them; the first step takes longer"""
    eval_every: int = 50
    """steps between evaluations on held-out tokens; 0 = only at the end"""
    eval_sequences: int = 256
    """held-out sequences in one evaluation, over all ranks; 0 = no evaluation"""
    sample_tokens: int = 32
    """tokens of text to generate at the end; 0 = none"""
    sample_prompt: str = "The"
    """what the generated text starts with"""


@dataclass(frozen=True)
class CheckpointConfig:
    """What the run keeps of itself, so that it can go on after an end before its time."""

    folder: str = ""
    """where checkpoints are, a folder that all nodes see; empty = the run keeps none"""
    every: int = 0
    """steps between checkpoints; 0 = only at the end, and when the run is told to end (SIGTERM)"""
    every_minutes: float = 0.0
    """minutes between checkpoints; 0 = steps count alone"""
    keep: int = 2
    """the newest so many are kept"""
    asynchronous: bool = True
    """write while training goes on, from a copy of the state in host memory"""
    resume: bool = True
    """go on from the newest checkpoint in the folder, if there is one"""


@dataclass(frozen=True)
class RunConfig:
    """Where the run leaves its files, and how many ranks to start here."""

    folder: str = "runs/latest"
    """folder for config, metrics, plots and the data state"""
    nproc: int = 0
    """ranks to start on this machine; 0 = one per GPU, or one; no effect under torchrun"""
    log_every: int = 1
    """steps between lines"""
    tensorboard: bool = True
    """write TensorBoard events where tensorboard is installed"""
    memory_report: bool = True
    """measure where the memory of the first step goes, say it and write memory.json"""
    peak_tflops: float = 0.0
    """peak of one accelerator, for the MFU; 0 = known by name, or measured on a CPU"""


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
            ("optimizer.implementation", self.optimizer.implementation, "auto", "it has its own"),
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


_LEAST = {
    "model.context": 0,
    "data.sequence_length": 0,
    "data.shuffle_block_mib": 0,
    "data.shuffle_blocks": 1,
    "data.read_ahead": 0,
    "batch.micro_batch_size": 1,
    "batch.accumulation": 1,
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
    "checkpoint.every": 0,
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
