"""MiCS, part three: two-hop gradient synchronisation over the micro-batches of one step.

Source: MiCS (Zhang et al., VLDB 2023), section 3.4. Every micro-batch reduce-scatters its gradients
inside the shard group; only the last one all-reduces the sums across replicas. The gradients equal
those of one batch holding all micro-batches of all ranks: each micro-batch is weighted by its
number of target tokens, so that uneven ones are right too.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .. import _torch, runtime
from ..errors import DataError, NearlinearError
from . import joint, loss_scale, optimizer_guard
from .on_backward import on_backward
from .roots import roots_of

log = logging.getLogger(__name__)

IGNORED_LABEL = -100


def accumulate(
    model: nn.Module,
    micro_batches: Iterable,
    *,
    weight: Callable[[object], float] | None = None,
    two_hop: bool = True,
) -> Iterator:
    """Yield each of ``micro_batches``; the body of the loop runs one forward and one backward.

    ::

        for batch in nl.accumulate(model, micro_batches):
            model(**batch).loss.backward()
        optimizer.step()

    ``loss`` is the mean over the micro-batch's targets; its value is left alone and its gradient is
    weighted, so that after the loop every gradient is the mean over all targets of all data ranks.
    What is weighted is the gradient of the model's outputs (tensors, tuples, dicts, Hugging Face
    outputs): a penalty on parameters, or an activation caught by a hook, must go through them.

    ``weight(batch)`` counts a micro-batch's targets (default: `count_targets`). With
    ``two_hop=False`` replicas synchronise after every micro-batch: the same gradients, more
    traffic. All ranks need the same number of micro-batches; one without targets (labels -100)
    weighs nothing. In float16 gradients go back times the loss scale; if they overflow, on any
    rank, there are none after the loop and the optimizer changes nothing, see `loss_scale`.

    Raises NearlinearError when a micro-batch was not followed by exactly one backward or when ranks
    disagree, DataError when the step has no target at all. Leaving the loop early drops the step's
    gradients, and the next ``optimizer.step()`` raises until a whole step has run.
    """
    if not all(isinstance(root, FSDPModule) for root in roots_of(model)):
        raise NearlinearError("nl.accumulate needs a model sharded by nl.shard")
    return _Step(model, list(micro_batches), weight or count_targets, two_hop).run()


def count_targets(batch) -> float:
    """Target tokens of a batch with ``labels`` (B, S), which causal models shift by one; for any
    other batch its number of samples, the first tensor's first dimension."""
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), torch.Tensor):
        labels = batch["labels"]
        targets = labels[..., 1:] if labels.dim() > 1 else labels
        return float((targets != IGNORED_LABEL).sum())
    values = batch.values() if isinstance(batch, Mapping) else batch
    values = [values] if isinstance(values, torch.Tensor) else values
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if first is None:
        raise DataError("cannot count the samples of a batch without tensors: pass weight=")
    return float(first.shape[0])


class _Step:
    """One optimizer step: the weights, the hook that applies them, the synchronisation flags."""

    def __init__(self, model, micro_batches: list, weight: Callable, two_hop: bool):
        self.model, self.micro_batches, self.two_hop = model, micro_batches, two_hop
        self.reduction = getattr(model, "_nearlinear_reduction", None)  # ours, or FSDP2's own
        self.schedule = getattr(model, "_nearlinear_schedule", None)
        self.pipeline = getattr(model, "_nearlinear_pipeline", None)
        self.slices = getattr(model, "_nearlinear_slices", None)
        self.scaler = loss_scale.of(model)  # None: not in float16
        self.weights = _global_weights([weight(batch) for batch in micro_batches])
        self.position = 0
        self.backwards = 0
        self.hook = None

    def run(self) -> Iterator:
        before = getattr(self.model, "_nearlinear_step", None)
        if before is not None:
            before.leave()
        total = len(self.micro_batches)
        self.model._nearlinear_step = self
        self.hook = self.model.register_forward_hook(self._weigh)
        if self.scaler is not None:
            self.scaler.begin(self.model)
        for part in joint.of(self.model):
            part.begin()
        optimizer_guard.begin(self.model, _unfinished(0, total))
        try:
            for position, batch in enumerate(self.micro_batches):
                last = position == total - 1
                self.position, self.backwards = position, 0
                self._synchronise(last)
                yield batch
                self._check(position, total)
                optimizer_guard.begin(self.model, _unfinished(position + 1, total))
            self.leave(done=True)
        finally:
            self.leave()

    def leave(self, done: bool = False) -> None:
        """End the step, once: finished, or abandoned with what it had summed."""
        if self.hook is None:
            return
        self.hook.remove()
        self.hook = self.model._nearlinear_step = None
        self._synchronise(last=True)
        if done:
            for part in joint.of(self.model):
                part.add_up()
            self._free()
            if self.scaler is not None:
                self.scaler.finish(self.model)
            optimizer_guard.finish(self.model)
            return
        finished = self.position + (self.backwards > 0)
        optimizer_guard.begin(self.model, _unfinished(finished, len(self.micro_batches)))
        try:
            for root in roots_of(self.model):
                _torch.abandon_backward(root)
        except RuntimeError as error:  # a gather under way, and its peers are gone
            log.debug("an abandoned step: %s", error)
        if self.reduction is not None:
            self.reduction.abandon()
        if self.slices is not None:
            self.slices.abandon()
        for part in joint.of(self.model):
            part.before = None
        self._free()
        self.model.zero_grad(set_to_none=True)

    def _free(self) -> None:
        if self.pipeline is not None:
            self.pipeline.free()
        if self.schedule is not None:
            self.schedule.end_step()

    def _synchronise(self, last: bool) -> None:
        """Say how far gradients go in the next backward pass, and what is gathered after it."""
        across = last or not self.two_hop
        if self.slices is not None:
            self.slices.last = across
        if self.pipeline is not None:  # whose schedule sees to the rest itself
            self.pipeline.last = across
            return
        if self.reduction is not None:
            # a slice is added to the one before it: no sum of whole gradients is kept for it
            self.reduction.last = last if self.slices is None else across
            self.reduction.two_hop = self.two_hop
        self.model.set_requires_all_reduce(across)  # where FSDP2 does it
        self.model.set_is_last_backward(last)
        if self.schedule is not None:
            self.schedule.begin_micro_batch(last)

    @property
    def weight(self) -> float:
        """What the gradients of the micro-batch at hand are weighted by."""
        scale = 1.0 if self.scaler is None else self.scaler.loss_scale
        return self.weights[self.position] * scale

    def came_back(self) -> None:
        """A pipeline has run the backward pass of the micro-batch at hand."""
        self.backwards += 1

    def _check(self, position: int, total: int) -> None:
        if self.hook is None:
            raise NearlinearError(
                "this nl.accumulate loop was left, and another has begun: finish one at a time"
            )
        if self.backwards != 1:
            raise NearlinearError(
                f"micro-batch {position + 1} of {total} was followed by {self.backwards} backward "
                "passes: the body of nl.accumulate's loop runs one forward of the model and one "
                "backward from its outputs (tensors, tuples, dicts or Hugging Face outputs); of a "
                "pipeline one pipe.step(batch)"
            )

    def _weigh(self, module, args, output):
        """Forward hook: what the model returns, with weighted gradients and counted backwards."""
        seen = []

        def backward_came():
            self.backwards += not seen
            seen.append(True)

        def weigh(tensor):
            if not tensor.requires_grad:
                return tensor
            return on_backward(tensor, _Weighing(self.weight, backward_came))

        if self.scaler is not None:
            output = loss_scale.widened(output)
        return _torch.map_tensors(weigh, output)


class _Weighing:
    """A gradient times ``weight``, once.

    On a new tensor: the loss depends on the logits, and a gradient that comes through both must be
    weighted once.
    """

    def __init__(self, weight: float, came: Callable[[], None]):
        self.weight, self.came = weight, came

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.came is None:
            raise NearlinearError(
                "a second backward pass through one forward inside nl.accumulate: add the losses "
                "up and call backward once"
            )
        self.came()
        self.came = None
        return gradient * self.weight


def _unfinished(done: int, total: int) -> str:
    return (
        f"optimizer.step() after {done} of {total} micro-batches: gradients are not synchronised "
        "across replicas until nl.accumulate's loop has run to its end"
    )


def _global_weights(counts: list[float]) -> list[float]:
    """Each micro-batch's share of the step's targets, times the number of ranks FSDP averages over.

    One all-reduce of three numbers, which also finds ranks that disagree before they hang.
    """
    now, number = runtime.current(), len(counts)
    values = [sum(counts), number, number**2]
    totals = torch.tensor(values, dtype=torch.float64, device=now.device)
    dist.all_reduce(totals)
    targets, numbers, squares = totals.tolist()
    ranks = dist.get_world_size()
    if ranks * squares != numbers**2:
        raise NearlinearError(
            f"this rank has {number} micro-batches and other ranks have other numbers: give every "
            "rank the same number, with labels -100 where there is no data"
        )
    if number == 0:
        raise DataError("nl.accumulate got no micro-batches: is the data exhausted?")
    if targets <= 0:
        raise DataError(
            "this step has no target token on any rank, and the mean over nothing is not a number: "
            "check the labels, or use longer sequences"
        )
    return [count * ranks / targets for count in counts]
