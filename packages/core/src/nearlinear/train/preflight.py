"""Check a run before any rank starts, so that a mistake is found in seconds.

Checks the layout against the number of ranks, the token shards, their fit to the model, and the
output folders. Imports no torch, to keep the start-up time of a failing command short.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import __version__, storage
from ..config import architecture
from ..config.architecture import layers_key
from ..config.parallel import ParallelConfig, divisors
from ..config.schema import coerce
from ..config.train import LoraConfig, TrainConfig
from ..data.cache import cache_folder
from ..data.dataset import TokenDataset
from ..data.mixture import Mixture
from ..data.source import NoSplit
from ..distributed.mesh import Mesh
from ..errors import ConfigError, DataError, StorageError

log = logging.getLogger(__name__)

OFFLOAD_KEYS = ("sm_activation_offloading", "activation_loading_horizon")
"""Keys of [parallel] that matter only with ``activations.offload``."""


def check_run(config: TrainConfig, world: int, ranks_per_node: int = 0) -> Mesh:
    """Check that ``config`` can train on ``world`` ranks, and return the mesh.

    Logs a warning for every setting without effect.

    Raises:
        ConfigError: A setting cannot be used.
        DataError: The token shards cannot be used.
    """
    if config.model.init_from:
        architecture.check_weights(config.model.init_from)
    config.parallel.check_supported()
    _warn_unused(config)
    mesh = Mesh.from_config(config.parallel.widest, world, ranks_per_node)
    check_model_divides(config, mesh)
    check_lora(config, mesh)
    config.batch.micro_batches(mesh.data_ranks * max(1, config.elastic.replicas))
    data = open_dataset(config, "train")
    if isinstance(data, TokenDataset) and data.pairs and not config.model.init_from:
        log.warning(
            "model.init_from is not set: preferences between answers teach little to a model that "
            "has learned nothing; train on conversations first, and start from that model"
        )
    if config.train.eval_sequences:
        with contextlib.suppress(NoSplit):  # the trainer warns, and trains without validation
            open_dataset(config, "val")
    if world > 1 and config.model.overrides:
        _check_overrides(config, data.manifest.vocab_size)
    state = read_data_state(config)
    if state and state["step"] >= config.train.steps:
        raise ConfigError(
            f"data.resume = {config.data.resume} is at step {state['step']} and train.steps = "
            f"{config.train.steps}: raise train.steps, or remove data.resume"
        )
    if config.optimizer.warmup_steps >= config.train.steps:
        log.warning(
            "optimizer.warmup_steps = %d, train.steps = %d: the learning rate only warms up",
            config.optimizer.warmup_steps,
            config.train.steps,
        )
    _check_folder("run.folder", config.run.folder, storage.require_local)
    if config.checkpoint_folder:
        _check_folder("checkpoint.folder", config.checkpoint_folder)
    return mesh


def _warn_unused(config: TrainConfig) -> None:
    """Log a warning for every setting without effect, and for a model that will not be saved."""
    if not config.checkpoint_folder:
        reason = "adamw_8bit's states cannot be saved" if config.checkpoint.folder else "is empty"
        log.warning(
            "checkpoint.folder: %s, so that the trained model is lost at the end of the run", reason
        )
    if config.parallel.microbatches > 1 and config.parallel.pipeline_parallel_degree == 1:
        log.warning(
            "parallel.microbatches = %d has no effect without a pipeline; batch.accumulation sets "
            "the number of micro-batches per step",
            config.parallel.microbatches,
        )
    for name in OFFLOAD_KEYS if not config.activations.offload else ():
        if (value := getattr(config.parallel, name)) != getattr(ParallelConfig, name):
            log.warning("parallel.%s = %s has no effect without activations.offload", name, value)
    remote = any(map(storage.is_remote, [config.data.path, *config.data.sources]))
    if config.data.cache and config.data.packing == "concat" and not remote:
        log.warning(
            'data.cache has no effect with data.packing = "concat" and local data: there is no '
            "plan to cache"
        )
    if config.data.cache_gib and not remote:
        log.warning(
            "data.cache_gib = %g has no effect: no data is in a bucket (s3://)",
            config.data.cache_gib,
        )


def check_model_divides(config: TrainConfig, mesh: Mesh) -> None:
    """Raise ConfigError if heads, experts or layers of the model do not fit the mesh."""
    name, family = config.model.name, config.model.family
    shape = config.model.architecture["shape"] | config.model.overrides
    heads = "n_head" if family == "gpt2" else "num_attention_heads"
    for key in (heads, "num_key_value_heads"):
        _check_divides("tensor_parallel_degree", mesh.tensor, key, shape.get(key))
    experts = next((key for key in architecture.EXPERT_KEYS if shape.get(key)), "")
    if mesh.expert > 1 and not experts:
        raise ConfigError(
            f"parallel.expert_parallel_degree = {mesh.expert}: {name} has no experts; set it to 1, "
            "or choose a mixtral preset"
        )
    _check_divides("expert_parallel_degree", mesh.expert, experts, shape.get(experts))
    if experts:
        own_loss = bool(shape.get("output_router_logits"))
        config.moe.check_degrees(mesh.expert, mesh.pipeline, mesh.context, own_loss)
    layers = shape.get(layers_key(family))
    if isinstance(layers, int) and mesh.pipeline > layers:
        raise ConfigError(
            f"parallel.pipeline_parallel_degree = {mesh.pipeline}: {name} has only {layers} "
            f"layers; allowed are 1 to {layers}"
        )


def check_lora(config: TrainConfig, mesh: Mesh) -> None:
    """Raise ConfigError if the adapters of ``config`` cannot be trained on ``mesh``."""
    rank, loss = config.lora.rank, config.model.trained_objective
    if not rank:
        if config.lora != LoraConfig():
            raise ConfigError("lora.rank = 0: the other keys of [lora] have no effect; set it to 8")
        return
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            f'lora.rank = {rank}: adapters require peft; pip install "nearlinear[lora]"'
        )
    if not config.model.init_from:
        raise ConfigError(
            f"lora.rank = {rank}: the weights of model.preset = {config.model.preset!r} are random "
            "and would be frozen; set model.init_from to a trained model"
        )
    for axis in ("tensor", "pipeline", "expert"):
        if (degree := getattr(mesh, axis)) > 1:
            raise ConfigError(
                f"lora.rank = {rank} and parallel.{axis}_parallel_degree = {degree}: adapters are "
                "sharded and replicated only; set the degree to 1"
            )
    if config.parallel.fp8 or loss != "causal":
        other = "parallel.fp8 = true" if config.parallel.fp8 else f"the objective {loss!r}"
        raise ConfigError(f"lora.rank = {rank} and {other} cannot be combined: set lora.rank = 0")


def _check_overrides(config: TrainConfig, vocabulary: int) -> None:
    """Raise ConfigError if the model cannot be built, before its ranks are started.

    Building takes seconds, most of them to import torch, so that a success is remembered.
    """
    versions = [__version__, *map(importlib.metadata.version, ("torch", "transformers"))]
    words = json.dumps([versions, dataclasses.asdict(config.model), vocabulary], default=str)
    known = cache_folder(config.data.cache or None) / "models"
    done = known / hashlib.sha256(words.encode()).hexdigest()[:32]
    if done.exists():
        return
    from .model import build_model

    build_model(config.model, vocabulary)
    with contextlib.suppress(OSError):  # a full disk
        known.mkdir(exist_ok=True)
        done.touch()


def _check_divides(key: str, degree: int, size: str, count: object) -> None:
    if isinstance(count, int) and count > 0 and count % degree:
        raise ConfigError(
            f"parallel.{key} = {degree} does not divide {size} = {count} of the model: allowed are "
            f"{divisors(count)}"
        )


def _check_folder(key: str, folder: str, parse: Callable[[str], Any] = storage.as_path) -> None:
    """Create a folder and try to write to it. Raises ConfigError if that fails."""
    try:
        storage.as_path(parse(folder)).check_writable()
    except StorageError as error:
        raise ConfigError(f"{key} = {error}") from None
    except OSError as error:
        raise ConfigError(
            f"{key} = {folder} cannot be written ({error.strerror}): choose another folder"
        ) from None


def open_dataset(config: TrainConfig, split: str, verified: bool = False) -> TokenDataset | Mixture:
    """Open the token shards of ``split`` and verify them as ``data.verify`` says.

    Sources of a mixture without a ``val`` split are left out of the held-out data.

    Args:
        config: The config of the run.
        split: "train" or "val".
        verified: True if the launcher has verified the shards, so that ranks compare sizes only.

    Raises:
        ConfigError: No data is set.
        DataError: The shards cannot be used, or do not fit the model.
    """
    if not config.data.folder:
        raise ConfigError(
            'data.path is not set: prepare tokens with "nearlinear data botocore" and set it '
            "to the folder printed by that command"
        )
    open_folder = functools.partial(
        TokenDataset,
        split=split,
        sequence_length=config.sequence_length,
        verify="size" if verified else config.data.verify,
        packing=config.data.packing,
        cache=config.data.cache or None,
        cache_gib=config.data.cache_gib,
        vocab_size=config.data.vocab_size,
        eos_id=config.data.eos_id,
        skip_long_pairs=config.preference.skip_long,
    )
    if config.data.sources:
        sources = _open_sources(config.data.sources, open_folder, split)
        if split == "train":
            stages = config.data.stages(config.sequence_length)
            weights = [(start, list(by_folder.values())) for start, by_folder in stages]
            limits = config.data.max_epochs
            epochs = {source: limits[name] for name, source in zip(config.data.sources, sources,
                      strict=True) if name in limits}  # fmt: skip
            dataset = Mixture(sources, weights, epochs)
        else:  # all sequences are read; a source may be trained on only later
            dataset = Mixture({source: weight or 1.0 for source, weight in sources.items()})
    else:
        dataset = open_folder(config.data.path)
        if dataset.pairs:
            _check_pairs(config)
    needed = dataset.manifest.vocab_size
    if config.model.init_from:
        architecture.check_vocabulary(config.model.init_from, config.data.folder, needed)
    override = config.model.overrides.get("vocab_size", needed)
    vocabulary = coerce(override, int, "model.overrides.vocab_size")
    if vocabulary < needed:
        raise DataError(
            f"model.overrides.vocab_size = {vocabulary}, but {config.data.folder} holds ids up to "
            f"{needed - 1}: set it to at least {needed}, or remove it to use the size of the data"
        )
    return dataset


def _check_pairs(config: TrainConfig) -> None:
    """Raise ConfigError if pairs of conversations cannot be trained on with ``config``."""
    for key, value, required, reason in (
        ("data.document_mask", config.data.document_mask, True,
         "conversations must not see each other"),
        ("data.fim_rate", config.data.fim_rate, 0.0, "documents cannot be rearranged"),
        ("data.mask_eos", config.data.mask_eos, False, "the end of an answer is part of it"),
        ("model.objective", config.model.trained_objective, "causal", "answers are continuations"),
        ("elastic.replicas", config.elastic.replicas, 0, "replicas do not exchange references"),
    ):  # fmt: skip
        if value != required:
            raise ConfigError(
                f"{config.data.path} holds pairs of conversations, and {key} = {value!r}: "
                f"{reason}; set it to {required!r}"
            )


def _open_sources(
    weights: dict[str, float], open_folder: Callable[[str], TokenDataset], split: str
) -> dict[TokenDataset, float]:
    found = {}
    for folder, weight in weights.items():
        try:
            found[open_folder(folder)] = weight
        except NoSplit:
            if split == "train":
                raise
    if not found:
        raise NoSplit(
            f"no folder of data.sources has a split {split!r} of at least one sequence: prepare "
            "the data again with a larger --val-fraction"
        )
    return found


def read_data_state(config: TrainConfig) -> dict[str, Any] | None:
    """Read the file named by ``data.resume``: {"step": int, "loader": dict}, or None if unset."""
    if not config.data.resume:
        return None
    path = Path(config.data.resume)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return {"step": int(state["step"]), "loader": dict(state["loader"])}
    except FileNotFoundError:
        raise DataError(f"data.resume = {path}: no such file; check the path") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(
            f"data.resume = {path}: not a data_state.json of a training run; check the path"
        ) from None
