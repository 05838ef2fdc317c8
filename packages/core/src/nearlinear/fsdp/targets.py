"""Number of targets over which a model's loss is a mean.

Gradients of uneven micro-batches are averaged by their numbers of targets. A loss function counts
labels in its own way: causal models shift them by one, encoder-decoders and masked language models
do not. Classes and names do not tell (``BartForCausalLM`` does not shift), so both sources measure:

- `target_rule` calls the loss function of a Hugging Face model on six labels and reads from the
  gradient which of them count. It applies to classes whose ``forward`` calls ``loss_function``.
- `measure_targets` reads the divisor of a mean from the autograd graph of a real loss. It applies
  to any loss of PyTorch's own functions, and verifies the rule in the first step.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .. import _torch
from ..errors import DataError, NearlinearError
from .model_state import model_state

log = logging.getLogger(__name__)

IGNORED_LABEL = -100

REMEDY = (
    "pass the number of targets of a micro-batch, as in nl.accumulate(model, micro_batches, "
    "weight=lambda batch: float((batch['labels'] != -100).sum()))"
)


@dataclass(frozen=True)
class TargetRule:
    """Labels (B, S) that a mean over tokens counts: all that are not `IGNORED_LABEL`."""

    shifted: bool
    """True if the loss function shifts labels by one, so that the first of a row is no target."""

    def count(self, batch: Mapping[str, Any]) -> float:
        """Return the number of targets of ``batch``."""
        labels = batch.get("shift_labels") if self.shifted else None
        if labels is None:
            labels = batch["labels"][..., 1:] if self.shifted else batch["labels"]
        return float((labels != IGNORED_LABEL).sum())


SHIFTED, UNSHIFTED = TargetRule(shifted=True), TargetRule(shifted=False)


def target_rule(model: nn.Module) -> TargetRule | None:
    """Return the rule of the loss in ``model``'s output, or None if it is unknown."""
    state = model_state(model)
    if state.target_rule is None and calls_loss_function(model):
        function = getattr(model, "loss_function", None)
        state.target_rule = getattr(function, "target_rule", None) or _rule_of_function(function)
    return state.target_rule


def calls_loss_function(model: nn.Module) -> bool:
    """Return True if the forward pass of a Hugging Face model calls its ``loss_function``.

    Other classes compute the loss inline, and may do so differently.
    """
    own = vars(model).get("forward")
    forwards = (vars(kind)["forward"] for kind in _model_classes(model) if "forward" in vars(kind))
    forward = inspect.unwrap(own or next(forwards, None) or (lambda: None))
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    return code is not None and "loss_function" in code.co_names


def _model_classes(model: nn.Module) -> list[type]:
    """Return the classes of ``model`` without those that sharding and pipelines mix in."""
    ours = __name__.partition(".")[0]
    return [kind for kind in type(model).__mro__ if kind.__module__.partition(".")[0] != ours]


def _rule_of_function(function: Any) -> TargetRule | None:
    """Measure which labels the loss function of a language model counts."""
    with _torch.unset_fake(), torch.enable_grad(), torch.device("cpu"):
        vocabulary = 3
        logits = torch.linspace(0, 1, 2 * 4 * vocabulary).view(2, 4, vocabulary).requires_grad_()
        labels = torch.tensor([[1, 2, IGNORED_LABEL, 0], [IGNORED_LABEL, 1, 1, 2]])
        known = {
            "logits": logits,
            "labels": labels,
            "vocab_size": vocabulary,
            "config": types.SimpleNamespace(num_labels=vocabulary, vocab_size=vocabulary),
        }
        try:
            names = inspect.signature(function).parameters
            if not {"logits", "labels"} <= names.keys():
                return None
            loss = function(**{name: known[name] for name in known if name in names})
            (gradient,) = torch.autograd.grad(loss, logits)
        except Exception as error:  # any error of a user's function
            log.debug("the loss function %s cannot be measured: %s", function, error)
            return None
        for rule in (SHIFTED, UNSHIFTED):
            own = logits.detach().clone().requires_grad_()
            targets = functional.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
            targets = (targets if rule.shifted else labels).reshape(-1)
            mean = functional.cross_entropy(own.view(-1, vocabulary), targets)
            (expected,) = torch.autograd.grad(mean, own)
            if torch.allclose(gradient, expected, atol=1e-6):
                return rule
    return None


def measure_targets(output: Any) -> list[tuple[float, bool]]:
    """Return the different numbers of elements that the loss in ``output`` is a mean over.

    Beside each stands whether `IGNORED_LABEL` is the label that does not count. Empty if there is
    no loss, or if it was not computed by loss functions of PyTorch.
    """
    loss = loss_of(output)
    if loss is None or loss.grad_fn is None or _torch.is_fake(loss):
        return []
    divisors = _torch.divisors_of_mean_losses(loss)
    return sorted({(float(n), ignored == IGNORED_LABEL) for n, ignored in divisors or ()})


def loss_of(output: Any) -> torch.Tensor | None:
    """Return the loss in the output of a model, or None."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    elif not isinstance(output, torch.Tensor):
        output = getattr(output, "loss", None)
    return output if isinstance(output, torch.Tensor) and output.dim() == 0 else None


@dataclass(frozen=True)
class Prediction:
    """Number of targets of a micro-batch before its forward pass."""

    count: float
    by_rule: bool = False
    """True if the model's rule gave it. False: a measured number replaces it."""
    needs_measurement: bool = False
    """True if only a measurement can tell."""
    given: bool = False
    """True if the user gave it, so that nothing measures it."""


def predict_targets(model: nn.Module, batch: Any) -> Prediction:
    """Return the number of targets of ``batch``, as far as it is known.

    Labels of one dim are one target per sample. A batch without labels is counted in samples: the
    first dim of its first tensor.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(labels, torch.Tensor) and labels.dim() > 1:
        rule = target_rule(model)
        if rule is None:
            return Prediction(1.0, needs_measurement=True)
        return Prediction(rule.count(batch), by_rule=True)
    if isinstance(labels, torch.Tensor):
        return Prediction(float((labels != IGNORED_LABEL).sum()))
    values = batch.values() if isinstance(batch, Mapping) else batch
    values = [values] if isinstance(values, torch.Tensor) else values
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if first is None:
        raise DataError(
            "nl.accumulate cannot count the samples of a batch without tensors: pass weight="
        )
    return Prediction(float(first.shape[0]))


def count_targets(model: nn.Module, batch: Any) -> float:
    """Return the number of targets of ``batch``, measured if it is the current micro-batch.

    Raises NearlinearError if it is unknown.
    """
    step = model_state(model).accumulation
    count = None if step is None else step.targets_of(batch)
    if count is not None:
        return count
    predicted = predict_targets(model, batch)
    if predicted.needs_measurement:
        raise unknown_targets(model)
    return predicted.count


def unknown_targets(model: nn.Module, reason: str = "") -> NearlinearError:
    """Return the error for a loss whose number of targets is unknown."""
    kind = _model_classes(model)[0].__name__.removeprefix("FSDP")
    reason = reason or (
        f"the loss of {kind} is neither model.loss_function nor computed by a mean of "
        "torch.nn.functional, so that the labels it counts are unknown"
    )
    return NearlinearError(f"{reason}: {REMEDY}")


class TargetMeasurement:
    """Measures the targets of a step's micro-batches, and learns or verifies the model's rule."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.rejected = dict.fromkeys((SHIFTED, UNSHIFTED), 0.0)
        """Number of micro-batches whose targets a rule does not count."""
        self.conflicts = 0.0
        """Number of micro-batches with other targets than the model's rule counts."""
        self.example = ""

    def observe(self, batch: Any, output: Any, predicted: Prediction) -> float:
        """Return the number of targets of ``batch``, whose forward pass returned ``output``."""
        found = measure_targets(output)
        if len(found) > 1 and isinstance(batch, Mapping) and "labels" in batch:
            raise unknown_targets(
                self.model,
                f"the loss is the sum of means over {' and '.join(f'{n:g}' for n, _ in found)} "
                "targets, so that no weight of this micro-batch gives the mean over all",
            )
        if len(found) != 1:
            if predicted.needs_measurement and loss_of(output) is None:
                raise unknown_targets(
                    self.model,
                    "the output has no loss, and how a loss outside of the model counts the "
                    "batch's labels is unknown",
                )
            if predicted.needs_measurement:
                raise unknown_targets(self.model)
            return predicted.count
        ((targets, ignores_as_usual),) = found
        if isinstance(batch, Mapping) and isinstance(batch.get("labels"), torch.Tensor):
            for rule in self.rejected:
                fits = ignores_as_usual and batch["labels"].dim() > 1
                self.rejected[rule] += not (fits and rule.count(batch) == targets)
        if predicted.by_rule and predicted.count != targets:
            self.conflicts += 1
            self.example = f"{targets:g} instead of {predicted.count:g}"
            return predicted.count
        return targets

    def summary(self) -> list[float]:
        """Return the numbers to sum over all ranks for `conclude`."""
        return [self.conflicts, *self.rejected.values()]

    def conclude(self, conflicts: float, *rejected: float) -> None:
        """Learn from the sums over all ranks. Raises NearlinearError if the rule is wrong."""
        if conflicts:
            here = f" ({self.example} on this rank)" if self.example else ""
            raise unknown_targets(
                self.model,
                f"the loss is a mean over another number of targets than its labels have{here}",
            )
        fitting = [rule for rule, n in zip(self.rejected, rejected, strict=True) if n == 0]
        if len(fitting) == 1:  # the other rule counts differently somewhere
            state = model_state(self.model)
            state.target_rule, state.target_rule_verified = fitting[0], True
