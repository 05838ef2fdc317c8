"""A training step as a sequence of what FSDP2 and autograd allocate, one unit after the other.

The order is FSDP2's, with the prefetching and keeping of `parallel.schedule`. A unit's gather has
its buffer until the unit after it is gathered (forwards) or its parameters are copied out
(backwards); a reduction has its input, in float32, until the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...config import Config
from ...parallel.kept import kept_blocks
from .activations import Activations
from .ledger import Ledger
from .listing import Listing
from .units import Unit

REDUCED = 4  # bytes of a number of gradients that travel, and of what is left of them

Part = tuple[int, int]  # a unit: the number of its block, from 1, and its place in that
ROOT: Part = (0, 0)


@dataclass(frozen=True)
class Model:
    """What a rank has of the model, and does with it."""

    root: Unit
    block: tuple[Unit, ...]
    """its units: experts that are divided have their own"""
    blocks: int
    tied: bool
    activations: Activations
    """of the blocks"""
    head: Listing
    table: int
    """bytes of the gradient of the table of words, as computed"""


class Step:
    """One step of ``model``, entered into ``ledger``."""

    def __init__(self, model: Model, config: Config, ledger: Ledger, item: int):
        """``item``: bytes of a gathered number."""
        self.model, self.ledger, self.item = model, ledger, item
        self.activations = model.activations
        self.depth = config.prefetch_depth
        root, block = model.root.elements, sum(unit.elements for unit in model.block)
        sizes = [root, *[block] * model.blocks]
        self.whole = kept_blocks(sizes, self.depth, config.sdp_max_live_parameters)
        self.gathered: set[Part] = set()
        self.ahead: set[Part] = set()
        self.held = self.reducing = 0  # bytes of buffers: the last gather's, the last reduction's

    def run(self, micro_batches: int, gradients: Callable[[Unit], int]) -> None:
        """``gradients``: bytes of a unit's reduced gradients."""
        for number in range(micro_batches):
            self._forward()
            self._backward(number == micro_batches - 1, number > 0, gradients)

    def _parts(self, number: int) -> list[Part]:
        """Of block ``number``; 0 is the root."""
        return [(number, part) for part in range(len(self.model.block) if number else 1)]

    def _unit(self, part: Part) -> Unit:
        number, place = part
        return self.model.block[place] if number else self.model.root

    def _buffer(self, part: Part) -> int:
        return self._unit(part).padded * self.item

    def _gather(self, part: Part) -> None:
        """Start; its result waits in a buffer."""
        if part in self.gathered or part in self.ahead:
            return
        self.ahead.add(part)
        if self.item != REDUCED:
            self.ledger.look(communication=self._unit(part).shard * self.item)  # rounded, to send
        self.ledger.add("communication", self._buffer(part))

    def _arrive(self, part: Part, forwards: bool) -> None:
        """Copy a gather's result to where it is used."""
        self._gather(part)
        if part not in self.ahead:
            return
        self.ahead.remove(part)
        self.gathered.add(part)
        self.ledger.add("gathered", self._buffer(part))
        self.ledger.add("communication", -self.held)
        self.held = self._buffer(part)
        if not forwards:
            self._let_go()

    def _let_go(self) -> None:
        self.ledger.add("communication", -self.held)
        self.held = 0

    def _free(self, part: Part) -> None:
        self.gathered.remove(part)
        self.ledger.add("gathered", -self._buffer(part))

    def _prefetch(self, numbers: range, depth: int | None = None) -> None:
        """Gather ahead; backwards FSDP2 does so by one unit even where it is told of none."""
        for number in numbers[: self.depth if depth is None else depth]:
            for part in self._parts(number):
                self._gather(part)

    def _forward(self) -> None:
        model, ledger, n = self.model, self.ledger, self.model.blocks
        ledger.moment = "in the forward pass: the embedding"
        self._arrive(ROOT, forwards=True)
        self._prefetch(range(1, n + 1))
        for number in range(1, n + 1):
            ledger.moment = f"in the forward pass: block {number} of {n}"
            for part in self._parts(number):
                self._arrive(part, forwards=True)
            self._prefetch(range(number + 1, n + 1))
            ledger.look(working=self.activations.forward(number))
            resident = self.activations.kept.resident
            if not resident or number > n - resident:
                ledger.add("kept", self.activations.kept_by(number))
            if self.whole < number < n:
                for part in self._parts(number):
                    self._free(part)
        ledger.moment = "in the forward pass: the loss"
        ledger.look(logits=model.head.forward_peak(saving=True))
        self._let_go()

    def _backward(self, last: bool, added: bool, gradients: Callable[[Unit], int]) -> None:
        model, ledger, n = self.model, self.ledger, self.model.blocks
        ledger.moment = "in the backward pass: the loss"
        ledger.look(logits=model.head.backward_peak())
        ledger.add("working", model.table)  # the head's gradient waits for the root's others
        staying = set() if last else {0, 1, *range(2, self.whole + 1)}
        for number in range(n, 0, -1):
            ledger.moment = f"in the backward pass: block {number} of {n}"
            for part in reversed(self._parts(number)):
                self._arrive(part, forwards=False)
            self._prefetch(range(number - 1, 0, -1), max(1, self.depth))
            self._block_backward(number)
            for part in reversed(self._parts(number)):
                self._reduce(part, number in staying, added, gradients)
        ledger.moment = "in the backward pass: the embedding"
        ledger.add("working", model.table)
        if model.tied:
            ledger.look(working=model.table)  # their sum
        ledger.add("working", -ledger.now["working"])
        self._reduce(ROOT, 0 in staying, added, gradients)
        if last:  # FSDP2 leaves it there while gradients are added up
            ledger.add("communication", -self.reducing)
            self.reducing = 0

    def _block_backward(self, number: int) -> None:
        activations, ledger = self.activations, self.ledger
        ledger.look(working=activations.backward(number))
        ledger.add("kept", -activations.kept_by(number))
        resident = activations.kept.resident
        if resident and number > resident:
            ledger.add("kept", activations.kept_by(number - resident))

    def _reduce(self, part: Part, stays: bool, added: bool, gradients) -> None:
        """The end of a unit's backward pass; ``added``: to what earlier micro-batches left."""
        ledger, unit = self.ledger, self._unit(part)
        if not stays:
            self._free(part)
        ledger.add("communication", -self.reducing)
        self.reducing = unit.padded * REDUCED
        raw = unit.elements * self.item + (self.activations.hidden if part[0] else 0)
        ledger.look(communication=self.reducing, working=raw)
        ledger.add("communication", self.reducing)
        if added:
            ledger.look(gradients=gradients(unit))
        else:
            ledger.add("gradients", gradients(unit))
