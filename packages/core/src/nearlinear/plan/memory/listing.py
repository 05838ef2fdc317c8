"""What a part of a model allocates and frees, operator by operator, as autograd would have it.

A `Listing` is written by calling what the model's code calls, with sizes in place of tensors. It
then tells what is saved for the backward pass, and the most that is there at once, forwards and
backwards. The rules are PyTorch's: an operator's output lives until its last use unless it is
saved; an operator's backward makes the gradients of its inputs, then lets go of what it saved and
of its output's gradient; gradients that meet are added into a third tensor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class Value:
    """A tensor."""

    bytes: int
    """of memory of its own; 0: it is a view, or nobody's business here"""
    gradient: int
    """bytes of its gradient; 0: it has none"""


@dataclass(eq=False)
class Operator:
    """One call."""

    output: Value
    inputs: tuple[Value, ...]
    saved: tuple[Value, ...]
    """inputs and, where it is there, the output, that its backward needs"""
    product: bool = False
    """a matrix product or attention: what selective checkpointing keeps"""
    passes: bool = False
    """gradients of its inputs are the output's own, in the same memory"""
    scratch: int = 0
    """bytes that are there for a while beside the output, forwards"""
    scratch_back: int = 0
    """bytes that are there for a while beside the inputs' gradients, backwards"""
    weights: int = 0
    """bytes of gradients of parameters, which stay"""


@dataclass
class Listing:
    """The operators of a part, in the order in which they run."""

    given: Value
    """what comes in"""
    operators: list[Operator] = field(default_factory=list)

    def call(self, size: int, *inputs: Value, saves: tuple[Value, ...] = (), out=False, **more):
        """An operator whose output has ``size`` bytes; ``out``: it saves that, too."""
        output = Value(size, size)
        saved = (*saves, output) if out else saves
        self.operators.append(Operator(output, inputs, saved, **more))
        return output

    def linear(self, x: Value, size: int, weights: int) -> Value:
        return self.call(size, x, saves=(x,), weights=weights, product=True)

    def add(self, *inputs: Value) -> Value:
        """Of equally large tensors, or of one and a number."""
        return self.call(inputs[0].gradient, *inputs, passes=True)

    def scaled(self, x: Value) -> Value:
        """Times a number."""
        return self.call(x.bytes, x)

    def times(self, a: Value, b: Value) -> Value:
        return self.call(a.bytes, a, b, saves=(a, b))

    def beside(self, size: int) -> Value:
        """What an operator makes beside its output, and saves; it has no gradient."""
        made = self.call(size)
        made.gradient = 0
        return made

    @property
    def kept(self) -> dict[Value, None]:
        """What is saved for the backward pass, each once, in order."""
        return dict.fromkeys(value for each in self.operators for value in each.saved)

    @property
    def kept_bytes(self) -> int:
        return sum(value.bytes for value in self.kept)

    @property
    def products(self) -> dict[Value, None]:
        """Outputs of matrix products and attention."""
        return dict.fromkeys(each.output for each in self.operators if each.product)

    @property
    def waiting_bytes(self) -> int:
        """Gradients of what matrices and norms put out: the gradients of weights need them."""
        return sum(each.output.gradient for each in self.operators if each.weights)

    def forward_peak(self, saving: bool) -> int:
        """The most bytes that a forward pass has made at once; ``saving``: for a backward pass."""
        kept = self.kept if saving else {}
        uses = Counter(value for each in self.operators for value in each.inputs)
        made: set[Value] = set()
        there = most = 0
        for each in self.operators:
            made.add(each.output)
            there += each.output.bytes
            most = max(most, there + each.scratch)
            for value in each.inputs:
                uses[value] -= 1
                if not uses[value] and value in made and value not in kept:
                    there -= value.bytes
        return most

    def backward_peak(self) -> int:
        """The most bytes that a backward pass has at once, of saved tensors, gradients (that of
        the output, too) and gradients of parameters."""
        saving = Counter(value for each in self.operators for value in each.saved)
        there = self.kept_bytes
        held: dict[Value, list] = {}  # a value's gradient: [bytes, values that share it]
        last = self.operators[-1].output
        held[last] = [last.gradient, 1]
        there += last.gradient
        most = there
        for each in reversed(self.operators):
            coming = held.pop(each.output, [0, 1])
            there += each.weights
            news = []
            for value in each.inputs:
                if not value.gradient:
                    continue
                if each.passes:
                    coming[1] += 1
                    news.append((value, coming))
                else:
                    news.append((value, [value.gradient, 1]))
                    there += value.gradient
            most = max(most, there + each.scratch_back)
            for value in each.saved:
                saving[value] -= 1
                there -= value.bytes * (saving[value] == 0)
            there -= _let_go(coming)
            for value, gradient in news:
                before = held.get(value)
                if before is None:
                    held[value] = gradient
                    continue
                there += value.gradient
                most = max(most, there)
                there -= _let_go(before) + _let_go(gradient)
                held[value] = [value.gradient, 1]
        return most


def _let_go(gradient: list) -> int:
    """Bytes that are free once one less has ``gradient``."""
    gradient[1] -= 1
    return gradient[0] if gradient[1] == 0 else 0
