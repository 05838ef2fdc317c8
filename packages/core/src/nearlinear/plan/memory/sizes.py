"""The sizes of one micro-batch on one rank, which everything that computes with it has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..shape import Shape

FLOAT = 4


@dataclass(frozen=True)
class Sizes:
    """One micro-batch on one rank."""

    shape: Shape
    tokens: int
    """of a micro-batch, that this rank's attention and matrices see"""
    tensor: int
    """ranks that split every matrix"""
    item: int
    """bytes of a number in blocks"""
    expert: int = 1
    """ranks that divide the experts of a mixture"""
    context: int = 1
    """ranks that split a sequence"""
    at_once: bool = False
    """all context ranks' keys and values are gathered, and stay: see `parallel.context.gathered`"""

    @property
    def rows(self) -> int:
        """Tokens of this rank between layers."""
        return math.ceil(self.tokens / self.tensor)

    @property
    def hidden(self) -> int:
        """Bytes of hidden states of this rank's rows."""
        return self.rows * self.shape.width * self.item

    def wide(self, width: int) -> int:
        """Bytes of ``width`` numbers for every token, cut over the tensor ranks."""
        return self.tokens * width // self.tensor * self.item

    def matrix(self, *dims: int) -> int:
        """Bytes of a matrix's gradient before it is reduced, cut over the tensor ranks."""
        return math.prod(dims) // self.tensor * self.item

    @property
    def embedded(self) -> int:
        """Bytes of what the embedding puts out, for all tokens: a rank's rows are a view of it."""
        return self.tokens * self.shape.width * self.item
