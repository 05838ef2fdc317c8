"""A mixture of experts in place of a block's feed-forward part: what transformers' code calls.

Routers choose all experts equally often here; a rank whose experts are chosen more often needs that
much more. Experts are stacked and multiplied by one grouped product. Where they are divided among
ranks, tokens travel to them and back: see `parallel.expert.dispatch`.

Shapes: T tokens, K experts of each, P = T x K pairs, E hidden, F inside an expert, N experts.
"""

from __future__ import annotations

from .listing import Listing, Value
from .sizes import FLOAT, Sizes

INDEX = 8  # bytes of a place


def mixture(to: Listing, sizes: Sizes, x: Value) -> Value:
    """What the experts make of ``x`` (T, E)."""
    shape, item = sizes.shape, sizes.item
    numbers = sizes.tokens * shape.experts
    pairs = sizes.tokens * shape.experts_per_token
    logits = to.linear(x, numbers * item, shape.experts * shape.width * item)
    logits = logits if item == FLOAT else to.call(numbers * FLOAT, logits)
    chances = to.call(numbers * FLOAT, logits, out=True)
    chosen = to.call(pairs * FLOAT, chances, saves=(to.beside(pairs * INDEX),))
    shares = to.call(pairs * FLOAT, chosen, saves=(chosen,))
    away = sizes.expert > 1
    mixed = _elsewhere(to, sizes, x, shares) if away else _here(to, sizes, x, shares)
    # the sum's gradient is one for all K; where experts are together it is copied for each
    summed = to.call(sizes.tokens * shape.width * FLOAT, mixed, passes=away)
    return summed if item == FLOAT else to.call(sizes.tokens * shape.width * item, summed)


def _here(to: Listing, sizes: Sizes, x: Value, shares: Value) -> Value:
    """Of every pair what its expert made, times its share, (P, E), in the order of tokens."""
    pairs = sizes.tokens * sizes.shape.experts_per_token
    made = _experts(to, sizes, x)
    return _ordered(to, pairs, _shared(to, pairs * sizes.shape.width, made, shares))


def _elsewhere(to: Listing, sizes: Sizes, x: Value, shares: Value) -> Value:
    """The same, with exchanges before and after; as many pairs come as go."""
    pairs = sizes.tokens * sizes.shape.experts_per_token
    wide = pairs * sizes.shape.width
    sent = to.call(wide * sizes.item, x, saves=(to.beside(pairs * INDEX),))
    made = _experts(to, sizes, to.call(wide * sizes.item, sent))
    weighed = to.call(made.bytes, made)  # by ones, as only the sender knows the shares
    alone = to.call(made.bytes, _ordered(to, pairs, weighed))  # the sum over its one expert
    back = to.call(made.bytes, alone)
    # its caller still holds what was made and what came back
    return _shared(to, wide, _ordered(to, pairs, back), shares, scratch=made.bytes + back.bytes)


def _experts(to: Listing, sizes: Sizes, x: Value) -> Value:
    """Rows sorted by expert, through them: SwiGLU (Shazeer 2020), (P, E)."""
    shape, item = sizes.shape, sizes.item
    pairs = sizes.tokens * shape.experts_per_token
    inner = shape.inner // sizes.tensor
    weights = shape.experts // sizes.expert * shape.width * inner * item
    sorted_rows = to.call(pairs * shape.width * item, x, saves=(to.beside(pairs * INDEX),))
    both = to.linear(sorted_rows, 2 * pairs * inner * item, 2 * weights)
    halves = to.call(0, both)
    halves.gradient = both.bytes
    gate = to.beside(pairs * inner * item)
    gated = to.call(gate.bytes, halves, saves=(both, gate))
    return to.linear(gated, sorted_rows.bytes, weights)


def _ordered(to: Listing, pairs: int, rows: Value) -> Value:
    return to.call(rows.bytes, rows, saves=(to.beside(pairs * INDEX),))


def _shared(to: Listing, wide: int, rows: Value, shares: Value, scratch: int = 0) -> Value:
    """Times every pair's share, which is finer than the rows: so is what comes out."""
    size = wide * FLOAT
    saves = (rows, shares)
    return to.call(size, rows, shares, saves=saves, scratch=scratch, scratch_back=2 * size)
