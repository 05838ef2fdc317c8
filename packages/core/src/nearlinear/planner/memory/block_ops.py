"""Operator traces of transformer blocks and heads, following transformers' model code.

Sizes are per rank: tensor ranks hold a part of every matrix and, between layers, of the tokens
(sequence parallelism). Attention is the fused kernel, which saves its output and one float32 per
token and head. Checked operator by operator against `planner.dry_run`.

MoE blocks assume that routers choose all experts equally often. Experts are stacked and multiplied
by one grouped matrix product; with expert parallelism, tokens travel to their experts and back (see
`expert_parallel.routing`).

MoE shapes: T tokens, K experts per token, P = T x K pairs, E hidden size, F expert size, N experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..model_shape import ModelShape
from .op_trace import OpTrace, TracedTensor

FLOAT = 4  # bytes
INDEX = 8  # bytes of an index
RMS = ("llama", "mistral", "mixtral")
"""Families with RMS norms (Zhang and Sennrich 2019)."""

Loss = Literal["own", "torch", "fused", "in_place", "whole"]
"""Cross-entropy: nearlinear's; torch's on float32 logits, over tensor ranks by ``loss_parallel``;
one that keeps nothing but the logits and their gradient (compiled, or a fused kernel); Megatron's,
which overwrites float32 logits; and a fused one of logits that tensor ranks gather."""


@dataclass(frozen=True)
class MicroBatchSizes:
    """Sizes of one micro-batch on one rank."""

    shape: ModelShape
    tokens: int
    """Tokens of a micro-batch seen by this rank's attention and matrices."""
    tensor: int
    """Tensor-parallel ranks."""
    item: int
    """Bytes of a number in blocks."""
    expert: int = 1
    """Expert-parallel ranks."""
    context: int = 1
    """Context-parallel ranks."""
    context_all_gather: bool = False
    """True if keys and values of all context ranks are gathered and saved: see
    `context_parallel.ring_attention`."""
    fused: bool = False
    """True if elementwise operators are fused, and save nothing but their inputs."""
    regathers: bool = False
    """True if tensor ranks gather the input of a product again in its backward pass."""

    @property
    def rows(self) -> int:
        """Tokens of this rank between layers."""
        return math.ceil(self.tokens / self.tensor)

    @property
    def hidden(self) -> int:
        """Bytes of hidden states of this rank's rows."""
        return self.rows * self.shape.width * self.item

    def wide(self, width: int) -> int:
        """Bytes of ``width`` numbers per token, divided by the tensor ranks."""
        return self.tokens * width // self.tensor * self.item

    def matrix(self, *dims: int) -> int:
        """Bytes of a matrix's gradient before reduction, divided by the tensor ranks."""
        return math.prod(dims) // self.tensor * self.item

    @property
    def embedded(self) -> int:
        """Bytes of the embedding's output for all tokens; a rank's rows are a view of it."""
        return self.tokens * self.shape.width * self.item


def known_family(family: str, shape: ModelShape) -> str:
    """Return ``family``, or the known family that is most similar."""
    if family in BLOCKS:
        return family
    return "mixtral" if shape.experts > 1 else "llama" if shape.gated else "gpt_neox"


def trace_block(family: str, sizes: MicroBatchSizes) -> OpTrace:
    """Trace one block of ``family``, a key of `BLOCKS`."""
    trace = OpTrace(TracedTensor(sizes.hidden, sizes.hidden))
    BLOCKS[family](trace, sizes, trace.given)
    return trace


def trace_head(family: str, sizes: MicroBatchSizes, loss: Loss = "own") -> OpTrace:
    """Trace the operators from the last block to the loss."""
    to = OpTrace(TracedTensor(sizes.hidden, sizes.hidden))
    norm = _rms_norm(to, sizes, to.given) if family in RMS else _layer_norm(to, to.given)
    normed = _all_gathered(to, sizes, norm)
    words = math.ceil(sizes.shape.vocabulary / sizes.tensor)
    size, wide = (sizes.tokens * words * item for item in (sizes.item, FLOAT))
    logits = to.linear(normed, size, words * sizes.shape.width * sizes.item)
    half = sizes.item != FLOAT
    if loss == "whole" and sizes.tensor > 1:
        whole = size * sizes.tensor
        logits = to.call(whole, logits, scratch=whole)  # their parts, before they are joined
    if loss in ("fused", "whole"):
        to.call(0, logits, saves=(logits,))
        return to
    if loss == "own" and sizes.tensor > 1:  # `tensor_parallel.loss` keeps the logits unchanged
        scratch = 2 * wide if half else wide
        to.call(0, logits, saves=(logits,), scratch=scratch, scratch_back=scratch - size)
        return to
    held = size if half else 0  # the model's output, until its caller has the loss
    logits = to.call(wide, logits) if half else logits
    if loss == "in_place":
        to.call(0, logits, passes=True).gradient = wide  # written over the logits
        return to
    scratch = wide if sizes.tensor > 1 else 0  # `loss_parallel` takes exponents in new tensors
    to.call(0, to.call(wide, logits, out=True, scratch=held + scratch, scratch_back=scratch))
    to.fragment = held  # all later tensors are larger
    return to


def _gpt2(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor) -> None:
    width, inner = sizes.shape.width, sizes.shape.inner
    normed = _all_gathered(to, sizes, _layer_norm(to, x))
    qkv = to.linear(normed, sizes.wide(3 * width), sizes.matrix(width, 3 * width))
    mixed = _in_rows(to, sizes, _attention(to, sizes, (_split(to, qkv),), saves=(qkv,)))
    mixed = to.linear(mixed, sizes.tokens * width * sizes.item, sizes.matrix(width, width))
    x = to.add(_reduce_scattered(to, sizes, mixed), x)
    normed = _all_gathered(to, sizes, _layer_norm(to, x))
    up = to.linear(normed, sizes.wide(inner), sizes.matrix(width, inner))
    gelu = to.call(up.bytes, up, saves=(up,)) if sizes.fused else _gelu_by_tanh(to, up)
    down = to.linear(gelu, sizes.tokens * width * sizes.item, sizes.matrix(inner, width))
    to.add(x, _reduce_scattered(to, sizes, down))


def _llama(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor) -> None:
    x = _llama_attention(to, sizes, x)
    normed = _all_gathered(to, sizes, _rms_norm(to, sizes, x))
    down = _gated(to, sizes, normed, sizes.shape.inner)
    to.add(x, _reduce_scattered(to, sizes, down))


def _gated(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor, inner: int) -> TracedTensor:
    """SwiGLU feed-forward layer (Shazeer 2020)."""
    width = sizes.shape.width
    gate = to.linear(x, sizes.wide(inner), sizes.matrix(width, inner))
    if not sizes.fused:
        gate = to.call(gate.bytes, gate, saves=(gate,))  # SiLU
    up = to.linear(x, sizes.wide(inner), sizes.matrix(width, inner))
    return to.linear(
        to.times(gate, up), sizes.tokens * width * sizes.item, sizes.matrix(inner, width)
    )


def _mixtral(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor) -> None:
    x = _llama_attention(to, sizes, x)
    normed = _all_gathered(to, sizes, _rms_norm(to, sizes, x))
    mixed = _moe(to, sizes, normed)
    if sizes.shape.shared_inner:
        mixed = to.add(mixed, _gated(to, sizes, normed, sizes.shape.shared_inner))
    to.add(x, _reduce_scattered(to, sizes, mixed))


def _llama_attention(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor) -> TracedTensor:
    """First half of a Llama block."""
    width, kv, queries = (
        sizes.shape.width, sizes.shape.kv_width, sizes.shape.attention_width,
    )  # fmt: skip
    normed = _all_gathered(to, sizes, _rms_norm(to, sizes, x))
    q = to.linear(normed, sizes.wide(queries), sizes.matrix(width, queries))
    k = to.linear(normed, sizes.wide(kv), sizes.matrix(width, kv))
    v = to.linear(normed, sizes.wide(kv), sizes.matrix(width, kv))
    qkv = _rotated(to, sizes, q), _rotated(to, sizes, k), v
    mixed = _in_rows(to, sizes, _attention(to, sizes, qkv, saves=qkv))
    mixed = to.linear(mixed, sizes.tokens * width * sizes.item, sizes.matrix(queries, width))
    return to.add(x, _reduce_scattered(to, sizes, mixed))


def _neox(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor) -> None:
    width, inner = sizes.shape.width, sizes.shape.inner
    normed = _all_gathered(to, sizes, _layer_norm(to, x))
    qkv = to.linear(normed, sizes.wide(3 * width), sizes.matrix(width, 3 * width))
    part = sizes.wide(width)
    # rotary positions of queries and keys
    rotated = to.call(2 * part, _split(to, qkv), scratch=part, scratch_back=part)
    rotated.gradient = 3 * part
    mixed = to.scaled(_attention(to, sizes, (rotated,), saves=(rotated, qkv)))  # heads in a row
    mixed = to.linear(mixed, sizes.tokens * width * sizes.item, sizes.matrix(width, width))
    mixed = _reduce_scattered(to, sizes, mixed)
    normed = _all_gathered(to, sizes, _layer_norm(to, x))
    up = to.linear(normed, sizes.wide(inner), sizes.matrix(width, inner))
    gelu = to.call(up.bytes, up, saves=(up,))
    down = to.linear(gelu, sizes.tokens * width * sizes.item, sizes.matrix(inner, width))
    to.add(to.add(_reduce_scattered(to, sizes, down), mixed), x)


def _layer_norm(to: OpTrace, x: TracedTensor) -> TracedTensor:
    return to.call(x.gradient, x, saves=(x,))


def _rms_norm(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor) -> TracedTensor:
    """RMS norm in float32, with the operators of the model's own code."""
    if sizes.fused:
        return _layer_norm(to, x)
    size = x.gradient // sizes.item * FLOAT
    half = sizes.item != FLOAT
    wide = to.call(size, x) if half else x
    scaled = to.call(size, wide, saves=(wide,), scratch=size, scratch_back=3 * size)
    narrow = to.call(x.gradient, scaled) if half else scaled
    return to.call(x.gradient, narrow, saves=(narrow,), scratch_back=x.gradient)


def _rotated(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor) -> TracedTensor:
    """Rotary positions (Su et al. 2021): two products, and one half with its sign changed."""
    scratch = 0 if sizes.fused else 2 * x.bytes
    return to.call(x.bytes, x, scratch=scratch, scratch_back=scratch)


def _split(to: OpTrace, qkv: TracedTensor) -> TracedTensor:
    """Views of a fused projection; their gradients are concatenated in a copy."""
    views = to.call(0, qkv)
    views.gradient = qkv.bytes
    return views


def _attention(
    to: OpTrace,
    sizes: MicroBatchSizes,
    given: tuple[TracedTensor, ...],
    saves: tuple[TracedTensor, ...],
) -> TracedTensor:
    """Fused attention; ``saves`` begins with the queries."""
    heads = sizes.tokens * sizes.shape.heads // sizes.tensor
    log_sums = to.side_output(heads * FLOAT)
    size = sizes.wide(sizes.shape.attention_width)
    if sizes.context == 1:
        return to.call(size, *given, saves=(*saves, log_sums), out=True, product=True)
    kv = 2 * sizes.wide(sizes.shape.kv_width)
    # keys and values, concatenated for the send or the all-gather
    held = to.side_output(kv * sizes.context if sizes.context_all_gather else kv)
    finer = FLOAT // sizes.item  # partial outputs and gradients are float32
    if sizes.context_all_gather:  # the gradients of every rank, in order, and their sum
        back = (2 * sizes.context + 1) * finer * kv
    else:  # this rank's gradients, and those being sent and received in two steps
        back = (5 if sizes.context > 2 else 3) * finer * kv + 2 * kv
    return to.call(
        size,
        *given,
        saves=(saves[0], log_sums, held),
        out=True,
        product=True,
        scratch=2 * finer * size,
        scratch_back=back + finer * size,
    )


def _in_rows(to: OpTrace, sizes: MicroBatchSizes, mixed: TracedTensor) -> TracedTensor:
    """Copy to rows: attention over context ranks returns its output head by head."""
    return to.scaled(mixed) if sizes.context > 1 else mixed


def _gelu_by_tanh(to: OpTrace, x: TracedTensor) -> TracedTensor:
    half = to.scaled(x)
    cube = to.call(x.bytes, x, saves=(x,), scratch_back=2 * x.bytes)
    inside = to.scaled(to.add(x, to.scaled(cube)))
    tanh = to.call(x.bytes, inside, out=True)
    return to.times(half, to.add(tanh))


def _all_gathered(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor) -> TracedTensor:
    """All-gather the rows of all tensor ranks."""
    if sizes.tensor == 1:
        return x
    whole = to.call(sizes.tokens * sizes.shape.width * sizes.item, x)
    whole.remade_from = x if sizes.regathers else None
    return whole


def _reduce_scattered(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor) -> TracedTensor:
    """Reduce-scatter: this rank's rows of the sum over tensor ranks."""
    return x if sizes.tensor == 1 else to.call(sizes.hidden, x)


def _moe(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor) -> TracedTensor:
    """MoE feed-forward of ``x`` (T, E)."""
    shape, item = sizes.shape, sizes.item
    scores = sizes.tokens * shape.experts
    pairs = sizes.tokens * shape.experts_per_token
    logits = to.linear(x, scores * item, shape.experts * shape.width * item)
    logits = logits if item == FLOAT else to.call(scores * FLOAT, logits)
    probabilities = to.call(scores * FLOAT, logits, out=True)
    chosen = to.call(pairs * FLOAT, probabilities, saves=(to.side_output(pairs * INDEX),))
    shares = to.call(pairs * FLOAT, chosen, saves=(chosen,))
    remote = sizes.expert > 1
    mixed = (_remote_experts if remote else _local_experts)(to, sizes, x, shares)
    # the sum's gradient is shared by all K; local experts copy it for each
    summed = to.call(sizes.tokens * shape.width * FLOAT, mixed, passes=remote)
    return summed if item == FLOAT else to.call(sizes.tokens * shape.width * item, summed)


def _local_experts(
    to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor, shares: TracedTensor
) -> TracedTensor:
    """Weighted expert output of every pair (P, E), in token order."""
    pairs = sizes.tokens * sizes.shape.experts_per_token
    made = _experts(to, sizes, x)
    return _permuted(to, pairs, _weighted(to, pairs * sizes.shape.width, made, shares))


def _remote_experts(
    to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor, shares: TracedTensor
) -> TracedTensor:
    """`_local_experts` between two all-to-alls of equally many pairs."""
    pairs = sizes.tokens * sizes.shape.experts_per_token
    wide = pairs * sizes.shape.width
    sent = to.call(wide * sizes.item, x, saves=(to.side_output(pairs * INDEX),))
    made = _experts(to, sizes, to.call(wide * sizes.item, sent))
    weighted = to.call(made.bytes, made)  # by ones: only the sender knows the shares
    summed = to.call(made.bytes, _permuted(to, pairs, weighted))  # over its one expert
    back = to.call(made.bytes, summed)
    # the caller still holds the experts' output and the received rows
    held = made.bytes + back.bytes
    return _weighted(to, wide, _permuted(to, pairs, back), shares, scratch=held)


def _experts(to: OpTrace, sizes: MicroBatchSizes, x: TracedTensor) -> TracedTensor:
    """SwiGLU experts (Shazeer 2020) on rows sorted by expert, (P, E)."""
    shape, item = sizes.shape, sizes.item
    pairs = sizes.tokens * shape.experts_per_token
    inner = shape.inner // sizes.tensor
    weights = shape.experts // sizes.expert * shape.width * inner * item
    rows = to.call(pairs * shape.width * item, x, saves=(to.side_output(pairs * INDEX),))
    both = to.linear(rows, 2 * pairs * inner * item, 2 * weights)
    halves = to.call(0, both)
    halves.gradient = both.bytes
    gate = to.side_output(pairs * inner * item)
    gated = to.call(gate.bytes, halves, saves=(both, gate))
    return to.linear(gated, rows.bytes, weights)


def _permuted(to: OpTrace, pairs: int, rows: TracedTensor) -> TracedTensor:
    return to.call(rows.bytes, rows, saves=(to.side_output(pairs * INDEX),))


def _weighted(
    to: OpTrace, wide: int, rows: TracedTensor, shares: TracedTensor, scratch: int = 0
) -> TracedTensor:
    """Multiply by every pair's share in float32, which makes the output float32."""
    size = wide * FLOAT
    saves = (rows, shares)
    return to.call(size, rows, shares, saves=saves, scratch=scratch, scratch_back=2 * size)


BLOCKS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "gpt_neox": _neox,
}
"""Functions that trace a block, by family."""
