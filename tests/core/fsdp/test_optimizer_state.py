"""Optimizer state sharded over replicas: training, memory and bytes sent."""

import functools
import logging

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import nearlinear as nl
from nearlinear.errors import RankError
from nearlinear.fsdp.model_state import local_tensor, model_state, optimizer_parameter
from tests.support import parity, tiny

SHARED = {"shard_optimizer_state": True}
BY_FSDP2 = {"overlap_communication": False}
TENSOR = {"tensor_parallel_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
EXPERT = {"expert_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}

LAYOUTS = {
    "2 replicas": (2, "gpt2", {"hybrid_shard_degree": 1}),
    "4 replicas": (4, "llama", {"hybrid_shard_degree": 1}),
    "2 shards x 2": (4, "gpt2", {"hybrid_shard_degree": 2}),
    "2 shards x 2, by FSDP2": (4, "llama", {"hybrid_shard_degree": 2} | BY_FSDP2),
    "2 shards x 4": (8, "llama", {"hybrid_shard_degree": 2}),
    "2 tensor x 2": (4, "gpt2", TENSOR | {"hybrid_shard_degree": 1}),
    "2 stages x 2": (4, "llama_tied", PIPELINE | {"hybrid_shard_degree": 1}),
    "2 stages on each rank x 2": (
        4,
        "gpt2",
        PIPELINE | {"hybrid_shard_degree": 1, "pipeline": "zbv_zero_bubble"},
    ),
    "2 expert x 2": (4, "mixtral", EXPERT | {"hybrid_shard_degree": 2}),
    "2 expert x 2 shards x 2": (8, "mixtral", EXPERT | {"hybrid_shard_degree": 4}),
    "2 context x 2": (4, "llama", CONTEXT | {"hybrid_shard_degree": 2}),
}
reference = functools.cache(parity.alone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sliced_optimizer_training_equals_one_process(layout):
    """Micro-batches with other numbers of targets; losses, gradients, their norm, values."""
    ranks, family, config = LAYOUTS[layout]
    staged = PIPELINE.items() <= config.items()
    accumulation = 1 if staged or ranks == 8 else 2
    deep = parity.layers(family, 4) if staged else {}
    together = functools.partial(parity.together, **deep)
    found = nl.spmd.run(together, ranks, args=(family, config | SHARED, accumulation))
    parity.assert_equal(found, reference(family, **deep))


@pytest.mark.parametrize("config", [{}, BY_FSDP2], ids=["lanes", "FSDP2"])
@pytest.mark.parametrize("two_hop", [True, False])
def test_sliced_optimizer_with_momentum_and_clipping(config, two_hop):
    expected = tiny.train_alone("gpt2", "momentum", 16, clip=0.1)
    args = ("gpt2", 2, 2, "momentum", 16, two_hop, 2, 0.1)

    def work(rank):
        return tiny.train_sharded(rank, *args, **config, **SHARED)

    for run in nl.spmd.run(work, 4):
        assert tiny.largest_difference(run, expected) < 2e-5


class Stack(nn.Module):
    """Blocks whose dims 4 ranks divide."""

    def __init__(self, width: int = 16, layers: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x).square().mean()


def stack(config: dict, optimizer=torch.optim.AdamW, build=Stack, reshard=None, **options):
    nl.init({"hybrid_shard_degree": 2} | config)
    with nl.spmd.one_at_a_time(seed=0):
        model = build()
    nl.shard(model, blocks=list(model.layers), reshard_after_forward=reshard)
    return model, nl.shard_optimizer(optimizer(model.parameters(), lr=0.1, **options), model)


def inputs(count: int, width: int = 16, seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(2, width, generator=generator)} for _ in range(count)]


def step(model, optimizer, micro_batches, **options) -> None:
    for batch in nl.accumulate(model, micro_batches, **options):
        model(**batch).backward()
    optimizer.step()


def of_a_step(rank, config):
    """Bytes sent by one step of 2 micro-batches, and bytes kept after it."""
    model, optimizer = stack(config)
    with nl.count_collectives() as counts:
        step(model, optimizer, inputs(2))
    states = [
        local_tensor(v) for s in optimizer.state.values() for k, v in s.items() if k != "step"
    ]
    gradients = [local_tensor(p.grad) for group in optimizer.param_groups for p in group["params"]]
    total = sum(p.numel() for p in model.parameters())
    # a gradient that is a view keeps its whole storage alive
    kept = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients}
    return counts, total, sum(s.nbytes for s in states), sum(kept.values())


@pytest.mark.parametrize("config", [{}, BY_FSDP2], ids=["lanes", "FSDP2"])
def test_state_and_gradients_are_divided_among_all_ranks(config):
    for _, total, states, gradients in nl.spmd.run(of_a_step, 8, args=(config | SHARED,)):
        assert states == 2 * 4 * total / 8
        assert gradients == 4 * total / 8
    for _, total, states, gradients in nl.spmd.run(of_a_step, 8, args=(config,)):
        assert states == 2 * 4 * total / 2
        assert gradients >= 4 * total / 2


@pytest.mark.parametrize("config", [{}, BY_FSDP2], ids=["lanes", "FSDP2"])
def test_slices_send_as_many_bytes_as_the_all_reduce(config):
    """A ring's all-reduce of B bytes sends 2 (R - 1) / R of B, its halves one each."""
    whole, total, *_ = nl.spmd.run(of_a_step, 8, args=(config,))[0]
    parts, *_ = nl.spmd.run(of_a_step, 8, args=(config | SHARED,))[0]
    units = 4
    assert whole.calls["all_reduce"] - parts.calls["all_reduce"] == units
    reduced = whole.bytes["all_reduce"] - parts.bytes["all_reduce"]
    assert reduced == 4 * total / 2
    for kind in ("reduce_scatter", "all_gather"):
        assert parts.calls[kind] - whole.calls[kind] == units
        assert parts.bytes[kind] - whole.bytes[kind] == reduced


@settings(max_examples=6, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=4),
    config=st.sampled_from([{}, BY_FSDP2]),
    degree=st.sampled_from([1, 2, 4]),
)
@example(shapes=[[1]], config={}, degree=2)
def test_slices_of_parameters_of_any_shape(shapes, config, degree):
    """Some ranks have no row of a shard, some no row of a slice, and each row is updated once."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(*shape) for shape in shapes)

        def forward(self, x):
            return sum((weight * x).sin().sum() for weight in self.weights)

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Block()])

        def forward(self, x):
            return self.layers[0](x)

    torch.manual_seed(0)
    alone = Odd()
    updates = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for _ in range(2):
        (alone(torch.tensor(1.0)) / 2 + alone(torch.tensor(2.0)) / 2).backward()
        updates.step()
        updates.zero_grad()

    def work(rank):
        model, optimizer = stack(config | SHARED | {"hybrid_shard_degree": degree}, build=Odd)
        for _ in range(2):
            step(model, optimizer, [{"x": torch.tensor(1.0)}, {"x": torch.tensor(2.0)}],
                 weight=lambda batch: 1.0)  # fmt: skip
            optimizer.zero_grad()
        return parity.whole(model, lambda parameter: parameter.detach())

    for values in nl.spmd.run(work, 8 if degree == 4 else 4):
        for name, value in alone.named_parameters():
            torch.testing.assert_close(values[name], value.detach(), atol=1e-5, rtol=0)


def test_uneven_first_dim_is_sliced_on_another_dim():
    """Two experts on 4 replicas: nobody holds half of them, and nobody nothing."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Bilinear(4, 4, 2, bias=False)])  # (2, 4, 4)

        def forward(self, x):
            return self.layers[0](x, x).square().mean()

    def work(rank):
        model, optimizer = stack(SHARED | {"hybrid_shard_degree": 1}, build=Experts)
        for number in range(2):
            step(model, optimizer, inputs(1, 4, number))
            optimizer.zero_grad()
            with torch.no_grad():  # the slice lies elsewhere, and follows
                model.layers[0].weight.mul_(0.5)
        (parameter,) = optimizer.param_groups[0]["params"]
        return tuple(local_tensor(parameter).shape), local_tensor(
            model.layers[0].weight.detach()
        ).clone()

    torch.manual_seed(0)
    alone = Experts()
    updates = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for number in range(2):
        alone(**inputs(1, 4, number)[0]).backward()
        updates.step()
        updates.zero_grad()
        with torch.no_grad():
            alone.layers[0].weight.mul_(0.5)
    for shape, values in nl.spmd.run(work, 4):
        assert shape == (2, 1, 4)
        torch.testing.assert_close(values, alone.layers[0].weight.detach(), atol=1e-5, rtol=0)


def visible(model) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("config", [{}, BY_FSDP2], ids=["lanes", "FSDP2"])
@pytest.mark.parametrize("two_hop", [True, False])
def test_partial_sums_of_replicas_stay_hidden(config, two_hop):
    """Inside a step, after it, after leaving it early, and after a backward pass by itself."""

    def work(rank):
        model, optimizer = stack(config | SHARED)
        for batch in nl.accumulate(model, inputs(2, seed=rank), two_hop=two_hop):
            model(**batch).backward()
            assert not visible(model)
            with pytest.raises(RuntimeError, match="of 2 micro-batches"):
                optimizer.step()
            break
        with pytest.raises(RuntimeError, match="run to its end"):
            optimizer.step()
        assert all(optimizer_parameter(p).grad is None for p in model.parameters())
        step(model, optimizer, inputs(2, seed=rank), two_hop=two_hop)
        assert not visible(model)
        found = parity.whole(model, parity.gradient)
        model.zero_grad()
        assert all(optimizer_parameter(p).grad is None for p in model.parameters())
        for batch in inputs(2, seed=rank):  # two passes by themselves add up
            model(**batch).backward()
            assert not visible(model)
        return found, parity.whole(model, parity.gradient)

    def whole(rank):
        model, optimizer = stack({"hybrid_shard_degree": 4})
        step(model, optimizer, inputs(2, seed=rank))
        found = parity.whole(model, parity.gradient)
        optimizer.zero_grad()
        for batch in inputs(2, seed=rank):
            model(**batch).backward()
        return found, parity.whole(model, parity.gradient)

    expected = nl.spmd.run(whole, 4)[0]
    for found in nl.spmd.run(work, 4):
        for mine, theirs in zip(found, expected, strict=True):
            for name, gradient in theirs.items():
                torch.testing.assert_close(mine[name], gradient)


@pytest.mark.parametrize("config", [{}, BY_FSDP2], ids=["lanes", "FSDP2"])
@pytest.mark.parametrize("reshard", [None, True])
def test_units_skipped_by_the_last_micro_batch_are_reduced(config, reshard):
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, x, spare):
            x = self.layers[0](x)
            return (self.layers[1](x) if spare else x).square().mean()

    batches = [{"x": torch.ones(2, 6), "spare": True}, {"x": torch.ones(2, 6), "spare": False}]

    def work(rank):
        model, optimizer = stack(config | SHARED, build=Choice, reshard=reshard)
        step(model, optimizer, batches)
        return parity.whole(model, parity.gradient)

    torch.manual_seed(0)
    alone = Choice()
    sum(alone(**batch) / 2 for batch in batches).backward()
    for found in nl.spmd.run(work, 4):
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("config", [{}, BY_FSDP2], ids=["lanes", "FSDP2"])
@pytest.mark.parametrize("two_hop", [True, False])
def test_partial_sums_are_dropped_after_a_failed_backward(config, two_hop):
    """Units behind it have reduced; the next step is right."""

    def work(rank, fail):
        model, optimizer = stack(config | SHARED)
        if fail:
            hook = model.layers[0].register_forward_hook(lambda *call: tiny.Fails.apply(call[-1]))
            with pytest.raises(ValueError, match="out of luck"):
                step(model, optimizer, inputs(1, seed=1), two_hop=two_hop)
            hook.remove()
        step(model, optimizer, inputs(2), two_hop=two_hop)
        return parity.whole(model, parity.gradient)

    expected = nl.spmd.run(work, 4, args=(False,))[0]
    for found in nl.spmd.run(work, 4, args=(True,)):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)


@pytest.mark.parametrize("config", [{}, BY_FSDP2], ids=["lanes", "FSDP2"])
def test_one_hop_keeps_only_slices_between_micro_batches(config):
    def work(rank, two_hop):
        model, _ = stack(config | SHARED | {"gradient_reduction": "micro_batch"})
        for batch in nl.accumulate(model, inputs(2), two_hop=two_hop):
            model(**batch).backward()
            reduction = model_state(model).reduction
            hidden = [] if reduction is None else [unit.stashed for unit in reduction.units]
            sums = [unit.sums or None for unit in model_state(model).optimizer_slices.units]
            return sum(each is not None for each in (*hidden, *sums))

    assert nl.spmd.run(work, 4, args=(False,)) == [0] * 4
    assert nl.spmd.run(work, 4, args=(True,)) == [4] * 4  # a sum for each unit


@pytest.mark.parametrize("config", [{}, BY_FSDP2], ids=["lanes", "FSDP2"])
def test_full_gradients_are_freed_during_the_backward_pass(config):
    def work(rank):
        model, _ = stack(config | SHARED)
        held = []

        def look(gradient):
            held.append([p.grad is not None for p in model.layers[2].parameters()])

        def watch(module, args, output):
            output.register_hook(look)

        model.layers[0].register_forward_hook(watch)
        for batch in nl.accumulate(model, inputs(1)):
            model(**batch).backward()
        return held

    # layers[2] is done when layers[1] is reduced, before the gradient of layers[0]'s output comes
    assert nl.spmd.run(work, 4) == [[[False, False]]] * 4


@pytest.mark.parametrize("config", [{}, BY_FSDP2], ids=["lanes", "FSDP2"])
def test_parameters_frozen_after_sharding_do_not_change(config):
    def work(rank, config):
        model, optimizer = stack(config, weight_decay=0.0)
        for layer in (model.layers[0].weight, model.layers[1].bias):
            layer.requires_grad_(False)
        before = parity.whole(model, lambda parameter: parameter.detach())
        for batch in inputs(2):
            model(**batch).backward()
        optimizer.step()
        return before, parity.whole(model, lambda parameter: parameter.detach())

    expected = nl.spmd.run(work, 4, args=({},))[0]
    for before, after in nl.spmd.run(work, 4, args=(config | SHARED,)):
        for name, value in expected[1].items():
            torch.testing.assert_close(after[name], value, atol=1e-6, rtol=0)
            moved = not torch.equal(after[name], before[name])
            assert moved == (name not in ("layers.0.weight", "layers.1.bias"))


@pytest.mark.parametrize("config", [{}, BY_FSDP2], ids=["lanes", "FSDP2"])
@pytest.mark.parametrize("two_hop", [True, False])
def test_units_of_one_parameter_are_sliced(config, two_hop):
    def build():
        model = Stack()
        for layer in (*model.layers, model.head):
            layer.bias = None
        return model

    def work(rank):
        model, optimizer = stack(config | SHARED, torch.optim.SGD, build)
        step(model, optimizer, inputs(2), two_hop=two_hop)
        return parity.whole(model, lambda parameter: parameter.detach())

    torch.manual_seed(0)
    alone = build()
    sum(alone(**batch) / 2 for batch in inputs(2)).backward()
    for found in nl.spmd.run(work, 4):
        for name, parameter in alone.named_parameters():
            expected = parameter - 0.1 * parameter.grad
            torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=1e-5)


def test_sliced_optimizer_with_parameter_groups_and_schedulers():
    """Weight decay by group, a scheduler made before the slices, a frozen bias, two optimizers."""

    def train(model, wrap, run):
        model.head.bias.requires_grad_(False)
        yield
        matrices = [p for p in model.layers.parameters() if p.dim() == 2]
        biases = [p for p in model.layers.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.5}, {"params": biases}]
        first = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
        second = torch.optim.SGD(model.head.parameters(), lr=0.1)
        for optimizer in (first, second):
            wrap(optimizer)
        for number in range(3):
            run(inputs(2, seed=number))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            schedule.step()

    def work(rank):
        nl.init({"hybrid_shard_degree": 2} | SHARED)
        with nl.spmd.one_at_a_time(seed=0):
            model = Stack()

        def run(batches):
            for batch in nl.accumulate(model, batches):
                model(**batch).backward()

        steps = train(model, lambda optimizer: nl.shard_optimizer(optimizer, model), run)
        next(steps)
        nl.shard(model, blocks=list(model.layers))
        list(steps)
        return parity.whole(model, lambda parameter: parameter.detach())

    torch.manual_seed(0)
    alone = Stack()

    def run_alone(batches):
        sum(alone(**batch) / 2 for batch in batches).backward()

    list(train(alone, lambda optimizer: None, run_alone))
    for found in nl.spmd.run(work, 4):
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), atol=1e-5, rtol=0)


def test_bf16_updates_float32_slices():
    def work(rank, config):
        nl.init({"hybrid_shard_degree": 2, "bf16": True} | config)
        with nl.spmd.one_at_a_time(seed=0):
            model = tiny.gpt2(2)
        nl.shard(model)
        optimizer = nl.shard_optimizer(tiny.optimizer_for(model, "adamw"), model)
        for number in range(2):
            for batch in nl.accumulate(model, [tiny.batch(tiny.rows(number + rank, 2))]):
                model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert {p.dtype for p in optimizer.param_groups[0]["params"]} == {torch.float32}
        return parity.whole(model, lambda parameter: parameter.detach())

    expected = nl.spmd.run(work, 4, args=({},))[0]
    for config in (SHARED, SHARED | BY_FSDP2):
        for found in nl.spmd.run(work, 4, args=(config,)):
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)


def test_optimizer_with_unsliced_parameters_is_refused():
    def work(rank):
        model, wrapped = stack(SHARED)
        whole = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in nl.accumulate(model, inputs(1)):
            model(**batch).backward()
        with pytest.raises(RuntimeError, match=r"wrap it, nl\.shard_optimizer"):
            whole.step()
        wrapped.step()
        with pytest.raises(nl.errors.ConfigError, match="stepped already"):
            nl.shard_optimizer(wrapped, model)
        with pytest.raises(nl.errors.ConfigError, match="not the model's"):
            stray = nn.Linear(2, 2).parameters()
            nl.shard_optimizer(torch.optim.SGD(stray, lr=0.1), model)

    nl.spmd.run(work, 4)


def test_shard_optimizer_without_key_or_replicas_changes_nothing(caplog):
    def work(rank, config):
        model, optimizer = stack(config)
        pairs = zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
        return all(one is other for one, other in pairs)

    assert all(nl.spmd.run(work, 4, args=({},)))
    with caplog.at_level(logging.WARNING):
        assert all(nl.spmd.run(work, 2, args=(SHARED,)))
    assert "shard_optimizer_state has no effect: with one replica" in caplog.text


@pytest.mark.parametrize("config", [{}, BY_FSDP2], ids=["lanes", "FSDP2"])
def test_death_of_a_replica_ends_the_others(config):
    def work(rank):
        model, optimizer = stack(config | SHARED)
        for number in range(3):
            if rank == 3 and number == 1:
                raise ValueError("out of luck")
            step(model, optimizer, inputs(1))

    with pytest.raises(RankError, match="rank 3 of 4 failed: ValueError: out of luck"):
        nl.spmd.run(work, 4)


def on_gloo(rank):
    """Training on communication threads and with FSDP2's communication, with bytes per step."""
    found = []
    for config in ({}, BY_FSDP2):
        counts, *rest = of_a_step(rank, config | SHARED)
        run = tiny.train_sharded(rank, "gpt2", 2, 2, "momentum", 16, **config, **SHARED)
        found.append((dict(counts.calls), dict(counts.bytes), rest, run))
    return found


@pytest.mark.slow
def test_sliced_optimizer_over_processes():
    threads = nl.spmd.run(on_gloo, 4)[0]
    expected = tiny.train_alone("gpt2", "momentum", 16)
    for found in nl.spmd.run(on_gloo, 4, processes=True):
        for (calls, sizes, rest, run), there in zip(found, threads, strict=True):
            assert tiny.largest_difference(run, expected) < 2e-5
            assert rest == there[2]
            kinds = ("all_to_all", "reduce_scatter")  # gloo: see parallel/scatter.py
            for mine, theirs in ((calls, there[0]), (sizes, there[1])):
                assert sum(mine.get(kind, 0) for kind in kinds) == theirs["reduce_scatter"]
                assert mine["all_gather"] == theirs["all_gather"]
