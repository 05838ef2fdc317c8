"""Attention over a split sequence equals attention over the whole one: outputs and gradients.

The reference is `F.scaled_dot_product_attention` on the whole sequence in one process.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import nearlinear as nl
from nearlinear import _torch, runtime
from nearlinear.parallel.context import kernels, zigzag
from nearlinear.parallel.context.attention import TRAVELS, attention


def whole(q, k, v, segments=None, scale=None, window=None):
    """Attention over the whole sequence by torch, with a mask that is written out."""
    rows = torch.arange(q.shape[2])
    seen = rows[:, None] >= rows
    if window is not None:
        seen = seen & (rows[:, None] - rows < window)
    if segments is not None:
        same = segments.clamp(min=1)[:, None, :, None] == segments[:, None, None]
        seen = seen & same
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


def random_tensors(batch, heads, key_heads, length, size, dtype=torch.float32, seed=0):
    """Queries, keys, values and the gradient of the output."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(batch, n, length, size) for n in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def split_attention(rank, travel, tensors, asked):
    """Output and gradients of q, k, v of this rank's rows, put together over all ranks; counts."""
    nl.init({"context_parallel_degree": torch.distributed.get_world_size()})
    group = runtime.current().group("context")
    how = TRAVELS[travel](group)
    mine = [zigzag.take(x, rank, how.ranks, 2).requires_grad_() for x in tensors[:3]]
    with nl.count_collectives() as forward:
        out = attention(*mine, how, **asked)
    with nl.count_collectives() as backward:
        out.backward(zigzag.take(tensors[3], rank, how.ranks, 2))
    assert out.dtype == tensors[0].dtype
    results = [out.detach(), *(x.grad for x in mine)]
    return results, dict(forward.calls), dict(backward.calls)


def together(runs):
    """The whole output and gradients from those of the ranks."""
    return [zigzag.restore(list(parts), 2) for parts in zip(*(run[0] for run in runs), strict=True)]


def reference(tensors, **asked):
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
    out = whole(*leaves, **asked)
    out.backward(tensors[3])
    return [out.detach(), *(x.grad for x in leaves)]


def largest(got, expected) -> float:
    pairs = zip(got, expected, strict=True)
    return max((a.float() - b.float()).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("travel", TRAVELS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_equals_attention_over_the_whole_sequence(ranks, travel):
    tensors = random_tensors(2, 4, 2, 32, 8)
    runs = nl.spmd.run(split_attention, ranks, args=(travel, tensors, {"scale": 0.3}))
    assert largest(together(runs), reference(tensors, scale=0.3)) < 5e-6


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 4),
    chunk=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)]),
    batch=st.integers(1, 3),
    window=st.none() | st.integers(1, 45),
    padding=st.sampled_from(["none", "right", "left", "packed"]),
    travel=st.sampled_from(sorted(TRAVELS)),
    seed=st.integers(0, 1000),
)
def test_any_shape_window_and_padding(ranks, chunk, heads, batch, window, padding, travel, seed):
    length = 2 * ranks * chunk
    tensors = random_tensors(batch, *heads, length, 8, seed=seed)
    asked = {"window": window, "segments": None}
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=draw)
    at = torch.arange(length)
    if padding == "right":
        asked["segments"] = (at < lengths).int()
    elif padding == "left":
        asked["segments"] = (at >= length - lengths).int()
    elif padding == "packed":
        asked["segments"] = (torch.rand(batch, length, generator=draw) < 0.2).cumsum(1) + 1
    ours = {"window": window, "segments_BS": asked["segments"]}
    runs = nl.spmd.run(split_attention, ranks, args=(travel, tensors, ours))
    assert largest(together(runs), reference(tensors, **asked)) < 1e-5


@pytest.mark.parametrize("travel", TRAVELS)
@pytest.mark.parametrize("window", [None, 9])
def test_bfloat16_is_as_near_as_torch_on_the_whole_sequence(travel, window):
    tensors = random_tensors(2, 4, 2, 64, 16, torch.bfloat16)
    exact = reference([x.float() for x in tensors], window=window)
    runs = nl.spmd.run(split_attention, 4, args=(travel, tensors, {"window": window}))
    ours, torchs = together(runs), reference(tensors, window=window)
    for mine, alone, true in zip(ours, torchs, exact, strict=True):
        # one rounding of the result is 2**-9 of it; sums are in float32, so that more ranks
        # do not make it worse
        error = (mine.float() - true).norm() / true.norm()
        assert error < 6e-3
        assert error < 1.5 * (alone.float() - true).norm() / true.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_flash_kernels_and_matrix_products_agree(heads, dtype, causal, monkeypatch):
    """Also where the final lse is of more keys than the block's, and rows are computed in parts."""
    q, k, v, grad = random_tensors(2, *heads, 12, 8, dtype)
    kind = {"causal": causal, "mask": None, "dropout": None}
    assert _torch.has_flash_attention(q, k, v)
    out, lse = kernels.forward(q, k, v, 0.4, **kind)
    backward = (grad, q, k, v, (0.5 * out), lse + 0.7, 0.4)
    gradients = kernels.backward(*backward, **kind)
    monkeypatch.setattr(_torch, "has_flash_attention", lambda *tensors: False)
    monkeypatch.setattr(kernels, "SCORES", 2 * heads[0] * 12 * 5)
    plain = kernels.forward(q, k, v, 0.4, **kind)
    bound = 2e-6 if dtype == torch.float32 else 4e-2
    assert largest((out, lse), plain) < bound
    assert largest(gradients, kernels.backward(*backward, **kind)) < bound


def test_head_sizes_of_keys_and_values_may_differ():
    q, k, _, _ = random_tensors(2, 4, 2, 16, 8)
    v, grad = torch.randn(2, 2, 16, 6), torch.randn(2, 4, 16, 6)
    runs = nl.spmd.run(split_attention, 2, args=("p2p", [q, k, v, grad], {}))
    assert largest(together(runs), reference([q, k, v, grad])) < 5e-6


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_what_is_communicated(ranks):
    tensors = random_tensors(1, 2, 2, 8 * ranks, 8)
    for _, forward, backward in nl.spmd.run(split_attention, ranks, args=("p2p", tensors, {})):
        one, two = ranks - 1, 2 * (ranks - 1)
        assert forward == ({"send": one, "recv": one} if one else {})
        assert backward == ({"send": two, "recv": two} if one else {})
    for run in nl.spmd.run(split_attention, ranks, args=("all_gather", tensors, {})):
        assert run[1] == ({"all_gather": 1} if one else {})
        assert run[2] == ({"reduce_scatter": 1} if one else {})


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_work_is_balanced(ranks):
    """Score elements that each rank's blocks hold: equal, and half of all but for the diagonal."""
    chunk = 6
    rows = 2 * chunk
    work = []
    for rank in range(ranks):
        steps = []
        for source in range(ranks):
            (block,) = zigzag.blocks(rank, source, ranks, chunk)
            queries, keys = (len(range(rows)[part]) for part in (block.queries, block.keys))
            steps.append(queries * (queries + 1) // 2 if block.causal else queries * keys)
        assert steps[rank] == rows * (rows + 1) // 2
        assert {n for source, n in enumerate(steps) if source != rank} == {rows * rows // 2}
        work.append(sum(steps))
    length = rows * ranks
    assert len(set(work)) == 1
    assert sum(work) == length * (length + 1) // 2  # no score that causality hides


@settings(deadline=None)
@given(
    ranks=st.integers(1, 4),
    chunk=st.integers(1, 5),
    window=st.none() | st.integers(1, 45),
)
def test_blocks_hold_every_score_that_is_seen_once(ranks, chunk, window):
    length = 2 * ranks * chunk
    rows = torch.arange(length)
    seen = (rows[:, None] >= rows) & (rows[:, None] - rows < (window or length))
    held = torch.zeros(length, length, dtype=torch.int)
    for rank in range(ranks):
        for source in range(ranks):
            at, there = (zigzag.positions(r, ranks, chunk, "cpu") for r in (rank, source))
            for block in zigzag.blocks(rank, source, ranks, chunk, window):
                part = seen[at[block.queries][:, None], there[block.keys]]
                if not block.cut:  # then nothing but causality hides a score of it
                    full = torch.ones_like(part)
                    assert torch.equal(part, full.tril() if block.causal else full)
                assert part.any()  # no block for nothing
                held[at[block.queries][:, None], there[block.keys]] += part
    assert torch.equal(held, seen.int())


def test_take_and_restore_are_inverse():
    x = torch.arange(24).view(2, 12)
    parts = [zigzag.take(x, rank, 3) for rank in range(3)]
    assert parts[1].tolist() == [[2, 3, 8, 9], [14, 15, 20, 21]]
    assert torch.equal(zigzag.restore(parts), x)
    assert [zigzag.padded(n, 3) for n in (1, 6, 7, 12)] == [6, 6, 12, 12]


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_of_a_block_equals_autograd_with_the_same_zeros(causal, monkeypatch):
    q, k, v, grad = random_tensors(2, 4, 2, 10, 8)
    monkeypatch.setattr(kernels, "SCORES", 2 * 4 * 10 * 3)  # three rows at a time
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


@pytest.mark.parametrize("travel", TRAVELS)
def test_dropout_keeps_the_mean_and_backward_repeats_it(travel):
    tensors = random_tensors(1, 2, 1, 16, 4)

    def work(rank):
        nl.init({"context_parallel_degree": 2})
        how = TRAVELS[travel](runtime.current().group("context"))
        q, k, v, grad = (zigzag.take(x, rank, 2, 2) for x in tensors)
        v.requires_grad_()
        outs = [attention(q, k, v, how, dropout=0.2) for _ in range(300)]
        assert not torch.equal(outs[0], outs[1])
        # the output is linear in v, so that <out, grad> = <v, dv>, each summed over the ranks
        outs[0].backward(grad)
        sums = torch.stack([(outs[0] * grad).sum(), (v * v.grad).sum()]).detach()
        torch.distributed.all_reduce(sums)
        return torch.stack(outs).mean(0).detach(), sums.tolist()

    runs = nl.spmd.run(work, 2)
    mean = zigzag.restore([run[0] for run in runs], 2)
    assert (mean - whole(*tensors[:3])).abs().max() < 0.25
    for _, (forward, backward) in runs:
        assert forward == pytest.approx(backward, rel=1e-4)


def test_the_same_seed_drops_the_same_and_recomputation_repeats_it():
    q, k, v, grad = random_tensors(1, 2, 1, 16, 4)

    def work(rank):
        nl.init()
        how = TRAVELS["p2p"](runtime.current().group("context"))

        def gradient(recompute):
            torch.manual_seed(3)
            leaf, args = q.clone().requires_grad_(), (k, v, how)
            if recompute:
                call = partial(attention, dropout=0.4)
                out = checkpoint(call, leaf, *args, use_reentrant=False)
            else:
                out = attention(leaf, *args, dropout=0.4)
            torch.rand(5)  # what recomputation must not be disturbed by
            out.backward(grad)
            return leaf.grad

        assert torch.equal(gradient(True), gradient(False))

    nl.spmd.run(work, 1)


def _processes(rank, travel):
    tensors = random_tensors(2, 4, 2, 24, 8)
    return split_attention(rank, travel, tensors, {"window": 10})


@pytest.mark.slow
@pytest.mark.parametrize("travel", TRAVELS)
def test_processes_over_gloo(travel):
    runs = nl.spmd.run(_processes, 3, args=(travel,), processes=True)
    assert largest(together(runs), reference(random_tensors(2, 4, 2, 24, 8), window=10)) < 5e-6
    assert runs[0][1] == ({"send": 2, "recv": 2} if travel == "p2p" else {"all_gather": 1})


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
