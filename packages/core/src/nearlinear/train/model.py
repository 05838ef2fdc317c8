"""Build a Hugging Face model from a preset or a config.json, on the meta device.

`nearlinear.shard` initializes its parameters, or `nearlinear.import_hf` loads them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.hf import meta_model
from ..config.presets import context_key
from ..config.train import ModelConfig, TrainConfig
from ..data.format import Manifest
from ..errors import ConfigError, DataError
from ..fsdp.deferred_init import deferred_init

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def build_model(config: ModelConfig, vocabulary: int) -> PreTrainedModel:
    """Return the causal language model of ``config`` with ``vocabulary`` ids, on the meta device.

    Raises ConfigError if transformers cannot build the model.
    """
    architecture = config.architecture
    arguments = {
        "vocab_size": vocabulary,
        "bos_token_id": vocabulary - 1,
        "eos_token_id": vocabulary - 1,
        **architecture["shape"],
        context_key(architecture["family"]): config.longest_sequence,
        "use_cache": False,
        **config.overrides,
    }
    transformers = meta_model.import_transformers()
    if architecture["family"] not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"model.init_from = {config.init_from}: this version of transformers has no "
            f"{architecture['family']} models; pip install -U transformers"
        )
    family = transformers.CONFIG_MAPPING[architecture["family"]]
    if keys := {"attn_implementation", "_attn_implementation"} & set(config.overrides):
        raise ConfigError(
            f"model.overrides.{min(keys)} cannot be set: the trainer uses sdpa, which selects a "
            "flash kernel if there is one and supports document masks (transformers' "
            "flash_attention_2 supports them for a single sequence only). Remove the key"
        )
    unknown = sorted(set(config.overrides) - set(family().to_dict()))
    if unknown:
        raise ConfigError(
            f"model.overrides.{unknown[0]}: {family.__name__} has no such key; remove it"
        )
    try:
        # meta device: initializing billions of parameters takes minutes
        with deferred_init(as_without=False, values=not config.init_from):
            model = transformers.AutoModelForCausalLM.from_config(
                family(**arguments), attn_implementation="sdpa"
            )
    except Exception as error:  # any error of the model's own code about invalid sizes
        reason = " ".join(str(error).split())
        raise ConfigError(f"the model cannot be built: {reason}") from error
    model.loss_type = "ForCausalLM"  # the default of transformers, set here to avoid its warning
    return model


def describe(config: TrainConfig, rows: Callable[[str], int]) -> tuple[dict, Path | None]:
    """Return the config.json of the model that ``config`` trains, and its tokenizer folder or None.

    Args:
        config: The config of the run.
        rows: Function that returns the number of rows of a parameter by its name. It determines
            the vocabulary size if the token shards are missing.
    """
    folder = Path(config.data.folder)
    try:
        vocabulary = Manifest.read(folder).vocab_size if config.data.folder else 0
    except DataError:
        vocabulary = 0
    if not vocabulary:
        model = build_model(config.model, 1)
        embeddings = model.get_input_embeddings()
        name = next(name for name, module in model.named_modules() if module is embeddings)
        vocabulary = rows(f"{name}.weight")
    tokenizer = folder / "tokenizer"
    has_tokenizer = bool(config.data.folder) and (tokenizer / "tokenizer.json").is_file()
    model = build_model(config.model, vocabulary)
    described = meta_model.config_dict(model)
    assert described is not None  # a class of transformers
    return described, tokenizer if has_tokenizer else None
