"""Ring attention equals attention over the full sequence in outputs and gradients.

The reference is `F.scaled_dot_product_attention` on the full sequence in one process.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import nearlinear as nl
from nearlinear import _torch
from nearlinear.context_parallel import batch, kernels
from nearlinear.context_parallel.masks import CAUSAL, SequenceMask
from nearlinear.context_parallel.ring_attention import EXCHANGES, attention
from nearlinear.distributed import runtime


def full_attention(q, k, v, segments=None, scale=None, window=None):
    """Compute attention over the full sequence with torch and an explicit mask."""
    rows = torch.arange(q.shape[2])
    visible = rows[:, None] >= rows
    if window is not None:
        visible = visible & (rows[:, None] - rows < window)
    if segments is not None:
        same = segments.clamp(min=1)[:, None, :, None] == segments[:, None, None]
        visible = visible & same
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)


def mask_of(length, batch_size, segments=None, window=None) -> SequenceMask:
    """Return the mask of `full_attention` as a function of positions."""

    def visible(row, head, query, key):
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        if segments is not None:
            seen = seen & (segments.clamp(min=1)[row, query] == segments[row, key])
        return seen

    return SequenceMask(visible, batch_size, length)


def random_tensors(batch, heads, key_heads, length, size, dtype=torch.float32, seed=0):
    """Return queries, keys, values and the gradient of the output."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, length, size) for n in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def split_attention(rank, comm_type, tensors, options):
    """Return the output and gradients of this rank's rows, and the calls of both passes."""
    nl.init({"context_parallel_degree": torch.distributed.get_world_size()})
    group = runtime.current().group("context")
    exchange = EXCHANGES[comm_type](group)
    mine = [batch.take(x, rank, exchange.ranks, 2).requires_grad_() for x in tensors[:3]]
    with nl.count_collectives() as forward:
        out = attention(*mine, exchange, **options)
    with nl.count_collectives() as backward:
        out.backward(batch.take(tensors[3], rank, exchange.ranks, 2))
    assert out.dtype == tensors[0].dtype
    results = [out.detach(), *(x.grad for x in mine)]
    return results, dict(forward.calls), dict(backward.calls)


def restored(runs):
    """Restore the full output and gradients from the rows of every rank."""
    return [batch.restore(list(parts), 2) for parts in zip(*(run[0] for run in runs), strict=True)]


def reference(tensors, **options):
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    out = full_attention(*leaves, **options)
    out.backward(tensors[3])
    return [out.detach(), *(x.grad for x in leaves)]


def largest(got, expected) -> float:
    pairs = zip(got, expected, strict=True)
    return max((a.float() - b.float()).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("comm_type", EXCHANGES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ring_attention_equals_sdpa(ranks, comm_type):
    tensors = random_tensors(2, 4, 2, 32, 8)
    runs = nl.spmd.run(split_attention, ranks, args=(comm_type, tensors, {"scale": 0.3}))
    assert largest(restored(runs), reference(tensors, scale=0.3)) < 5e-6


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 4),
    chunk=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)]),
    batch=st.integers(1, 3),
    window=st.none() | st.integers(1, 45),
    padding=st.sampled_from(["none", "right", "left", "packed"]),
    comm_type=st.sampled_from(sorted(EXCHANGES)),
    seed=st.integers(0, 1000),
)
def test_ring_attention_equals_sdpa_for_any_shape_window_and_padding(
    ranks, chunk, heads, batch, window, padding, comm_type, seed
):
    length = 2 * ranks * chunk
    tensors = random_tensors(batch, *heads, length, 8, seed=seed)
    options: dict = {"window": window, "segments": None}
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=draw)
    at = torch.arange(length)
    if padding == "right":
        options["segments"] = (at < lengths).int()
    elif padding == "left":
        options["segments"] = (at >= length - lengths).int()
    elif padding == "packed":
        options["segments"] = (torch.rand(batch, length, generator=draw) < 0.2).cumsum(1) + 1
    ours = {"mask": mask_of(length, batch, **options)}
    runs = nl.spmd.run(split_attention, ranks, args=(comm_type, tensors, ours))
    assert largest(restored(runs), reference(tensors, **options)) < 1e-5


@pytest.mark.parametrize("comm_type", EXCHANGES)
@pytest.mark.parametrize("window", [None, 9])
def test_bfloat16_ring_attention_is_as_accurate_as_sdpa(comm_type, window):
    tensors = random_tensors(2, 4, 2, 64, 16, torch.bfloat16)
    exact = reference([x.float() for x in tensors], window=window)
    ours = {} if window is None else {"mask": mask_of(64, 2, window=window)}
    runs = nl.spmd.run(split_attention, 4, args=(comm_type, tensors, ours))
    ours, torch_results = restored(runs), reference(tensors, window=window)
    for mine, alone, true in zip(ours, torch_results, exact, strict=True):
        # rounding the result has a relative error of 2**-9; sums are in float32, therefore
        # the error does not grow with the number of ranks
        error = (mine.float() - true).norm() / true.norm()
        assert error < 6e-3
        assert error < 1.5 * (alone.float() - true).norm() / true.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_flash_kernels_and_matrix_products_agree(heads, dtype, causal, monkeypatch):
    """Includes an lse over more keys than the block's, and rows computed in several parts."""
    q, k, v, grad = random_tensors(2, *heads, 12, 8, dtype)
    kind = {"causal": causal, "mask": None, "dropout": None}
    assert _torch.has_flash_attention(q, k, v)
    out, lse = kernels.forward(q, k, v, 0.4, **kind)
    backward = (grad, q, k, v, (0.5 * out), lse + 0.7, 0.4)
    gradients = kernels.backward(*backward, **kind)
    monkeypatch.setattr(_torch, "has_flash_attention", lambda *tensors: False)
    monkeypatch.setattr(kernels, "MAX_SCORES", 2 * heads[0] * 12 * 5)
    plain = kernels.forward(q, k, v, 0.4, **kind)
    bound = 2e-6 if dtype == torch.float32 else 4e-2
    assert largest((out, lse), plain) < bound
    assert largest(gradients, kernels.backward(*backward, **kind)) < bound


def test_ring_attention_supports_different_key_and_value_sizes():
    q, k, _, _ = random_tensors(2, 4, 2, 16, 8)
    v, grad = torch.randn(2, 2, 16, 6), torch.randn(2, 4, 16, 6)
    runs = nl.spmd.run(split_attention, 2, args=("p2p", [q, k, v, grad], {}))
    assert largest(restored(runs), reference([q, k, v, grad])) < 5e-6


@pytest.mark.parametrize("comm_type", EXCHANGES)
def test_softcap_sinks_and_later_keys_equal_plain_attention(comm_type):
    """The mask is a prefix of 11 tokens that see each other, and causal after it."""
    tensors, sinks = random_tensors(2, 4, 2, 24, 8), torch.randn(4)
    prefix = SequenceMask(lambda b, h, query, key: (key <= query) | (key < 11), 2, 24)

    def run(rank, comm_type):
        leaf = sinks.clone().requires_grad_()
        options = {"mask": prefix, "softcap": 1.5, "sinks_H": leaf}
        return split_attention(rank, comm_type, tensors, options)[0], leaf.grad

    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    leaf, rows = sinks.clone().requires_grad_(), torch.arange(24)
    scores = 1.5 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 8**-0.5 / 1.5)
    scores = scores.masked_fill(~((rows <= rows[:, None]) | (rows < 11)), -torch.inf)
    scores = torch.cat([scores, leaf.view(1, 4, 1, 1).expand(2, 4, 24, 1)], -1)
    out = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    out.backward(tensors[3])
    runs = nl.spmd.run(run, 2, args=(comm_type,))
    assert largest(restored(runs), [out.detach(), q.grad, k.grad, v.grad]) < 5e-6
    assert largest([sum(run[1] for run in runs)], [leaf.grad]) < 5e-6


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ring_attention_has_the_expected_collectives(ranks):
    tensors = random_tensors(1, 2, 2, 8 * ranks, 8)
    for _, forward, backward in nl.spmd.run(split_attention, ranks, args=("p2p", tensors, {})):
        one, two = ranks - 1, 2 * (ranks - 1)
        assert forward == ({"send": one, "recv": one} if one else {})
        assert backward == ({"send": two, "recv": two} if one else {})
    for run in nl.spmd.run(split_attention, ranks, args=("all_gather", tensors, {})):
        assert run[1] == ({"all_gather": 1} if one else {})
        assert run[2] == ({"reduce_scatter": 1} if one else {})


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_scores_are_balanced_between_ranks(ranks):
    """Every rank computes equally many scores; together they compute the lower triangle."""
    chunk = 6
    rows = 2 * chunk
    work = []
    for rank in range(ranks):
        steps = []
        for source in range(ranks):
            (block,) = CAUSAL.blocks(rank, source, ranks, chunk, "cpu")
            queries, keys = (len(range(rows)[part]) for part in (block.queries, block.keys))
            steps.append(queries * (queries + 1) // 2 if block.causal else queries * keys)
        assert steps[rank] == rows * (rows + 1) // 2
        assert {n for source, n in enumerate(steps) if source != rank} == {rows * rows // 2}
        work.append(sum(steps))
    length = rows * ranks
    assert len(set(work)) == 1
    assert sum(work) == length * (length + 1) // 2  # no masked score is computed


@settings(deadline=None)
@given(
    ranks=st.integers(1, 4),
    chunk=st.integers(1, 5),
    window=st.none() | st.integers(1, 45),
)
def test_score_blocks_cover_every_visible_score_once(ranks, chunk, window):
    length = 2 * ranks * chunk
    rows = torch.arange(length)
    visible = (rows[:, None] >= rows) & (rows[:, None] - rows < (window or length))
    mask = CAUSAL if window is None else mask_of(length, 1, window=window)
    held = torch.zeros(length, length, dtype=torch.int)
    for rank in range(ranks):
        for source in range(ranks):
            at, there = (batch.positions(r, ranks, chunk, "cpu") for r in (rank, source))
            for block in mask.blocks(rank, source, ranks, chunk, "cpu"):
                part = visible[at[block.queries][:, None], there[block.keys]]
                if not block.masked:
                    full = torch.ones_like(part)
                    assert torch.equal(part, full.tril() if block.causal else full)
                assert part.any()  # no fully masked block
                held[at[block.queries][:, None], there[block.keys]] += part
    assert torch.equal(held, visible.int())


def test_restore_inverts_take():
    x = torch.arange(24).view(2, 12)
    parts = [batch.take(x, rank, 3) for rank in range(3)]
    assert parts[1].tolist() == [[2, 3, 8, 9], [14, 15, 20, 21]]
    assert torch.equal(batch.restore(parts), x)
    assert [batch.padded_length(n, 3) for n in (1, 6, 7, 12)] == [6, 6, 12, 12]


@pytest.mark.parametrize("causal", [False, True])
def test_block_dropout_equals_autograd_with_the_same_mask(causal, monkeypatch):
    q, k, v, grad = random_tensors(2, 4, 2, 10, 8)
    monkeypatch.setattr(kernels, "MAX_SCORES", 2 * 4 * 10 * 3)  # three rows at a time
    dropout = kernels.Dropout(0.3, seed=5)
    generator, parts = dropout.generator("cpu"), []
    for rows in (3, 3, 3, 1):
        parts.append(dropout.scale(torch.empty(2, 2, 2, rows, 10), generator))
    factors = torch.cat(parts, 3).flatten(1, 2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 1) for x in leaves[1:])
    scores = leaves[0] @ keys.mT * 0.4
    if causal:
        scores = scores.masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf)
    out = (scores.softmax(-1) * factors) @ values
    out.backward(grad)
    kind = {"causal": causal, "mask": None, "dropout": dropout}
    ours, lse = kernels.forward(q, k, v, 0.4, **kind)
    gradients = kernels.backward(grad, q, k, v, ours, lse, 0.4, **kind)
    assert 0.2 < (factors == 0).float().mean() < 0.4
    assert largest([ours, *gradients], [out.detach(), *(x.grad for x in leaves)]) < 5e-6


@pytest.mark.parametrize("comm_type", EXCHANGES)
def test_dropout_keeps_the_mean_and_backward_reuses_the_mask(comm_type):
    tensors = random_tensors(1, 2, 1, 16, 4)

    def work(rank):
        nl.init({"context_parallel_degree": 2})
        exchange = EXCHANGES[comm_type](runtime.current().group("context"))
        q, k, v, grad = (batch.take(x, rank, 2, 2) for x in tensors)
        v.requires_grad_()
        outs = [attention(q, k, v, exchange, dropout=0.2) for _ in range(300)]
        assert not torch.equal(outs[0], outs[1])
        # the output is linear in v, therefore <out, grad> = <v, dv>, each summed over ranks
        outs[0].backward(grad)
        sums = torch.stack([(outs[0] * grad).sum(), (v * v.grad).sum()]).detach()
        torch.distributed.all_reduce(sums)
        return torch.stack(outs).mean(0).detach(), sums.tolist()

    runs = nl.spmd.run(work, 2)
    mean = batch.restore([run[0] for run in runs], 2)
    assert (mean - full_attention(*tensors[:3])).abs().max() < 0.25
    for _, (forward, backward) in runs:
        assert forward == pytest.approx(backward, rel=1e-4)


def test_dropout_is_reproduced_by_seed_and_recomputation():
    q, k, v, grad = random_tensors(1, 2, 1, 16, 4)

    def work(rank):
        nl.init()
        exchange = EXCHANGES["p2p"](runtime.current().group("context"))

        def gradient(recompute):
            torch.manual_seed(3)
            leaf, args = q.clone().requires_grad_(), (k, v, exchange)
            if recompute:
                call = partial(attention, dropout=0.4)
                out = checkpoint(call, leaf, *args, use_reentrant=False)
            else:
                out = attention(leaf, *args, dropout=0.4)
            torch.rand(5)  # advances the generator before recomputation
            out.backward(grad)
            return leaf.grad

        assert torch.equal(gradient(True), gradient(False))

    nl.spmd.run(work, 1)


def windowed_attention(rank, comm_type):
    tensors = random_tensors(2, 4, 2, 24, 8)
    return split_attention(rank, comm_type, tensors, {"mask": mask_of(24, 2, window=10)})


@pytest.mark.slow
@pytest.mark.parametrize("comm_type", EXCHANGES)
def test_ring_attention_over_gloo_processes(comm_type):
    runs = nl.spmd.run(windowed_attention, 3, args=(comm_type,), processes=True)
    assert largest(restored(runs), reference(random_tensors(2, 4, 2, 24, 8), window=10)) < 5e-6
    assert runs[0][1] == ({"send": 2, "recv": 2} if comm_type == "p2p" else {"all_gather": 1})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("causal", [False, True])
def test_flash_kernels_on_a_gpu_agree_with_matrix_products(causal, monkeypatch):
    tensors = random_tensors(2, 4, 2, 64, 32, torch.bfloat16)
    q, k, v, grad = (x.cuda() for x in tensors)
    kind = {"causal": causal, "mask": None, "dropout": None}
    assert _torch.has_flash_attention(q, k, v)
    out, lse = kernels.forward(q, k, v, 0.2, **kind)
    gradients = kernels.backward(grad, q, k, v, out, lse + 0.7, 0.2, **kind)
    monkeypatch.setattr(_torch, "has_flash_attention", lambda *tensors: False)
    assert largest((out, lse), kernels.forward(q, k, v, 0.2, **kind)) < 4e-2
    plain = kernels.backward(grad, q, k, v, out, lse + 0.7, 0.2, **kind)
    assert largest(gradients, plain) < 4e-2
