"""Sharded training equals a single process, over models, ranks, degrees and accumulation."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import nearlinear as nl
from nearlinear.errors import ConfigError
from tests.support import tiny
from tests.support.processes import in_turn

ROWS = 32
LAYOUTS = [(ranks, degree) for ranks in (1, 2, 4, 8) for degree in (1, 2, 4, 8) if degree <= ranks]


@cache
def alone(kind, optimizer):
    return tiny.train_alone(kind, optimizer, ROWS)


@pytest.mark.parametrize(
    ("kind", "accumulation", "ranks", "degree"),
    [("gpt2", 4, *layout) for layout in LAYOUTS]
    + [("llama", 1, 1, 1), ("llama", 1, 2, 1), ("llama", 1, 4, 2), ("llama", 1, 8, 8)],
)
def test_sharded_training_equals_one_process(kind, accumulation, ranks, degree):
    optimizer = "adamw"
    runs = nl.spmd.run(
        tiny.train_sharded, ranks, args=(kind, degree, accumulation, optimizer, ROWS)
    )
    for run in runs:
        assert tiny.largest_difference(run, alone(kind, optimizer)) < 1e-5


@pytest.mark.slow
def test_sharded_training_over_gloo_processes_equals_one_process():
    runs = [("gpt2", 2, 4, "sgd", ROWS), ("llama", 4, 4, "sgd", ROWS)]
    for (kind, *_), found in zip(runs, in_turn(tiny.train_sharded, 4, runs), strict=True):
        assert tiny.largest_difference(found[0], alone(kind, "sgd")) < 1e-5, kind


def test_ranks_hold_only_their_shards():
    def held(rank):
        nl.init({"hybrid_shard_degree": 4})
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2()
        whole = sum(p.numel() for p in model.parameters())
        nl.shard(model)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return sum(p.to_local().numel() for p in model.parameters()), whole

    results = nl.spmd.run(held, 8)
    whole = results[0][1]
    assert sum(mine for mine, _ in results[:4]) == whole
    assert sum(mine for mine, _ in results[4:]) == whole
    assert max(mine for mine, _ in results) < whole / 4 * 1.15


def test_tied_embeddings_stay_one_parameter():
    def tied(rank):
        nl.init()
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2()
        nl.shard(model)
        assert model.lm_head.weight is model.transformer.wte.weight
        return len(list(model.parameters()))

    assert nl.spmd.run(tied, 2) == [len(list(tiny.gpt2().parameters()))] * 2


def test_bf16_computes_in_bf16_and_keeps_float32_masters():
    def dtypes(rank):
        nl.init({"hybrid_shard_degree": 2, "bf16": True})
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2()
        nl.shard(model)
        seen = set()
        model.transformer.h[0].register_forward_hook(
            lambda module, args, output: seen.add(
                (output[0] if isinstance(output, tuple) else output).dtype
            )
        )
        losses = []
        optimizer = tiny.optimizer_for(model, "sgd")
        for step in range(2):
            for micro_batch in nl.accumulate(model, [tiny.batch(tiny.rows(step, 16))]):
                loss = model(**micro_batch).loss
                loss.backward()
            masters = {t.dtype for p in model.parameters() for t in (p, p.grad)}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return seen, masters, losses

    reference, _ = tiny.train_alone("gpt2", "sgd", 16, clip=1e9)
    for seen, masters, losses in nl.spmd.run(dtypes, 4):
        assert seen == {torch.bfloat16}
        assert masters == {torch.float32}
        assert losses == pytest.approx(reference, abs=3e-2)


def test_error_without_equal_blocks_names_the_remedy():
    def lone(rank):
        nl.init()
        with pytest.raises(nl.errors.ConfigError, match="blocks="):
            nl.shard(nn.Linear(3, 3))

    nl.spmd.run(lone, 1)


def test_parallel_degree_without_transform_is_refused():
    def refused(rank):
        nl.init({"tensor_parallel_degree": 2})
        with pytest.raises(nl.errors.ConfigError, match="tensor_parallel_degree = 2"):
            nl.shard(tiny.gpt2())

    nl.spmd.run(refused, 2)


def test_sharding_twice_is_refused():
    def twice(rank):
        nl.init()
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2()
        nl.shard(model)
        with pytest.raises(nl.errors.ConfigError, match="already"):
            nl.shard(model)

    nl.spmd.run(twice, 1)


class CallsForward(nn.Module):
    """A model that calls its blocks past their hooks, like SqueezeBERT."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block.forward(x)
        return x


def test_model_that_calls_forward_of_its_blocks_is_refused():
    def work(rank):
        nl.init({})
        with nl.spmd.one_at_a_time(seed=0):
            model = CallsForward()
        with pytest.raises(ConfigError, match="CallsForward calls the method forward"):
            nl.shard(model)
        return nl.shard(model, blocks=[])(torch.ones(1, 4)).tolist()

    with nl.spmd.one_at_a_time(seed=0):
        expected = CallsForward()(torch.ones(1, 4)).tolist()
    assert nl.spmd.run(work, 2) == [expected] * 2
