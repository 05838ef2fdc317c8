"""Joint token assignment is balanced, follows router scores and is equal in every process."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.distributed import runtime
from nearlinear.expert_parallel.routing import TokenShuffle, balanced, sinkhorn
from tests.support import mixtures, tiny

EP = "expert_parallel_degree"


def logits(tokens: int, experts: int, seed: int = 0, skew: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(tokens, experts, generator=generator)
    return found + skew * torch.arange(experts, 0, -1)


def loads(index: torch.Tensor, experts: int) -> list[int]:
    return torch.bincount(index.flatten(), minlength=experts).tolist()


@settings(deadline=None, max_examples=150)
@given(
    tokens=st.integers(1, 40),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 4),
    seed=st.integers(0, 99),
    skew=st.sampled_from([0.0, 0.3, 3.0, 200.0]),
)
def test_balanced_assigns_equally_many_tokens_to_every_expert(tokens, experts, top_k, seed, skew):
    top_k = min(top_k, experts)
    index = balanced(logits(tokens, experts, seed, skew), top_k)
    assert index.shape == (tokens, top_k)
    assert all(len(set(row)) == top_k for row in index.tolist())
    found = loads(index, experts)
    assert max(found) - min(found) <= 1 and sum(found) == tokens * top_k


def test_balanced_keeps_an_even_assignment():
    scores = torch.eye(4).repeat(3, 1)
    assert balanced(scores, 1).flatten().tolist() == [0, 1, 2, 3] * 3


def test_balanced_prefers_tokens_with_the_highest_scores():
    scores = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [0.5, 0.0]])
    assert balanced(scores, 1).flatten().tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_balanced_terminates_for_nan_and_inf(bad):
    assert balanced(torch.full((6, 3), bad), 2).shape == (6, 2)


def test_sinkhorn_equals_sinkhorn_knopp():
    """The reference scales columns and rows of a matrix in turn until convergence."""
    x = logits(64, 8, skew=0.5)
    plan = np.exp(x.double().numpy())
    for _ in range(1000):
        plan /= plan.sum(0, keepdims=True) * 8 / 64
        plan /= plan.sum(1, keepdims=True)
    assert np.allclose(plan.sum(0), 8)
    agree = (sinkhorn(x, 1).flatten().numpy() == plan.argmax(1)).mean()
    assert agree == 1.0


def test_sinkhorn_balances_skewed_scores():
    x = logits(512, 8, skew=1.0)
    assert max(loads(x.topk(2).indices, 8)) > 400
    found = loads(sinkhorn(x, 2), 8)
    assert max(found) < 1.25 * 512 * 2 / 8 and min(found) > 0.75 * 512 * 2 / 8


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("mixtral", {}), ("qwen3_moe", {"norm_topk_prob": True}), ("qwen3_moe", {})],
    ids=["mixtral", "qwen3_moe-normed", "qwen3_moe"],
)
@pytest.mark.parametrize("assignment", ["sinkhorn", "balanced"])
def test_weights_equal_the_unmodified_router(kind, changes, assignment):
    """Compares the tokens whose assigned experts equal the top-k experts of the router."""

    def weights(rank):
        nl.init()
        model = mixtures.transformed(kind, 4, {"moe_load_balancing": assignment}, **changes)
        untouched = mixtures.KINDS[kind](4, **changes).model.layers[0].mlp.gate
        gate = model.model.layers[0].mlp.gate
        untouched.load_state_dict(gate.state_dict())
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        _, theirs, chosen = untouched(x)
        _, mine, assigned = gate.train()(x)
        same = (assigned.sort(1).values == chosen.sort(1).values).all(1)
        assert 0 < same.sum()
        torch.testing.assert_close(
            mine.sort(1).values[same], theirs.sort(1).values[same], atol=1e-6, rtol=0
        )
        mine.square().sum().backward()
        assert gate.weight.grad.abs().sum() > 0
        for a, b in zip(gate.eval()(x), untouched(x), strict=True):
            assert torch.equal(a, b)

    nl.spmd.run(weights, 1)


def test_shuffle_returns_assignments_in_token_order():
    """A shuffle does not change an assignment that treats every token independently."""

    def shuffled(rank):
        nl.init({EP: 4})
        shuffle = TokenShuffle(runtime.current().group("expert"), seed=3)
        mine = logits(5 + 3 * rank, 6, seed=rank)
        seen = []

        def assign(x, top_k):
            seen.append(x)
            return x.topk(top_k).indices

        assert torch.equal(shuffle(assign, mine, 2), mine.topk(2).indices)
        assert torch.equal(shuffle(assign, mine, 2), mine.topk(2).indices)
        assert torch.equal(seen[0], seen[1])  # the permutation is reproducible
        return mine, seen[0]

    runs = nl.spmd.run(shuffled, 4)
    all_logits = torch.cat([mine for mine, _ in runs])
    assigned = torch.cat([seen for _, seen in runs])
    assert torch.equal(all_logits.sort(0).values, assigned.sort(0).values)
    for mine, seen in runs:
        local_rows = (seen.unsqueeze(1) == mine).all(-1).any(1)
        assert 0 < local_rows.sum() < len(seen)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("assignment", ["sinkhorn", "balanced"])
def test_training_with_balanced_assignment(assignment, shuffle):
    moe = {"moe_load_balancing": assignment, "global_token_shuffle": shuffle}

    def trained(rank):
        nl.init({EP: 2})
        model = nl.shard(mixtures.transformed("mixtral", 4, moe, checkpointing=True))
        chosen = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda *call: chosen.append(call[-1][2]))
        for batch in nl.accumulate(model, [tiny.batch(tiny.rows(rank, 4))]):
            model(**batch).loss.backward()
        assert all(p.grad.to_local().isfinite().all() for p in model.parameters())
        distinct = {tuple(map(tuple, index.tolist())) for index in chosen}
        # recomputation repeats the assignment of each layer
        assert len(chosen) == 4 and len(distinct) == 2
        return chosen[:2]

    runs = nl.spmd.run(trained, 2)
    for layer in range(2):
        found = loads(torch.cat([chosen[layer] for chosen in runs]), 4)
        assert sum(found) == 2 * 2 * 64
        assert max(found) - min(found) <= (2 if assignment == "balanced" else 0.25 * 64)


def test_unsupported_router_is_rejected():
    def refused(rank):
        nl.init()
        with pytest.raises(
            nl.errors.ConfigError, match="GptOssTopKRouter, .* Use 'none' or 'aux_loss'"
        ):
            mixtures.transformed("gpt_oss", 4, {"moe_load_balancing": "sinkhorn"})

    nl.spmd.run(refused, 1)
