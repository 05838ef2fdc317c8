"""Pipeline stages: copies of the model in which modules of other stages are replaced.

The model's own ``forward`` runs unchanged on every stage, and parameters keep their names. Hidden
states enter as ``inputs_embeds`` and leave as ``logits``, because the final norm and the head are
replaced by identities. A stage shares its modules with the rank's model; only the containers around
them are copied.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from ..errors import ConfigError, NearlinearError
from ..fsdp.forward_transforms import forward_transforms
from ..fsdp.model_state import model_state, set_model_state
from ..spmd import one_at_a_time
from ..tensor_parallel.modules import TensorParallel, TokenRows
from ..tensor_parallel.parallelize import HuggingFaceModel

KNOWN_SPLITS = {"gpt2": {"first": ("wte", "wpe", "drop"), "blocks": "h", "last": ("ln_f",)}}
"""Splits by ``model_type``, for models whose config has no ``base_model_pp_plan``."""


@dataclass(frozen=True)
class ModelSplit:
    """Names of the children of a causal language model before, in and after its blocks.

    Modules that are not named must have no parameters (rotary embeddings): every stage computes
    them again.
    """

    base: str
    """The base model, in the model."""
    first: tuple[str, ...]
    """Embeddings and the modules after them, in the base model."""
    blocks: str
    """The list of blocks, in the base model."""
    last: tuple[str, ...]
    """Modules after the blocks, in the base model."""
    head: str
    """The output embedding, in the model."""

    def num_blocks(self, model: nn.Module) -> int:
        return len(self.block_list(model))

    def block_list(self, model: nn.Module) -> nn.ModuleList:
        return cast(nn.ModuleList, model.get_submodule(f"{self.base}.{self.blocks}"))

    def modules_before_blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        """Return the modules that only the first stage holds, without its blocks."""
        yield from (model.get_submodule(f"{self.base}.{name}") for name in self.first)

    def modules_after_blocks(self, model: nn.Module) -> Iterator[nn.Module]:
        """Return the modules that only the last stage holds, without its blocks."""
        yield from (model.get_submodule(f"{self.base}.{name}") for name in self.last)
        yield model.get_submodule(self.head)


def find_model_split(model: HuggingFaceModel, parts: Mapping | None = None) -> ModelSplit:
    """Return the split of ``model``, from ``parts`` or its config.

    Args:
        parts: Names of the base model's children, as in `KNOWN_SPLITS`.

    Raises:
        ConfigError: The model cannot be divided into stages.
    """
    kind, base = type(model).__name__, getattr(model, "base_model_prefix", "")
    head = _child_name(model, getattr(model, "get_output_embeddings", lambda: None)())
    if not base or not isinstance(getattr(model, base, None), nn.Module) or head is None:
        raise ConfigError(
            f"nl.pipeline: {kind} is not a Hugging Face causal language model (a base model and a "
            "head). Wrap its stages yourself with torch.distributed.pipelining.PipelineStage."
        )
    parts = parts or _split_from_config(model)
    if parts is None:
        raise ConfigError(
            f"nl.pipeline: the config of {kind} has no base_model_pp_plan, which names the modules "
            "before and after the blocks. Set pipeline_parallel_degree = 1, or name the children "
            f"of the base model, as in nl.pipeline(model, parts={KNOWN_SPLITS['gpt2']})."
        )
    split = ModelSplit(base, tuple(parts["first"]), parts["blocks"], tuple(parts["last"]), head)
    _check_split(model, split)
    return split


def _split_from_config(model: HuggingFaceModel) -> Mapping | None:
    """Read ``base_model_pp_plan``, which lists the base model's children in forward order."""
    plan = getattr(model.config, "base_model_pp_plan", None)
    if not plan:
        return KNOWN_SPLITS.get(getattr(model.config, "model_type", ""))
    names = list(plan)
    lists = [n for n in names if isinstance(getattr(model.base_model, n, None), nn.ModuleList)]
    if len(lists) != 1:
        return None
    index = names.index(lists[0])
    return {"first": names[:index], "blocks": lists[0], "last": names[index + 1 :]}


def _check_split(model: HuggingFaceModel, split: ModelSplit) -> None:
    """Raise ConfigError for parameters that no stage would hold, and for losses across stages."""
    kind, base = type(model).__name__, getattr(model, split.base)
    children = dict(base.named_children())
    missing = [n for n in (*split.first, split.blocks, *split.last) if n not in children]
    if missing:
        raise ConfigError(
            f"nl.pipeline: {kind}.{split.base} has no child {missing[0]!r}. Its children are "
            f"{', '.join(children)}."
        )
    held = {f"{split.base}.{name}" for name in (*split.first, split.blocks, *split.last)}
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{part}.") for part in (*held, split.head)):
            raise ConfigError(
                f"nl.pipeline: no stage of {kind} would hold parameter {name}. Name the module it "
                f"belongs to, as in nl.pipeline(model, parts={KNOWN_SPLITS['gpt2']})."
            )
    if getattr(model.config, "output_router_logits", False):
        raise ConfigError(
            "nl.pipeline: output_router_logits = true in the model's config needs one loss over "
            "the routers of all stages, which a pipeline cannot compute. Set it to false."
        )


def _child_name(model: nn.Module, child: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_children() if module is child), None)


FIRST_STAGE_ARGUMENTS = ("input_ids", "inputs_embeds", "token_type_ids")
"""Arguments for the first stage only. Later stages receive hidden states."""
LAST_STAGE_ARGUMENTS = ("labels", "logits_to_keep", "shift_labels")
"""Arguments for the last stage only."""


class PassThrough(nn.Module):
    """Replaces a module of another stage; returns the hidden states."""

    def __init__(
        self,
        as_tuple: bool = False,
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        """Create the replacement.

        Args:
            as_tuple: Return a tuple, as blocks in older releases of transformers do.
            transform: Change of the hidden states that the replaced module is responsible for.
        """
        super().__init__()
        self.as_tuple = as_tuple
        self.transform = transform

    def forward(self, hidden: torch.Tensor, *args, **kwargs):
        hidden = hidden if self.transform is None else self.transform(hidden)
        return (hidden,) if self.as_tuple else hidden


class ZeroEmbedding(nn.Module):
    """Replaces an embedding that the first stage has already added to the hidden states."""

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return torch.zeros(())


@dataclass
class StageState:
    """Position of a stage in the pipeline, and its current micro-batches."""

    is_first: bool
    is_last: bool
    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    """Arguments of the whole model for each micro-batch."""
    on_output: Callable[[int, Any], Any] | None = None
    """Called with (micro-batch index, model output) on the last stage, which returns the result."""
    index: int = 0
    """Index of the current micro-batch."""

    def begin(
        self, micro_batches: list[dict[str, Any]], on_output: Callable[[int, Any], Any]
    ) -> None:
        self.micro_batches, self.on_output = micro_batches, on_output

    def clear(self) -> None:
        """Release the micro-batches."""
        self.micro_batches, self.on_output = [], None


class StageForward:
    """The ``forward`` of a stage: from hidden states to hidden states, or to the loss."""

    def __init__(self, stage: nn.Module, state: StageState):
        self.stage, self.state = stage, state

    def __call__(self, *received: torch.Tensor):
        stage, state = self.stage, self.state
        output = type(stage).forward(stage, **_stage_arguments(stage, received, state))
        if state.is_last:
            assert state.on_output is not None
            return state.on_output(state.index, forward_transforms(stage).leave(output))
        return _hidden_to_send(stage, output)


def stage_state(stage: nn.Module) -> StageState:
    """Return the state of ``stage``, built by `build_stage`."""
    assert isinstance(stage.forward, StageForward)
    return stage.forward.state


def _stage_arguments(
    stage: nn.Module, received: tuple[torch.Tensor, ...], state: StageState
) -> dict[str, Any]:
    """Return the model's arguments for the current micro-batch, with the received hidden states."""
    arguments = forward_transforms(stage).enter((), dict(state.micro_batches[state.index]))
    shape = _batch_shape(arguments)
    excluded = (() if state.is_first else FIRST_STAGE_ARGUMENTS) + (
        () if state.is_last else LAST_STAGE_ARGUMENTS
    )
    arguments = {name: value for name, value in arguments.items() if name not in excluded}
    if not state.is_first:
        rows = token_rows(stage)
        if rows is not None:
            rows.set_shape(*shape)
        arguments["inputs_embeds"] = received[0] if rows is None else rows.place(received[0])
    return arguments | {"use_cache": False, "return_dict": True}


def _hidden_to_send(stage: nn.Module, output: Any) -> torch.Tensor:
    """Return the hidden states for the next stage; never a view, which torch cannot detach."""
    rows = token_rows(stage)
    hidden = output.logits if rows is None else rows.take(output.logits)
    return hidden if hidden._base is None else hidden.clone()


def token_rows(model: nn.Module) -> TokenRows | None:
    """Return the rows of the hidden states that each tensor rank sends; None without them."""
    tensor = model_state(model).extension(TensorParallel)
    return None if tensor is None else tensor.rows


def hidden_shape(model: HuggingFaceModel, micro_batch: Mapping) -> tuple[int, ...]:
    """Return the shape (B, S, E) of the hidden states between stages for one micro-batch.

    S is this context rank's part of the sequence. Tensor ranks send (1, rows, E).
    """
    arguments = forward_transforms(model).enter((), dict(micro_batch))
    shape, rows = _batch_shape(arguments), token_rows(model)
    if rows is not None:
        rows.set_shape(*shape)
        shape = (1, rows.rows_per_rank)
    return (*shape, model.config.hidden_size)


def _batch_shape(arguments: Mapping) -> tuple[int, int]:
    """Return (B, S) of a micro-batch."""
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, torch.Tensor) or tokens.dim() < 2:
        raise NearlinearError(
            "a pipeline finds neither input_ids (B, S) nor inputs_embeds (B, S, E) among the "
            f"model's arguments ({', '.join(arguments)}). Pass one of them."
        )
    return tokens.shape[0], tokens.shape[1]


def build_stage(
    model: HuggingFaceModel, split: ModelSplit, blocks: Iterable[int], num_blocks: int
) -> nn.Module:
    """Return the stage of ``model`` that holds ``blocks``. It shares the model's modules.

    Args:
        num_blocks: Number of blocks of the whole model.
    """
    stage, blocks = _copy_containers(model, split), set(blocks)
    remove_other_stages(stage, split, blocks, num_blocks, token_rows(model))
    set_model_state(stage, replace(model_state(model), is_stage=True))
    stage.forward = StageForward(stage, StageState(0 in blocks, num_blocks - 1 in blocks))
    return stage


def remove_other_stages(
    model: HuggingFaceModel,
    split: ModelSplit,
    blocks: set[int],
    num_blocks: int,
    rows: TokenRows | None = None,
) -> None:
    """Replace the modules of ``model`` that stages without ``blocks`` hold, in place."""
    base, block_list = model._modules[split.base], split.block_list(model)
    if 0 not in blocks:
        input_embeddings = model.get_input_embeddings()
        for name in split.first:
            module = base._modules[name]
            is_added = isinstance(module, nn.Embedding) and module is not input_embeddings
            base._modules[name] = ZeroEmbedding() if is_added else PassThrough()
    for name, block in list(block_list._modules.items()):
        if int(name) not in blocks and not isinstance(block, PassThrough):
            transform = rows.take if rows is not None and name == "0" else None
            block_list._modules[name] = PassThrough(returns_tuple(type(block)), transform)
    if num_blocks - 1 not in blocks:
        for name in split.last:
            transform = rows.place if rows is not None and name == split.last[0] else None
            base._modules[name] = PassThrough(transform=transform)
        model._modules[split.head] = PassThrough()


def _copy_containers(model: HuggingFaceModel, split: ModelSplit) -> HuggingFaceModel:
    """Return a copy of the model, its base model and its list of blocks; share all else."""
    copied = _shallow_copy(model)
    base = copied._modules[split.base] = _shallow_copy(copied._modules[split.base])
    base._modules[split.blocks] = _shallow_copy(base._modules[split.blocks])
    return copied


def _shallow_copy(module: HuggingFaceModel) -> HuggingFaceModel:
    """Return a copy that shares children, parameters and buffers, but not the dicts of them."""
    copied = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # `copy` shares children, hooks, ...
            vars(copied)[name] = value.copy()
    return copied


def returns_tuple(block: type[nn.Module]) -> bool:
    """Return True if the block's ``forward`` returns a tuple, as some did in transformers 4.

    Reads the source of its return statements. Falls back to the return annotation if a returned
    value is neither a tuple nor a name.
    """
    forward = inspect.unwrap(block.forward)
    annotation = inspect.signature(forward).return_annotation
    with one_at_a_time():  # the parser of Python 3.11 is not thread-safe
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(forward)))))
    tuple_names = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    if not all(isinstance(value, ast.Tuple | ast.Name) for value in returned):
        return "tuple[" in str(annotation).lower()
    return any(
        isinstance(value, ast.Tuple) or (isinstance(value, ast.Name) and value.id in tuple_names)
        for value in returned
    )


def preserves_hidden_states(model: HuggingFaceModel, split: ModelSplit, num_blocks: int) -> bool:
    """Return True if ``model`` changes hidden states only in the modules of ``split``.

    Some models scale or cap hidden states in between, which every stage would repeat.
    """
    bare = _copy_containers(model, split)
    remove_other_stages(bare, split, set(), num_blocks)
    device = next((b.device for b in model.buffers() if not b.is_meta), torch.device("cpu"))
    hidden = torch.linspace(-1, 1, 2 * model.config.hidden_size, device=device).view(1, 2, -1)
    with torch.no_grad():
        forward = type(model).forward
        output = forward(bare, inputs_embeds=hidden, use_cache=False, return_dict=True).logits
    return output.shape == hidden.shape and torch.equal(output, hidden)
