"""Activation checkpointing: equal gradients, memory of each strategy, refused models."""

import itertools
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.activation.memory_budget import choose_blocks
from nearlinear.config.activation_strategy import ActivationStrategy, parse_strategy
from nearlinear.distributed.collectives import count_collectives
from nearlinear.fsdp.model_state import model_state
from tests.support import activations, parity

TWO = {"hybrid_shard_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 4}
HIDDEN = parity.ROWS * parity.SEQUENCE * 32 * 4  # bytes
LAYOUTS = [
    (4, "gpt2", TWO, "group_2", 1),
    (4, "llama", TWO | {"overlap_communication": False}, "contiguous", None),
    (2, "gpt2", {"tensor_parallel_degree": 2}, "each", 1),
    (2, "llama", {"tensor_parallel_degree": 2}, "group_3", 2),
    (2, "llama", {"context_parallel_degree": 2}, "selective", 2),
    (4, "mixtral", TWO | {"expert_parallel_degree": 2, "sdp_max_live_parameters": 0}, "each", 1),
    (2, "mixtral", {"expert_parallel_degree": 2}, "contiguous", 2),
    (4, "mixtral", TWO | {"expert_parallel_degree": 2, "sdp_max_live_parameters": 0}, None, 1),
    (4, "gpt2", PIPELINE | TWO | {"sdp_max_live_parameters": 0}, "group_2", 1),
    (2, "llama", PIPELINE, 60_000, None),
    (2, "llama", PIPELINE | {"pipeline": "zbv_zero_bubble"}, "selective", 1),
    (2, "llama", PIPELINE | {"pipeline": "interleaved_zero_bubble"}, "each", 1),
    (2, "llama_tied", PIPELINE | {"pipeline": "interleaved_1f1b"}, "contiguous", None),
]


def name_of(run) -> str:
    ranks, family, config, strategy, horizon = run
    return f"{family} on {ranks}: {', '.join(config)}: {strategy}, horizon {horizon}"


@pytest.mark.parametrize("run", LAYOUTS, ids=name_of)
def test_training_at_any_layout_is_that_of_one_process(run):
    ranks, family, config, strategy, horizon = run
    layers = parity.layers(family, 4)

    def on_rank(rank):
        def then(model):
            if strategy:
                nl.checkpoint_activations(model, strategy)
            if horizon:
                nl.offload_activations(model, horizon, smallest=1)

        accumulation = 1 if "pipeline_parallel_degree" in config else 2
        return parity.together(rank, family, config, accumulation, steps=1, then=then, **layers)

    expected = activations.reference(family, steps=1, **layers)
    parity.assert_equal(nl.spmd.run(on_rank, ranks), expected)


@pytest.mark.parametrize("family", activations.DROPOUT)
@pytest.mark.parametrize("strategy", activations.STRATEGIES)
@pytest.mark.parametrize("sharded", ["before", "after"])
def test_gradients_are_those_of_the_plain_run_with_dropout(family, strategy, sharded):
    def on_rank(rank):
        nl.init({})
        model = activations.build(family)
        model = nl.shard(model) if sharded == "before" else model
        assert nl.checkpoint_activations(model, strategy) is model
        model = nl.shard(model) if sharded == "after" else model
        return activations.two_steps(model)

    ((losses, gradients),) = nl.spmd.run(on_rank, 1)
    its_losses, theirs = activations.plain(family)
    assert losses == its_losses
    activations.assert_close(gradients, theirs)


def over_processes(rank):
    """Gradients without and with, dropout on; each rank draws its own numbers."""
    nl.init(TWO | {"sdp_max_live_parameters": 0})
    found = []
    for strategy in (None, "each", "group_2"):
        model = nl.shard(activations.build("gpt2", use_cache=False))
        if strategy:
            nl.offload_activations(nl.checkpoint_activations(model, strategy), 1, smallest=1)
        torch.manual_seed(rank)
        for batch in nl.accumulate(model, [parity.rows(2 * rank + i, 2) for i in range(2)]):
            model(**batch).loss.backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    return found


@pytest.mark.slow
def test_dropout_over_processes():
    for without, *recomputed in nl.spmd.run(over_processes, 2, processes=True):
        for found in recomputed:
            activations.assert_close(found, without)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_gathered(overlap):
    """Blocks by themselves cost no collective, and groups none where gathered blocks may stay;
    where they may not, all but the last of a group are gathered once more."""

    def gathers(rank, strategy, live, ahead):
        more = {"sdp_max_live_parameters": live, "prefetch_depth": ahead}
        nl.init(TWO | more | {"overlap_communication": overlap})
        with nl.spmd.one_at_a_time(seed=0):
            model = activations.deep("llama")
        nl.shard(model)
        if strategy:
            nl.checkpoint_activations(model, strategy)
        with count_collectives() as counts:
            for batch in nl.accumulate(model, parity.split(parity.rows(0), 2)):
                model(**batch).loss.backward()
        micro_batches = 1 if live else 2  # gradients that fit are reduced once
        assert counts.calls["reduce_scatter"] == 5 * micro_batches
        return counts.calls["all_gather"]

    def count(strategy, live, ahead=1):
        return nl.spmd.run(gathers, 2, args=(strategy, live, ahead))[0]

    everything, few = 10**9, 0
    assert count("each", everything) == count("contiguous", everything) == count(None, everything)
    freed = count(None, few)
    assert count("each", few) == freed
    assert count("group_2", few) == freed + 2 * 2  # two groups, two micro-batches
    assert count("contiguous", few) == freed + 3 * 2
    assert count("group_2", few, ahead=2) == count(None, few, ahead=2) + 2 * 2


@pytest.mark.parametrize("family", activations.DROPOUT)
def test_memory_between_the_passes(family):
    """Bytes that are alive between forward and backward beside the model and its outputs."""

    def on_rank(rank):
        nl.init({})
        alive = {}
        for strategy in (None, "selective", "each", "group_2", "contiguous"):
            model = activations.build(family)
            if strategy:
                nl.checkpoint_activations(model, strategy)
            alive[strategy] = activations.alive_after_forward(model)
        others = alive["contiguous"] - HIDDEN  # tensors outside of blocks
        budget = alive[None] - others - (alive[None] - alive["each"]) * 3 // 8
        model = nl.checkpoint_activations(activations.build(family), f"{budget}B")
        activations.alive_after_forward(model)
        found = activations.alive_after_forward(model) - others
        return alive, budget, found, len(model_state(model).activations.budget.recomputed)

    alive, budget, found, recomputed = nl.spmd.run(on_rank, 1)[0]
    assert alive["contiguous"] < alive["group_2"] < alive["each"] < alive["selective"] < alive[None]
    assert alive["group_2"] - alive["contiguous"] == HIDDEN
    assert alive["each"] - alive["group_2"] == 2 * HIDDEN
    assert found <= budget and recomputed == 2


def test_ranks_agree_on_the_blocks_that_a_budget_asks_for():
    """One rank has short sequences; both ranks choose by the longer ones."""

    def on_rank(rank):
        nl.init({"hybrid_shard_degree": 2})
        with nl.spmd.one_at_a_time(seed=0):
            model = activations.deep("llama")
        nl.checkpoint_activations(nl.shard(model), "1MiB")
        for _ in range(2):
            model(**parity.rows(0, 8, 8 if rank else 32)).loss.backward()
        return model_state(model).activations.budget.recomputed

    first, second = nl.spmd.run(on_rank, 2)
    assert first == second and 0 < len(first) < 4


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)).map(sorted).map(lambda p: p[::-1]),
             min_size=1, max_size=6),
    st.integers(0, 100),
)  # fmt: skip
def test_as_few_blocks_as_the_budget_asks_for(sizes, limit):
    def total(recomputed):
        return sum(pair[i in recomputed] for i, pair in enumerate(sizes))

    everything = range(len(sizes))
    fitting = [
        count
        for count in range(len(sizes) + 1)
        if any(total(some) <= limit for some in itertools.combinations(everything, count))
    ]
    if not fitting:
        with pytest.raises(nl.errors.ConfigError, match="raise it"):
            choose_blocks(sizes, limit)
        return
    found = choose_blocks(sizes, limit)
    assert total(found) <= limit and len(found) == fitting[0]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("each", ActivationStrategy()),
        ("group_1", ActivationStrategy()),
        ("contiguous", ActivationStrategy(group_size=0)),
        ("group_12", ActivationStrategy(group_size=12)),
        ("selective", ActivationStrategy(selective=True)),
        ("1.5GiB", ActivationStrategy(budget=3 * 2**29)),
        ("500 MiB", ActivationStrategy(budget=500 * 2**20)),
        (4096, ActivationStrategy(budget=4096)),
    ],
)
def test_names_of_strategies(asked, expected):
    assert parse_strategy(asked) == expected


@pytest.mark.parametrize("asked", ["every", "group_0", "group_", "12GB", "", 0, -1, None, True])
def test_strategies_that_are_not(asked):
    with pytest.raises(nl.errors.ConfigError, match="strategy"):
        parse_strategy(asked)


def alone(body):
    """``body()`` on one rank."""

    def on_rank(rank):
        nl.init({})
        body()

    nl.spmd.run(on_rank, 1)


def test_the_model_looks_as_before():
    def body():
        model = activations.deep("llama")
        names, kinds = list(model.state_dict()), [type(m).__name__ for m in model.modules()]
        block = type(model.model.layers[0])
        nl.checkpoint_activations(model, "group_2")
        assert list(model.state_dict()) == names
        assert [type(m).__name__ for m in model.modules()] == kinds
        assert isinstance(model.model.layers[0], block)

    alone(body)


def test_only_training_is_recomputed():
    def body():
        expected = activations.deep("llama").eval()(**parity.rows(0)).loss
        calls = []
        for strategy in ("each", "contiguous"):
            model = nl.checkpoint_activations(activations.deep("llama"), strategy)
            for block in model.model.layers:
                block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
            assert torch.equal(model.eval()(**parity.rows(0)).loss, expected)
            with torch.no_grad():
                model.train()(**parity.rows(0), output_hidden_states=True)
            assert len(calls) == 8
            model(**parity.rows(0)).loss.backward()
            assert len(calls) == 16
            calls.clear()

    alone(body)


@pytest.mark.parametrize("strategy", ["each", "group_2"])
def test_frozen_blocks(strategy):
    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".0." not in name and "embed" not in name)
        return model

    def body():
        plain, model = (freeze(activations.deep("llama")) for _ in range(2))
        nl.offload_activations(nl.checkpoint_activations(model, strategy), smallest=1)
        for each in (plain, model):
            each(**parity.rows(0)).loss.backward()
        for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert (parameter.grad is None) == (expected.grad is None)
            assert parameter.grad is None or torch.equal(parameter.grad, expected.grad)

    alone(body)


def test_what_is_refused_at_once():
    def body():
        model = activations.deep("llama")
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()
        with pytest.raises(nl.errors.ConfigError, match="own gradient checkpointing"):
            nl.checkpoint_activations(model)
        model.gradient_checkpointing_disable()
        nl.checkpoint_activations(model)
        with pytest.raises(nl.errors.ConfigError, match="already"):
            nl.checkpoint_activations(model, "group_2")
        (enable or model.gradient_checkpointing_enable)()
        with pytest.raises(nl.errors.NearlinearError, match="own gradient checkpointing"):
            model(**parity.rows(0))
        for too_late in (nl.transform, nl.pipeline):
            with pytest.raises(nl.errors.ConfigError, match=r"before nl\.checkpoint_activations"):
                too_late(model)
        with pytest.raises(nl.errors.ConfigError, match="not a part"):
            nl.checkpoint_activations(activations.deep("gpt2"), blocks=[torch.nn.Linear(1, 1)])

    alone(body)


class Between(torch.nn.Module):
    """Blocks with something between them, or some left out."""

    def __init__(self, change, last=None):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.change, self.last = change, last

    def forward(self, x):
        for layer in self.layers[: self.last]:
            x = self.change(layer(x))
        return x.sum()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Between(lambda x: 2 * x), "between blocks 1 and 2"),
        (Between(lambda x: x, last=3), "called 1 of 2 blocks"),
    ],
)
def test_groups_refuse_models_that_skip_or_change_blocks(model, says):
    def body():
        nl.checkpoint_activations(model, "group_2")
        with pytest.raises(nl.errors.NearlinearError, match=says):
            model(torch.ones(2, 4, requires_grad=True)).backward()

    alone(body)


def test_a_forward_pass_that_fails_within_a_group_is_forgotten():
    def body():
        failing = [False]

        def change(x):
            if failing[0]:
                raise KeyError
            return x

        model = nl.checkpoint_activations(Between(change), "group_2")
        expected = model(torch.ones(2, 4)).item()
        failing[0] = True
        with pytest.raises(KeyError):
            model(torch.ones(2, 4))
        failing[0] = False
        assert model(torch.ones(2, 4)).item() == expected

    alone(body)


def test_hidden_states_between_blocks_are_refused_by_groups():
    def body():
        model = nl.checkpoint_activations(activations.deep("llama"), "group_2")
        with pytest.raises(nl.errors.NearlinearError, match="output_hidden_states"):
            model(**parity.rows(0), output_hidden_states=True)
        model(**parity.rows(0)).loss.backward()

    alone(body)


def test_a_cache_with_something_in_it_is_refused():
    def body():
        model = nl.checkpoint_activations(activations.deep("llama"))
        with torch.no_grad():
            cache = model(**parity.rows(0)).past_key_values
        with pytest.raises(nl.errors.NearlinearError, match="past_key_values"):
            model(**parity.rows(0), past_key_values=cache)

    alone(body)


def test_budget_logs_the_chosen_blocks(caplog):
    def body():
        model = nl.checkpoint_activations(activations.deep("llama"), "1GiB")
        with caplog.at_level(logging.INFO, logger="nearlinear"):
            model(**parity.rows(0)).loss.backward()
        assert "0 of 4 blocks are recomputed" in caplog.text

    alone(body)
