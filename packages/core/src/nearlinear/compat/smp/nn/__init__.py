"""SMP v1's distributed modules.

A distributed transformer is the model of transformers itself, under v1's names of its parts:
``transformer.seq_layers`` are the blocks, each with ``attention`` and ``output``. Parameters keep
their names. Layers are divided over tensor ranks by `nearlinear.transform`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ....distributed import runtime as runtimes
from ....errors import ConfigError
from ....fsdp.model_state import mixin_class
from . import huggingface as huggingface

log = logging.getLogger(__name__)

_REFUSED = {
    "use_alibi": "attention biases are those of the model's config",
    "zero_init": "initial values are those of the model's config",
}
_WITHOUT_EFFECT = {
    "attention_in_fp32": "attention kernels accumulate in float32",
    "query_key_layer_scaling": "it cancels out, and kernels accumulate in float32",
    "fused_softmax": "attention kernels are fused",
    "fused_dropout": "see torch.compile",
    "fused_bias_gelu": "see torch.compile",
    "flash_attention": "set attn_implementation in the model's config",
    "distribute_embedding": "embeddings are always divided",
    "fp32_residual_addition": "residuals have the compute dtype",
}
_ATTENTION = ("attn", "self_attn", "attention")
_OUTPUT = ("mlp", "feed_forward")


def check_options(options: Mapping[str, Any]) -> None:
    """Warn of ``options`` without effect. Raises ConfigError for those that are not supported."""
    for name, value in options.items():
        if name not in _REFUSED and name not in _WITHOUT_EFFECT:
            allowed = ", ".join([*_WITHOUT_EFFECT, *_REFUSED])
            raise ConfigError(f"smp.tensor_parallelism has no option {name!r}. Options: {allowed}.")
        if name in _REFUSED and value:
            raise ConfigError(
                f"smp.tensor_parallelism: {name} = {value!r} is not supported: {_REFUSED[name]}."
            )
    used = [f"{n} ({_WITHOUT_EFFECT[n]})" for n, v in options.items() if v and n in _WITHOUT_EFFECT]
    if used and runtimes.current().rank == 0:
        log.warning("smp.tensor_parallelism: options accepted without effect: %s", "; ".join(used))


class _Part(nn.Module):
    """A module that `distribute` creates from one of transformers'."""

    def __init__(self, *args: Any, **kwargs: Any):
        if type(self).__module__ == __name__:
            raise ConfigError(
                f"smp.nn.{type(self).__name__} is created from a model of transformers: build that "
                "model in smp.model_creation(tensor_parallelism=True)."
            )
        super().__init__(*args, **kwargs)


class DistributedTransformerLayer(_Part):
    """A block of a distributed transformer."""

    @property
    def attention(self) -> nn.Module:
        """The attention layer."""
        return _child(self, _ATTENTION)

    @property
    def output(self) -> nn.Module:
        """The layers after attention."""
        return _child(self, _OUTPUT)


class DistributedAttentionLayer(_Part):
    """The attention layer of a block."""


class DistributedTransformerOutputLayer(_Part):
    """The layers of a block after attention."""


class DistributedTransformer(_Part):
    """A transformer without a head."""

    @property
    def seq_layers(self) -> nn.Module:
        """The blocks."""
        return next(each for each in self.children() if isinstance(each, nn.ModuleList))


class DistributedTransformerLMHead(_Part):
    """A causal language model: ``transformer`` and the head."""


def _child(module: nn.Module, names: tuple[str, ...]) -> nn.Module:
    for name in names:
        if name in module._modules:
            found = module._modules[name]
            assert found is not None
            return found
    raise AttributeError(f"{type(module).__name__} has none of {', '.join(names)}")


def distribute(root: nn.Module) -> None:
    """Make the transformers in ``root`` distributed ones, in place."""
    for model in list(root.modules()):
        stacks = [each for each in model.children() if isinstance(each, nn.ModuleList)]
        if not hasattr(model, "config") or len(stacks) != 1:
            continue
        _become(model, DistributedTransformer)
        for block in stacks[0]:
            _become(block, DistributedTransformerLayer)
            for names, kind in (
                (_ATTENTION, DistributedAttentionLayer),
                (_OUTPUT, DistributedTransformerOutputLayer),
            ):
                part = next((block._modules[n] for n in names if n in block._modules), None)
                if part is not None:
                    _become(part, kind)
    embeddings = getattr(root, "get_output_embeddings", None)
    if embeddings is not None and embeddings() is not None:
        _become(root, DistributedTransformerLMHead)


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    if not isinstance(module, kind):
        module.__class__ = mixin_class(type(module), kind)


@contextmanager
def distributing() -> Iterator[None]:
    """Make the models that this thread builds in the block distributed ones, at its end."""
    thread, parents = threading.get_ident(), {}

    def see(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if threading.get_ident() == thread and submodule is not None:
            parents[submodule] = module
            built[module] = None

    built: dict[nn.Module, None] = {}
    handle = register_module_module_registration_hook(see)
    try:
        yield
    finally:
        handle.remove()
    for module in built:
        if module not in parents and hasattr(module, "config"):
            distribute(module)


class DistributedLinear(nn.Linear):
    """``torch.nn.Linear``, for ``tensor_parallel_degree = 1``."""

    def __init__(self, *args: Any, **kwargs: Any):
        _require_one_tensor_rank("DistributedLinear")
        super().__init__(*args, **kwargs)


class DistributedEmbedding(nn.Embedding):
    """``torch.nn.Embedding``, for ``tensor_parallel_degree = 1``."""

    def __init__(self, *args: Any, **kwargs: Any):
        _require_one_tensor_rank("DistributedEmbedding")
        super().__init__(*args, **kwargs)


FusedLayerNorm = nn.LayerNorm
"""``torch.nn.LayerNorm``, whose kernel is fused. Scripts look for it to choose weight decay."""


class FlashAttentionLayer(_Part):
    """Refused: attention is chosen by ``attn_implementation`` in the model's config."""


def _require_one_tensor_rank(name: str) -> None:
    now = runtimes.current_or_none()
    if now is not None and now.mesh.tensor > 1:
        raise ConfigError(
            f"smp.nn.{name} with tensor_parallel_degree = {now.mesh.tensor}: layers are divided by "
            "nl.transform, which knows Hugging Face causal language models. Set it to 1."
        )
