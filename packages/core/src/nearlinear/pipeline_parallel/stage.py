"""Pipeline stages: copies of the model in which modules of other stages are replaced.

The model's own ``forward`` runs unchanged on every stage, and parameters keep their names. Hidden
states enter a stage where its first block would receive them and leave it after its last block, so
that factors and caps around the blocks (Granite, Cohere, Gemma) have no effect on them. A stage
shares its modules with the rank's model; only the containers around them are copied.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from .. import _torch
from ..errors import ConfigError, NearlinearError
from ..fsdp.forward_transforms import forward_transforms
from ..fsdp.model_state import find_blocks, model_state, set_model_state
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
    """The module that holds the blocks, in the model."""
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
    named, parts = parts is not None, parts or _split_from_config(model)
    if parts is not None:
        split = ModelSplit(base, tuple(parts["first"]), parts["blocks"], tuple(parts["last"]), head)
        if not _problem(model, split):
            _check_model(model)
            return split
        if named:
            _check_split(model, split)  # raises
    split = _derive_split(model, head)
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


def _problem(model: HuggingFaceModel, split: ModelSplit) -> str | None:
    """Return the reason why ``split`` does not cover ``model``, if any."""
    kind, children = type(model).__name__, dict(model.get_submodule(split.base).named_children())
    for name in (*split.first, split.blocks, *split.last):
        if name not in children:
            return f"{kind}.{split.base} has no child {name!r}. Its children: {', '.join(children)}"
    held = {f"{split.base}.{name}" for name in (*split.first, split.blocks, *split.last)}
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{part}.") for part in (*held, split.head)):
            return f"no stage of {kind} would hold parameter {name}"
    return None


def _check_split(model: HuggingFaceModel, split: ModelSplit) -> None:
    """Raise ConfigError for parameters that no stage would hold, and for losses across stages."""
    problem = _problem(model, split)
    if problem:
        raise ConfigError(
            f"nl.pipeline: {problem}. Name the modules before and after the blocks, as in "
            f"nl.pipeline(model, parts={KNOWN_SPLITS['gpt2']}), or set "
            "pipeline_parallel_degree = 1."
        )
    _check_model(model)


def _check_model(model: HuggingFaceModel) -> None:
    """Raise ConfigError for a model that differs if its batch is divided into micro-batches."""
    if getattr(model.config, "output_router_logits", False):
        raise ConfigError(
            "nl.pipeline: output_router_logits = true in the model's config needs one loss over "
            "the routers of all stages, which a pipeline cannot compute. Set it to false."
        )
    for source in {type(module).__module__ for module in model.modules()}:
        apply_mask = getattr(sys.modules.get(source), "apply_mask_to_padding_states", None)
        if apply_mask is None:
            continue
        with _torch.unset_fake(), torch.device("cpu"):
            masked = apply_mask(torch.ones(1, 2, 1), torch.tensor([[0, 1]]))
            if masked.tolist() != [[[0.0], [1.0]]]:
                raise _indivisible(
                    model,
                    "this transformers ignores the padding of batches of one row, and a later one "
                    "does not (pip install -U transformers)",
                )


def _derive_split(model: HuggingFaceModel, head: str) -> ModelSplit:
    """Find the modules before and after the blocks by a forward pass without any of them."""
    names = {module: name for name, module in model.named_modules()}
    if not hasattr(model.config, "hidden_size"):
        raise _indivisible(model, "its config has no hidden_size, but those of several models")
    blocks = find_blocks(model)
    base, _, stack = names[blocks[0]].rpartition(".")[0].rpartition(".")
    holder = model.get_submodule(base)
    children = {
        name: child
        for name, child in holder.named_children()
        if name != stack and any(True for _ in child.parameters())
    }
    embedding = _child_name(holder, model.get_input_embeddings())
    if embedding is None or list(holder._modules[stack].children()) != blocks:
        raise _indivisible(model, f"its embedding and its blocks are not children of {base}")
    split = ModelSplit(base, tuple(children), stack, (), head)
    order = _run_bare(model, split, len(blocks)).order
    called = [name for name in order if name is not None]
    if set(children) - set(called) - {embedding} or len(called) != len(set(called)):
        odd = sorted(set(children) - set(called) - {embedding}) or called
        raise _indivisible(model, f"{', '.join(odd)} are not called once, before or after blocks")
    first = [name for name in order[: order.index(None)] if name and name != embedding]
    last = [name for name in order[order.index(None) :] if name]
    return ModelSplit(base, (embedding, *first), stack, tuple(last), head)


def _indivisible(model: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"nl.pipeline: {type(model).__name__} cannot be divided into stages: {reason}. Set "
        "pipeline_parallel_degree = 1 and raise hybrid_shard_degree."
    )


def _child_name(model: nn.Module, child: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_children() if module is child), None)


FIRST_STAGE_ARGUMENTS = ("input_ids", "inputs_embeds", "token_type_ids")
"""Arguments for the first stage only. Later stages receive hidden states."""
LAST_STAGE_ARGUMENTS = ("labels", "logits_to_keep", "shift_labels")
"""Arguments for the last stage only."""


class PassThrough(nn.Module):
    """Replaces a module of another stage; returns the hidden states."""

    def __init__(self, as_tuple: bool = False, replaced: nn.Module | None = None):
        """Create the replacement.

        Args:
            as_tuple: Return a tuple, as blocks in older releases of transformers do.
            replaced: Module whose plain attributes the model may read, such as the type of a layer.
        """
        super().__init__()
        self.as_tuple = as_tuple
        for name, value in ({} if replaced is None else vars(replaced)).items():
            if isinstance(value, str | int | float | None) and name != "training":
                vars(self).setdefault(name, value)

    def forward(self, hidden: torch.Tensor, *args, **kwargs):
        return (hidden,) if self.as_tuple else hidden


class Boundary(PassThrough):
    """Replaces the first block of the model, the last one or both.

    The first block of later stages returns the received hidden states. The last block of earlier
    stages keeps those to send, and returns zeros of the whole batch to the rest of ``forward``:
    tensor ranks have rows of hidden states, which GPT-2 would view as (B, S, E).
    """

    def __init__(
        self, replaced: nn.Module, as_tuple: bool, state: StageState, is_first: bool, is_last: bool
    ):
        super().__init__(as_tuple, replaced)
        self.state, self.is_first, self.is_last = state, is_first, is_last

    def forward(self, hidden: torch.Tensor, *args, **kwargs):
        if self.is_first:
            assert self.state.received is not None
            hidden = self.state.received
        if self.is_last:
            self.state.result = hidden
            hidden = hidden.new_zeros(()).expand(*self.state.shape, hidden.shape[-1])
        return super().forward(hidden)


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
    shape: tuple[int, int] = (0, 0)
    """(B, S) of the current micro-batch."""
    received: torch.Tensor | None = None
    """Hidden states from the previous stage, during a forward pass."""
    result: torch.Tensor | None = None
    """Hidden states for the next stage, during a forward pass."""

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
        state.received = None if state.is_first else received[0]
        output = type(stage).forward(stage, **_stage_arguments(stage, state))
        hidden, state.received, state.result = state.result, None, None
        if state.is_last:
            assert state.on_output is not None
            return state.on_output(state.index, forward_transforms(stage).leave(output))
        assert hidden is not None
        return hidden if hidden._base is None else hidden.clone()  # torch cannot detach views


def stage_state(stage: nn.Module) -> StageState:
    """Return the state of ``stage``, built by `build_stage`."""
    assert isinstance(stage.forward, StageForward)
    return stage.forward.state


def _stage_arguments(stage: nn.Module, state: StageState) -> dict[str, Any]:
    """Return the model's arguments for the current micro-batch.

    Later stages get zeros in place of embeddings, see `Boundary`.
    """
    arguments = forward_transforms(stage).enter((), dict(state.micro_batches[state.index]))
    state.shape = shape = _batch_shape(arguments)
    excluded = (() if state.is_first else FIRST_STAGE_ARGUMENTS) + (
        () if state.is_last else LAST_STAGE_ARGUMENTS
    )
    arguments = {name: value for name, value in arguments.items() if name not in excluded}
    if state.received is not None:
        rows = token_rows(stage)
        if rows is not None:
            rows.set_shape(*shape)
        arguments["inputs_embeds"] = state.received.new_zeros(*shape, state.received.shape[-1])
    return arguments | {"use_cache": False, "return_dict": True}


def token_rows(model: nn.Module) -> TokenRows | None:
    """Return the rows of the hidden states that each tensor rank sends; None if it sends all."""
    tensor = model_state(model).extension(TensorParallel)
    return None if tensor is None or tensor.whole_states else tensor.rows


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
    state = StageState(0 in blocks, num_blocks - 1 in blocks)
    remove_other_stages(stage, split, blocks, num_blocks, state)
    set_model_state(stage, replace(model_state(model), is_stage=True))
    stage.forward = StageForward(stage, state)
    return stage


def remove_other_stages(
    model: HuggingFaceModel,
    split: ModelSplit,
    blocks: set[int],
    num_blocks: int,
    state: StageState | None = None,
) -> None:
    """Replace the modules of ``model`` that stages without ``blocks`` hold, in place.

    With ``state``, the model becomes a stage that receives and sends hidden states.
    """
    base, block_list = model.get_submodule(split.base), split.block_list(model)
    if 0 not in blocks:
        input_embeddings = model.get_input_embeddings()
        for name in split.first:
            module = base._modules[name]
            is_added = isinstance(module, nn.Embedding) and module is not input_embeddings
            base._modules[name] = ZeroEmbedding() if is_added else PassThrough()
    for name, block in list(block_list._modules.items()):
        if int(name) not in blocks and not isinstance(block, PassThrough):
            as_tuple = returns_tuple(type(block))
            ends = int(name) == 0, int(name) == num_blocks - 1
            is_boundary = state is not None and any(ends)
            block_list._modules[name] = (
                Boundary(block, as_tuple, state, *ends)
                if state and is_boundary
                else PassThrough(as_tuple, block)
            )
    if num_blocks - 1 not in blocks:
        for name in split.last:
            base._modules[name] = PassThrough()
        model._modules[split.head] = PassThrough()


def _copy_containers(model: HuggingFaceModel, split: ModelSplit) -> HuggingFaceModel:
    """Return a copy of the model, its base model and its list of blocks; share all else."""
    copied = container = _shallow_copy(model)
    for name in (*split.base.split("."), split.blocks):
        inner = _shallow_copy(container._modules[name])
        container._modules[name] = inner
        container = inner
    return copied


def _shallow_copy(module: HuggingFaceModel) -> HuggingFaceModel:
    """Return a copy that shares children, parameters and buffers, but not the dicts of them."""
    copied = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # `copy` shares children, hooks, ...
            vars(copied)[name] = value.copy()
    return copied


@functools.cache
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


class _Probe(PassThrough):
    """Records the call of a module in a bare forward pass, in which no module has parameters.

    Modules before the blocks return NaN, which must reach the blocks in their hidden states only.
    """

    def __init__(self, name: str | None, trace: _Trace, module: nn.Module):
        super().__init__(name is None and returns_tuple(type(module)), module)
        self.name, self.trace = name, trace
        self.is_embedding = isinstance(module, nn.Embedding)

    def forward(self, *args, **kwargs):
        self.trace.order.append(self.name)
        hidden = next((x for x in (*args, *kwargs.values()) if _is_float(x)), None)
        if self.name is not None:
            if hidden is None or self.is_embedding:
                hidden = self.trace.given
            return hidden * torch.nan
        if None not in self.trace.order[:-1]:
            self.trace.entering = hidden
            hidden = self.trace.given
        assert hidden is not None
        others = [x for x in _tensors((args[1:], kwargs)) if x is not hidden]
        self.trace.leaks |= any(
            _is_float(x) and not x.is_meta and bool(x.isnan().any()) for x in others
        )
        self.trace.leaving = hidden
        return super().forward(hidden)


@dataclass
class _Trace:
    """Observations of a bare forward pass."""

    given: torch.Tensor
    """Hidden states that the first block returns."""
    order: list[str | None] = field(default_factory=list)
    """Names of the called modules around the blocks, and None for every block."""
    entering: torch.Tensor | None = None
    """Hidden states at the first block."""
    leaving: torch.Tensor | None = None
    """Hidden states at the last block."""
    leaks: bool = False
    """Blocks receive more from the modules before them than hidden states."""


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from _tensors(value)


def _run_bare(model: HuggingFaceModel, split: ModelSplit, num_blocks: int) -> _Trace:
    """Run the model's forward with recorders in place of all modules with parameters."""
    bare, device = _copy_containers(model, split), torch.device("cpu")
    device = next((buffer.device for buffer in model.buffers() if not buffer.is_meta), device)
    size = model.config.hidden_size
    given = torch.linspace(-1, 1, 2 * size, device=device).view(1, 2, size)
    trace, base = _Trace(given), bare.get_submodule(split.base)
    for name in (*split.first, *split.last):
        base._modules[name] = _Probe(name, trace, base._modules[name])
    for name, block in list(split.block_list(bare)._modules.items()):
        split.block_list(bare)._modules[name] = _Probe(None, trace, block)
    bare._modules[split.head] = PassThrough()
    arguments = {"inputs_embeds": given.clone(), "use_cache": False, "return_dict": True}
    try:
        with torch.no_grad():
            type(model).forward(bare, **arguments)
    except Exception as error:  # the model's own code, on modules that it does not expect
        raise _indivisible(
            model, f"without its modules it raises {type(error).__name__} ({error})"
        ) from error
    if len([name for name in trace.order if name is None]) != num_blocks:
        raise _indivisible(model, "its blocks are not called once each")
    return trace


def check_hidden_states(model: HuggingFaceModel, split: ModelSplit, num_blocks: int) -> None:
    """Check that blocks pass only hidden states (B, S, E) to each other. Raises ConfigError."""
    if getattr(model.config, "num_kv_shared_layers", 0):
        raise _indivisible(model, "blocks use the keys and values of earlier ones")
    trace = _run_bare(model, split, num_blocks)
    if trace.entering is None or trace.entering.shape != trace.given.shape:
        raise _indivisible(model, "its hidden states do not have shape (batch, tokens, width)")
    if trace.leaving is None or not torch.equal(trace.leaving, trace.given):
        raise _indivisible(model, "it changes hidden states between blocks")
    if trace.leaks:
        raise _indivisible(model, "blocks receive more than hidden states from modules before them")
