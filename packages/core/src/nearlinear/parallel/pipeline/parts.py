"""What of a model comes before its blocks, what after: where a pipeline can be cut.

Hugging Face models say it in ``base_model_pp_plan``, in the order of their forward pass; GPT-2,
which has no such plan, is known here. Everything else of the model must be without parameters
(rotary embeddings), as every stage computes it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ...errors import ConfigError

OURS = {"gpt2": {"first": ("wte", "wpe", "drop"), "blocks": "h", "last": ("ln_f",)}}
"""By ``model_type``, for models without a plan of their own."""


@dataclass(frozen=True)
class Parts:
    """Names of a causal language model's children, and of its base model's."""

    base: str
    """the base model, in the model"""
    first: tuple[str, ...]
    """in the base model: embeddings and what follows them"""
    blocks: str
    """in the base model: the list of blocks"""
    last: tuple[str, ...]
    """in the base model: what follows the blocks"""
    head: str
    """the output embedding, in the model"""

    def count(self, model: nn.Module) -> int:
        """How many blocks ``model`` has."""
        return len(self.list_of(model))

    def list_of(self, model: nn.Module) -> nn.ModuleList:
        return model.get_submodule(f"{self.base}.{self.blocks}")

    def before(self, model: nn.Module) -> Iterator[nn.Module]:
        """What only the first stage holds, beside its blocks."""
        yield from (model.get_submodule(f"{self.base}.{name}") for name in self.first)

    def after(self, model: nn.Module) -> Iterator[nn.Module]:
        """What only the last stage holds, beside its blocks."""
        yield from (model.get_submodule(f"{self.base}.{name}") for name in self.last)
        yield model.get_submodule(self.head)


def parts_of(model: nn.Module, given: Mapping | None = None) -> Parts:
    """The parts of ``model``; ``given``: as in `OURS`. ConfigError where it cannot be cut."""
    kind, base = type(model).__name__, getattr(model, "base_model_prefix", "")
    head = _name_of(model, getattr(model, "get_output_embeddings", lambda: None)())
    if not base or not isinstance(getattr(model, base, None), nn.Module) or head is None:
        raise ConfigError(
            f"nl.pipeline: {kind} is not a Hugging Face causal language model, a base model and a "
            "head: wrap its stages yourself with torch.distributed.pipelining.PipelineStage"
        )
    said = given or _said_by(model)
    if said is None:
        raise ConfigError(
            f"nl.pipeline: {kind} does not say how it can be cut (no base_model_pp_plan in its "
            "config): name the base model's children yourself, as in nl.pipeline(model, "
            f"parts={OURS['gpt2']})"
        )
    found = Parts(base, tuple(said["first"]), said["blocks"], tuple(said["last"]), head)
    _check(model, found)
    return found


def _said_by(model: nn.Module) -> Mapping | None:
    """From the model's own plan: in the order of its forward pass, around the list of blocks."""
    plan = getattr(model.config, "base_model_pp_plan", None)
    if not plan:
        return OURS.get(getattr(model.config, "model_type", None))
    names = list(plan)
    lists = [n for n in names if isinstance(getattr(model.base_model, n, None), nn.ModuleList)]
    if len(lists) != 1:
        return None
    at = names.index(lists[0])
    return {"first": names[:at], "blocks": lists[0], "last": names[at + 1 :]}


def _check(model: nn.Module, parts: Parts) -> None:
    """Raise ConfigError for parameters that no stage would hold, and for losses across stages."""
    kind, base = type(model).__name__, getattr(model, parts.base)
    children = dict(base.named_children())
    missing = [n for n in (*parts.first, parts.blocks, *parts.last) if n not in children]
    if missing:
        raise ConfigError(
            f"nl.pipeline: {kind}.{parts.base} has no {missing[0]!r}; its children are "
            f"{', '.join(children)}"
        )
    known = {f"{parts.base}.{name}" for name in (*parts.first, parts.blocks, *parts.last)}
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{part}.") for part in (*known, parts.head)):
            raise ConfigError(
                f"nl.pipeline: no stage of {kind} would hold {name}: name the part it belongs to, "
                f"as in nl.pipeline(model, parts={OURS['gpt2']})"
            )
    if getattr(model.config, "output_router_logits", False):
        raise ConfigError(
            "nl.pipeline: output_router_logits = true in the model's config asks for one loss over "
            "the routers of all stages: set it to false"
        )


def _name_of(model: nn.Module, child: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_children() if module is child), None)
