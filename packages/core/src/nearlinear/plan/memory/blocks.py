"""What the blocks of model families, and their heads, call: as transformers' code of them does.

Sizes are per rank: tensor ranks have a part of every matrix and, between layers, of the tokens
(sequence parallelism). Attention is the fused kernel's, which keeps its output and one float32 per
token and head. Checked operator by operator against `dry_run`.
"""

from __future__ import annotations

import math

from ..shape import Shape
from .listing import Listing, Value
from .mixture import mixture
from .sizes import FLOAT, Sizes

RMS = ("llama", "mistral", "mixtral")
"""families whose norms are RMS norms (Zhang and Sennrich 2019)"""


def known_as(family: str, shape: Shape) -> str:
    """``family``, or the one known here that models with its keys are most like."""
    if family in WRITERS:
        return family
    return "mixtral" if shape.experts > 1 else "llama"


def block(family: str, sizes: Sizes) -> Listing:
    """The operators of one block of ``family``, one of `WRITERS`."""
    listing = Listing(Value(sizes.hidden, sizes.hidden))
    WRITERS[family](listing, sizes, listing.given)
    return listing


def head(family: str, sizes: Sizes) -> Listing:
    """The operators from the last block to the loss."""
    to = Listing(Value(sizes.hidden, sizes.hidden))
    norm = _rms_norm(to, sizes, to.given) if family in RMS else _layer_norm(to, to.given)
    normed = _gathered(to, sizes, norm)
    words = math.ceil(sizes.shape.vocabulary / sizes.tensor)
    size, wide = (sizes.tokens * words * item for item in (sizes.item, FLOAT))
    logits = to.linear(normed, size, words * sizes.shape.width * sizes.item)
    half = sizes.item != FLOAT
    if sizes.tensor > 1:  # `parallel.loss` keeps the logits as they are
        scratch = 2 * wide if half else wide
        to.call(0, logits, saves=(logits,), scratch=scratch, scratch_back=scratch - size)
        return to
    held = size if half else 0  # what the model returns is there until its caller has the loss
    logits = to.call(wide, logits) if half else logits
    to.call(0, to.call(wide, logits, out=True, scratch=held))
    return to


def _gpt2(to: Listing, sizes: Sizes, x: Value) -> None:
    width, inner = sizes.shape.width, sizes.shape.inner
    normed = _gathered(to, sizes, _layer_norm(to, x))
    qkv = to.linear(normed, sizes.wide(3 * width), sizes.matrix(width, 3 * width))
    mixed = _in_rows(to, sizes, _attention(to, sizes, (_parts(to, qkv),), saves=(qkv,)))
    mixed = to.linear(mixed, sizes.tokens * width * sizes.item, sizes.matrix(width, width))
    x = to.add(_summed(to, sizes, mixed), x)
    normed = _gathered(to, sizes, _layer_norm(to, x))
    up = to.linear(normed, sizes.wide(inner), sizes.matrix(width, inner))
    down = to.linear(
        _gelu_by_tanh(to, up), sizes.tokens * width * sizes.item, sizes.matrix(inner, width)
    )
    to.add(x, _summed(to, sizes, down))


def _llama(to: Listing, sizes: Sizes, x: Value) -> None:
    width, inner = sizes.shape.width, sizes.shape.inner
    x = _attended(to, sizes, x)
    normed = _gathered(to, sizes, _rms_norm(to, sizes, x))
    gate = to.linear(normed, sizes.wide(inner), sizes.matrix(width, inner))
    gate = to.call(gate.bytes, gate, saves=(gate,))  # SiLU
    up = to.linear(normed, sizes.wide(inner), sizes.matrix(width, inner))
    down = to.linear(
        to.times(gate, up), sizes.tokens * width * sizes.item, sizes.matrix(inner, width)
    )
    to.add(x, _summed(to, sizes, down))


def _mixtral(to: Listing, sizes: Sizes, x: Value) -> None:
    x = _attended(to, sizes, x)
    normed = _gathered(to, sizes, _rms_norm(to, sizes, x))
    to.add(x, _summed(to, sizes, mixture(to, sizes, normed)))


def _attended(to: Listing, sizes: Sizes, x: Value) -> Value:
    """The first half of Llama's blocks."""
    width, kv = sizes.shape.width, sizes.shape.kv_width
    normed = _gathered(to, sizes, _rms_norm(to, sizes, x))
    q = to.linear(normed, sizes.wide(width), sizes.matrix(width, width))
    k = to.linear(normed, sizes.wide(kv), sizes.matrix(width, kv))
    v = to.linear(normed, sizes.wide(kv), sizes.matrix(width, kv))
    qkv = _turned(to, q), _turned(to, k), v
    mixed = _in_rows(to, sizes, _attention(to, sizes, qkv, saves=qkv))
    mixed = to.linear(mixed, sizes.tokens * width * sizes.item, sizes.matrix(width, width))
    return to.add(x, _summed(to, sizes, mixed))


def _neox(to: Listing, sizes: Sizes, x: Value) -> None:
    width, inner = sizes.shape.width, sizes.shape.inner
    normed = _gathered(to, sizes, _layer_norm(to, x))
    qkv = to.linear(normed, sizes.wide(3 * width), sizes.matrix(width, 3 * width))
    part = sizes.wide(width)
    turned = to.call(2 * part, _parts(to, qkv), scratch=part, scratch_back=part)  # queries and keys
    turned.gradient = 3 * part
    mixed = to.scaled(_attention(to, sizes, (turned,), saves=(turned, qkv)))  # heads in a row
    mixed = to.linear(mixed, sizes.tokens * width * sizes.item, sizes.matrix(width, width))
    mixed = _summed(to, sizes, mixed)
    normed = _gathered(to, sizes, _layer_norm(to, x))
    up = to.linear(normed, sizes.wide(inner), sizes.matrix(width, inner))
    gelu = to.call(up.bytes, up, saves=(up,))
    down = to.linear(gelu, sizes.tokens * width * sizes.item, sizes.matrix(inner, width))
    to.add(to.add(_summed(to, sizes, down), mixed), x)


def _layer_norm(to: Listing, x: Value) -> Value:
    return to.call(x.gradient, x, saves=(x,))


def _rms_norm(to: Listing, sizes: Sizes, x: Value) -> Value:
    """In float32, with the operators of a model's own code."""
    size = x.gradient // sizes.item * FLOAT
    half = sizes.item != FLOAT
    wide = to.call(size, x) if half else x
    scaled = to.call(size, wide, saves=(wide,), scratch=size, scratch_back=3 * size)
    narrow = to.call(x.gradient, scaled) if half else scaled
    return to.call(x.gradient, narrow, saves=(narrow,), scratch_back=x.gradient)


def _turned(to: Listing, x: Value) -> Value:
    """Rotary positions (Su et al. 2021): two products, and a half that changes its sign."""
    return to.call(x.bytes, x, scratch=2 * x.bytes, scratch_back=2 * x.bytes)


def _parts(to: Listing, qkv: Value) -> Value:
    """Views of a fused projection; their gradients are put together in a copy."""
    views = to.call(0, qkv)
    views.gradient = qkv.bytes
    return views


def _attention(to: Listing, sizes: Sizes, given: tuple[Value, ...], saves: tuple) -> Value:
    """``saves``: queries first."""
    heads = sizes.tokens * sizes.shape.heads // sizes.tensor
    sums = to.beside(heads * FLOAT)  # of exponentials, their logarithms
    size = sizes.wide(sizes.shape.width)
    if sizes.context == 1:
        return to.call(size, *given, saves=(*saves, sums), out=True, product=True)
    kv = 2 * sizes.wide(sizes.shape.kv_width)
    held = to.beside(kv * sizes.context if sizes.at_once else kv)  # put together, before it leaves
    finer = FLOAT // sizes.item  # attention's parts and gradients are float32
    if sizes.at_once:  # every rank's gradients, all in a row, and the sum
        back = (2 * sizes.context + 1) * finer * kv
    else:  # this rank's, and of two steps those that leave and those that come
        back = (5 if sizes.context > 2 else 3) * finer * kv + 2 * kv
    return to.call(
        size,
        *given,
        saves=(saves[0], sums, held),
        out=True,
        product=True,
        scratch=2 * finer * size,
        scratch_back=back + finer * size,
    )


def _in_rows(to: Listing, sizes: Sizes, mixed: Value) -> Value:
    """Attention over context ranks puts out head after head, and rows are a copy."""
    return to.scaled(mixed) if sizes.context > 1 else mixed


def _gelu_by_tanh(to: Listing, x: Value) -> Value:
    half = to.scaled(x)
    cube = to.call(x.bytes, x, saves=(x,), scratch_back=2 * x.bytes)
    inside = to.scaled(to.add(x, to.scaled(cube)))
    tanh = to.call(x.bytes, inside, out=True)
    return to.times(half, to.add(tanh))


def _gathered(to: Listing, sizes: Sizes, x: Value) -> Value:
    """All tensor ranks' rows."""
    if sizes.tensor == 1:
        return x
    return to.call(sizes.tokens * sizes.shape.width * sizes.item, x)


def _summed(to: Listing, sizes: Sizes, x: Value) -> Value:
    """This rank's rows of the sum of all tensor ranks'."""
    return x if sizes.tensor == 1 else to.call(sizes.hidden, x)


WRITERS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "gpt_neox": _neox,
}
"""Of blocks, by family."""
