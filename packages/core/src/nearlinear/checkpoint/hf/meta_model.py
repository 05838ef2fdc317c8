"""Build a `transformers` model on the meta device: names, shapes, ties, and config without values.

The model of a run may lack the layers of other pipeline stages, and its parameters are sharded. Its
class and config describe the whole model. Both are JSON-serializable; no code of a folder is run.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, NearlinearError
from ...fsdp.deferred_init import deferred_init
from ...spmd import one_at_a_time


def build_like(model: nn.Module) -> Any:
    """Build the whole model of which ``model`` may be a part. Raises CheckpointError."""
    kind = _transformers_class(type(model))
    if kind is None:
        raise CheckpointError(
            f"{type(model).__name__} is not a transformers model: save it with nl.save instead"
        )
    bare = _build(lambda: kind(_portable_config(model.config)))
    bare._weight_conversions = getattr(model, "_weight_conversions", None)
    if getattr(model, "generation_config", None) is not None:
        bare.generation_config = copy.deepcopy(model.generation_config)
    return bare


def deferred_like(model: nn.Module) -> Any:
    """Build the whole model of ``model`` under `deferred_init`, with the job's seed.

    Returns None unless ``model`` is a transformers model.
    """
    kind = _transformers_class(type(model))
    if kind is None:
        return None
    config: Any = _portable_config(model.config)
    with deferred_init():
        return kind(config)


def build_from_config(described: dict) -> Any:
    """Build the causal language model of a config.json. Raises CheckpointError."""
    transformers = import_transformers()
    described = {k: v for k, v in described.items() if k not in ("auto_map", "torch_dtype")}
    kind = described.pop("model_type", "")
    if kind not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"model_type = {kind!r} is unknown to transformers {transformers.__version__}: "
            "pip install -U transformers"
        )

    def build():
        config = _portable_config(transformers.CONFIG_MAPPING[kind](**described))
        return transformers.AutoModelForCausalLM.from_config(config)

    return _build(build)


def config_dict(model: nn.Module) -> dict | None:
    """Return the config.json of ``model``, or None if it is not a transformers model."""
    kind = _transformers_class(type(model))
    if kind is None:
        return None
    config: Any = model.config
    described = json.loads(config.to_json_string()) | {"architectures": [kind.__name__]}
    return dict(sorted(described.items()))  # save_pretrained adds a key on the rank that writes


def _transformers_class(kind: type) -> Any:
    """Return the class that a model was built as, before classes were mixed in, or None."""
    for each in kind.__mro__:
        module = sys.modules.get(each.__module__)
        defined = getattr(module, each.__qualname__, None) is each
        if defined and hasattr(each, "from_pretrained") and hasattr(each, "base_model_prefix"):
            return each
    return None


def _portable_config(config: Any) -> Any:
    config = copy.deepcopy(config)
    config.dtype = torch.float32  # some models do not accept a name here
    config._attn_implementation = "eager"  # the run's own may not be installed elsewhere
    return config


def _build(build: Callable[[], Any]) -> Any:
    try:
        with one_at_a_time(), torch.device("meta"):
            return build()
    except Exception as error:  # any error of the model's own code about invalid sizes
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"the model cannot be built from its config ({reason}): check the sizes in config.json"
        ) from None


def import_transformers() -> Any:
    """Import `transformers` with its lazy names. Raises NearlinearError."""
    try:
        with one_at_a_time():  # its lazy imports are not safe when ranks are threads
            import transformers
            from transformers import (  # noqa: F401
                CONFIG_MAPPING,
                AutoModelForCausalLM,
                AutoModelForMaskedLM,
                AutoModelForSeq2SeqLM,
                DataCollatorForLanguageModeling,
                PreTrainedTokenizerFast,
            )
    except ModuleNotFoundError as error:
        raise NearlinearError(
            f'{error.name} is not installed: pip install "nearlinear[data]"'
        ) from None
    return transformers
