"""Compiled blocks: numerics, number of graphs, and refused combinations."""

import functools

import pytest
import torch

import nearlinear as nl
from nearlinear.config import train as train_config
from tests.support import activations, parity

reference = functools.cache(parity.alone)
QUICK = functools.partial(nl.compile_blocks, backend="aot_eager")
RING = {"context_parallel_degree": 2}


def trained(rank, family, config):
    """A run with compiled blocks, and the graphs that they took here."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    accumulation = 1 if "context_parallel_degree" in config else 2
    run = parity.together(rank, family, config, accumulation, prepare=QUICK)
    return run, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check(found, family):
    runs, graphs = zip(*found, strict=True)
    parity.assert_equal(runs, reference(family))
    return graphs


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_one_graph_serves_all_blocks(family):
    """Compile a model of four layers with two micro-batches per step."""
    assert check(nl.spmd.run(trained, 1, args=(family, {})), family) == (1,)


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (4, {"hybrid_shard_degree": 2}),
        (2, {"tensor_parallel_degree": 2}),
        (2, {"pipeline_parallel_degree": 2, "microbatches": 2}),
        (2, RING | {"cp_comm_type": "all_gather"}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_compiled_training_on_every_layout(ranks, config):
    assert min(check(nl.spmd.run(trained, ranks, args=("gpt2", config)), "gpt2")) > 0


@pytest.mark.slow
def test_compiled_ring_attention_over_processes():
    found = nl.spmd.run(trained, 2, args=("gpt2", RING), processes=True)
    assert min(check(found, "gpt2")) > 0


def test_compiled_ring_attention_of_threads_is_refused():
    def refused(rank):
        nl.init(RING)
        with nl.spmd.one_at_a_time(seed=0):
            model = parity.build("llama")
        with pytest.raises(
            nl.errors.ConfigError, match="'all_gather', or start the ranks as processes"
        ):
            nl.compile_blocks(nl.transform(model))

    nl.spmd.run(refused, 2)


@pytest.mark.parametrize("strategy", [None, *activations.STRATEGIES])
def test_compiled_blocks_save_as_few_activations(strategy):
    def alive(rank, prepare):
        nl.init()
        model = activations.build("llama")
        prepare(model)
        model = nl.shard(model)
        if strategy:
            nl.checkpoint_activations(model, strategy)
        return activations.alive_after_forward(model)

    eager, compiled = (nl.spmd.run(alive, 1, args=(each,))[0] for each in (lambda m: m, QUICK))
    assert compiled == pytest.approx(eager, rel=0.02)


@pytest.mark.parametrize("strategy", ["each", "selective"])
def test_one_graph_serves_all_recomputed_blocks(strategy):
    def graphs(rank):
        nl.init()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = nl.shard(QUICK(activations.build("llama")))
        nl.checkpoint_activations(model, strategy)
        activations.two_steps(model)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert nl.spmd.run(graphs, 1) == [1]


@pytest.mark.parametrize("keep", [nl.checkpoint_activations, nl.offload_activations])
def test_compiling_after_activation_checkpointing_is_refused(keep):
    def refused(rank):
        nl.init()
        model = keep(activations.build("gpt2"))
        with pytest.raises(nl.errors.ConfigError, match="call nl.compile_blocks first"):
            nl.compile_blocks(model)

    nl.spmd.run(refused, 1)


def test_compiling_keeps_names_and_disables_the_cache():
    def names(rank):
        nl.init()
        model = parity.build("llama", use_cache=True)
        before = list(model.state_dict())
        assert nl.compile_blocks(model) is model and not model.config.use_cache
        return list(model.state_dict()) == before

    assert nl.spmd.run(names, 1) == [True]


@pytest.mark.slow
def test_trainer_compiles_by_its_config(small_run):
    """By inductor, on sharded blocks, over two micro-batches a step."""

    def losses(rank, compiled):
        settings = [f"train.compile_blocks={compiled}", "train.steps=3", "train.eval_sequences=0"]
        torch._dynamo.utils.counters.clear()
        trainer = nl.Trainer(train_config.load(small_run, settings, environment={}))
        found = [trainer.step()["loss"] for _ in range(3)]
        trainer.reporter.close()
        return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    (plain, none), (found, graphs) = (
        nl.spmd.run(losses, 2, args=(on,))[0] for on in ("false", "true")
    )
    assert found == pytest.approx(plain, abs=1e-5) and none == 0 < graphs
