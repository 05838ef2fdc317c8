"""State that nearlinear keeps for a model and for each of its parameters.

`model_state(model)` returns the one `ModelState` of a model, `parameter_state(parameter)` the one
`ParameterState` of a parameter. No other attribute is set on a user's modules or tensors.
``nl.transform`` and ``nl.pipeline`` record their changes here and register a `ShardingExtension`,
so that ``nl.shard`` needs no knowledge of the other kinds of parallelism.

Classes of user modules are exchanged in the two places below only, by `mixin_class`. Everything
else uses hooks, or a ``forward`` set on the instance, which keep ``isinstance`` and state dicts.

============================================  ==================================================
Mixed-in class                                Reason
============================================  ==================================================
``pipeline_parallel.api.Pipelined``,          ``named_parameters`` (names of tied parameters),
in front of the model                         ``train`` and ``__call__`` differ: Python and torch
                                              look them up on the class, and no hook covers them
``activation.wrapper.CheckpointedBlock``,     blocks that are recomputed together must not run
in front of each block                        their hooks one by one, and so have a ``__call__``
============================================  ==================================================
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..distributed import runtime as runtimes
from ..distributed.runtime import Runtime
from ..errors import ConfigError

if TYPE_CHECKING:
    from .accumulate import AccumulationStep
    from .forward_transforms import ForwardTransforms
    from .loss_scaler import LossScaler
    from .optimizer_state import OptimizerSlices
    from .prefetch import PrefetchSchedule
    from .targets import TargetRule
    from .unit_collectives import GradientReduction

_STATE = "_nearlinear_state"


HuggingFaceModel = Any
"""A `transformers.PreTrainedModel`; transformers is imported only where it is used."""


@dataclass(frozen=True)
class DimSplit:
    """Division of one dim of a parameter among the ranks of a mesh axis."""

    axis: str
    """Mesh axis: ``tensor`` or ``expert``."""
    dim: int
    size: int
    """Elements of the full parameter on that dim."""
    ranges: tuple[tuple[int, int], ...]
    """This rank's (start, length) ranges, in the order of their values in local memory."""

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``full`` as a contiguous copy."""
        parts = [full.narrow(self.dim, start, length) for start, length in self.ranges]
        return torch.cat(parts, self.dim).contiguous()


def split_evenly(axis: str, dim: int, size: int, rank: int, ranks: int, parts: int = 1) -> DimSplit:
    """Return ``rank``'s `DimSplit` into ``ranks`` nearly equal ranges; the first take remainders.

    Args:
        parts: Number of tensors that are stacked along ``dim`` (fused projections). Each of them
            is split by itself.
    """
    each = size // parts
    small, remainder = divmod(each, ranks)
    start = rank * small + min(rank, remainder)
    length = small + (rank < remainder)
    return DimSplit(axis, dim, size, tuple((part * each + start, length) for part in range(parts)))


@dataclass
class ParameterLayout:
    """Splits of a model's parameters by name, and the mesh axes the model was transformed for.

    A parameter may be split on several dims. Parameters without an entry are whole on every rank.
    The split parameters are plain tensors rather than DTensors: fused projections are split in
    several ranges, vocabularies need not divide evenly, and the model's own code runs unchanged.
    """

    splits: dict[str, tuple[DimSplit, ...]] = field(default_factory=dict)
    axes: set[str] = field(default_factory=set)

    def take(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the full values of parameter ``name``."""
        for split in self.splits.get(name, ()):
            full = split.take(full)
        return full

    def split_parameter(self, model: nn.Module, name: str, split: DimSplit) -> None:
        """Replace parameter ``name`` by this rank's part of it, also where it is tied.

        On the meta device only the shape changes; `deferred_init.materialize` splits the values.
        """
        full = model.get_parameter(name)
        part = nn.Parameter(split.take(full.detach()), requires_grad=full.requires_grad)
        parameter_state(part).initial_values = parameter_state(full).initial_values
        for module_name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is full:
                    module._parameters[key] = part
                    full_name = f"{module_name}.{key}" if module_name else key
                    self.splits[full_name] = (*self.splits.get(full_name, ()), split)


class InitialValues(Protocol):
    """Source of the values of a parameter on the meta device."""

    def values(self, name: str, like: nn.Parameter, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the full values of parameter ``name`` in the dtype of ``like``."""
        ...


@dataclass(eq=False)
class ParameterState:
    """State of one parameter; see `parameter_state`."""

    splits: tuple[DimSplit, ...] = ()
    """Splits over tensor or expert ranks, beside FSDP2's sharding."""
    initial_values: InitialValues | None = None
    """Source of the values while the parameter is on the meta device."""
    optimizer_slice: nn.Parameter | None = None
    """This replica's slice, which the optimizer updates; None: the parameter itself."""
    replaced: bool = False
    """True for a parameter that ``nl.shard`` replaced by a sharded one."""
    is_tied_copy: bool = False
    """True for a second copy on another pipeline stage. Norms count its gradient once."""
    model: ModelState | None = None
    """State of the transformed or sharded model that owns the parameter."""


def parameter_state(parameter: torch.Tensor) -> ParameterState:
    """Return the state of ``parameter``, created on first use."""
    state = getattr(parameter, _STATE, None)
    if state is None:
        state = ParameterState()
        setattr(parameter, _STATE, state)
    return state


def optimizer_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return the tensor the optimizer updates for ``parameter``: its slice, or itself."""
    state = getattr(parameter, _STATE, None)
    return parameter if state is None or state.optimizer_slice is None else state.optimizer_slice


class PartialGradients(Protocol):
    """Gradients to which several ranks contribute; they are summed once per step."""

    def begin(self) -> None:
        """Record the gradients that exist before the step's first backward pass."""

    def reduce(self) -> None:
        """Sum the contributions since `begin`. A collective call."""

    def abandon(self) -> None:
        """Forget an unfinished step."""


class ShardingExtension:
    """Contribution of another kind of parallelism to ``nl.shard``.

    ``nl.transform`` and ``nl.pipeline`` append extensions to ``model_state(model).extensions`` when
    they change the model. Override the methods that apply; each of them defaults to no
    contribution. A kind of parallelism may also keep state of its own in its extension.
    """

    def expert_units(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules inside ``module`` to shard over `Runtime.expert_mesh`."""
        return []

    def partial_gradients(self, model: nn.Module, runtime: Runtime) -> list[PartialGradients]:
        """Return reducers for gradients to which several ranks contribute.

        Called on every rank after the units of ``model`` are sharded; may make collective calls.
        """
        return []


class PipelineRunner(Protocol):
    """The part of a pipelined model's runtime that sharding and accumulation use."""

    stages: dict[int, nn.Module]
    """This rank's stages by number. Each is sharded as a model of its own."""
    dtype: torch.dtype | None
    """Dtype of the hidden states between stages, set by ``nl.shard``."""
    reduce_replicas: bool
    """True if the next schedule ends with the reduction across replicas."""

    @property
    def schedule_name(self) -> str: ...
    @property
    def needs_gathered_weights(self) -> bool:
        """True if the schedule computes weight gradients apart from the backward pass."""
        ...

    def blocks_of(self, stage: nn.Module) -> list[nn.Module]: ...
    def control_replica_reduction(self, stage: nn.Module) -> None:
        """Take over the reduction across replicas of a sharded stage."""

    def shared_batch(self, batch: Any) -> Any:
        """Return the batch that the pipeline's ranks compute."""

    def reshard(self) -> None:
        """Free the gathered parameters of all stages."""


class ActivationHandling(Protocol):
    """The part of activation checkpointing and offload that other modules ask for."""

    blocks: list[nn.Module]


Extension = TypeVar("Extension")


@dataclass(eq=False)
class ModelState:
    """State of one model; see `model_state`."""

    layout: ParameterLayout = field(default_factory=ParameterLayout)
    """Splits by ``nl.transform``."""
    extensions: list[ShardingExtension] = field(default_factory=list)
    """Contributions of the other kinds of parallelism, in the order they were registered."""
    forward_transforms: ForwardTransforms | None = None
    """Changes of the model's arguments and outputs by ``nl.transform``."""
    pipeline: PipelineRunner | None = None
    """Runtime of a model that ``nl.pipeline`` divided into stages."""
    is_stage: bool = False
    """True for a pipeline stage, which applies the forward transforms itself."""
    activations: ActivationHandling | None = None
    """Checkpointing and offload of activations."""
    converted_to_fp8: bool = False
    """True after ``nl.convert_to_fp8``."""

    runtime: Runtime | None = None
    """Ranks over which ``nl.shard`` sharded the model; None before."""
    reduction: GradientReduction | None = None
    """Overlapped gradient reduction on the CPU; None: FSDP2 reduces."""
    prefetch: PrefetchSchedule | None = None
    """Prefetch schedule of the units; None in pipelines and with explicit resharding."""
    optimizer_slices: OptimizerSlices | None = None
    """Slices of the optimizer state, if replicas shard it."""
    partial_gradients: list[PartialGradients] = field(default_factory=list)
    """Gradients to which several ranks contribute."""
    loss_scaler: LossScaler | None = None
    """Dynamic loss scale; None unless the model computes in float16."""
    target_rule: TargetRule | None = None
    """Labels that the model's loss counts; None while unknown, see `targets.target_rule`."""
    target_rule_verified: bool = False
    """True after a measured step that no other rule fits."""
    accumulation: AccumulationStep | None = None
    """The open `nl.accumulate` loop."""

    def extension(self, kind: type[Extension]) -> Extension | None:
        """Return the registered extension of class ``kind``, or None."""
        for extension in self.extensions:
            if isinstance(extension, kind):
                return extension
        return None


def model_state(model: nn.Module) -> ModelState:
    """Return the state of ``model``, created on first use.

    Submodules that must find it at run time (attention layers under context parallelism) and the
    stages of a pipeline share their model's state, see `set_model_state`.
    """
    state = getattr(model, _STATE, None)
    if state is None:
        state = ModelState()
        setattr(model, _STATE, state)
    return state


def set_model_state(module: nn.Module, state: ModelState) -> None:
    """Make `model_state` return ``state`` for ``module``, a submodule or stage of its model."""
    setattr(module, _STATE, state)


def runtime_of(model: nn.Module) -> Runtime:
    """Return the runtime over which ``model`` is sharded, or before that the one of `nl.init`.

    Raises NearlinearError if there is neither.
    """
    return model_state(model).runtime or runtimes.current()


def label_parameters(model: nn.Module) -> None:
    """Record in every parameter of ``model`` its splits and its model."""
    state = model_state(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = parameter_state(parameter)
        own.splits, own.model = state.layout.splits.get(name, ()), state


def full_shape(tensor: torch.Tensor, splits: Sequence[DimSplit] = ()) -> tuple[int, ...]:
    """Return the shape in the whole model of ``tensor``, which was split by ``splits``."""
    shape = list(tensor.shape)
    for split in splits:
        shape[split.dim] = split.size
    return tuple(shape)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's values of a tensor that may be a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@functools.cache
def mixin_class(kind: type, mixin: type) -> type:
    """Return a subclass of ``mixin`` and ``kind`` under the name of ``kind``.

    Checkpoints, logs and lookups by class name keep speaking of the model's own class.
    """
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (mixin, kind), names)


def fsdp_roots(model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP2 shards as whole models: ``model``, or its pipeline stages."""
    pipeline = model_state(model).pipeline
    return [model] if pipeline is None else list(pipeline.stages.values())


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of ``model`` in forward order: the units to gather one at a time.

    Hugging Face models name the classes of their blocks in ``_no_split_modules``, some of them also
    the class of their embeddings. A module with a parameter that is tied to another module's is no
    block, so that tied parameters stay together in the root unit. Neither is one that holds the
    table of input embeddings, which models of images and text call by itself. For any other model
    the blocks are the children of the ``nn.ModuleList`` or ``nn.Sequential`` that holds the most
    parameters in modules of one class. Raises ConfigError if there is none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if _original_class_name(module) in names]
    outermost = _without_nested(named)
    shared, table = tied_blocks(model, outermost), _input_embeddings(model)
    outermost = [m for m in outermost if m not in shared and table not in set(m.modules())]
    if outermost and outermost != [model]:
        return outermost
    stacks = [_children_of_stack(m) for m in model.modules() if _is_stack(m)]
    if not stacks:
        raise ConfigError(
            f"{type(model).__name__} has no list of equal blocks to shard by: pass them, as in "
            "nl.shard(model, blocks=list(model.layers))"
        )
    return max(stacks, key=lambda blocks: sum(p.numel() for b in blocks for p in b.parameters()))


def _input_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the table of input embeddings of a Hugging Face model, if it names one."""
    with suppress(AttributeError, NotImplementedError):
        return model.get_input_embeddings()  # type: ignore[operator]
    return None


def _children_of_stack(stack: nn.Module) -> list[nn.Module]:
    """Return the blocks of a stack, or of a stack of stacks."""
    children = list(stack.children())
    if all(isinstance(child, nn.ModuleList) for child in children):
        return [block for child in children for block in child.children()]
    return children


def is_conv1d(module: nn.Module) -> bool:
    """Return whether ``module`` is GPT-2's linear layer, without importing transformers."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def tied_blocks(model: nn.Module, blocks: list[nn.Module]) -> dict[nn.Module, str]:
    """Return the ``blocks`` that share a parameter with the rest of ``model``, and its name."""
    uses: dict[nn.Parameter, set[nn.Module | None]] = {}
    block_of = {module: block for block in blocks for module in block.modules()}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses.setdefault(parameter, set()).add(block_of.get(module))
    return {
        block: name
        for name, parameter in model.named_parameters()
        if len(uses[parameter]) > 1
        for block in uses[parameter]
        if block is not None
    }


def _original_class_name(module: nn.Module) -> str:
    """Return the class name without the prefix that FSDP2 adds."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name


def _is_stack(module: nn.Module) -> bool:
    children = list(module.children())
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(children) > isinstance(module, nn.Sequential)
        and len({type(child) for child in children}) == 1
        and any(True for _ in children[0].parameters())
    )


def _without_nested(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if id(module) not in inner]
