"""The tables of a run's config, each with its keys, their defaults and what they mean."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..data.packing import Packing
from ..errors import ConfigError
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
    """folder of token shards written by python -m data_prep; or s3://bucket/prefix; channel:name in
    a SageMaker job; or .bin files of Megatron (with .idx) or nanoGPT"""
    sources: dict[str, float] = field(default_factory=dict)
    """several such folders in place of path, each with its weight, as in "tokens/code" = 0.3: of
    every few samples each has its share"""
    sequence_length: int = 0
    """tokens per sequence; 0 = the model's context"""
    packing: Packing = "concat"
    """how documents fill sequences: end to end and cut anywhere, cut only where longer than one
    (best_fit), or one document to each; the last two are padded"""
    document_mask: bool = False
    """documents of one sequence do not see each other; off = they do, with EOS between them"""
    mask_eos: bool = False
    """the token that ends a document is no target of the loss"""
    seed: int = 0
    """seed of the global shuffle"""
    verify: Literal["auto", "full", "size"] = "auto"
    """check every block of the shards (full), sizes only (size), or full up to 2 GiB (auto)"""
    shuffle_block_mib: int = 0
    """MiB of a file that are shuffled and read together, for Lustre; 0 = single sequences"""
    shuffle_blocks: int = 64
    """blocks mixed at a time, at least one per node; no effect without shuffle_block_mib"""
    read_ahead: int = 0
    """steps whose sequences are read before they are needed, by a thread"""
    cache: str = ""
    """folder of this node for what can be made again: blocks of data in a bucket, plans of best_fit
    and one_document; empty = ~/.cache/nearlinear"""
    cache_gib: float = 0.0
    """GiB of blocks to keep there; 0 = all that have been read"""
    vocab_size: int = 0
    """ids of .bin files of others, which do not say; 0 = GPT-2's 50,257"""
    eos_id: int = -1
    """the id that ends a document in .bin files of others; -1 = the last one"""
    resume: str = ""
    """a data_state.json of an earlier run: continue with the batches it had not seen"""

    def __post_init__(self):
        if self.path and self.sources:
            raise ConfigError(
                f"data.path = {self.path} and data.sources name the data twice: drop one of them"
            )
        if self.sources and self.shuffle_block_mib:
            raise ConfigError(
                "data.sources and data.shuffle_block_mib: blocks are shuffled of one folder alone; "
                "drop one of them"
            )
        if self.packing != "concat" and self.shuffle_block_mib:
            raise ConfigError(
                f"data.packing = {self.packing} and data.shuffle_block_mib: blocks are shuffled of "
                "documents laid end to end; drop one of them"
            )

    @property
    def folders(self) -> list[str]:
        """Every name of data that is told."""
        return [self.path] if self.path else list(self.sources)

    @property
    def folder(self) -> str:
        """The folder whose tokenizer and vocabulary are those of all; empty: not told."""
        return next(iter(self.folders), "")


@dataclass(frozen=True)
class BatchConfig:
    """How many sequences make an optimizer step."""

    micro_batch_size: int = 8
    """sequences per rank in one forward and backward"""
    accumulation: int = 1
    """micro-batches per optimizer step"""
    sequences: int = 0
    """sequences per optimizer step, over however many ranks there are, in place of accumulation,
    which then follows: a run goes on with other ranks as if they were the same; 0 = not fixed"""

    def __post_init__(self):
        if self.sequences and self.accumulation != 1:
            raise ConfigError(
                f"batch.sequences = {self.sequences} and batch.accumulation = {self.accumulation}: "
                "one follows from the other; drop batch.accumulation"
            )

    def micro_batches(self, data_ranks: int) -> int:
        """Of each of so many ranks in an optimizer step. Raises ConfigError."""
        if not self.sequences:
            return self.accumulation
        together = self.micro_batch_size * data_ranks
        if self.sequences % together:
            raise ConfigError(
                f"batch.sequences = {self.sequences} is no multiple of batch.micro_batch_size x "
                f"ranks that read = {self.micro_batch_size} x {data_ranks}: lower "
                "batch.micro_batch_size, or take another number of ranks"
            )
        return self.sequences // together


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
    implementation: Literal["fused", "foreach", "for_loop"] = "fused"
    """how adamw updates: in one kernel, by lists of tensors, or one by one"""
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
    rank_timeout: float = 300.0
    """seconds that the others wait for a rank which has died or hangs, until the run ends and says
    which it was; 0 = nobody watches"""
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
    """folder that all nodes see, or s3://bucket/prefix; empty = the run keeps no checkpoints"""
    every: int = 0
    """steps between checkpoints; 0 = only at the end, and when the run is told to end (SIGTERM)"""
    every_minutes: float = 0.0
    """minutes between checkpoints; 0 = steps count alone"""
    keep: int = 2
    """the newest so many are kept"""
    asynchronous: bool = True
    """write while training goes on, from a copy of the state in host memory"""
    emergency: bool = True
    """save the last whole step, too, when a rank fails or hangs and all are there to save it; with
    several ranks it takes train.rank_timeout"""
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
class PlanConfig:
    """Where a run is to take place, for ``nearlinear plan`` and ``advise``; training has ranks."""

    cluster: str = ""
    """machines and how many, as in p4d.24xlarge:32; or machine.toml:2, by tune --machine"""
    machine: dict = field(default_factory=dict)
    """the tables of such a file, in place of it; its node then goes by its name there"""
