"""SMP v1's model: `DistributedModel`, and functions that prepare it before the first step."""

from __future__ import annotations

import contextlib
import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ...checkpoint.state import model_tensors
from ...config.activation_strategy import parse_strategy
from ...errors import ConfigError, NearlinearError
from ...fsdp.deferred_init import record_init
from ...fsdp.model_state import local_tensor, parameter_state
from . import nn as distributed_nn
from .gather import gather_state, load_state
from .session import session

log = logging.getLogger(__name__)
_thread = threading.local()

_DTYPES = {torch.float32: None, torch.bfloat16: "bf16", torch.float16: "fp16"}
_MEANINGLESS = {
    "trace_device": "gpu",
    "trace_execution_times": False,
    "overlapping_allreduce": True,
    "bucket_cap_mb": 25,
    "trace_memory_usage": False,
    "broadcast_buffers": True,
    "gradient_as_bucket_view": False,
}
"""Arguments of `DistributedModel` without effect, and their defaults in v1."""


class DistributedModel(nn.Module):
    """The script's model, which is divided and sharded at the first step.

    ::

        model = smp.DistributedModel(model)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    Until then its parameters are those of ``module``. There is one `DistributedModel` per script.
    Names in state dicts and of parameters are those of ``module``. All ranks get the values of
    rank 0.

    Args:
        module: The model. Pipelines and tensor parallelism need a Hugging Face causal language
            model.
        backward_passes_per_step: Calls of step functions per step of the optimizer. Replicas are
            synchronized in the last one, and the gradients of the calls are added.
        average_grads_across_microbatches: Average the gradients of a call's micro-batches. False:
            add them, for losses that are sums.
        others: Arguments of v1 without a meaning here: ``trace_device``,
            ``trace_execution_times``, ``overlapping_allreduce``, ``bucket_cap_mb``,
            ``trace_memory_usage``, ``broadcast_buffers`` and ``gradient_as_bucket_view``.

    Raises:
        ConfigError: There is another model, or an argument does not exist.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        *,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        **others: Any,
    ):
        super().__init__()
        found = session()
        if found.model is not None:
            raise ConfigError("smp.DistributedModel: a script has one model. Call smp.init again.")
        if backward_passes_per_step < 1:
            raise ConfigError(
                f"backward_passes_per_step = {backward_passes_per_step}: must be at least 1"
            )
        given = {"trace_device": trace_device, **others}
        if unknown := sorted(given.keys() - _MEANINGLESS):
            raise ConfigError(f"smp.DistributedModel has no argument {unknown[0]!r}")
        changed = [name for name, value in given.items() if value != _MEANINGLESS[name]]
        if changed and found.runtime.rank == 0:
            log.warning(
                "smp.DistributedModel: arguments accepted without effect: %s (nothing is traced, "
                "and communication is set by configuration keys)",
                ", ".join(changed),
            )
        self.module = module
        self.backward_passes_per_step = backward_passes_per_step
        self.averages = average_grads_across_microbatches
        found.model = self

    @property
    def partitioned(self) -> bool:
        """True after the model was divided and sharded."""
        return session().partitioned

    def get_module(self) -> nn.Module:
        """Return the script's model."""
        return self.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        session().partition()
        return self.module(*args, **kwargs)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        """Run the backward pass of ``tensors`` in a function under `step`.

        Args:
            tensors: A loss, or tensors with ``grad_tensors``.
            grad_tensors: Gradients of ``tensors``; None for scalars.
        """
        if isinstance(tensors, torch.Tensor):
            tensors, grad_tensors = [tensors], None if grad_tensors is None else [grad_tensors]
        grads = [None] * len(tensors) if grad_tensors is None else grad_tensors
        pairs = list(zip(tensors, grads, strict=True))
        terms = [each if grad is None else (each * grad).sum() for each, grad in pairs]
        backward: Any = getattr(self.module, "backward", None)
        if backward is None:
            raise NearlinearError("model.backward must be called in a function under @smp.step")
        backward(sum(terms[1:], terms[0]))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters on this rank under their names in ``module``."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers on this rank under their names in ``module``."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def local_parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters on this rank."""
        return self.parameters(recurse)

    def local_named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters on this rank with their names."""
        return self.named_parameters(prefix, recurse)

    def local_buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Yield the buffers on this rank."""
        return self.buffers(recurse)

    def local_named_buffers(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers on this rank with their names."""
        return self.named_buffers(prefix, recurse)

    def local_modules(self) -> Iterator[nn.Module]:
        """Yield the modules on this rank."""
        return self.module.modules()

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules on this rank with their names."""
        return self.module.named_modules()

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> dict:
        """Return the state of the whole model, in host memory. A collective call.

        Args:
            args: Ignored.
            gather_to_rank0: Other ranks return an empty dict.
            kwargs: Ignored.
        """
        session().partition()
        return gather_state(self.module, to_all=not gather_to_rank0)

    def local_state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's shards by name, for `save`; of tied parameters once."""
        session().partition()
        tensors = model_tensors(self.module)
        return {name: local_tensor(each.tensor.detach()) for name, each in tensors.items()}

    def load_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        state_dict: Mapping[str, torch.Tensor],
        strict: bool = True,
        same_partition_load: bool = False,
    ) -> None:
        """Load a result of `state_dict` or `local_state_dict`; before the first step, then.

        Args:
            state_dict: The state.
            strict: Names must be equal.
            same_partition_load: Has no effect: shards are recognized by their shapes.
        """
        found, state = session(), dict(state_dict)
        found.do_when_partitioned(lambda: load_state(self.module, state, strict))

    def register_post_partition_hook(self, hook: Callable[[Any, Any], Any]) -> None:
        """Call ``hook(model, optimizer)`` after the model was divided and sharded."""
        found = session()
        if found.partitioned:
            raise NearlinearError("the model is partitioned already: register the hook before")
        found.after_partition.append(hook)

    def register_post_step_hook(self, hook: Callable[[Any, Any], Any]) -> None:
        """Call ``hook(model, optimizer)`` after the first step function call in training."""
        session().after_step.append(hook)

    def register_comm_hook(self, state: Any, hook: Callable) -> None:
        """Refuse ``hook``, which would replace the gradient reduction."""
        raise ConfigError(
            "register_comm_hook: gradients are reduced by nearlinear. Choose bf16, or gather_dtype "
            "and gradient_reduction in smp.init."
        )

    def cpu(self) -> DistributedModel:
        """Refuse to move the model, whose shards belong to this rank's device, after sharding."""
        if self.partitioned:
            raise NearlinearError("the model is sharded: use model.state_dict() for a copy")
        return super().cpu()

    def join(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Refuse uneven numbers of batches."""
        raise NearlinearError(
            "model.join: all ranks need equally many batches. Drop the last ones, or pad them with "
            "labels -100."
        )

    def distributed_modules(self) -> Iterator[nn.Module]:
        """Yield the modules with parameters that tensor parallelism divides."""
        for module in self.module.modules():
            if any(self.is_distributed_parameter(p) for p in module.parameters(recurse=False)):
                yield module

    def is_distributed_parameter(self, parameter: torch.Tensor) -> bool:
        """Return whether tensor parallelism divides ``parameter``."""
        return any(split.axis == "tensor" for split in parameter_state(parameter).splits)

    def is_distributed_buffer(self, buffer: torch.Tensor) -> bool:
        """Return False: no buffer is divided."""
        return False

    def is_scaled_batch_parameter(self, parameter: torch.Tensor) -> bool:
        """Return `is_distributed_parameter`: its gradient covers the batch of all tensor ranks."""
        return self.is_distributed_parameter(parameter)

    def is_scaled_batch_buffer(self, buffer: torch.Tensor) -> bool:
        """Return False: no buffer is divided."""
        return False

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that tensor parallelism replicates."""
        return (n for n in self.named_parameters() if not self.is_distributed_parameter(n[1]))

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that tensor parallelism divides."""
        return (n for n in self.named_parameters() if self.is_distributed_parameter(n[1]))


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **options: Any
) -> Iterator[None]:
    """Create the model inside the block, without memory for parameters if initialization is late.

    Example::

        with smp.model_creation(tensor_parallelism=True, dtype=torch.bfloat16):
            model = AutoModelForCausalLM.from_config(config)

    Args:
        tensor_parallelism: Build distributed transformers, see `nn`. Whether layers are divided
            depends on ``tensor_parallel_degree``.
        dtype: Compute dtype; parameters and optimizer states stay in float32.
        options: See `tensor_parallelism`.

    Raises:
        ConfigError: An option is not supported.
    """
    found = session()
    if dtype not in (None, *_DTYPES):
        raise ConfigError(f"smp.model_creation: dtype = {dtype}: allowed are float32, bfloat16 "
                          "and float16")  # fmt: skip
    config = found.runtime.config
    if config.precision == "fp32" and dtype is not None:
        found.precision = _DTYPES[dtype]
    deferred = found.settings.deferred
    with ExitStack() as stack:
        stack.enter_context(delay_param_initialization(deferred))
        stack.enter_context(_distributed(tensor_parallelism, options))
        yield


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Create parameters without memory inside the block; they are created sharded.

    The values equal those of the model built directly under the same seed.
    """
    if not enabled:
        yield
        return
    session().generator_checksum = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    with record_init(None):
        yield


@contextmanager
def tensor_parallelism(enabled: bool = True, **options: Any) -> Iterator[None]:
    """Build distributed transformers from the models that transformers builds in the block.

    Args:
        enabled: False builds them unchanged.
        options: ``attention_in_fp32``, ``query_key_layer_scaling``, ``fused_softmax``,
            ``fused_dropout``, ``fused_bias_gelu``, ``flash_attention``, ``distribute_embedding``,
            ``fp32_residual_addition``; ``use_alibi`` and ``zero_init`` must be False.

    Raises:
        ConfigError: An option is not supported.
    """
    with _distributed(enabled, options):
        yield


@contextmanager
def _distributed(enabled: bool, options: Mapping[str, Any]) -> Iterator[None]:
    session()
    distributed_nn.check_options(options)
    with distributed_nn.distributing() if enabled else contextlib.nullcontext():
        yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **options: Any) -> None:
    """Make the transformers in ``module`` distributed ones, as `tensor_parallelism` does."""
    session()
    distributed_nn.check_options(options)
    if enabled:
        distributed_nn.distribute(module)


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Assign the modules that are registered in the block to pipeline stage ``index``.

    Used with ``auto_partition = false``.
    """
    _check_stage(index)
    stages, before = session().stages, getattr(_thread, "partition", None)
    _thread.partition = (stages, index)
    handle = register_module_module_registration_hook(_assign)
    try:
        yield
    finally:
        handle.remove()
        _thread.partition = before


def set_partition(module: nn.Module, index: int) -> None:
    """Assign ``module`` to pipeline stage ``index``, before the first step.

    Used with ``auto_partition = false``. Blocks without an assignment belong to
    ``default_partition``.
    """
    _check_stage(index)
    found = session()
    if found.partitioned:
        raise NearlinearError("smp.set_partition: the model is partitioned already")
    found.stages[module] = index


def _assign(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Registration hook: assign ``submodule`` to the stage of the block of this thread."""
    current = getattr(_thread, "partition", None)
    if current is not None and submodule is not None:
        stages, index = current
        stages.setdefault(submodule, index)


def _check_stage(index: int) -> None:
    stages = session().runtime.mesh.pipeline
    if not 0 <= index < stages:
        raise ConfigError(
            f"smp.set_partition: stage {index}: allowed are 0 .. {stages - 1}, see "
            "pipeline_parallel_degree"
        )


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Recompute the activations of ``module`` in the backward pass.

    Args:
        module: A block of the model, a part of a block, a list of blocks, or a transformer, whose
            blocks are meant.
        preserve_rng_state: Must be True: dropout repeats its random numbers.
        pack_args_as_tuple: Has no effect.
        strategy: For lists of blocks, ``each``, ``contiguous`` or ``group_N``.

    Raises:
        ConfigError: The strategy does not exist, or ``preserve_rng_state`` is False.
    """
    found = session()
    parse_strategy(strategy)
    if not preserve_rng_state:
        raise ConfigError(
            "smp.set_activation_checkpointing: preserve_rng_state = False would repeat dropout "
            "with other random numbers. Leave it True."
        )
    if found.partitioned:
        raise NearlinearError(
            "smp.set_activation_checkpointing must be called before the first step"
        )
    found.checkpointed[module] = strategy


def register_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Refuse a parameter that a distributed module of the script divides by itself."""
    raise ConfigError(
        "smp.register_parameter: parameters are divided by nl.transform, not by modules of the "
        "script. Set tensor_parallel_degree = 1."
    )
