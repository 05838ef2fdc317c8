"""What one stage of a pipeline has, and what a pass of one micro-batch through it takes."""

from __future__ import annotations

from dataclasses import dataclass

from .ledger import Bytes, Ledger
from .rank import Rank
from .step import REDUCED
from .units import Unit, embedding_of, head_of, table_of


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass of one micro-batch through a stage."""

    peak: int
    """the most bytes it has, what its micro-batch has kept among them"""
    at_peak: Bytes
    moment: str
    leaves: Bytes
    """bytes that are there for this micro-batch afterwards"""


class Stage:
    """What one stage has, and does with one micro-batch."""

    def __init__(self, rank: Rank, number: int, blocks: range, stages: int):
        self.rank, self.number, self.blocks = rank, number, blocks
        self.first, self.last = number == 0, number == stages - 1
        shape, sizes, tensor = rank.shape, rank.sizes, rank.mesh.tensor
        root = embedding_of(shape, tensor) if self.first else ()
        root += head_of(rank.family, shape, tensor) if self.last else ()
        roots = (Unit(root, rank.mesh.sharing),) if root else ()
        self.units = (*roots, *rank.block * len(blocks))
        received = not self.first and tensor == 1  # it has a place already
        self.activations = rank.activations(len(blocks), 0 if received else sizes.embedded)
        self.table_unit = Unit((table_of(shape, tensor),), rank.mesh.sharing)
        self.table = self.table_unit.elements * rank.item
        self.elements = sum(unit.elements for unit in self.units)

    @property
    def gathered(self) -> int:
        return sum(unit.padded for unit in self.units) * self.rank.item

    @property
    def _block_gathered(self) -> int:
        return sum(unit.padded for unit in self.rank.block) * self.rank.item

    @property
    def moves(self) -> bool:
        """Activations are in host memory: what is on the device of them is `_Walk`'s to count."""
        return self.activations.kept.resident is not None

    def places(self, micro_batches: int) -> int:
        """Bytes of what is received, one place for every micro-batch and direction."""
        return micro_batches * self.rank.sizes.hidden * (2 - self.first - self.last)

    def forward(self, frees: bool, whole: bool) -> Pass:
        """``frees`` blocks after use; ``whole``: all of the stage is gathered before."""
        ledger, activations, n = Ledger(), self.activations, len(self.blocks)
        block, root = self._block_gathered, self.gathered - n * self._block_gathered
        if frees:
            ledger.add("gathered", self.gathered if whole else root)
        for number in range(1, n + 1):
            ledger.moment = f"in the forward pass: {self._name(number)}"
            if frees and not whole:
                ledger.add("gathered", block)
            ledger.look(working=activations.forward(number))
            if not self.moves:
                ledger.add("kept", activations.kept_by(number))
            if frees:
                ledger.add("gathered", -block)
        if frees:
            ledger.add("gathered", -root)
        if self.last:
            ledger.moment = "in the forward pass: the loss"
            ledger.look(logits=self.rank.head.forward_peak(saving=True))
            ledger.add("logits", self.rank.head.kept_bytes)
        else:
            ledger.add("handed", self.rank.sizes.hidden)
        return Pass(ledger.peak, ledger.at_peak, ledger.moment_of_peak, dict(ledger.now))

    def backward(self, kept: Bytes, gathers: bool, adds: bool) -> Pass:
        """``adds``: to gradients of earlier micro-batches, which are counted elsewhere."""
        ledger, rank = Ledger(), self.rank
        ledger.enter(kept)
        if self.last:
            ledger.moment = "in the backward pass: the loss"
            ledger.add("logits", -rank.head.kept_bytes)
            ledger.look(logits=rank.head.backward_peak())
            ledger.add("working", self.table)
        block = sum(unit.elements for unit in rank.block)
        for number in range(len(self.blocks), 0, -1):
            ledger.moment = f"in the backward pass: {self._name(number)}"
            ahead = self._gather(ledger, number) if gathers else 0
            ledger.look(working=self.activations.backward(number), communication=ahead)
            if not self.moves:
                ledger.add("kept", -self.activations.kept_by(number))
            if not adds:
                ledger.add("gradients", block * REDUCED)
        return Pass(ledger.peak, ledger.at_peak, ledger.moment_of_peak, {})

    def backward_of_inputs(self, kept: Bytes, gathers: bool) -> Pass:
        """Without gradients of weights: all that they need stays until they are there."""
        ledger, rank, calls = Ledger(), self.rank, self.rank.calls
        ledger.enter(kept)
        if self.last:
            ledger.moment = "in the backward pass: the loss"
            head = rank.head
            ledger.look(logits=head.backward_peak() - head.kept_bytes)
            ledger.add("kept", head.waiting_bytes)
        for number in range(len(self.blocks), 0, -1):
            ledger.moment = f"in the backward pass: {self._name(number)}"
            ahead = self._gather(ledger, number) if gathers else 0
            ledger.add("kept", calls.waiting_bytes)
            if self.activations.again(number) and not self.moves:
                ledger.add("kept", calls.kept_bytes)
            working = calls.backward_peak() - calls.kept_bytes - calls.waiting_bytes
            ledger.look(working=max(0, working), communication=ahead)
        del ledger.now["gathered"]
        return Pass(ledger.peak, ledger.at_peak, ledger.moment_of_peak, dict(ledger.now))

    def backward_of_weights(self, kept: Bytes, adds: bool) -> Pass:
        """The rest: gradients of all weights, as computed, then added up."""
        ledger = Ledger()
        ledger.enter(kept)
        ledger.moment = "in the backward pass: gradients of weights"
        ledger.look(gradients=self.elements * (self.rank.item if adds else REDUCED))
        return Pass(ledger.peak, ledger.at_peak, ledger.moment_of_peak, {})

    def _gather(self, ledger: Ledger, number: int) -> int:
        """Block ``number``, going backwards; bytes of the buffer of the one that comes next."""
        ledger.add("gathered", self._block_gathered)
        return self._block_gathered if number > 1 else 0

    def _name(self, number: int) -> str:
        return f"block {self.blocks.start + number} of {self.rank.shape.layers}"
