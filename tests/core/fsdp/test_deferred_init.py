"""Delayed initialisation: no whole model anywhere, the same values whatever the layout."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import nearlinear as nl
from nearlinear.fsdp import deferred_init
from nearlinear.fsdp.deferred_init import materialize
from nearlinear.spmd import RankError
from tests.support import objectives, parity, tiny


def built(rank, kind, degree, seed=0):
    nl.init({"hybrid_shard_degree": degree, "random_seed": seed})
    with nl.deferred_init():
        model = tiny.MODELS[kind]()
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    nl.shard(model)
    with torch.no_grad():
        return {name: p.full_tensor().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_deferred_values_do_not_depend_on_the_layout(kind):
    reference = nl.spmd.run(built, 1, args=(kind, 1))[0]
    for ranks, degree in [(2, 2), (4, 2), (8, 8)]:
        for found in nl.spmd.run(built, ranks, args=(kind, degree)):
            assert found.keys() == reference.keys()
            for name, value in reference.items():
                assert torch.equal(found[name], value), name


def of_family(rank, family, config, as_without=True):
    nl.init(config | {"random_seed": 7})
    with nl.deferred_init(as_without=as_without):
        model = parity.unseeded(family)
    model = nl.shard(nl.transform(model))
    return parity.whole(model, lambda parameter: parameter.detach())


SPLIT = {"hybrid_shard_degree": 2, "tensor_parallel_degree": 2}


@pytest.mark.parametrize("family", parity.FAMILIES)
def test_deferred_values_equal_direct_initialization(family):
    torch.manual_seed(7)
    expected = dict(parity.unseeded(family).named_parameters())
    for ranks, config in [(1, {}), (2, {"hybrid_shard_degree": 2}), (4, SPLIT)]:
        for found in nl.spmd.run(of_family, ranks, args=(family, config)):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("family", objectives.RECURRENT)
def test_values_computed_from_other_tensors_equal_direct_initialization(family):
    """Decays and time steps, which initializers compute on the device of a parameter."""
    torch.manual_seed(7)
    expected = dict(objectives.build(family).named_parameters())

    def on_rank(rank):
        nl.init({"hybrid_shard_degree": 2})
        with nl.deferred_init(seed=7):
            model = objectives.build(family)
        assert all(p.is_meta for p in model.parameters())
        return parity.whole(nl.shard(model), lambda parameter: parameter.detach())

    for found in nl.spmd.run(on_rank, 2):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("initialize", ["orthogonal_", "sparse_", "dirac_", "trunc_normal_"])
def test_initializers_that_skip_tensors_without_memory(initialize):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv1d(300, 300, 1) for _ in range(2))
            for layer in self.layers:
                weight = layer.weight if initialize == "dirac_" else layer.weight[..., 0]
                options = {"sparsity": 0.5} if initialize == "sparse_" else {}
                getattr(nn.init, initialize)(weight.detach(), **options)

    def on_rank(rank):
        nl.init()
        with nl.deferred_init(seed=7):
            model = Net()
        return parity.whole(nl.shard(model), lambda parameter: parameter.detach())

    torch.manual_seed(7)
    expected = Net()
    (found,) = nl.spmd.run(on_rank, 1)
    for name, value in expected.named_parameters():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("family", ["gpt2", "llama_tied", "mixtral"])
def test_values_of_derived_seeds_have_the_same_distribution(family):
    """Same spread, means and constants per parameter; the same at any layout."""
    torch.manual_seed(3)
    expected = dict(parity.unseeded(family).named_parameters())
    (found,) = nl.spmd.run(of_family, 1, args=(family, {}, False))
    for other in nl.spmd.run(of_family, 4, args=(family, SPLIT, False)):
        assert all(torch.equal(other[name], value) for name, value in found.items())
    for name, value in found.items():
        theirs = expected[name]
        if theirs.std() == 0 or theirs.numel() == 1:
            assert torch.equal(value, theirs), name
        else:
            assert not torch.equal(value, theirs)
            assert value.std().item() == pytest.approx(theirs.std().item(), rel=0.2), name
            assert abs(value.mean().item()) < 5 * value.std().item() / value.numel() ** 0.5, name


def test_generator_state_is_restored():
    def work(rank):
        nl.init({"random_seed": 3})
        torch.manual_seed(11)
        before = torch.get_rng_state()
        with nl.deferred_init():
            model = tiny.gpt2()
        between = torch.get_rng_state()
        nl.shard(model)
        return torch.equal(before, between), torch.equal(before, torch.get_rng_state())

    assert nl.spmd.run(work, 1) == [(True, True)]


def test_values_differ_between_blocks_and_seeds():
    zero, one = (nl.spmd.run(built, 1, args=("gpt2", 1, seed))[0] for seed in (0, 1))
    name = "transformer.h.{}.attn.c_attn.weight"
    assert not torch.equal(zero[name.format(0)], zero[name.format(1)])
    assert not torch.equal(zero[name.format(0)], one[name.format(0)])


def test_tied_weights_stay_tied_and_trainable():
    def work(rank):
        nl.init({"hybrid_shard_degree": 2})
        with nl.deferred_init():
            model = tiny.gpt2()
        nl.shard(model)
        assert model.lm_head.weight is model.transformer.wte.weight
        optimizer = tiny.optimizer_for(model, "sgd")
        losses = []
        for _ in range(3):
            for batch in nl.accumulate(model, [tiny.batch(tiny.rows(0, 4))]):
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    for losses in nl.spmd.run(work, 4):
        assert losses[2] < losses[0]


def test_modules_of_plain_torch_are_initialized():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def work(rank):
        nl.init()
        with nl.deferred_init():
            net = Net()
        nl.shard(net)
        return [p.full_tensor().abs().max().item() for p in net.parameters()]

    for largest in nl.spmd.run(work, 2):
        assert all(0 < value <= 5**-0.5 for value in largest)


class Odd(nn.Module):
    """Parameters that come by their values in unusual ways."""

    def __init__(self, inside: bool = True):
        super().__init__()
        self.scale = nn.Parameter(torch.arange(3.0))
        self.table = nn.Parameter(torch.empty(4, 6))
        self.narrow = nn.Parameter(torch.empty(300, 300))
        nn.init.trunc_normal_(self.narrow, std=1.0, a=-0.1, b=0.1)
        nn.init.trunc_normal_(self.table, std=0.5)
        with torch.no_grad():
            self.table[1].fill_(2.0)
            self.table[:, 2:4].uniform_()
            self.table.mul_(0.5).t()[0].add_(1.0)
        self.orthogonal = nn.Parameter(torch.empty(3, 3), requires_grad=False)
        nn.init.eye_(self.orthogonal)
        self.later = nn.Linear(5, 5)


def test_operations_on_views_and_earlier_values_are_replayed():
    torch.manual_seed(0)
    expected = Odd()

    def work(rank):
        nl.init()
        with nl.deferred_init():
            model = Odd()
        assert all(p.is_meta for p in model.parameters())
        materialize(model, model, torch.device("cpu"))
        return model

    (found,) = nl.spmd.run(work, 1)
    for (name, value), theirs in zip(found.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(value, theirs), name
        assert value.requires_grad == theirs.requires_grad


class Lost(nn.Module):
    def __init__(self, how: str):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 300))
        if how == "from meta":
            with torch.no_grad():
                self.weight.copy_(self.weight.exp())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("before", "was never filled in place"),
        ("from meta", "another tensor without values"),
    ],
)
def test_error_names_operations_that_cannot_be_replayed(how, words):
    def work(rank):
        nl.init()
        with nl.deferred_init():
            net = nn.Sequential(Lost(how), Lost(how))
        with pytest.raises(nl.errors.ConfigError, match=f"0.weight .*{words}.*fill it in place"):
            nl.shard(net)

    nl.spmd.run(work, 1)


def test_meta_parameters_built_elsewhere_are_refused():
    def work(rank):
        nl.init()
        with torch.device("meta"):
            model = tiny.llama()
        with pytest.raises(nl.errors.ConfigError, match="build the model inside nl.deferred_init"):
            nl.shard(model)

    nl.spmd.run(work, 1)


class SetsData(torch.nn.Module):
    """Initializes a parameter as Bamba of transformers 4 does."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 3, bias=False) for _ in range(2)])
        for layer in self.layers:
            with torch.device("cpu"):
                layer.weight.data = torch.arange(6.0).view(3, 2)
        other = torch.empty_like(layer.weight).copy_(torch.arange(6.0).view(3, 2))
        layer.weight.data = other  # as RWKV: a meta tensor in deferred initialization


def test_values_set_as_data_are_kept():
    def work(rank):
        nl.init()
        with nl.deferred_init():
            model = SetsData()
        assert model.layers[0].weight.is_meta
        return [p.full_tensor().flatten().tolist() for p in nl.shard(model).parameters()]

    assert nl.spmd.run(work, 2) == [[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2] * 2


def test_buffer_made_from_a_parameter_is_refused():
    class Quantized(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("rounded", torch.zeros_like(self.weight))

    def work(rank):
        nl.init()
        with nl.deferred_init():
            model = torch.nn.ModuleList([Quantized(), Quantized()])
        with pytest.raises(nl.errors.ConfigError, match="buffer rounded of Quantized"):
            nl.shard(model)

    nl.spmd.run(work, 1)


def largest_held(rank, config):
    """Largest number of materialized elements while sharding, and number at the end."""
    nl.init(config)
    with nl.deferred_init():
        model = parity.unseeded("llama")
    model = nl.transform(model)
    held, take = [0], deferred_init.InitHistory.values

    def values(self, *arguments):
        found = take(self, *arguments)
        here = sum(elements(p) for p in model.parameters() if not p.is_meta)
        held[0] = max(held[0], here + found.numel())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred_init.InitHistory, "values", values)
        nl.shard(model)
    return held[0], sum(elements(p) for p in model.parameters())


def elements(parameter) -> int:
    """Number of elements on this rank of two; all tensors have an even number of rows."""
    return parameter.numel() // (2 if isinstance(parameter, DTensor) else 1)


def test_materialization_holds_at_most_a_shard_and_a_block():
    alone = parity.unseeded("llama")
    whole = sum(p.numel() for p in alone.parameters())
    block = sum(p.numel() for p in alone.model.layers[0].parameters())
    root = whole - 2 * block
    for most, left in nl.spmd.run(largest_held, 4, args=(SPLIT,)):
        assert left < 1.1 * whole / 4
        assert most <= left + max(block, root)
        assert most < 0.7 * whole


def test_casts_apply_to_deferred_values():
    torch.manual_seed(0)
    expected = parity.unseeded("llama").to(torch.bfloat16)

    def work(rank):
        nl.init()
        with nl.deferred_init():
            model = parity.unseeded("llama").to(torch.bfloat16)
        materialize(model, model, torch.device("cpu"))
        return model

    (found,) = nl.spmd.run(work, 1)
    for value, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert value.dtype == torch.bfloat16 and torch.equal(value, theirs)


@pytest.mark.parametrize("call", [nl.transform, nl.pipeline, nl.shard])
def test_later_calls_inside_deferred_init_are_refused(call):
    def work(rank):
        nl.init()
        with nl.deferred_init():
            call(parity.unseeded("llama"))

    with pytest.raises(RankError, match=rf"nl\.{call.__name__} was called inside nl\.def"):
        nl.spmd.run(work, 2)
