"""The config of a training run: one dataclass per table, one key per setting.

`load` reads TOML or JSON and applies ``--set table.key=value`` and the launcher's environment
variable. ``nearlinear train --print-config`` prints every key with its docstring. Imports no torch,
so that `--help` and errors are fast.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError, ConfigError
from . import architecture, schema
from . import parallel as parallel_config
from .activation_strategy import parse_strategy
from .architecture import Architecture, context_key, get_preset, objective_of
from .moe import MoEConfig
from .parallel import ParallelConfig
from .schema import coerce

log = logging.getLogger(__name__)

Packing = Literal["concat", "best_fit", "one_document"]
"""Ways to fill sequences with documents, see `nearlinear.data.packing`."""


TRACKERS = ("wandb", "mlflow", "cloudwatch")
"""Allowed values of ``run.trackers``."""


@dataclass(frozen=True)
class ModelConfig:
    """The model and its initial values."""

    preset: str = "gpt2-tiny"
    """gpt2-tiny, gpt2-small, gpt2-xl, gpt2-30b, llama-tiny, llama2-7b, llama2-13b, llama2-70b,
    llama3-8b, llama3-70b, llama3-405b, gpt-neox-tiny, gpt-neox-20b, mistral-7b, mixtral-tiny,
    mixtral-8x7b, mixtral-8x22b, bert-tiny, bert-base, t5-tiny, t5-small"""
    objective: Literal["auto", "causal", "masked", "span_corruption"] = "auto"
    """predict the next token (causal), masked tokens (BERT), or corrupted spans with an
    encoder-decoder (T5); auto = as the family is pre-trained"""
    context: int = 0
    """longest sequence of the model in tokens; 0 = the preset's"""
    overrides: dict[str, Any] = field(default_factory=dict)
    """keys of the Hugging Face model config to change, e.g. n_layer = 2"""
    init_from: str = ""
    """model to start from instead of a preset: a Hugging Face folder (config.json, safetensors), or
    a name on the Hub, as in org/model or org/model@revision; a config.json alone can be planned;
    empty = random initialization"""

    @property
    def architecture(self) -> Architecture:
        """The architecture of the preset, or of the folder to start from."""
        if self.init_from:
            return architecture.read_architecture(self.init_from)
        return get_preset(self.preset)

    @property
    def trained_objective(self) -> str:
        """The objective with ``auto`` resolved."""
        return self.objective if self.objective != "auto" else objective_of(self.family)

    @property
    def is_readable(self) -> bool:
        """True if the architecture is known here; a job's folder may be on its machines only."""
        if not self.init_from or Path(self.init_from).is_file():
            return True
        try:
            return architecture.model_folder(self.init_from, download=False).is_dir()
        except CheckpointError:  # not downloaded yet
            return False

    @property
    def name(self) -> str:
        """Name of the model: its preset or folder."""
        return self.init_from or self.preset

    @property
    def family(self) -> str:
        """``model_type`` of the model in transformers."""
        return self.architecture["family"]

    @property
    def longest_sequence(self) -> int:
        """Longest sequence of the model in tokens. Raises ConfigError if it is set twice."""
        key = context_key(self.family)
        override = self.overrides.get(key, self.context)
        if self.context and override != self.context:
            raise ConfigError(
                f"model.context = {self.context} and model.overrides.{key} = {override} are two "
                "names for one setting: remove one of them"
            )
        tokens: Any = coerce(override, int, f"model.overrides.{key}")
        return tokens or self.architecture["context"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA) beside the frozen weights of a model."""

    rank: int = 0
    """rank of the adapters, with peft; 0 = train all weights"""
    alpha: float = 16.0
    """scale: the product of an adapter's matrices is multiplied by alpha / rank"""
    targets: list[str] = field(default_factory=list)
    """names of the linear layers with adapters, e.g. ["q_proj", "v_proj"]; empty = all of them"""
    dropout: float = 0.0
    """dropout of the inputs of adapters"""


@dataclass(frozen=True)
class PreferenceConfig:
    """Training on pairs of conversations (nearlinear data preference), by DPO."""

    beta: float = 0.1
    """weight of the log probabilities in the loss; the larger, the closer the model stays to the
    one at the start of the run"""
    skip_long: bool = False
    """leave out pairs longer than a sequence, with a warning, instead of an error"""


@dataclass(frozen=True)
class DataConfig:
    """The training data and its order."""

    path: str = ""
    """folder of token shards written by nearlinear data; or s3://bucket/prefix; channel:name in
    a SageMaker job; or token files of Megatron or nanoGPT (.bin), datatrove (.ds), OLMo (.npy),
    litdata or Streaming (folders)"""
    sources: dict[str, float] = field(default_factory=dict)
    """mixture of several such folders instead of path, with weights, e.g. "tokens/code" = 0.3"""
    curriculum: dict[str, Any] = field(default_factory=dict)
    """other weights of the sources from a number of tokens on, e.g. "300e9" = {"tokens/code" = 1};
    sources without a weight are not read"""
    max_epochs: dict[str, float] = field(default_factory=dict)
    """most passes over a source, after which only the others are read, e.g. "tokens/code" = 4"""
    sequence_length: int = 0
    """tokens per sequence; 0 = the model's context"""
    packing: Packing = "concat"
    """fill sequences with documents end to end (concat), cut only documents longer than a sequence
    (best_fit), or put one document in each (one_document); the last two add padding"""
    document_mask: bool = False
    """restrict attention to each document of a sequence; off = documents see each other"""
    mask_eos: bool = False
    """exclude the token that ends a document from the loss"""
    fim_rate: float = 0.0
    """share of the documents that are rearranged for filling in: prefix, suffix, then middle"""
    fim_spm_rate: float = 0.5
    """share of these that begin with the suffix"""
    fim_tokens: list[str] = field(default_factory=list)
    """tokens before prefix, middle and suffix; empty = those of StarCoder, Qwen, Code Llama or
    DeepSeek, whichever the data's tokenizer has"""
    noise_density: float = 0.15
    """share of the tokens that are masked or in corrupted spans; no effect with the causal
    objective"""
    mean_noise_span: float = 3.0
    """mean tokens per corrupted span"""
    seed: int = 0
    """seed of the global shuffle and of the noise"""
    verify: Literal["auto", "full", "size"] = "auto"
    """verify every block of the shards (full), sizes only (size), or full up to 2 GiB (auto)"""
    shuffle_block_mib: int = 0
    """MiB of a file that are shuffled and read together, for Lustre; 0 = single sequences"""
    shuffle_blocks: int = 64
    """blocks mixed at a time, at least one per node; no effect without shuffle_block_mib"""
    read_ahead: int = 0
    """steps whose sequences a thread reads in advance"""
    cache: str = ""
    """folder on each node for blocks of data in a bucket and for the plans of best_fit and
    one_document; empty = ~/.cache/nearlinear"""
    cache_gib: float = 0.0
    """limit of cached blocks in GiB; 0 = all blocks that were read"""
    vocab_size: int = 0
    """number of ids in token files of other projects, which do not record it; 0 = GPT-2's
    50,257"""
    eos_id: int = -1
    """id that ends a document in token files of other projects; -1 = the last id"""
    resume: str = ""
    """data_state.json of an earlier run: continue with the batches it has not seen"""

    def __post_init__(self) -> None:
        if self.path and self.sources:
            raise ConfigError(
                f"data.path = {self.path} and data.sources are both set: remove one of them"
            )
        if len(self.fim_tokens) not in (0, 3) or len(set(self.fim_tokens)) != len(self.fim_tokens):
            raise ConfigError(
                f"data.fim_tokens = {self.fim_tokens}: give three names, of the tokens before "
                "prefix, middle and suffix"
            )
        if self.curriculum:
            self._check_curriculum()
        self._check_known("data.max_epochs", self.max_epochs)

    def _check_known(self, label: str, folders: Mapping[str, Any]) -> None:
        if unknown := folders.keys() - self.sources.keys():
            raise ConfigError(f"{label}: {min(unknown)} is not in data.sources: add it there")

    def _check_curriculum(self) -> None:
        if not self.sources:
            raise ConfigError("data.curriculum changes the weights of data.sources: set them")
        for tokens, weights in self.curriculum.items():
            label = f'data.curriculum."{tokens}"'
            try:
                begin = float(tokens)
            except ValueError:
                begin = math.nan
            if not 0 < begin < math.inf:
                raise ConfigError(f"{label}: the key must be a number of tokens above 0")
            if not isinstance(weights, dict):
                raise ConfigError(f"{label} = {weights!r}: expected weights by folder")
            self._check_known(label, weights)
            for folder, weight in weights.items():
                coerce(weight, float, f'{label}."{folder}"')

    def stages(self, sequence_length: int) -> list[tuple[int, dict[str, float]]]:
        """Return the first sequence of each stage of the curriculum and its weights, in order."""
        found = (
            (math.ceil(float(tokens) / sequence_length), {
                folder: float(weights.get(folder, 0.0)) for folder in self.sources
            })
            for tokens, weights in self.curriculum.items()
        )  # fmt: skip
        return sorted(found, key=lambda stage: stage[0])

    @property
    def folders(self) -> list[str]:
        """Folders of the data."""
        return [self.path] if self.path else list(self.sources)

    @property
    def folder(self) -> str:
        """The folder whose tokenizer and vocabulary apply to all; empty if no data is set."""
        return next(iter(self.folders), "")


@dataclass(frozen=True)
class BatchConfig:
    """The number of sequences per optimizer step."""

    micro_batch_size: int = 8
    """sequences per rank in one forward and backward"""
    accumulation: int = 1
    """micro-batches per optimizer step"""
    sequences: int = 0
    """sequences per optimizer step over all ranks, which determines accumulation, so that a run can
    continue on another number of ranks; 0 = set by accumulation"""

    def __post_init__(self) -> None:
        if self.sequences and self.accumulation != 1:
            raise ConfigError(
                f"batch.sequences = {self.sequences} and batch.accumulation = {self.accumulation}: "
                "sequences determines accumulation; remove batch.accumulation"
            )

    def micro_batches(self, data_ranks: int) -> int:
        """Return the micro-batches per step of each rank. Raises ConfigError if not whole."""
        if not self.sequences:
            return self.accumulation
        per_pass = self.micro_batch_size * data_ranks
        if self.sequences % per_pass:
            raise ConfigError(
                f"batch.sequences = {self.sequences} is not a multiple of batch.micro_batch_size x "
                f"data ranks = {self.micro_batch_size} x {data_ranks}: change "
                "batch.micro_batch_size or the number of ranks"
            )
        return self.sequences // per_pass


@dataclass(frozen=True)
class ActivationsConfig:
    """Recomputation and offloading of activations."""

    checkpoint: str = ""
    """recompute: each block, group_N blocks together, contiguous (all), selective (all but matrix
    products and attention), or as few as a budget requires, e.g. 12GiB; empty = no recomputation"""
    offload: bool = False
    """keep the saved activations of blocks in host memory; see
    parallel.activation_loading_horizon"""

    def __post_init__(self) -> None:
        if self.checkpoint:
            parse_strategy(self.checkpoint)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay, warm-up and cosine decay."""

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw, or adamw_8bit with 8-bit states by torchao, which cannot be saved"""
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    """implementation of adamw: one kernel, lists of tensors, or one tensor at a time"""
    lr: float = 6e-4
    """peak learning rate"""
    min_lr_ratio: float = 0.1
    """final learning rate as a share of the peak"""
    warmup_steps: int = 10
    """steps of linear warm-up"""
    weight_decay: float = 0.1
    """weight decay of matrices; biases and norms have none"""
    beta1: float = 0.9
    """decay rate of the gradient's mean"""
    beta2: float = 0.95
    """decay rate of the gradient's square"""
    eps: float = 1e-8
    """added to the denominator"""
    clip: float = 1.0
    """largest norm of all gradients together; 0 = no clipping"""


@dataclass(frozen=True)
class LoopConfig:
    """The length of a run, bad steps, evaluation and text samples."""

    steps: int = 100
    """optimizer steps"""
    stop_after: int = 0
    """stop after this step, with the learning-rate schedule of all steps; 0 = at the end"""
    two_hop: bool = True
    """all-reduce across replicas once per step instead of after every micro-batch"""
    bad_steps_in_a_row: int = 10
    """consecutive steps that may be skipped, because the loss or gradients are not finite or the
    gradient norm is a spike, before the run stops; 0 = stop at the first"""
    spike_factor: float = 0.0
    """skip a step whose gradient norm exceeds this multiple of the recent median; 0 = never"""
    rank_timeout: float = 300.0
    """seconds without progress of a rank, or after its death, before the run ends with an error
    that names the rank; 0 = no watchdog"""
    divergence_every: int = 100
    """steps between comparisons of the weights and the optimizer's state of replicas, which find
    silently corrupted data; checkpoints are preceded by one; 0 = never"""
    on_divergence: Literal["stop", "replay"] = "stop"
    """if replicas differ: stop, or repeat the steps since the newest checkpoint. The run goes on if
    the difference does not come back (a flipped bit), and stops if it does (a bug); replay needs
    checkpoint.folder"""
    compile_blocks: bool = False
    """compile all blocks with torch.compile as one graph; the first step takes longer"""
    self_check: Literal["auto", "always", "off"] = "auto"
    """before the first step, compare a small twin of the model in this layout with one process, and
    refuse a layout that differs: for families other than GPT-2, GPT-NeoX, Llama, Mistral and
    Mixtral (auto), all, or none; results are cached"""
    eval_every: int = 50
    """steps between evaluations on held-out tokens; 0 = only at the end"""
    eval_sequences: int = 256
    """held-out sequences per evaluation, over all ranks; 0 = no evaluation"""
    sample_tokens: int = 32
    """tokens of text to generate at the end; 0 = none"""
    sample_prompt: str = "The"
    """prompt of the generated text"""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of the run."""

    folder: str = "auto"
    """folder shared by all nodes, or s3://bucket/prefix; auto = checkpoints in run.folder; empty =
    no checkpoints: the trained model is lost"""
    every: int = 0
    """steps between checkpoints, besides those at the end, on SIGTERM and on Ctrl-C; 0 = none"""
    every_minutes: float = 30.0
    """minutes between checkpoints; 0 = by steps only"""
    keep: int = 2
    """number of newest checkpoints to keep"""
    asynchronous: bool = True
    """write during training, from a copy of the state in host memory"""
    emergency: bool = True
    """save the last complete step when a rank fails or hangs and all ranks are alive; with several
    ranks this needs train.rank_timeout"""
    resume: bool = True
    """resume from the newest checkpoint in the folder, if there is one"""
    on_damage: Literal["fallback", "fail"] = "fallback"
    """if the newest checkpoint is damaged: resume from the newest intact one with a warning, or
    fail; a run whose checkpoints are all damaged always fails"""


@dataclass(frozen=True)
class RunConfig:
    """Output files and the number of local ranks."""

    folder: str = "runs/latest"
    """folder for config, metrics, plots and the data state"""
    nproc: int = 0
    """ranks to start on this machine; 0 = one per GPU, or one; no effect under torchrun"""
    log_every: int = 1
    """steps between log lines"""
    tensorboard: bool = True
    """write TensorBoard events if tensorboard is installed"""
    trackers: list[str] = field(default_factory=list)
    """services that receive the metrics, too: wandb, mlflow, cloudwatch; settings of each are
    environment variables, such as WANDB_PROJECT and MLFLOW_TRACKING_URI"""
    memory_report: bool = True
    """measure the memory of the first step by category, print it and write memory.json"""
    peak_tflops: float = 0.0
    """peak of one accelerator for the MFU; 0 = known by name, or measured on a CPU"""

    def __post_init__(self) -> None:
        for name in self.trackers:
            if name not in TRACKERS:
                hint = schema.did_you_mean(name, TRACKERS) or f"allowed are {', '.join(TRACKERS)}"
                raise ConfigError(f"run.trackers: unknown tracker {name!r}: {hint}")


@dataclass(frozen=True)
class ElasticConfig:
    """Replicas that may be lost while the others train on, see docs/elastic.md."""

    replicas: int = 0
    """replicas of the job, each started by itself on an equal part of the ranks; a lost rank ends
    its replica only; 0 = off, one job of all ranks"""
    mode: Literal["exact", "rescale"] = "exact"
    """without a replica: compute its batches on the others, with the same bits as if it had not
    been lost (exact), or leave its batches out (rescale)"""
    min_replicas: int = 1
    """end the run when fewer replicas are left"""
    silence_seconds: float = 10.0
    """seconds without a sign of life after which a replica is lost; a process that the kernel has
    ended is noticed at once"""
    form_seconds: float = 300.0
    """seconds to wait for all replicas at the start; then a majority begins without the others"""
    peers: list[str] = field(default_factory=list)
    """host:port of the first rank of each replica; empty = ports from elastic.port on, on this
    machine"""
    port: int = 0
    """port of the first rank of the first replica, and of every host in peers without a port; 0 =
    free ones chosen by nearlinear train on one machine, otherwise 29700"""
    max_restarts: int = 100
    """starts of lost replicas by nearlinear train on one machine before it gives up"""

    def __post_init__(self) -> None:
        if self.replicas < 0 or self.replicas == 1:
            raise ConfigError(
                f"elastic.replicas = {self.replicas}: give at least 2, or 0 for a job that ends "
                "with its first lost rank"
            )
        if not 1 <= self.min_replicas <= max(1, self.replicas):
            raise ConfigError(
                f"elastic.min_replicas = {self.min_replicas} is not between 1 and elastic.replicas "
                f"= {self.replicas}"
            )
        if self.silence_seconds <= 0 or self.form_seconds < 0:
            raise ConfigError("elastic.silence_seconds and form_seconds must be positive")


@dataclass(frozen=True)
class PlanConfig:
    """The cluster of ``nearlinear plan``; no effect on training."""

    cluster: str = ""
    """node type and count, e.g. p4d.24xlarge:32; or machine.toml:2, written by tune --machine"""
    machine: dict[str, Any] = field(default_factory=dict)
    """tables of such a file, instead of it; cluster then refers to its node by name"""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run.

    Example::

        from nearlinear.config import train

        config = train.load("run.toml", ["optimizer.lr=1e-3"])
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    run: RunConfig = field(default_factory=RunConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)

    def __post_init__(self) -> None:
        if self.model.init_from and self.model.preset != ModelConfig.preset:
            raise ConfigError(
                f"model.preset = {self.model.preset!r} and model.init_from = "
                f"{self.model.init_from!r} are both set: remove model.preset, the config.json of "
                "the folder describes the model"
            )
        schema.check_ranges(self, _RANGES)
        for key, path in (
            ("model.init_from", self.model.init_from),
            *(("data.path", folder) for folder in self.data.folders),
            ("data.resume", self.data.resume),
            ("data.cache", self.data.cache),
            ("checkpoint.folder", self.checkpoint.folder),
            ("run.folder", self.run.folder),
        ):
            schema.check_path(path, key)
        if not 0 < self.data.noise_density < 1:
            raise ConfigError(
                f"data.noise_density = {self.data.noise_density}: must be between 0 and 1"
            )
        if not 0 <= self.lora.dropout < 1:
            raise ConfigError(f"lora.dropout = {self.lora.dropout}: must be from 0 to below 1")
        for name in ("min_lr_ratio", "beta1", "beta2"):
            value = getattr(self.optimizer, name)
            if not 0 <= value <= 1 or (name != "min_lr_ratio" and value == 1):
                raise ConfigError(f"optimizer.{name} = {value}: must be from 0 to 1")
        if self.train.on_divergence == "replay":
            self._check_replay()
        if self.optimizer.kind == "adamw_8bit":
            self._check_adamw_8bit()
        if self.batch.micro_batch_size * self.batch.accumulation > 2**31:
            raise ConfigError(
                f"batch.micro_batch_size x batch.accumulation = {self.batch.micro_batch_size} x "
                f"{self.batch.accumulation}: more than 2^31 samples"
            )
        size, parts = self.batch.micro_batch_size, self.parallel.microbatches
        if self.parallel.pipeline_parallel_degree > 1 and size % parts:
            raise ConfigError(
                f"batch.micro_batch_size = {size} cannot be divided by the pipeline into "
                f"parallel.microbatches = {parts} equal parts: make it a multiple"
            )
        if self.model.is_readable and self.sequence_length > self.model.longest_sequence:
            raise ConfigError(
                f"data.sequence_length = {self.data.sequence_length} is longer than the model's "
                f"context of {self.model.longest_sequence} tokens: lower it, or raise model.context"
            )

    def _check_replay(self) -> None:
        if self.elastic.replicas:
            raise ConfigError(
                f"elastic.replicas = {self.elastic.replicas} and train.on_divergence = "
                '"replay": replicas of an elastic job go on without a faulty one, which copies '
                'their state when it is started again; use train.on_divergence = "stop"'
            )
        for key, value, reason in (
            ("checkpoint.folder", self.checkpoint_folder, "steps are replayed from a checkpoint"),
            ("train.divergence_every", self.train.divergence_every, "replicas are not compared"),
        ):
            if not value:
                raise ConfigError(
                    f'train.on_divergence = "replay" and {key} = {value!r}: {reason}; set {key}, '
                    'or train.on_divergence = "stop"'
                )

    def _check_adamw_8bit(self) -> None:
        for key, value, required, reason in (
            ("checkpoint.folder", self.checkpoint_folder, "", "its states cannot be saved"),
            ("optimizer.implementation", self.optimizer.implementation, "fused",
             "it has its own implementation"),
            ("parallel.offload_optimizer", self.parallel.offload_optimizer, False,
             "it is compiled for the device of the parameters"),
        ):  # fmt: skip
            if value != required:
                raise ConfigError(
                    f'optimizer.kind = "adamw_8bit" and {key} = {value!r}: {reason}; set {key} = '
                    f'{required!r}, or optimizer.kind = "adamw"'
                )

    @property
    def sequence_length(self) -> int:
        """Tokens per training sequence."""
        return self.data.sequence_length or self.model.longest_sequence

    @property
    def checkpoint_folder(self) -> str:
        """Folder of the checkpoints with ``auto`` resolved; empty if the run writes none."""
        folder = self.checkpoint.folder
        if folder != "auto":
            return folder
        return "" if self.optimizer.kind == "adamw_8bit" else f"{self.run.folder}/checkpoints"


# At import, in one thread: ast of CPython 3.11 fails if several threads parse at once (gh-106905).
for _table in (TrainConfig, *(each.default_factory for each in fields(TrainConfig))):
    schema.field_docs(_table)


_COUNT = 2.0**53  # integers up to this one are exact as floats
_RANGES: schema.Ranges = {
    "model.context": (0, _COUNT),
    "lora.rank": (0, _COUNT),
    "lora.alpha": (0.0, 1e6),
    "preference.beta": (1e-6, 1e3),
    "data.sequence_length": (0, _COUNT),
    "data.mean_noise_span": (1.0, 1e9),
    "data.fim_rate": (0.0, 1.0),
    "data.fim_spm_rate": (0.0, 1.0),
    "data.cache_gib": (0.0, 1e9),
    "data.vocab_size": (0, _COUNT),
    "data.eos_id": (-1, _COUNT),
    "data.shuffle_block_mib": (0, _COUNT),
    "data.shuffle_blocks": (1, _COUNT),
    "data.read_ahead": (0, _COUNT),
    "batch.micro_batch_size": (1, _COUNT),
    "batch.accumulation": (1, _COUNT),
    "batch.sequences": (0, _COUNT),
    "optimizer.lr": (0.0, 1e3),
    "optimizer.eps": (0.0, 1.0),
    "optimizer.warmup_steps": (0, _COUNT),
    "optimizer.weight_decay": (0.0, 1e3),
    "optimizer.clip": (0.0, 1e12),
    "train.steps": (1, _COUNT),
    "train.stop_after": (0, _COUNT),
    "train.eval_every": (0, _COUNT),
    "train.eval_sequences": (0, _COUNT),
    "train.sample_tokens": (0, _COUNT),
    "train.bad_steps_in_a_row": (0, _COUNT),
    "train.spike_factor": (0.0, 1e12),
    "train.rank_timeout": (0.0, 1e9),
    "train.divergence_every": (0, _COUNT),
    "checkpoint.every": (0, _COUNT),
    "checkpoint.every_minutes": (0.0, 1e9),
    "checkpoint.keep": (1, _COUNT),
    "run.nproc": (0, 1e6),
    "run.log_every": (1, _COUNT),
    "run.peak_tflops": (0.0, 1e9),
}


def load(
    source: Mapping | str | Path | None = None,
    settings: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> TrainConfig:
    """Load the config of a training run.

    The launcher's ``SM_HP_MP_PARAMETERS`` overrides ``settings``, which override ``source``, key by
    key. The table [job], which `nearlinear launch` reads, is ignored.

    Args:
        source: Path of a TOML or JSON file, a dict, or None for the defaults.
        settings: Changes of the form "table.key=value".
        environment: Environment variables; default: those of the process.

    Raises:
        ConfigError: A key or value is invalid.
    """
    if isinstance(source, Mapping):
        data = dict(source)
    else:
        data = schema.read(source) if source else {}
    changes: dict = {}
    for setting in settings:
        schema.assign(changes, setting)
    for tables in (data, changes):
        if not isinstance(tables.get("parallel", {}), dict):
            raise ConfigError(
                f"parallel = {tables['parallel']!r}: expected a table of keys and values"
            )
    data.pop("job", None)
    from_source, from_settings = data.pop("parallel", {}), changes.pop("parallel", {})
    parallel = parallel_config.canonical(from_source) | parallel_config.canonical(from_settings)
    data = merge_tables(data, changes)
    data["parallel"] = parallel_config.load(parallel, environment)
    config = schema.build(TrainConfig, data)
    _warn_of_offloading_without_effect(parallel, data)
    return config


def _warn_of_offloading_without_effect(parallel: dict, data: dict) -> None:
    """Log a warning if SMP's key is set without the key that turns offloading on.

    In a file of all keys, such as the config in a run's folder, both are set.
    """
    if parallel.get("sm_activation_offloading") and "offload" not in data.get("activations", {}):
        log.warning(
            "parallel.sm_activation_offloading = true selects the way of offloading and does not "
            "turn it on: set activations.offload = true, or remove the key"
        )


def merge_tables(data: dict, changes: dict) -> dict:
    """Return ``data`` with the values of ``changes``, merged table by table."""
    result = dict(data)
    for key, value in changes.items():
        below = result.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            result[key] = merge_tables(below, value)
        else:
            result[key] = value
    return result
