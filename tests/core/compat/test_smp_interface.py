"""Symbols of SMP v1: ranks, groups, messages, state, preparation and refusals."""

import json
import logging

import pytest
import torch

import nearlinear as nl
from nearlinear.compat import smp
from nearlinear.compat.smp.checkpoint import encode
from nearlinear.errors import CheckpointError, ConfigError, NearlinearError

ORDERS = {
    "DPT": lambda tp, pp, rdp: (rdp * 2 + pp) * 2 + tp,
    "cluster": lambda tp, pp, rdp: (rdp * 2 + pp) * 2 + tp,
    "PTD": lambda tp, pp, rdp: (pp * 2 + tp) * 2 + rdp,
    "spread": lambda tp, pp, rdp: (tp * 2 + pp) * 2 + rdp,
}


@pytest.mark.parametrize("strategy", ORDERS)
def test_ranks_follow_the_placement_strategy(interface, strategy):
    found = nl.spmd.run(lambda rank: interface.ranks(strategy), 8)
    for rank, pp, tp, rdp, mp, dp in found:
        assert rank == ORDERS[strategy](tp, pp, rdp)
        others = sorted(r for r, *_, of_rdp, _, _ in found if of_rdp == rdp)
        assert others[mp] == rank
        assert sorted(r for r, of_pp, *_ in found if of_pp == pp)[dp] == rank


def test_objects_reach_the_ranks_of_every_group(interface):
    nl.spmd.run(lambda rank: interface.messages(), 8)


def test_objects_that_would_need_pickle_are_refused_on_both_ends():
    def work(rank):
        smp.init({"ddp": True})
        with pytest.raises(NearlinearError, match="an object of type object, which cannot be sent"):
            if rank == 0:
                smp.send({"a": object()}, 1)
            else:
                smp.recv_from(0)
        with pytest.raises(NearlinearError, match="type object"):
            smp.allgather(object() if rank == 1 else None)

    nl.spmd.run(work, 2)


def plain_model(interface):
    with nl.spmd.one_at_a_time(seed=3):
        return interface.AutoModelForCausalLM.from_config(interface.config())


def test_step_outputs_and_split_arguments(interface):
    model, ids = plain_model(interface), interface.ids()
    expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    for loss, gradients in nl.spmd.run(lambda rank: interface.step_outputs(), 1):
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        for name, gradient in gradients.items():
            expected_gradient = model.get_parameter(name).grad
            assert torch.allclose(gradient.full_tensor(), expected_gradient, atol=1e-5)


LAYOUTS = {
    "sharded": (2, {"sharded_data_parallel_degree": 2}),
    "tensor": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    "pipeline": (2, {"partitions": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_whole_on_any_layout_and_loads_again(interface, layout, tmp_path):
    ranks, settings = LAYOUTS[layout]
    model, ids = plain_model(interface), interface.ids()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=ids, labels=ids).loss.backward()
    if layout == "sharded":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    found = nl.spmd.run(lambda rank: interface.model_state(settings, tmp_path), ranks)
    momentum = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    for _, state, updates in found:
        assert state.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert torch.allclose(state[name], value, atol=1e-4), name
        assert momentum.keys() == updates["state"].keys()
        for name, value in momentum.items():
            assert torch.allclose(updates["state"][name]["exp_avg"], value, atol=1e-5), name
    assert {n for names, _, _ in found for n in names} == {n for n, _ in model.named_parameters()}


def test_preparation_before_the_first_step(interface, caplog):
    model, ids = plain_model(interface), interface.ids()
    expected = model(input_ids=ids, labels=ids).loss.item()
    with caplog.at_level(logging.WARNING):
        found = nl.spmd.run(lambda rank: interface.preparation(), 2)
    assert found[0][1] == ["transformer.h.0.ln_1.weight"]
    assert found[1][1] == [f"transformer.h.{i}.ln_1.weight" for i in (1, 2, 3)]
    assert [loss for loss, _ in found] == pytest.approx([expected] * 2, abs=1e-2)  # bfloat16
    assert "options accepted without effect: flash_attention (set attn" in caplog.text


def test_modules_and_functions_of_one_rank(interface):
    assert isinstance(interface.parts(), torch.nn.Linear)


def test_grad_scaler_skips_overflowing_steps_on_all_ranks(interface):
    model, ids = plain_model(interface), interface.ids()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for found, scale in nl.spmd.run(lambda rank: interface.scaled(1024.0), 2):
        assert found == pytest.approx(losses, abs=1e-5) and scale == 4096
    for found, scale in nl.spmd.run(lambda rank: interface.scaled(2.0**127), 2):
        assert found == pytest.approx([losses[0]] * 2, abs=1e-5) and scale == 2.0**125


def test_dynamic_loss_scale_drops_overflowing_steps(interface):
    for first, second in nl.spmd.run(lambda rank: interface.overflowing(), 2):
        assert first[:2] == (True, 2.0**10)
        assert second == (False, 2.0**10, False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline_paralel_degree": 2}, "no configuration key.*Did you mean 'pipeline_parallel"),
        ({"ddp": False}, "ddp = false, but 2 ranks hold each stage"),
        ({"ddp": True, "horovod": True}, "horovod = True is not supported.*ddp = true"),
        ({"ddp": True, "fp16_params": True}, "set fp16 = true"),
        ({"ddp": True, "load_partition": True}, "smp.set_partition"),
        ({"ddp": True, "pipeline": "simple_only_forward"}, "evaluate under torch.no_grad"),
        ({"ddp": True, "pipeline": "other"}, "allowed are 'simple'"),
        ({"ddp": True, "partitions": 2, "pipeline_parallel_degree": 1}, "two names for one"),
        ({"ddp": True, "memory_weight": 2.0}, "must be in 0 .. 1"),
        ({"ddp": True, "tensor_parallel_degree": 3}, "does not divide"),
    ],
)
def test_settings_that_would_change_results_are_refused(settings, words):
    def work(rank):
        with pytest.raises(ConfigError, match=words):
            smp.init(settings)

    nl.spmd.run(work, 2)


def test_keys_of_the_launcher_take_precedence_and_unused_ones_warn(monkeypatch, caplog):
    launched = {"tensor_parallel_degree": 2, "ddp_port": 1, "sdp_reduce_bucket_size": 5e6}
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", json.dumps(launched))

    def work(rank):
        smp.init({"ddp": 1, "tensor_parallel_degree": 1, "skip_tracing": True, "microbatches": 3})
        config = nl.distributed.runtime.current().config
        return smp.tp_size(), config.microbatches, config.sdp_reduce_bucket_size

    with caplog.at_level(logging.WARNING):
        assert nl.spmd.run(work, 2) == [(2, 3, 5_000_000)] * 2
    (told,) = [each.getMessage() for each in caplog.records if "smp.init" in each.getMessage()]
    assert "ddp_port (the ranks' process group" in told and "skip_tracing (nothing" in told


def test_defaults_are_those_of_v1():
    def work(rank):
        smp.init({"ddp": True, "sharded_data_parallel_degree": 2})
        sharded = nl.distributed.runtime.current().config
        smp.init({"ddp": True, "offload_activations": True})
        return sharded, nl.distributed.runtime.current().config

    for sharded, replicated in nl.spmd.run(work, 2):
        assert (sharded.hybrid_shard_degree, sharded.sdp_gradient_clipping) == (2, 1.0)
        assert (replicated.hybrid_shard_degree, replicated.sdp_gradient_clipping) == (1, 0.0)
        assert replicated.placement == "DPT" and replicated.activation_loading_horizon == 4


def one_rank(call):
    def work(rank):
        smp.init({"ddp": True})
        return call()

    return nl.spmd.run(work, 1)[0]


REFUSALS = {
    "option": lambda: smp.tensor_parallelism(use_alibi=True).__enter__(),
    "transformer": lambda: smp.nn.DistributedTransformerLMHead(),
    "layer": lambda: smp.nn.FlashAttentionLayer(),
    "register": lambda: smp.register_parameter(torch.nn.Linear(1, 1), None),
    "lamb": lambda: smp.optimizers.FusedLAMB([]),
    "lamb_too": lambda: smp.optimizers.FusedLamb([]),
    "novograd": lambda: smp.optimizers.FusedNovoGrad([]),
    "random": lambda: smp.set_activation_checkpointing(torch.nn.Linear(1, 1), False),
    "stage": lambda: smp.set_partition(torch.nn.Linear(1, 1), 1),
    "argument": lambda: smp.DistributedModel(torch.nn.Linear(1, 1), tracing=True),
    "passes": lambda: smp.DistributedModel(torch.nn.Linear(1, 1), backward_passes_per_step=0),
    "hook": lambda: smp.DistributedModel(torch.nn.Linear(1, 1)).register_comm_hook(None, print),
    "join": lambda: smp.DistributedModel(torch.nn.Linear(1, 1)).join(),
    "no_model": lambda: smp.save_checkpoint("nowhere", "tag"),
    "no_checkpoint": lambda: (
        smp.DistributedModel(torch.nn.Linear(1, 1)),
        smp.resume_from_checkpoint("nowhere"),
    ),
    "content": lambda: encode({"a": object()}),
}
WORDS = {
    "option": "use_alibi = True is not supported",
    "transformer": "build that model in smp.model_creation",
    "layer": "FlashAttentionLayer is created from",
    "register": "divided by nl.transform",
    "lamb": "FusedLAMB scales updates",
    "lamb_too": "torch.optim.AdamW",
    "novograd": "FusedNovoGrad scales updates",
    "random": "preserve_rng_state = False",
    "stage": "allowed are 0 .. 0",
    "argument": "no argument 'tracing'",
    "passes": "must be at least 1",
    "hook": "gradients are reduced by nearlinear",
    "join": "equally many batches",
    "no_model": "call smp.DistributedModel",
    "no_checkpoint": "no partial checkpoint in nowhere",
    "content": "an object of type object",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_calls_that_cannot_be_honored_are_refused_with_the_reason(case):
    def call():
        with pytest.raises((ConfigError, NearlinearError, CheckpointError), match=WORDS[case]):
            REFUSALS[case]()

    one_rank(call)


class TwoLayers(torch.nn.Module):
    """A model without blocks, which is sharded as one unit."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.second(self.first(x))


def test_a_second_model_and_calls_after_the_first_step_are_refused():
    def work(rank):
        with pytest.raises(NearlinearError, match="Call smp.init"):
            smp.DistributedModel(torch.nn.Linear(1, 1))
        smp.init({"ddp": True})
        module = TwoLayers()
        model = smp.DistributedModel(module)
        with pytest.raises(ConfigError, match="a script has one model"):
            smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(NearlinearError, match="before the first call"):
            optimizer.step()
        model.cpu()

        @smp.step
        def train_step(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        first = train_step(model, torch.ones(2, 2)).reduce_mean().item()
        optimizer.step()
        assert train_step(model, torch.ones(2, 2)).reduce_mean().item() < first
        for call in (
            lambda: smp.set_partition(module.first, 0),
            lambda: smp.set_activation_checkpointing(module.first),
            lambda: model.register_post_partition_hook(print),
            model.cpu,
        ):
            with pytest.raises(NearlinearError, match="already|before the first|is sharded"):
                call()

    nl.spmd.run(work, 2)


def test_a_file_with_code_is_not_loaded(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("loaded",)

    torch.save(Evil(), tmp_path / "model.pt")

    def call():
        with pytest.raises(CheckpointError, match="could run code"):
            smp.load(tmp_path / "model.pt", partial=False)

    one_rank(call)


def test_ranks_with_other_seeds_are_refused_in_deferred_initialization(interface):
    def work(rank):
        smp.init({"ddp": True, "delayed_parameter_initialization": True})
        with nl.spmd.one_at_a_time(seed=rank):
            with smp.model_creation():
                module = interface.AutoModelForCausalLM.from_config(interface.config())
        model = smp.DistributedModel(module)
        with pytest.raises(NearlinearError, match="one seed on all ranks"):
            interface.train_step(model, interface.ids())

    nl.spmd.run(work, 2)


@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_degree": 2}])
def test_ranks_with_other_values_start_from_those_of_rank_0(interface, settings):
    def work(rank):
        smp.init({"ddp": True, "prescaled_batch": True, **settings})
        with nl.spmd.one_at_a_time(seed=3 + rank):
            module = interface.AutoModelForCausalLM.from_config(interface.config())
        return interface.train_step(smp.DistributedModel(module), interface.ids()).reduce_mean()

    model, ids = plain_model(interface), interface.ids()
    expected = model(input_ids=ids, labels=ids).loss.item()
    assert [loss.item() for loss in nl.spmd.run(work, 2)] == pytest.approx([expected] * 2, abs=1e-5)


@pytest.mark.parametrize(
    ("assign", "words"),
    [
        (lambda m: smp.set_partition(m.transformer.wte, 1), "wte is assigned to stage 1"),
        (lambda m: smp.set_partition(m.transformer.h[3].mlp, 0), "parts of block 3"),
        (lambda m: smp.set_partition(m.transformer.h[0], 1), "must ascend"),
    ],
)
def test_partitions_that_are_no_stages_are_refused(interface, assign, words):
    def work(rank):
        smp.init({"partitions": 2, "auto_partition": False, "ddp": True})
        module = interface.create_model()
        for block in list(module.transformer.h)[2:]:
            smp.set_partition(block, 1)
        assign(module)
        with pytest.raises(ConfigError, match=words):
            interface.train_step(smp.DistributedModel(module), interface.ids())

    nl.spmd.run(work, 2)


def test_tensor_ranks_with_parts_of_other_shapes_are_refused(interface):
    def work(rank):
        smp.init({"tensor_parallel_degree": 2, "ddp": True})
        model = smp.DistributedModel(interface.create_model())
        with pytest.raises(nl.errors.DataError, match="has the shapes"):
            interface.train_step(model, interface.ids(rows=2 + 2 * rank))

    nl.spmd.run(work, 2)


def test_parts_of_tensor_ranks_need_a_step_function_of_smp(interface):
    def work(rank):
        nl.init({"tensor_parallel_degree": 2, "prescaled_batch": False})
        with nl.spmd.one_at_a_time(seed=3):
            module = interface.AutoModelForCausalLM.from_config(interface.config())
        model = nl.shard(nl.transform(module))
        with pytest.raises(ConfigError, match="prescaled_batch = false.*after smp.init"):
            nl.accumulate(model, [interface.ids()])

    nl.spmd.run(work, 2)
