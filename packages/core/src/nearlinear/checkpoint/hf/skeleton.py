"""A model without values, as `transformers` builds it: its names, shapes, ties and config.

A run's own model may have lost parts to other stages and have shards for parameters; what it was
is told by its class and config alone. Both come from JSON: no code of a folder is run.
"""

from __future__ import annotations

import copy
import json
import sys

import torch
from torch import nn

from ...errors import CheckpointError, NearlinearError
from ...spmd import one_at_a_time


def of_model(model: nn.Module) -> nn.Module:
    """The whole of which ``model`` may be a part, on the meta device. Raises CheckpointError."""
    kind = _own_class(type(model))
    if kind is None:
        raise CheckpointError(
            f"{type(model).__name__} is no model of transformers: save it with nl.save"
        )
    bare = _built(lambda: kind(_fit_to_build(model.config)))
    bare._weight_conversions = getattr(model, "_weight_conversions", None)
    if getattr(model, "generation_config", None) is not None:
        bare.generation_config = copy.deepcopy(model.generation_config)
    return bare


def of_config(described: dict) -> nn.Module:
    """The causal language model that a config.json describes. Raises CheckpointError."""
    transformers = library()
    described = {k: v for k, v in described.items() if k not in ("auto_map", "torch_dtype")}
    kind = described.pop("model_type", "")
    if kind not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"model_type = {kind!r}: transformers {transformers.__version__} has no such model; "
            "pip install -U transformers"
        )

    def build():
        config = _fit_to_build(transformers.CONFIG_MAPPING[kind](**described))
        return transformers.AutoModelForCausalLM.from_config(config)

    return _built(build)


def describe(model: nn.Module) -> dict | None:
    """The config.json of ``model``, for `of_config`; None: it is no model of transformers."""
    kind = _own_class(type(model))
    if kind is None:
        return None
    return json.loads(model.config.to_json_string()) | {"architectures": [kind.__name__]}


def _own_class(kind: type) -> type | None:
    """What a model was built as, before classes were put in front of its own."""
    for each in kind.__mro__:
        module = sys.modules.get(each.__module__)
        defined = getattr(module, each.__qualname__, None) is each
        if defined and hasattr(each, "from_pretrained") and hasattr(each, "base_model_prefix"):
            return each
    return None


def _fit_to_build(config):
    config = copy.deepcopy(config)
    config.dtype = torch.float32  # a name there is more than some models can take
    config._attn_implementation = "eager"  # a run's own is not everybody's
    return config


def _built(build) -> nn.Module:
    try:
        with one_at_a_time(), torch.device("meta"):
            return build()
    except Exception as error:  # whatever a model's own code says of numbers that cannot be
        raise CheckpointError(
            f"the model cannot be built: {' '.join(str(error).split())}"
        ) from None


def library():
    """The module ``transformers``, with what it imports late. Raises NearlinearError."""
    try:
        with one_at_a_time():  # its lazy imports are not safe among ranks that are threads
            import transformers
            from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: F401
    except ModuleNotFoundError as error:
        raise NearlinearError(f'{error.name} is missing: pip install "nearlinear[data]"') from None
    return transformers
