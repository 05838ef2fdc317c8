"""Communication overlapped with computation: equal training and visible gradients."""

import functools
import itertools

import pytest
import torch
from torch import nn

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives
from nearlinear.fsdp import overlap
from tests.support import tiny
from tests.support.processes import in_turn
from tests.support.releases import needs_hooks

ROWS = 32


def sharded(degree, layers=2, **config):
    nl.init({"hybrid_shard_degree": degree, **config})
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(layers)
    return nl.shard(model)


def trained(rank, degree, two_hop, config):
    return tiny.train_sharded(rank, "gpt2", degree, 4, "sgd", ROWS, two_hop=two_hop, **config)


@functools.cache
def alone():
    return tiny.train_alone("gpt2", "sgd", ROWS)


@pytest.mark.parametrize(("degree", "two_hop"), [(1, True), (2, True), (2, False), (4, True)])
@pytest.mark.parametrize(
    "config",
    [
        {"overlap_communication": False},
        {"prefetch_depth": 0, "sdp_max_live_parameters": 0},
        {"prefetch_depth": 3, "sdp_max_live_parameters": 0},
        {"sdp_max_live_parameters": 0},
        {"sdp_reduce_bucket_size": 0},
        {"gradient_reduction": "micro_batch"},
        {"hierarchical_all_gather": "on", "ranks_per_node": 2},
    ],
    ids=lambda config: "-".join(config),
)
def test_communication_settings_do_not_change_training(degree, two_hop, config):
    for run in nl.spmd.run(trained, 4, args=(degree, two_hop, config)):
        assert tiny.largest_difference(run, alone()) < 1e-5


def test_memory_of_whole_gradients_is_used_again_unless_they_are_kept():
    """Gradients that the caller keeps beyond ``zero_grad`` hold their values."""

    def step(model, number):
        model(**tiny.batch(tiny.rows(number, 2))).loss.backward()
        gradients = [parameter.grad.to_local() for parameter in model.parameters()]
        model.zero_grad()
        return gradients

    def body(rank):
        model = sharded(1)
        first = [gradient.data_ptr() for gradient in step(model, 0)]
        kept = step(model, 1)
        values = [gradient.clone() for gradient in kept]
        other = [gradient.data_ptr() for gradient in step(model, 2)]
        return first, [gradient.data_ptr() for gradient in kept], other, values, kept

    for first, second, third, values, kept in nl.spmd.run(body, 2):
        assert second == first
        assert not set(third) & set(second)
        assert all(map(torch.equal, kept, values))


@pytest.mark.slow
def test_comm_threads_of_processes_do_not_change_training():
    two_nodes = {"ranks_per_node": 2}
    configs = [two_nodes | {"hierarchical_all_gather": way} for way in ("on", "auto", "off")]
    runs = [*itertools.product((2, 4), (True,), configs), (1, True, {}), (1, False, {})]
    for run, found in zip(runs, in_turn(trained, 4, runs), strict=True):
        assert tiny.largest_difference(found[0], alone()) < 1e-5, run


@pytest.mark.slow
def test_collectives_package_does_not_change_training():
    configs = [{}, {"prefetch_depth": 2, "hierarchical_all_gather": "on"}]
    runs = list(itertools.product((2, 4), (True,), configs))
    for run, found in zip(runs, in_turn(trained, 4, runs, backend="nearlinear"), strict=True):
        assert tiny.largest_difference(found[0], alone()) < 1e-5, run


@pytest.mark.parametrize("reduction", ["auto", "micro_batch"])
def test_gradients_are_exposed_after_synchronization(reduction):
    def seen(rank):
        model = sharded(2, gradient_reduction=reduction)
        there = []
        for batch in nl.accumulate(model, [tiny.batch(tiny.rows(i, 2)) for i in range(3)]):
            model(**batch).loss.backward()
            there.append({p.grad is not None for p in model.parameters()})
        return there

    for there in nl.spmd.run(seen, 4):
        assert there == [{False}, {False}, {True}]


@pytest.mark.parametrize("reduction", ["auto", "micro_batch"])
def test_accumulate_adds_to_existing_gradients(reduction):
    batches = [tiny.batch(tiny.rows(i, 2)) for i in range(2)]

    def gradients(rank, times):
        model = sharded(2, gradient_reduction=reduction)
        for _ in range(times):
            for batch in nl.accumulate(model, batches):
                model(**batch).loss.backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    once, twice = (nl.spmd.run(gradients, 4, args=(times,))[0] for times in (1, 2))
    for name, gradient in once.items():
        torch.testing.assert_close(twice[name], 2 * gradient)


class Branching(nn.Module):
    """Blocks of which a batch may leave some out, or use one twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x, path):
        for i in path:
            x = self.blocks[i](x).relu()
        return (x**2).mean()


PATHS = ["012 01", "01 012", "012 01 01", "01 01", "0112 0112 0112", "0112 012", "012 0112 01"]


@pytest.mark.parametrize("paths", PATHS)
@pytest.mark.parametrize(
    ("degree", "two_hop", "reduction"),
    [
        (2, True, "auto"),
        (2, True, "micro_batch"),
        (2, False, "auto"),
        (1, True, "auto"),
        (1, True, "micro_batch"),
    ],
)
def test_gradients_of_blocks_skipped_or_used_twice_are_summed(paths, degree, two_hop, reduction):
    paths = [[int(i) for i in path] for path in paths.split()]
    inputs = [[torch.full((2, 6), 0.1 + rank + i) for i in range(len(paths))] for rank in range(4)]

    def model_and_batches(rank):
        with nl.spmd.one_at_a_time(seed=0):
            model = Branching()
        return model, list(zip(inputs[rank], paths, strict=True))

    def gradients(rank):
        nl.init({"hybrid_shard_degree": degree, "gradient_reduction": reduction})
        model, batches = model_and_batches(rank)
        nl.shard(model)
        for x, path in nl.accumulate(model, batches, weight=lambda batch: 1.0, two_hop=two_hop):
            model(x, path).backward()
        return {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}

    found = nl.spmd.run(gradients, 4)
    torch.manual_seed(0)
    model = Branching()
    for rank in range(4):
        for x, path in zip(inputs[rank], paths, strict=True):
            (model(x, path) / (4 * len(paths))).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for run in found:
        assert run.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(run[name], gradient, atol=1e-6, rtol=1e-5)


def test_plain_loop_without_accumulate_synchronizes_gradients():
    def gradients(rank, together):
        model = sharded(2)
        losses = [model(**tiny.batch(tiny.rows(i, 2))).loss for i in range(2)] if together else []
        if together:
            sum(losses).backward()
        for i in () if together else range(2):
            model(**tiny.batch(tiny.rows(i, 2))).loss.backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    together, apart = (nl.spmd.run(gradients, 4, args=(way,))[0] for way in (True, False))
    for name, gradient in together.items():
        torch.testing.assert_close(apart[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("reduction", ["auto", "micro_batch"])
def test_unfinished_step_leaves_no_partial_sums(reduction):
    batches = [tiny.batch(tiny.rows(i, 2)) for i in range(3)]

    def gradients(rank, abandon):
        model = sharded(2, gradient_reduction=reduction)
        if abandon:
            for batch in nl.accumulate(model, batches[::-1]):
                model(**batch).loss.backward()
                break
        for batch in nl.accumulate(model, batches):
            model(**batch).loss.backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    plain, after = (nl.spmd.run(gradients, 4, args=(way,))[0] for way in (False, True))
    for name, gradient in plain.items():
        torch.testing.assert_close(after[name], gradient, rtol=0, atol=0)


def gathers_of_a_pass(rank, way):
    nl.init({"hybrid_shard_degree": 4, "hierarchical_all_gather": way}, ranks_per_node=2)
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(2)
    nl.shard(model)
    with count_collectives() as counts:
        model(**tiny.batch(tiny.rows(0, 2))).loss.backward()
    return counts.calls["all_gather"]


@needs_hooks
@pytest.mark.slow
def test_hierarchical_all_gather_runs_one_inter_node_and_intra_node_gathers():
    flat, staged = (
        nl.spmd.run(gathers_of_a_pass, 4, args=(way,), processes=True)[0] for way in ("off", "on")
    )
    assert staged == 3 * flat


@needs_hooks
@pytest.mark.parametrize(
    ("dtypes", "policy", "expected"),
    [
        ((torch.float32,), "fp32", True),
        ((torch.float32,), "bf16", True),
        ((torch.bfloat16,), "fp32", True),
        ((torch.bfloat16,), "bf16", False),  # FSDP2 would cast the result before it is complete
        ((torch.float64,), "fp32", False),  # and divide it
        ((torch.float32, torch.float64), "fp32", False),
    ],
)
def test_overlap_requires_dtypes_that_are_summed_unscaled(dtypes, policy, expected):
    from nearlinear.distributed import runtime
    from nearlinear.fsdp.shard import _precision_policy

    def answer(rank):
        nl.init({"hybrid_shard_degree": 2})
        config = nl.ParallelConfig(bf16=policy == "bf16")
        model = nn.ModuleList(nn.Linear(2, 2, dtype=dtype) for dtype in dtypes)
        return overlap.can_overlap(runtime.current(), model, _precision_policy(config))

    assert nl.spmd.run(answer, 2) == [expected] * 2
