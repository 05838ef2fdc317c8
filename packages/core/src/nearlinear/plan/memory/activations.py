"""What blocks keep for their backward pass, and need in it: of blocks that are alike, in a row."""

from __future__ import annotations

from dataclasses import dataclass

from .listing import Listing


@dataclass(frozen=True)
class Kept:
    """What is there of activations between the forward and the backward pass."""

    products: int = 0
    """bytes of a block's products, where they are kept though the block is computed again"""
    again: int = 0
    """blocks that are computed again as one, from the input of the first; 0: none are"""
    until: int | None = None
    """the last block that is computed again, those after it keep all; None: the last one"""
    resident: int | None = None
    """blocks whose activations are on the device at once; None: all"""


@dataclass(frozen=True)
class Activations:
    """Of blocks 1, 2, .. in a row."""

    calls: Listing
    """of a block"""
    kept: Kept
    hidden: int
    """bytes of the hidden states between two blocks"""
    first: int
    """and of those that enter the first one; 0: they are counted elsewhere"""

    def again(self, number: int) -> int:
        """Blocks that are computed again together with block ``number``; 0: it is not."""
        kept = self.kept
        return kept.again if kept.until is None or number <= kept.until else 0

    def window(self, blocks: int) -> int:
        """The most bytes that ``blocks`` blocks in a row keep."""
        return blocks * max(self.kept_by(1), self.kept_by(2))

    def kept_by(self, number: int) -> int:
        """Bytes that block ``number`` keeps for its backward pass."""
        again, enters = self.again(number), self.first if number == 1 else self.hidden
        if again:
            return self.kept.products + (enters if (number - 1) % again == 0 else 0)
        own = self.calls.kept_bytes
        return own - self.hidden + enters if self.calls.given in self.calls.kept else own

    def forward(self, number: int) -> int:
        """The most bytes that block ``number`` makes in its forward pass, kept ones among them."""
        return self.calls.forward_peak(saving=not self.again(number))

    def backward(self, number: int) -> int:
        """The most bytes that its backward pass needs beyond what it has kept."""
        calls, again, peak = self.calls, self.again(number), self.calls.backward_peak()
        if again:
            if calls.given not in calls.kept:
                peak += self.hidden  # which recomputation began with
            waiting = (number - 1) % again  # blocks of its group that have run again, too
            peak += waiting * calls.kept_bytes
            if self.kept.products:
                peak += sum(each.bytes for each in calls.products if each not in calls.kept)
        return max(0, peak - self.kept_by(number))
