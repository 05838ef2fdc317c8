"""The model in a Hugging Face folder that a run starts from, as far as its config.json tells.

Read as JSON, without transformers and torch, so that a wrong folder is found before a rank starts.
"""

from functools import cache
from pathlib import Path

from ..checkpoint.hf.listing import read_config, weight_files
from ..errors import CheckpointError, ConfigError, DataError
from .presets import context_key

NO_SHAPE = ("model_type", "architectures", "dtype", "torch_dtype", "auto_map",
            "transformers_version", "use_cache")  # fmt: skip
"""Keys of a config.json that are not about how a model is built."""


@cache
def architecture(folder: str) -> dict:
    """Family, context and shape, as `presets.preset` has them. Raises ConfigError."""
    try:
        weight_files(Path(folder))
        found = read_config(Path(folder))
    except CheckpointError as error:
        raise ConfigError(f"model.init_from: {error}") from None
    family = found["model_type"]
    if "quantization_config" in found:
        raise ConfigError(
            f"model.init_from = {folder} holds quantised values, which cannot be trained: take the "
            "model they were made from"
        )
    context = found.get(context_key(family), 0)
    if not isinstance(context, int) or context < 1:
        raise ConfigError(
            f"model.init_from: {folder}/config.json has no {context_key(family)}: set "
            f"model.overrides.{context_key(family)}"
        )
    shape = {key: value for key, value in found.items() if key not in NO_SHAPE}
    return {"family": family, "context": context, "shape": shape}


def check_vocabulary(folder: str, data: str, needed: int) -> None:
    """Raise DataError where the tokens in ``data``, ``needed`` ids, are not the model's."""
    has = architecture(folder)["shape"].get("vocab_size")
    if isinstance(has, int) and has < needed:
        raise DataError(
            f"{data} holds ids up to {needed - 1}, and the model in {folder} knows {has}: prepare "
            "the data with the model's own tokenizer (python -m data_prep ... --tokenizer "
            f"{folder}/tokenizer.json)"
        )
