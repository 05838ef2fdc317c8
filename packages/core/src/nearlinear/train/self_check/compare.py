"""Comparison of a twin in the layout of a run with the same twin in one process.

Each rank computes the reference by itself, runs its part of the batch through the layout, and
compares the losses of its own parts and the shards of the gradients that it holds.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...checkpoint.shards import TensorShard, local_tensor_shards
from ...config.moe import MoEConfig
from ...config.parallel import ParallelConfig
from ...config.train import TrainConfig
from ...data.masking import IGNORED_LABEL
from ...distributed import runtime as runtimes
from ...distributed.consensus import all_gather_json
from ...fsdp.accumulate import accumulate
from ...fsdp.clip_grad import clip_grad_norm_
from ...fsdp.deferred_init import deferred_init
from ...fsdp.model_state import optimizer_parameter, parameter_state
from ...pipeline_parallel.api import Pipelined
from ...spmd import one_at_a_time
from ..model import parallelize
from .probe import Batch, Probe, probe_batches
from .twin import TwinError, TwinSize, build_twin, spread_values

SEED = 20
TOLERANCE = 1e-3
"""Largest error of a gradient, relative to its norm. Rounding in float32 stays below 1e-4."""

LOSS_TOLERANCE = 2e-5
"""Largest error of the loss, relative to the loss."""

FLOOR = 2e-6
"""Gradients this small against the whole gradient are rounding errors, as of the bias of a key."""


@dataclass(frozen=True)
class Difference:
    """The first difference between a layout and one process."""

    quantity: str
    """loss, values, gradient, or gradient norm"""
    tensor: str
    """Name of the parameter; empty for the loss and the norm."""
    error: float
    """Relative error."""
    others: int = 0
    """Number of further tensors that differ."""
    kind: str = "plain"
    """Kind of the batch, see `probe.KINDS`."""

    @property
    def module(self) -> str:
        """Name of the module that has the tensor."""
        return self.tensor.rpartition(".")[0]

    def __str__(self) -> str:
        where = f"module {self.module}, tensor {self.tensor.rpartition('.')[2]}: "
        more = f" and in {self.others} more tensors" if self.others else ""
        how = f"differs by {self.error:.2%}" if math.isfinite(self.error) else "is not comparable"
        return f"{where if self.tensor else ''}the {self.quantity} {how}{more} ({self.kind} batch)"


@dataclass
class Reference:
    """Losses and gradients of the twin in one process."""

    losses: list[float]
    """Loss of each of the rank's own parts."""
    gradients: dict[str, torch.Tensor]
    shapes: dict[str, torch.Size]
    """Shape of every parameter."""
    norm: float


def twin_size(config: TrainConfig) -> TwinSize:
    """Return the sizes of a twin for the degrees of ``config``."""
    parallel = config.parallel
    stages = parallel.pipeline_parallel_degree * max(
        1,
        parallel.virtual_pipeline_degree,
        2 if parallel.pipeline in _SEVERAL_STAGES and parallel.pipeline_parallel_degree > 1 else 1,
    )
    tensor, expert = parallel.tensor_parallel_degree, parallel.expert_parallel_degree
    probe = probe_of(1, config)
    return TwinSize(
        layers=max(2, stages),
        heads=max(4, 2 * tensor),
        experts=max(4, 2 * expert),
        positions=max(64, 2 ** math.ceil(math.log2(2 * probe.tokens))),
    )


_SEVERAL_STAGES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble",
                   "dualpipev")  # fmt: skip


def probe_of(data_ranks: int, config: TrainConfig) -> Probe:
    """Return the shape of the batches for the layout of ``config``."""
    parallel = config.parallel
    stages = parallel.pipeline_parallel_degree
    microbatches = parallel.microbatches if stages > 1 else 1
    return Probe.for_degrees(data_ranks, microbatches, parallel.context_parallel_degree)


def compare(
    kind: type[nn.Module],
    twin: Any,
    config: TrainConfig,
    kinds: tuple[str, ...],
    deferred: bool = False,
) -> dict[str, Difference | None]:
    """Return the first difference of each kind of batch. A collective call after `nl.init`.

    Args:
        kind: Class of the model.
        twin: Config of the twin, see `twin_config`.
        config: Config of the run. The twin computes in float32 whatever the precision of the run.
        kinds: Kinds of batches, see `probe.KINDS`.
        deferred: Build the twin under `deferred_init`.

    Raises ConfigError if the twin cannot be built, or if the layout does not support the model.
    """
    now = runtimes.current()
    with _in_float32(now):
        plain = _without_changes_of_the_model(config, now.config)
        original = build_twin(kind, twin, SEED)
        if not deferred:
            spread_values(original, SEED)
        model = _build_parallel(kind, twin, original, plain, deferred)
        wrong = _agree(_initial_difference(model, original))
        if wrong is not None:
            return {each: dataclasses.replace(wrong, kind=each) for each in kinds}
        if deferred:
            spread_values(original, SEED)
            _copy_values(model, original)
        found = {}
        for each in kinds:
            probe = probe_of(now.mesh.data_ranks, plain)
            parts = probe_batches(original, probe, each, vocabulary_of(twin))
            found[each] = _agree(_compare_batch(model, original, parts, each))
        return found


def _without_changes_of_the_model(config: TrainConfig, parallel: ParallelConfig) -> TrainConfig:
    """Return ``config`` without settings that change the results: router losses, assignments.

    Blocks are not compiled, since that takes longer than the comparison.
    """
    kept = ("smp_moe", "moe_all_to_all_dispatcher")
    moe = MoEConfig(**{name: getattr(config.moe, name) for name in kept})
    loop = dataclasses.replace(config.train, compile_blocks=False)
    return dataclasses.replace(config, parallel=parallel, moe=moe, train=loop)


@contextmanager
def _in_float32(now: runtimes.Runtime) -> Iterator[None]:
    """Let the ranks compute in float32; keep their mesh, groups and threads."""
    before = now.config
    now.config = dataclasses.replace(
        before, bf16=False, fp16=False, fp8=False, gather_dtype="same", offload_optimizer=False
    )
    try:
        yield
    finally:
        now.config = before


def _build_parallel(
    kind: type[nn.Module], twin: Any, original: nn.Module, config: TrainConfig, deferred: bool
) -> nn.Module:
    if deferred:
        with deferred_init(seed=SEED):
            model = kind._from_config(copy.deepcopy(twin))  # pyright: ignore
    else:
        with one_at_a_time():
            model = copy.deepcopy(original)
    return parallelize(model, config)[0]


def vocabulary_of(twin: Any) -> int:
    """Return the number of ids of a twin's config; 0 for a model without text."""
    text = twin.get_text_config() if hasattr(twin, "get_text_config") else twin
    return getattr(text, "vocab_size", None) or getattr(twin, "vocab_size", 0) or 0


def _compare_batch(
    model: nn.Module, original: nn.Module, parts: list[Batch], kind: str
) -> Difference | None:
    """Run one step in the layout and compare it on this rank."""
    now = runtimes.current()
    data_rank, count = now.mesh.data_rank(now.rank), len(parts) // now.mesh.data_ranks
    own = slice(data_rank * count, (data_rank + 1) * count)
    try:
        reference = run_alone(original, parts, now.device, own)
    except TwinError:
        raise
    except Exception as error:  # any error of the model's own code
        raise TwinError(
            f"the small twin of {type(original).__name__} cannot be trained in one process: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    losses = []
    for batch in accumulate(model, parts[own]):
        if isinstance(model, Pipelined):
            loss = model.step(batch)
        else:
            loss = model(**batch).loss
            loss.backward()
        losses.append(loss.item())
    pairs = zip(losses, reference.losses, strict=True)
    loss_error = max(abs(found - expected) / abs(expected) for found, expected in pairs)
    equal = loss_error <= LOSS_TOLERANCE  # False for NaN
    found = _first("gradient", _different_gradients(model, reference), closest=equal)
    if not equal:
        tensor, others = (found.tensor, found.others) if found else ("", 0)
        found = Difference("loss", tensor, loss_error, others)
    norm = clip_grad_norm_(model, reference.norm / 2)
    clipped = clip_grad_norm_(model, math.inf)
    norm_error = max(abs(norm / reference.norm - 1), abs(2 * clipped / reference.norm - 1))
    if found is None and not norm_error <= TOLERANCE:
        found = Difference("gradient norm", "", norm_error)
    model.zero_grad()
    return None if found is None else dataclasses.replace(found, kind=kind)


def run_alone(
    model: nn.Module, parts: list[Batch], device: torch.device, own: slice = slice(None)
) -> Reference:
    """Run the whole batch in one process with plain PyTorch; losses are those of the parts ``own``.

    The loss of all rows together is the reference, since it weights every target equally. Models
    whose loss is no mean over rows (router losses, batch norms) run part by part.
    """
    model.to(device)
    model.zero_grad()
    parts = [{name: value.to(device) for name, value in part.items()} for part in parts]
    with one_at_a_time():
        if _depends_on_batch(model):
            targets = [_count_targets(model, part) for part in parts]
            losses = []
            for part, count in zip(parts, targets, strict=True):
                loss = model(**part).loss
                losses.append(loss.item())
                (loss * count / sum(targets)).backward()
            losses = losses[own]
        else:
            with torch.no_grad():
                losses = [model(**part).loss.item() for part in parts[own]]
            whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            model(**whole).loss.backward()
        with torch.no_grad():
            again = model(**parts[own][0]).loss.item()
    if not abs(again - losses[0]) <= LOSS_TOLERANCE * abs(losses[0]):
        raise TwinError(
            f"{type(model).__name__} computes with random numbers although dropout is off: the "
            f"losses of two equal runs are {losses[0]:g} and {again:g}"
        )
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return Reference(losses, gradients, shapes, norm)


def _depends_on_batch(model: nn.Module) -> bool:
    argument = inspect.signature(type(model).forward).parameters.get("output_router_logits")
    default = argument is not None and argument.default is True
    return bool(getattr(model.config, "output_router_logits", None) or default) or any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()
    )


def _count_targets(model: nn.Module, part: Batch) -> int:
    """Return the number of labels that a model of one of these kinds counts."""
    labels = part["labels"]
    if labels.dim() == 1:
        return len(labels)
    shifted = not getattr(model.config, "is_encoder_decoder", False)
    return int((labels[..., int(shifted) :] != IGNORED_LABEL).sum())


def _different_gradients(model: nn.Module, reference: Reference) -> dict[str, float]:
    """Return the relative error of each gradient of which this rank holds a shard."""
    errors, smallest = {}, FLOOR * reference.norm
    for name, parameter in model.named_parameters():
        if name not in reference.shapes:
            errors[name] = math.inf  # a parameter that the model does not have
            continue
        splits = parameter_state(parameter).splits
        own = optimizer_parameter(parameter)
        gradient = torch.zeros_like(own) if own.grad is None else own.grad
        expected = reference.gradients.get(name)
        if expected is None:
            expected = torch.zeros(reference.shapes[name], device=gradient.device)
        errors[name] = _error(local_tensor_shards(gradient, splits), expected, smallest)
    return errors


def _initial_difference(model: nn.Module, original: nn.Module) -> Difference | None:
    """Compare the values after the transformation, and find parameters that no rank has."""
    expected = dict(original.named_parameters())
    errors = {
        name: _error(
            local_tensor_shards(parameter, parameter_state(parameter).splits),
            expected[name].detach(),
            0.0,
        )
        if name in expected
        else math.inf
        for name, parameter in model.named_parameters()
    }
    held = {name for names in all_gather_json(sorted(errors)) for name in names}
    errors |= dict.fromkeys(expected.keys() - held, math.inf)
    return _first("initial values", errors)


@torch.no_grad()
def _copy_values(model: nn.Module, original: nn.Module) -> None:
    expected = dict(original.named_parameters())
    for name, parameter in model.named_parameters():
        whole = expected[name].detach()
        splits = parameter_state(parameter).splits
        for piece, block in local_tensor_shards(parameter, splits).items():
            block.copy_(whole[piece.slices_in(TensorShard.full(whole.shape))])


def _error(
    shards: dict[TensorShard, torch.Tensor], expected: torch.Tensor, smallest: float
) -> float:
    """Return the error of the shards of a tensor, relative to its norm or to ``smallest``."""
    squares = 0.0
    for piece, block in shards.items():
        part = expected[piece.slices_in(TensorShard.full(expected.shape))]
        squares += (block.to(part.device).double() - part.double()).square().sum().item()
    # errors below the floor of a small gradient are rounding
    scale = max(expected.double().norm().item(), smallest / TOLERANCE, 1e-30)
    return math.sqrt(squares) / scale if math.isfinite(squares) else math.inf


def _first(quantity: str, errors: dict[str, float], closest: bool = False) -> Difference | None:
    """Return the largest error, or the one closest to the loss.

    A fault of a backward pass spreads to all earlier layers, so that the last tensor shows it.
    """
    wrong = [name for name, error in errors.items() if not error <= TOLERANCE]
    if not wrong:
        return None
    name = wrong[-1] if closest else max(wrong, key=lambda name: errors[name])
    return Difference(quantity, name, errors[name], len(wrong) - 1)


def _agree(found: Difference | None) -> Difference | None:
    """Return the same difference on every rank: the one of the first rank that has one."""
    everywhere = all_gather_json(None if found is None else dataclasses.asdict(found))
    return next((Difference(**each) for each in everywhere if each is not None), None)
