"""State of SMP v1's functions on one rank, from `init` to the end of the job.

v1 has one model and one optimizer per script, which its functions find by themselves. The model is
cut into stages and sharded at the first step, not before, so that scripts can assign partitions,
choose checkpointing and build the optimizer in between: see `Session.partition`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ...activation.api import checkpoint_activations, offload_activations
from ...distributed import runtime as runtimes
from ...distributed.consensus import all_gather_ints
from ...distributed.runtime import Runtime
from ...errors import ConfigError, NearlinearError
from ...fsdp.accumulate import AccumulationStep
from ...fsdp.loss_scaler import LossScaler
from ...fsdp.model_state import find_blocks, model_state
from ...fsdp.shard import shard
from ...pipeline_parallel.api import pipeline
from ...pipeline_parallel.stage import find_model_split
from ...transforms import transform
from . import config as keys
from . import ranks

if TYPE_CHECKING:
    from .model import DistributedModel
    from .optimizer import DistributedOptimizer

log = logging.getLogger(__name__)

MODEL_ONLY = "call smp.DistributedModel(module) first"


def init(config: Mapping[str, Any] | None = None) -> None:
    """Join the ranks of the job and read the configuration.

    Keys of ``SM_HP_MP_PARAMETERS`` take precedence over ``config``. Keys without a meaning here are
    accepted with a warning.

    Example::

        smp.init({"partitions": 2, "microbatches": 4, "ddp": True})

    Args:
        config: Values by key, see the migration guide; default: those of v1.

    Raises:
        ConfigError: A key or value is not supported, or does not fit the number of ranks.
    """
    world = runtimes.world_size()
    settings = keys.read(config, world)
    runtimes.join(settings.parallel)
    runtime = runtimes.current()
    if settings.unused and runtime.rank == 0:
        log.warning("smp.init: keys accepted without effect: %s", settings.unused)
    runtime.compat = Session(runtime, settings)
    ranks.create_groups(runtime)


def is_initialized() -> bool:
    """Return whether `init` was called on this rank."""
    return session_or_none() is not None


def is_tracing() -> bool:
    """Return False: nothing is traced, see ``skip_tracing``."""
    return False


def session_or_none() -> Session | None:
    """Return the session of this rank, or None before `init`."""
    runtime = runtimes.current_or_none()
    found = None if runtime is None else runtime.compat
    return found if isinstance(found, Session) else None


def session() -> Session:
    """Return the session of this rank. Raises NearlinearError before `init`."""
    found = session_or_none()
    if found is None:
        raise NearlinearError("smp is not initialized on this rank. Call smp.init(config) first.")
    return found


class Session:
    """State of one rank."""

    def __init__(self, runtime: Runtime, settings: keys.Settings):
        self.runtime, self.settings = runtime, settings
        self.model: DistributedModel | None = None
        self.optimizer: DistributedOptimizer | None = None
        self.partitioned = False
        self.stages: dict[nn.Module, int] = {}
        """Stages of modules, by ``partition`` and ``set_partition``."""
        self.checkpointed: dict[nn.Module, str] = {}
        """Modules to recompute, with their strategies."""
        self.precision: str | None = None
        """Compute dtype by ``model_creation(dtype=...)``."""
        self.generator_checksum: int | None = None
        """Checksum of the random generator before a deferred initialization."""
        self.when_partitioned: list[Callable[[], Any]] = []
        """Calls that had to wait for `partition`, such as loading a checkpoint."""
        self.after_partition: list[Callable[[Any, Any], Any]] = []
        """Hooks of the script."""
        self.after_step: list[Callable[[Any, Any], Any]] = []
        """Hooks of the script, after the first step function call in training."""
        self._passes: Passes | None = None

    def require_model(self) -> DistributedModel:
        """Return the model. Raises NearlinearError if there is none."""
        if self.model is None:
            raise NearlinearError(f"there is no model: {MODEL_ONLY}")
        return self.model

    def do_when_partitioned(self, call: Callable[[], Any]) -> None:
        """Run ``call`` after `partition`, which may be now."""
        if self.partitioned:
            call()
        else:
            self.when_partitioned.append(call)

    def run_step_hooks(self) -> None:
        """Call the hooks in ``after_step`` once."""
        hooks, self.after_step = self.after_step, []
        for hook in hooks:
            hook(self.model, self.optimizer)

    def passes(self, module: nn.Module) -> Passes:
        """Return the step function calls of the current optimizer step."""
        model = self.require_model()
        if self._passes is None:
            self._passes = Passes(module, model.backward_passes_per_step, model.averages)
        return self._passes

    def partition(self) -> None:
        """Divide, shard and wrap the model, once. A collective call.

        The optimizer's parameters are replaced by the sharded ones.
        """
        if self.partitioned:
            return
        model, runtime = self.require_model(), self.runtime
        module, mesh = model.module, runtime.mesh
        names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters()}
        if self.optimizer is not None:
            self.optimizer.name_parameters(names)
        stages, recomputed = self._stages_of_blocks(module), self._recomputed()
        self._share_values(module)
        if mesh.tensor > 1:
            transform(module)
        if mesh.pipeline > 1:
            pipeline(module, split=stages)
        shard(module, blocks=_units(module), precision=self.precision)
        self.partitioned = True
        present = set(module.modules())
        kept = [each for each in recomputed if each in present]
        if recomputed and kept:
            checkpoint_activations(module, self._strategy(), blocks=self._blocks(module, kept))
        if self.settings.offload_activations:
            blocks = self._blocks(module, kept) if recomputed else None
            offload_activations(module, blocks=blocks)
        if self.optimizer is not None:
            self.optimizer.use_parameters(module)
        for call in self.when_partitioned:
            call()
        self.when_partitioned.clear()
        for hook in self.after_partition:
            hook(model, self.optimizer)

    def _share_values(self, module: nn.Module) -> None:
        """Give all ranks the values of rank 0, as ``DistributedDataParallel`` does."""
        device, deferred = self.runtime.device, any(p.is_meta for p in module.parameters())
        if deferred:
            sums = all_gather_ints([self.generator_checksum or 0], device)
            if any(each != sums[0] for each in sums):
                raise NearlinearError(
                    "the ranks would initialize different models: call torch.manual_seed with one "
                    "seed on all ranks before smp.model_creation"
                )
            return
        if self.runtime.mesh.world == 1:
            return
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                values = tensor.detach().to(device).contiguous()
                dist.broadcast(values, 0)
                tensor.copy_(values)

    def _stages_of_blocks(self, module: nn.Module) -> dict[int, int] | None:
        """Return the stages of blocks by number; None: balance them. Raises ConfigError."""
        mesh = self.runtime.mesh
        if mesh.pipeline == 1:
            return None
        if not self.settings.manual_partition:
            if self.stages and self.runtime.rank == 0:
                log.warning(
                    "smp.set_partition and smp.partition have no effect with auto_partition = true"
                )
            return None
        split = find_model_split(module)
        names = {each: name for name, each in module.named_modules()}
        default = self.runtime.config.default_partition or 0

        def stage_of(each: nn.Module) -> int | None:
            name = names[each]
            while name:
                found = self.stages.get(module.get_submodule(name))
                if found is not None:
                    return found
                name = name.rpartition(".")[0]
            return self.stages.get(module)

        found = {}
        for number, block in enumerate(split.block_list(module)):
            stage = stage_of(block)
            found[number] = default if stage is None else stage
            inside = {found[number], *(self.stages.get(p, found[number]) for p in block.modules())}
            if len(inside) > 1:
                raise ConfigError(
                    f"smp.set_partition: parts of block {number} are assigned to the stages "
                    f"{sorted(inside)}. A block belongs to one stage: assign the whole block."
                )
        ends = (
            (split.modules_before_blocks(module), 0, "before"),
            (split.modules_after_blocks(module), mesh.pipeline - 1, "after"),
        )
        for parts, place, where in ends:
            for part in parts:
                stage = self.stages.get(part)
                if stage not in (None, place):
                    raise ConfigError(
                        f"smp.set_partition: {names[part]} is assigned to stage {stage}. Modules "
                        f"{where} the blocks belong to stage {place}: leave it unassigned."
                    )
        return found

    def _strategy(self) -> str:
        strategies = sorted(set(self.checkpointed.values()))
        if len(strategies) > 1:
            raise ConfigError(
                f"smp.set_activation_checkpointing: strategies {', '.join(strategies)}. Use one "
                "strategy for the whole model."
            )
        return strategies[0]

    def _recomputed(self) -> list[nn.Module]:
        """Return the modules to recompute: the children of lists, the blocks of transformers, or
        the modules themselves.
        """
        found: list[nn.Module] = []
        for module in self.checkpointed:
            stacks = [each for each in module.children() if isinstance(each, nn.ModuleList)]
            if isinstance(module, nn.ModuleList | nn.Sequential):
                found += module.children()
            elif hasattr(module, "config") and len(stacks) == 1:
                found += stacks[0]
            else:
                found.append(module)
        return list(dict.fromkeys(found))

    def _blocks(self, module: nn.Module, chosen: list[nn.Module]) -> list[nn.Module] | None:
        """Return ``chosen`` in the order of the model; None if it is all blocks of the rank."""
        wanted = set(chosen)
        ordered = [each for each in module.modules() if each in wanted]
        for each in ordered:
            if any(part in wanted for part in each.modules() if part is not each):
                raise ConfigError(
                    "smp.set_activation_checkpointing: a module and a part of it are both "
                    "checkpointed. Choose one of them."
                )
        state = model_state(module)
        if state.pipeline is None:
            return ordered
        held = [
            b for stage in state.pipeline.stages.values() for b in state.pipeline.blocks_of(stage)
        ]
        return None if set(held) == wanted else ordered

    def set_loss_scale(self, settings: dict[str, Any]) -> None:
        """Set the loss scale of a float16 model by keys of `ParallelConfig`."""
        state = model_state(self.require_model().module)
        if state.loss_scaler is not None:
            config = dataclasses.replace(state.loss_scaler.config, **settings)
            state.loss_scaler = LossScaler(config)


def _units(module: nn.Module) -> list[nn.Module] | None:
    """Return no units for a model without blocks, which is sharded as one; None: find them."""
    if model_state(module).pipeline is not None:
        return None
    try:
        return find_blocks(module)
    except ConfigError:
        return []


class Passes:
    """Calls of step functions between two steps of the optimizer.

    v1 sums the gradients of ``backward_passes_per_step`` calls, each the mean over its
    micro-batches or, without ``average_grads_across_microbatches``, their sum.
    """

    def __init__(self, model: nn.Module, count: int, average: bool):
        self.model, self.count = model, count
        pipelined = model_state(model).pipeline is not None
        micro_batches = runtimes.current().config.microbatches
        self.steps_per_pass = 1 if pipelined else micro_batches
        self.loss_factor = float(count if average else count * micro_batches)
        """Factor of a loss, beside the weight of `nearlinear.accumulate`."""
        self._step: AccumulationStep | None = None
        self._left = 0

    def take(self, number: int) -> Generator[None, None, None]:
        """Yield for each of the ``number`` micro-batches of one call, of equal weights."""
        if self._step is None:
            self._left = self.count * self.steps_per_pass
            self._step = AccumulationStep(self.model, self._left, two_hop=True)
        step = self._step
        try:
            for _ in range(number):
                with step.micro_batch(targets=1.0):
                    yield
                self._left -= 1
        except BaseException:
            step.leave()
            self._left = 0
            raise
        finally:
            if not self._left:
                self._step = None
