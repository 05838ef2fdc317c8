"""``FullyShardedDataParallel`` (FSDP1) as SMP v2's scripts use it, on `nl.shard`.

Between `install` and `uninstall` the names in `REPLACED` behave as below, on ranks that called
``tsm.init``. Scripts may have imported them before: classes are changed in place, and functions
keep their identity.

==============================================  ====================================================
Name in torch                                   Behaviour
==============================================  ====================================================
``FullyShardedDataParallel(...)``               returns a `ShardedModel`
its static methods                              accept a `ShardedModel`
``FullStateDictConfig(translate_on_save=)``     accepts the argument
``load_sharded_optimizer_state_dict``           accepts ``process_group``, returns DTensors
``apply_activation_checkpointing``              calls `nl.checkpoint_activations`
``offload_wrapper``                             calls `nl.offload_activations`
==============================================  ====================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import optimizer as dcp_optimizer
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from ... import _torch
from ...activation.api import checkpoint_activations, offload_activations
from ...distributed import runtime as runtimes
from ...distributed.consensus import all_gather_ints
from ...errors import ConfigError
from ...fsdp.accumulate import defer_replica_reduction
from ...fsdp.clip_grad import clip_grad_norm_
from ...fsdp.deferred_init import broadcast_initial_values
from ...fsdp.model_state import find_blocks, model_state, parameter_state, tied_blocks
from ...fsdp.shard import shard
from . import state_dicts
from .delayed_param import allocate_buffers, initialize_by
from .distributed.checkpoint.state_dict_loader import load_optimizer_state

log = logging.getLogger(__name__)

WRAPPED = "_fsdp_wrapped_module"
"""Attribute of the wrapped model, as in FSDP1."""

PRECISIONS = {None: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16"}
"""``nl.shard(precision=)`` by ``MixedPrecision(param_dtype=)``."""

KEPT_GATHERED = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)
"""Strategies that do not free parameters between forward and backward pass."""


class ShardedModel(FullyShardedDataParallel):
    """A model sharded by `nl.shard` with the interface of FSDP1.

    ``module`` is the sharded model; its parameters keep their names. Arguments are those of
    ``FullyShardedDataParallel`` and SMP's ``post_param_init_fn``. The degree is
    ``hybrid_shard_degree``; where that is 0, ``sharding_strategy`` determines it.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Any = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Any = None,
        device_mesh: Any = None,
        post_param_init_fn: Callable[[nn.Module], None] | None = None,
    ):
        nn.Module.__init__(self)
        if ignored_modules or ignored_states:
            raise ConfigError(
                "FullyShardedDataParallel(ignored_modules=, ignored_states=): every parameter is "
                "sharded here. Leave them out, and freeze parameters by requires_grad = False."
            )
        if device_mesh is not None:
            raise ConfigError(
                "FullyShardedDataParallel(device_mesh=): the ranks are those of tsm.init. Leave it "
                "out, and set hybrid_shard_degree."
            )
        if any(isinstance(part, ShardedModel) for part in module.modules()):
            raise ConfigError(
                "FullyShardedDataParallel: a part of the model is wrapped already. Wrap the whole "
                "model once, with auto_wrap_policy."
            )
        settings = runtimes.current().config
        if backward_prefetch is None or forward_prefetch or not limit_all_gathers:
            log.warning(
                "backward_prefetch, forward_prefetch and limit_all_gathers have no effect: "
                "prefetch_depth = %d sets the prefetching",
                settings.prefetch_depth,
            )
        _set_degree(module, sharding_strategy)
        _check_group(process_group)
        now = runtimes.current()
        if cpu_offload is not None and cpu_offload.offload_params:
            now.config = dataclasses.replace(now.config, offload_optimizer=True)
        if sync_module_states:
            _use_values_of_rank0(module)
        initialize_by(module, param_init_fn)
        shard(
            module,
            blocks=_blocks(module, auto_wrap_policy),
            precision=_precision(mixed_precision, settings.precision),
            reshard_after_forward=False if sharding_strategy in KEPT_GATHERED else None,
        )
        if post_param_init_fn is not None:
            for part in module.modules():
                post_param_init_fn(part)
        self.add_module(WRAPPED, module)
        self.state_dict_settings = StateDictSettings(
            StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )

    @property
    def module(self) -> nn.Module:
        return self._modules[WRAPPED]  # pyright: ignore[reportReturnType] set in __init__

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """Strategy of FSDP1 that has the layout of the job."""
        mesh = runtimes.current().mesh
        if mesh.sharing == 1:
            return ShardingStrategy.NO_SHARD
        full = mesh.replicate == 1
        return ShardingStrategy.FULL_SHARD if full else ShardingStrategy.HYBRID_SHARD

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Ranks that share one copy of the model states."""
        return runtimes.current().group("sharing")

    @property
    def rank(self) -> int:
        return dist.get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        return self.process_group.size()

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return getattr(nn.Module.__getattr__(self, WRAPPED), name)

    def __getitem__(self, key: int) -> Any:
        return self.module[key]  # pyright: ignore[reportIndexIssue] as in FSDP1, for Sequential

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def check_is_root(self) -> bool:
        return True

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in nn.Module.named_parameters(self, *args, **kwargs):
            yield name.replace(f"{WRAPPED}.", ""), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in nn.Module.named_buffers(self, *args, **kwargs):
            yield name.replace(f"{WRAPPED}.", ""), buffer

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        return nn.Module._apply(self, fn, recurse)

    def apply(self, fn: Callable) -> nn.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise ConfigError(
            "FullyShardedDataParallel.apply would see shards of the parameters: call "
            "model.apply(fn) before FullyShardedDataParallel(model)"
        )

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        raise ConfigError(
            "register_comm_hook: collectives of the gradients are chosen by the config "
            "(gather_dtype, hierarchical_all_gather). Remove the hook."
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not synchronize replicas; gradients are still reduced inside the shard group."""
        with defer_replica_reduction(self.module):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the L2 norm over all ranks; return it. Raises ConfigError for other norms."""
        if float(norm_type) != 2.0:
            raise ConfigError(f"clip_grad_norm_(norm_type={norm_type}): only 2 is supported")
        return torch.tensor(clip_grad_norm_(self.module, float(max_norm)))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state dict of the current type, see `state_dicts.of_model`."""
        return state_dicts.of_model(self.module, self.state_dict_settings)

    def load_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride] no assign
        self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy values of any state dict of this module's `state_dict`; return wrong names."""
        return state_dicts.load_into_model(self.module, state_dict, strict)


def _set_degree(model: nn.Module, strategy: ShardingStrategy | None) -> None:
    """Set the degree of ``strategy`` if the job has none, as SMP leaves it to FSDP then."""
    now = runtimes.current()
    if now.config.hybrid_shard_degree or model_state(model).layout.axes:
        return
    hybrid = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    degree = 1 if strategy is ShardingStrategy.NO_SHARD else 0
    if strategy in hybrid:
        degree = min(now.mesh.ranks_per_node or now.mesh.world, now.mesh.world)
    if degree:
        config = dataclasses.replace(now.config, hybrid_shard_degree=degree)
        runtimes.join(config, now.mesh.ranks_per_node)


def _check_group(given: Any) -> None:
    """Raise ConfigError for a process group other than that of the shards."""
    group = given[0] if isinstance(given, tuple) else given
    if group is None:
        return
    now = runtimes.current()
    expected = now.mesh.group("sharing", now.rank)
    if dist.get_process_group_ranks(group) != expected:
        raise ConfigError(
            f"FullyShardedDataParallel(process_group=): its ranks are "
            f"{dist.get_process_group_ranks(group)}, and hybrid_shard_degree shards over "
            f"{expected}. Leave process_group out."
        )


def _use_values_of_rank0(model: nn.Module) -> None:
    """Replace the values of ``model`` by those of rank 0, for ``sync_module_states``.

    Nothing is left to do after ``tsm.transform``, which takes equal values on all ranks, or with
    ``load_state_dict_from_rank0`` those of rank 0. Raises ConfigError for a split model without
    values.
    """
    unknown = [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_meta and parameter_state(parameter).initial_values is None
    ]
    if model_state(model).layout.axes:
        if unknown:
            raise ConfigError(
                f"sync_module_states = True, but {unknown[0]} of the transformed model has no "
                "values on this rank: pass load_state_dict_from_rank0=True to tsm.transform"
            )
        return
    now = runtimes.current()
    deferred = not unknown and all(parameter.is_meta for parameter in model.parameters())
    if not all(same for (same,) in all_gather_ints([deferred], now.device)):
        allocate_buffers(model, now.device)
        broadcast_initial_values(model, now)


def _precision(given: MixedPrecision | None, configured: str) -> str:
    """Return the precision for `nl.shard`. Raises ConfigError for float16."""
    if given is None:
        return configured
    if given.param_dtype not in PRECISIONS:
        raise ConfigError(
            f"MixedPrecision(param_dtype={given.param_dtype}): float16 needs the loss scale of "
            "nl.accumulate. Use torch.bfloat16, or nl.shard with fp16 = true."
        )
    lower = [
        f"{name}={dtype}"
        for name in ("reduce_dtype", "buffer_dtype")
        if (dtype := getattr(given, name)) not in (None, torch.float32)
    ]
    if lower:
        log.info("MixedPrecision(%s): float32 is used, which is more precise", ", ".join(lower))
    return PRECISIONS[given.param_dtype]


def _blocks(model: nn.Module, policy: Any) -> list[nn.Module] | None:
    """Return the units that ``policy`` selects, the outermost ones; None: those of `nl.shard`."""
    function = policy.func if isinstance(policy, functools.partial) else policy
    if policy is None or function is size_based_auto_wrap_policy:
        try:
            find_blocks(model)
        except ConfigError:
            return []
        return None
    if not callable(policy):
        raise ConfigError(
            f"auto_wrap_policy = {policy!r}: pass transformer_auto_wrap_policy, ModuleWrapPolicy "
            "or a function of (module, recurse, nonwrapped_numel)"
        )
    found: list[nn.Module] = []
    inside: set[nn.Module] = {model}
    for part in model.modules():
        if part in inside:
            continue
        size = sum(parameter.numel() for parameter in part.parameters())
        if size and policy(module=part, recurse=False, nonwrapped_numel=size):
            found.append(part)
            inside |= set(part.modules())
    tied = tied_blocks(model, found)
    return [block for block in found if block not in tied]


def _construct(cls: type, *args: Any, **kwargs: Any) -> Any:
    """``FullyShardedDataParallel.__new__``: Python then calls ``__init__`` of the result."""
    wanted = cls is FullyShardedDataParallel and is_active()
    return object.__new__(ShardedModel if wanted else cls)


def _sharded(model: nn.Module) -> ShardedModel | None:
    """Return the `ShardedModel` in ``model``, which other wrappers may contain."""
    return next((part for part in model.modules() if isinstance(part, ShardedModel)), None)


def _set_state_dict_type(
    original: Callable,
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    found = _sharded(module)
    if found is None:
        return original(module, state_dict_type, state_dict_config, optim_state_dict_config)
    before = found.state_dict_settings
    found.state_dict_settings = state_dicts.settings_of(
        state_dict_type, state_dict_config, optim_state_dict_config
    )
    return before


def _get_state_dict_type(original: Callable, module: nn.Module) -> StateDictSettings:
    found = _sharded(module)
    return original(module) if found is None else found.state_dict_settings


@contextlib.contextmanager
def _state_dict_type(original: Callable, module: nn.Module, *args: Any, **kwargs: Any):
    found = _sharded(module)
    if found is None:
        with original(module, *args, **kwargs):
            yield
        return
    before = _set_state_dict_type(original, module, *args, **kwargs)
    try:
        yield
    finally:
        found.state_dict_settings = before


def _optim_state_dict(original: Callable, model: nn.Module, optim: Any, *args, **kwargs) -> Any:
    found = _sharded(model)
    if found is None:
        return original(model, optim, *args, **kwargs)
    return state_dicts.of_optimizer(found.module, optim, found.state_dict_settings)


def _full_optim_state_dict(original: Callable, model: nn.Module, optim: Any, *args, **kwargs):
    found = _sharded(model)
    if found is None:
        return original(model, optim, *args, **kwargs)
    rank0_only = kwargs.get("rank0_only", True)
    config = FullOptimStateDictConfig(rank0_only=rank0_only)
    settings = state_dicts.settings_of(StateDictType.FULL_STATE_DICT, None, config)
    return state_dicts.of_optimizer(found.module, optim, settings)


def _optim_state_dict_to_load(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Accept torch's present order (model, optim, state) and the former (state, model, optim)."""
    given = list(args)
    model = kwargs.get("model") or next(a for a in given if isinstance(a, nn.Module))
    found = _sharded(model)
    if found is None:
        return original(*args, **kwargs)
    optimizer = kwargs.get("optim") or next(
        a for a in given if isinstance(a, torch.optim.Optimizer)
    )
    values = next((a for a in given if isinstance(a, dict)), None)
    for name in ("optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict"):
        values = kwargs.get(name, values)
    if values is None:
        raise ConfigError("optim_state_dict_to_load needs the state dict on every rank")
    return state_dicts.to_load(found.module, optimizer, values)


def _fsdp_modules(original: Callable, module: nn.Module, root_only: bool = False) -> list:
    found = _sharded(module)
    return original(module, root_only) if found is None else [found]


def _refused(name: str, instead: str) -> Callable:
    def call(original: Callable, *args: Any, **kwargs: Any) -> Any:
        modules = (a for a in (*args, *kwargs.values()) if isinstance(a, nn.Module))
        if not any(_sharded(module) for module in modules):
            return original(*args, **kwargs)
        raise ConfigError(f"FullyShardedDataParallel.{name} is not supported here: {instead}")

    return call


STATIC_METHODS: dict[str, Callable] = {
    "state_dict_type": _state_dict_type,
    "set_state_dict_type": _set_state_dict_type,
    "get_state_dict_type": _get_state_dict_type,
    "fsdp_modules": _fsdp_modules,
    "optim_state_dict": _optim_state_dict,
    "sharded_optim_state_dict": _optim_state_dict,
    "full_optim_state_dict": _full_optim_state_dict,
    "optim_state_dict_to_load": _optim_state_dict_to_load,
    "shard_full_optim_state_dict": _optim_state_dict_to_load,
    "flatten_sharded_optim_state_dict": _optim_state_dict_to_load,
    "scatter_full_optim_state_dict": _refused(
        "scatter_full_optim_state_dict",
        "load the full state on every rank and call optim_state_dict_to_load",
    ),
    "rekey_optim_state_dict": _refused(
        "rekey_optim_state_dict", "state dicts of optimizers are keyed by parameter names"
    ),
    "summon_full_params": _refused(
        "summon_full_params", "read the full values from a FULL_STATE_DICT"
    ),
}
"""Replacements of FSDP1's static methods; each receives the original as its first argument."""


def _checkpoint_blocks(original: Callable, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """``apply_activation_checkpointing``: recompute the blocks that ``check_fn`` selects."""
    found = _sharded(model)
    names = ("checkpoint_wrapper_fn", "check_fn", "auto_wrap_policy")
    given = dict(zip(names, args, strict=False)) | kwargs
    check = given.get("check_fn")
    if found is None or check is None or given.get("auto_wrap_policy") is not None:
        return original(model, *args, **kwargs)
    selected = [part for part in found.module.modules() if check(part)]
    inner = {part for outer in selected for part in outer.modules() if part is not outer}
    blocks = [part for part in selected if part not in inner]
    if blocks:
        checkpoint_activations(found.module, blocks=blocks)
    return None


def _offload(original: Callable, module: nn.Module) -> nn.Module:
    """``offload_wrapper``: keep the saved tensors of a sharded model in host memory."""
    found = _sharded(module)
    if found is None:
        return original(module)
    known = model_state(found.module).activations
    offload_activations(found.module, blocks=None if known is None else known.blocks)
    return module


FUNCTIONS: tuple[tuple[Any, str, Callable], ...] = (
    (dcp_optimizer, "load_sharded_optimizer_state_dict", load_optimizer_state),
    (_torch.activation_wrappers(), "apply_activation_checkpointing", _checkpoint_blocks),
    (_torch.activation_wrappers(), "offload_wrapper", _offload),
)
"""(module, name, replacement) of functions; each receives the original as its first argument."""

_lock = threading.Lock()
_installed: contextlib.ExitStack | None = None


def is_active() -> bool:
    """Return whether the replacements are installed and this rank has joined a job."""
    return _installed is not None and runtimes.is_initialized()


def install() -> None:
    """Replace the names in the table of this module, once per process."""
    global _installed
    with _lock:
        if _installed is not None:
            return
        stack = contextlib.ExitStack()
        FullyShardedDataParallel.__new__ = _construct  # stays: Python cannot take it back
        for name, function in STATIC_METHODS.items():
            original = getattr(FullyShardedDataParallel, name)
            replacement = functools.wraps(original)(functools.partial(function, original))
            method = staticmethod(replacement)
            stack.enter_context(_class_attribute(FullyShardedDataParallel, name, method))
        create = FullStateDictConfig.__init__

        @functools.wraps(create)
        def initialize(self: Any, *args: Any, translate_on_save: bool = False, **kwargs: Any):
            create(self, *args, **kwargs)
            self.translate_on_save = translate_on_save

        stack.enter_context(_class_attribute(FullStateDictConfig, "__init__", initialize))
        for module, name, function in FUNCTIONS:
            stack.enter_context(_torch.replaced_code(getattr(module, name), function))
        _installed = stack


def uninstall() -> None:
    """Undo `install`."""
    global _installed
    with _lock:
        if _installed is not None:
            _installed.close()
            _installed = None


@contextlib.contextmanager
def _class_attribute(cls: type, name: str, value: Any) -> Iterator[None]:
    """Set an attribute that a class has, and restore it afterwards."""
    before = vars(cls)[name]
    setattr(cls, name, value)
    try:
        yield
    finally:
        setattr(cls, name, before)
