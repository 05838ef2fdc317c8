"""Find what is wrong with a run before any rank is started: seconds, not minutes, to an error.

Checks the layout against the number of ranks, the token shards, how they fit the model, and where
the run will write. Imports no torch, so that a mistake costs no start-up time.
"""

import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path

from .. import storage
from ..config import Config, divisors
from ..data.blend import Blend
from ..data.dataset import TokenDataset
from ..data.split import NoSplit
from ..errors import ConfigError, DataError, StorageError
from ..mesh import Mesh
from ..schema import coerce
from . import pretrained
from .config import TrainConfig
from .presets import layers_key

log = logging.getLogger(__name__)

OF_OFFLOAD = ("sm_activation_offloading", "activation_loading_horizon")
"""Keys that matter only where activations are offloaded."""


def check(config: TrainConfig, world: int, ranks_per_node: int = 0) -> Mesh:
    """Raise ConfigError or DataError if ``config`` cannot train on ``world`` ranks; the mesh."""
    config.model.architecture  # noqa: B018 - raises ConfigError
    config.parallel.check_supported()
    if config.parallel.microbatches > 1 and config.parallel.pipeline_parallel_degree == 1:
        log.warning(
            "parallel.microbatches = %d has no effect without a pipeline; batch.accumulation is "
            "how many micro-batches a step has",
            config.parallel.microbatches,
        )
    for name in OF_OFFLOAD if not config.activations.offload else ():
        if (value := getattr(config.parallel, name)) != getattr(Config, name):
            log.warning("parallel.%s = %s has no effect without activations.offload", name, value)
    remote = any(map(storage.elsewhere, [config.data.path, *config.data.sources]))
    if config.data.cache and config.data.packing == "concat" and not remote:
        log.warning(
            'data.cache has no effect with data.packing = "concat" of data that is here: it needs '
            "no plan"
        )
    if config.data.cache_gib and not remote:
        log.warning("data.cache_gib = %g has no effect: no data is in a bucket (s3://)",
                    config.data.cache_gib)  # fmt: skip
    mesh = Mesh.from_config(config.parallel, world, ranks_per_node)
    check_degrees(config, mesh)
    config.batch.micro_batches(mesh.data_ranks)
    open_dataset(config, "train")
    if config.train.eval_sequences:
        open_dataset(config, "val")
    state = read_state(config)
    if state and state["step"] >= config.train.steps:
        raise ConfigError(
            f"data.resume = {config.data.resume} is at step {state['step']} and train.steps = "
            f"{config.train.steps}: raise train.steps, or drop data.resume"
        )
    if config.optimizer.warmup_steps >= config.train.steps:
        log.warning(
            "optimizer.warmup_steps = %d, train.steps = %d: the learning rate only warms up",
            config.optimizer.warmup_steps,
            config.train.steps,
        )
    _check_folder("run.folder", config.run.folder, storage.on_disk)
    if config.checkpoint.folder:
        _check_folder("checkpoint.folder", config.checkpoint.folder)
    return mesh


def check_degrees(config: TrainConfig, mesh: Mesh) -> None:
    """Raise ConfigError where the model's own numbers do not go with the mesh."""
    name, family = config.model.name, config.model.family
    shape = config.model.architecture["shape"] | config.model.overrides
    heads = "n_head" if family == "gpt2" else "num_attention_heads"
    for key in (heads, "num_key_value_heads"):
        _divides("tensor_parallel_degree", mesh.tensor, key, shape.get(key))
    if mesh.expert > 1 and "num_local_experts" not in shape:
        raise ConfigError(
            f"parallel.expert_parallel_degree = {mesh.expert}: {name} has no experts; set it to 1, "
            "or take a mixtral preset"
        )
    _divides("expert_parallel_degree", mesh.expert, "num_local_experts",
             shape.get("num_local_experts"))  # fmt: skip
    if "num_local_experts" in shape:
        own_loss = bool(shape.get("output_router_logits"))
        config.moe.check_degrees(mesh.expert, mesh.pipeline, mesh.context, own_loss)
    layers = shape.get(layers_key(family))
    if isinstance(layers, int) and mesh.pipeline > layers:
        raise ConfigError(
            f"parallel.pipeline_parallel_degree = {mesh.pipeline}: {name} has only {layers} layers"
        )


def _divides(key: str, degree: int, what: str, count) -> None:
    if isinstance(count, int) and count > 0 and count % degree:
        raise ConfigError(
            f"parallel.{key} = {degree} does not divide {what} = {count} of the model: allowed are "
            f"{divisors(count)}"
        )


def _check_folder(key: str, folder: str, named: Callable = storage.at) -> None:
    """Make a folder and leave nothing in it. Raises ConfigError if it cannot be written."""
    try:
        storage.at(named(folder)).try_out()
    except StorageError as error:
        raise ConfigError(f"{key} = {error}") from None
    except OSError as error:
        raise ConfigError(
            f"{key} = {folder} cannot be written ({error.strerror}): choose another folder"
        ) from None


def open_dataset(config: TrainConfig, split: str, verified: bool = False) -> TokenDataset | Blend:
    """The token shards of ``split``, checked as ``data.verify`` says. Raises DataError.

    ``verified``: the launcher has checked them already, so that ranks look at sizes only. Of
    several sources those without anything in ``val`` have no part in it.
    """
    if not config.data.folder:
        raise ConfigError(
            'data.path is not set: prepare tokens with "python -m data_prep botocore" and set it '
            "to the folder that it names"
        )
    opened = functools.partial(
        TokenDataset,
        split=split,
        sequence_length=config.sequence_length,
        verify="size" if verified else config.data.verify,
        packing=config.data.packing,
        cache=config.data.cache or None,
        cache_gib=config.data.cache_gib,
        vocab_size=config.data.vocab_size,
        eos_id=config.data.eos_id,
    )
    if config.data.sources:
        dataset = Blend(_sources(config.data.sources, opened, split))
    else:
        dataset = opened(config.data.path)
    needed = dataset.manifest.vocab_size
    if config.model.init_from:
        pretrained.check_vocabulary(config.model.init_from, config.data.folder, needed)
    asked = config.model.overrides.get("vocab_size", needed)
    vocabulary = coerce(asked, int, "model.overrides.vocab_size")
    if vocabulary < needed:
        raise DataError(
            f"model.overrides.vocab_size = {vocabulary} but {config.data.folder} holds ids up to "
            f"{needed - 1}: raise it, or drop it to follow the data"
        )
    return dataset


def _sources(weights: dict[str, float], opened: Callable, split: str) -> dict:
    found = {}
    for folder, weight in weights.items():
        try:
            found[opened(folder)] = weight
        except NoSplit:
            if split == "train":
                raise
    return found


def read_state(config: TrainConfig) -> dict | None:
    """The data state ``data.resume`` names: {"step": int, "loader": dict}, or None."""
    if not config.data.resume:
        return None
    path = Path(config.data.resume)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return {"step": int(state["step"]), "loader": dict(state["loader"])}
    except FileNotFoundError:
        raise DataError(f"data.resume = {path}: no such file; check the path") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"data.resume = {path}: not a data_state.json of a training run") from None
