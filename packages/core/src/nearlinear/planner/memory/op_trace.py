"""Trace of the operators of a model part: saved tensors and peak memory, without torch.

An `OpTrace` is written by calling the operators of the model's code with sizes in place of tensors.
It then gives the bytes saved for backward and the peak in forward and backward, by PyTorch's rules:
an operator's output lives until its last use unless it is saved; an operator's backward allocates
the gradients of its inputs, then frees its saved tensors and the gradient of its output; gradients
of the same tensor are added into a new one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(eq=False)
class TracedTensor:
    """A tensor, by its sizes."""

    bytes: int
    """Bytes of its own storage; 0 for a view or a tensor that is counted elsewhere."""
    gradient: int
    """Bytes of its gradient; 0 if it has none."""
    remade_from: TracedTensor | None = None
    """Tensor from which backward makes it again, instead of saving it."""


@dataclass(eq=False)
class TracedOp:
    """Operator call."""

    output: TracedTensor
    inputs: tuple[TracedTensor, ...]
    saved: tuple[TracedTensor, ...]
    """Inputs, and possibly the output, needed by its backward."""
    product: bool = False
    """True if it is a matrix product or attention, which selective checkpointing keeps."""
    passes: bool = False
    """True if the gradients of its inputs share the memory of the output's gradient."""
    scratch: int = 0
    """Temporary bytes next to the output in forward."""
    scratch_back: int = 0
    """Temporary bytes next to the input gradients in backward."""
    weights: int = 0
    """Bytes of parameter gradients, which remain allocated."""


@dataclass
class OpTrace:
    """Operators of a model part, in execution order."""

    given: TracedTensor
    """Input of the part."""
    operators: list[TracedOp] = field(default_factory=list)
    fragment: int = 0
    """Bytes freed before backward which are too small for the tensors that follow."""

    def call(
        self,
        size: int,
        *inputs: TracedTensor,
        saves: tuple[TracedTensor, ...] = (),
        out: bool = False,
        product: bool = False,
        passes: bool = False,
        scratch: int = 0,
        scratch_back: int = 0,
        weights: int = 0,
    ) -> TracedTensor:
        """Trace an operator with ``size`` bytes of output; ``out``: the output is saved, too."""
        output = TracedTensor(size, size)
        saved = (*saves, output) if out else saves
        self.operators.append(
            TracedOp(output, inputs, saved, product, passes, scratch, scratch_back, weights)
        )
        return output

    def linear(self, x: TracedTensor, size: int, weights: int) -> TracedTensor:
        source = x.remade_from
        remade = x.bytes if source else 0
        saves = (source or x,)
        return self.call(size, x, saves=saves, weights=weights, product=True, scratch_back=remade)

    def add(self, *inputs: TracedTensor) -> TracedTensor:
        """Add tensors of equal size, or a tensor and a number."""
        return self.call(inputs[0].gradient, *inputs, passes=True)

    def scaled(self, x: TracedTensor) -> TracedTensor:
        """Multiply by a number."""
        return self.call(x.bytes, x)

    def times(self, a: TracedTensor, b: TracedTensor) -> TracedTensor:
        return self.call(a.bytes, a, b, saves=(a, b))

    def side_output(self, size: int) -> TracedTensor:
        """Add a second output of an operator, which is saved and has no gradient."""
        made = self.call(size)
        made.gradient = 0
        return made

    @property
    def kept(self) -> dict[TracedTensor, None]:
        """Saved tensors in order, each once."""
        return dict.fromkeys(value for each in self.operators for value in each.saved)

    @property
    def kept_bytes(self) -> int:
        return sum(value.bytes for value in self.kept)

    @property
    def products(self) -> dict[TracedTensor, None]:
        """Outputs of matrix products and attention."""
        return dict.fromkeys(each.output for each in self.operators if each.product)

    @property
    def delayed_bytes(self) -> int:
        """Output gradients of matrices and norms, kept until weight gradients are computed."""
        return sum(each.output.gradient for each in self.operators if each.weights)

    def forward_peak(self, saving: bool) -> int:
        """Return the peak bytes of a forward pass; ``saving``: with saved tensors."""
        kept = self.kept if saving else {}
        uses = Counter(value for each in self.operators for value in each.inputs)
        made: set[TracedTensor] = set()
        allocated = peak = 0
        for each in self.operators:
            made.add(each.output)
            allocated += each.output.bytes
            peak = max(peak, allocated + each.scratch)
            for value in each.inputs:
                uses[value] -= 1
                if not uses[value] and value in made and value not in kept:
                    allocated -= value.bytes
        return peak

    def backward_peak(self) -> int:
        """Return the peak bytes of a backward pass: saved tensors and all gradients.

        Includes the gradient of the output, and parameter gradients. Call it for a finished trace.
        """
        return self._backward_peak

    @cached_property
    def _backward_peak(self) -> int:
        saving = Counter(value for each in self.operators for value in each.saved)
        allocated = self.kept_bytes
        held: dict[TracedTensor, list] = {}  # a tensor's gradient: [bytes, tensors sharing it]
        last = self.operators[-1].output
        held[last] = [last.gradient, 1]
        allocated += last.gradient
        peak = allocated
        for each in reversed(self.operators):
            coming = held.pop(each.output, [0, 1])
            allocated += each.weights
            news = []
            for value in each.inputs:
                if not value.gradient:
                    continue
                if each.passes:
                    coming[1] += 1
                    news.append((value, coming))
                else:
                    news.append((value, [value.gradient, 1]))
                    allocated += value.gradient
            peak = max(peak, allocated + each.scratch_back)
            for value in each.saved:
                saving[value] -= 1
                allocated -= value.bytes * (saving[value] == 0)
            allocated -= _release(coming)
            for value, gradient in news:
                before = held.get(value)
                if before is None:
                    held[value] = gradient
                    continue
                allocated += value.gradient
                peak = max(peak, allocated)
                allocated -= _release(before) + _release(gradient)
                held[value] = [value.gradient, 1]
        return peak


def _release(gradient: list) -> int:
    """Drop one reference to ``gradient``; return the bytes freed by it."""
    gradient[1] -= 1
    return gradient[0] if gradient[1] == 0 else 0
