"""Expert-parallel training equals the unmodified model with the expected communication."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import nearlinear as nl
from nearlinear.expert_parallel.parallelize import parallel_experts
from nearlinear.fsdp.model_state import model_state, parameter_state
from tests.support import mixtures, parity, tiny
from tests.support.processes import in_turn
from tests.support.releases import needs_hooks

ROWS = 32
EP = "expert_parallel_degree"
SHARDS = "hybrid_shard_degree"
TENSOR = {"tensor_parallel_degree": 2}


def expert_parallel_error(
    ranks, kind, experts, config, *, processes=False, accumulation=1, **options
):
    """Return the largest difference of any rank's run from the unmodified model."""
    changes = options.pop("changes", {})
    run = (kind, experts, config, ROWS, accumulation, options.pop("moe", None), changes, options)
    reference = mixtures.train_alone(kind, experts, ROWS, **changes)
    runs = nl.spmd.run(_run, ranks, args=run, processes=processes)
    return max(mixtures.largest_difference(run, reference) for run in runs)


def _run(rank, kind, experts, config, count, accumulation, moe, changes, options):
    return mixtures.train_divided(
        rank, kind, experts, config, count, accumulation, moe, **options, **changes
    )


@pytest.mark.parametrize("moe", [None, {"moe_all_to_all_dispatcher": False}], ids=["a2a", "ag"])
@pytest.mark.parametrize(
    ("ranks", "experts", "config"),
    [
        (2, 4, {EP: 2}),
        (4, 4, {EP: 4}),
        (4, 8, {EP: 4}),
        (4, 4, {EP: 2}),
        (8, 8, {EP: 2, SHARDS: 4}),
        (8, 8, {EP: 4}),
        (6, 6, {EP: 3}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_expert_parallel_training_equals_one_process(ranks, experts, config, moe):
    changes = {"hidden_size": 48} if ranks == 6 else {}
    assert expert_parallel_error(ranks, "mixtral", experts, config, moe=moe, changes=changes) < 1e-5


@pytest.mark.parametrize(
    ("config", "two_hop"),
    [
        ({EP: 2, SHARDS: 4}, True),
        ({EP: 2, SHARDS: 4}, False),
        ({EP: 4, SHARDS: 4}, True),  # experts are replicated but not sharded
        ({EP: 2, SHARDS: 4, "overlap_communication": False}, True),
        ({EP: 2, SHARDS: 4, "overlap_communication": False}, False),
        ({EP: 2, SHARDS: 8, "prefetch_depth": 0, "sdp_max_live_parameters": 0}, False),
        ({EP: 2, SHARDS: 4, "prefetch_depth": 3, "sdp_max_live_parameters": 0}, True),
        ({EP: 2, SHARDS: 8, "hierarchical_all_gather": "on", "ranks_per_node": 4}, True),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_uneven_micro_batches_with_every_communication_option(config, two_hop):
    found = expert_parallel_error(8, "mixtral", 4, config, accumulation=2, two_hop=two_hop)
    assert found < 1e-5


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_other_mixture_families_equal_one_process(kind):
    assert expert_parallel_error(4, kind, 4, {EP: 2}) < 2e-5


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_every_expert_implementation_equals_one_process(implementation):
    changes = {"implementation": implementation}
    assert expert_parallel_error(4, "mixtral", 8, {EP: 4}, changes=changes) < 1e-5


def test_expert_parallelism_with_activation_checkpointing():
    assert expert_parallel_error(2, "mixtral", 4, {EP: 2}, changes={"checkpointing": True}) < 1e-5


@pytest.mark.parametrize("moe", [None, {"moe_all_to_all_dispatcher": False}], ids=["a2a", "ag"])
def test_expert_parallelism_with_tensor_parallelism(moe):
    config = TENSOR | {EP: 2, SHARDS: 2}
    assert expert_parallel_error(8, "mixtral", 4, config, moe=moe, accumulation=2) < 1e-5


@pytest.mark.slow
def test_expert_parallelism_over_gloo_processes():
    layouts = [
        ({EP: 2, SHARDS: 4}, None),
        ({EP: 2, SHARDS: 2}, None),
        ({EP: 4, "overlap_communication": False}, {"moe_all_to_all_dispatcher": False}),
    ]
    runs = [("mixtral", 4, config, ROWS, 2, moe) for config, moe in layouts]
    reference = mixtures.train_alone("mixtral", 4, ROWS)
    for (config, _), found in zip(layouts, in_turn(mixtures.train_divided, 4, runs), strict=True):
        for run in found:
            assert mixtures.largest_difference(run, reference) < 1e-5, config


def test_expert_parallelism_over_two_gloo_processes():
    assert expert_parallel_error(2, "mixtral", 4, {EP: 2}, accumulation=2, processes=True) < 1e-5


def test_bf16_training_is_close_to_sharding_without_expert_parallelism():
    """The runs compute in bfloat16, precise to one part in 256, in different orders."""

    def gradients(rank, config):
        return mixtures.train_divided(rank, "mixtral", 4, config, ROWS, precision="bf16")

    (losses, found, _), *_ = nl.spmd.run(gradients, 4, args=({EP: 2},))
    (expected_losses, expected, _), *_ = nl.spmd.run(gradients, 4, args=({},))
    assert losses == pytest.approx(expected_losses, abs=2e-3)
    for name, value in expected.items():
        assert (found[name] - value).norm() < 0.03 * value.norm(), name


def test_bf16_keeps_routing_weights_in_float32():
    def expert_input_dtypes(rank, config):
        nl.init({**config, "bf16": True})
        model = nl.shard(mixtures.transformed("mixtral", 4, None))
        given = []
        model.model.layers[0].mlp.experts.register_forward_pre_hook(
            lambda module, args: given.append([value.dtype for value in args])
        )
        model(tiny.rows(0, 2))
        return given

    expected = nl.spmd.run(expert_input_dtypes, 2, args=({},))  # dtypes without expert parallelism
    assert nl.spmd.run(expert_input_dtypes, 2, args=({EP: 2},)) == expected
    assert expected[0] == [[torch.bfloat16, torch.int64, torch.float32]]


@pytest.mark.parametrize("overlap", [True, False])
def test_two_hop_all_reduces_expert_replicas_once_per_step(overlap):
    def count_collectives(rank, two_hop):
        nl.init({EP: 2, SHARDS: 2, "overlap_communication": overlap})
        model = nl.shard(mixtures.transformed("mixtral", 4, None))
        batches = [tiny.batch(tiny.rows(i, 2)) for i in range(3)]
        with nl.count_collectives() as counts:
            for batch in nl.accumulate(model, batches, two_hop=two_hop):
                model(**batch).loss.backward()
        return counts.calls["all_reduce"]

    weights, units = 2, 5  # targets, expected and measured; two blocks, their experts, the root
    assert nl.spmd.run(count_collectives, 4, args=(True,)) == [weights + units] * 4
    assert nl.spmd.run(count_collectives, 4, args=(False,)) == [weights + 3 * units] * 4


@pytest.mark.parametrize(
    ("experts", "config", "expert_ranks", "ranks_per_copy"),
    [
        (8, {EP: 2}, 2, 8),
        (8, {EP: 8}, 8, 8),
        (8, {EP: 2, SHARDS: 4}, 2, 4),
        (4, {EP: 2}, 2, 8),  # more ranks per expert than experts
        (8, TENSOR | {EP: 2}, 4, 8),
    ],
)
def test_every_rank_holds_its_shard_of_the_experts(experts, config, expert_ranks, ranks_per_copy):
    def count_elements(rank):
        nl.init(config)
        model = mixtures.transformed("mixtral", experts, None)
        cut = sum(p.numel() for m in parallel_experts(model) for p in m.parameters())
        nl.shard(model)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        found = [p for m in parallel_experts(model) for p in m.parameters()]
        assert len(found) == 4
        return cut, sum(p.to_local().numel() for p in found)

    untouched = mixtures.build("mixtral", experts).named_parameters()
    whole = sum(p.numel() for name, p in untouched if "experts" in name)
    expected = whole // expert_ranks, whole // ranks_per_copy
    assert nl.spmd.run(count_elements, 8) == [expected] * 8


@needs_hooks
@pytest.mark.parametrize("live", [0, 10**9])
def test_experts_are_gathered_and_retained_with_their_blocks(live):
    def all_gathers(rank, config):
        nl.init({SHARDS: 4, "sdp_max_live_parameters": live} | config)
        model = nl.shard(mixtures.transformed("mixtral", 4, None, num_hidden_layers=4))
        with nl.count_collectives() as counts:
            for batch in nl.accumulate(model, [tiny.batch(tiny.rows(i, 2)) for i in range(3)]):
                model(**batch).loss.backward()
        return counts.calls["all_gather"]

    (sharded, *_), (expert_parallel, *_) = (
        nl.spmd.run(all_gathers, 4, args=(c,)) for c in ({}, {EP: 2})
    )
    root = 1
    assert expert_parallel - root == 2 * (sharded - root)


@needs_hooks
@pytest.mark.parametrize("recompute", [0, 1], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("shards", "all_gathers"), [(2, 3), (4, 5)])
def test_expert_parallel_step_has_the_expected_collectives(shards, all_gathers, recompute):
    layers = 2

    def count_collectives(rank):
        nl.init({EP: 2, SHARDS: shards, "sdp_max_live_parameters": 0})
        shape = {"num_hidden_layers": layers, "checkpointing": bool(recompute)}
        model = nl.shard(mixtures.transformed("mixtral", 4, None, **shape))
        batch = tiny.batch(tiny.rows(0, 2))
        model(**batch).loss.backward()  # process groups are created on first use
        with nl.count_collectives() as forward:
            loss = model(**batch).loss
        with nl.count_collectives() as backward:
            loss.backward()
        return forward, backward

    for forward, backward in nl.spmd.run(count_collectives, shards):
        assert forward.calls["all_to_all"] == layers * 3  # sizes, tokens, results
        # gradients of tokens and results
        assert backward.calls["all_to_all"] == layers * (2 + 3 * recompute)
        # each block, the root, and experts sharded over several ranks
        assert forward.calls["all_gather"] == all_gathers
        assert backward.calls["reduce_scatter"] == all_gathers
        assert forward.calls["all_reduce"] == backward.calls["all_reduce"] == 0


def test_all_gather_dispatch_has_the_expected_collectives():
    def count_collectives(rank):
        nl.init({EP: 2})
        model = nl.shard(mixtures.transformed("mixtral", 4, {"moe_all_to_all_dispatcher": False}))
        with nl.count_collectives() as counts:
            model(**tiny.batch(tiny.rows(0, 2)))
        return counts.calls

    for calls in nl.spmd.run(count_collectives, 2):
        assert calls["all_to_all"] == 0
        assert calls["reduce_scatter"] == 2
        assert calls["all_gather"] == 3 + 2 * 4  # units; sizes, experts, weights and tokens


def route_all_to_first_experts(model: nn.Module) -> None:
    """Zero the routers: every token takes the same two experts with equal weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.zero_()


@pytest.mark.parametrize("only_experts", [False, True], ids=["all", "only-experts-trained"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("moe", [None, {"moe_all_to_all_dispatcher": False}], ids=["a2a", "ag"])
def test_experts_without_tokens_get_zero_gradients(moe, implementation, only_experts):
    """Experts without tokens get zero gradients, and their backward pass does not block."""

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not only_experts or "experts" in name)

    reference = mixtures.build("mixtral", 4, implementation=implementation)
    route_all_to_first_experts(reference)
    freeze(reference)
    reference(**tiny.batch(tiny.rows(0, 8))).loss.backward()

    def expert_parallel_gradients(rank):
        nl.init({EP: 4})
        with nl.spmd.one_at_a_time(seed=0):
            model = mixtures.build("mixtral", 4, implementation=implementation)
            route_all_to_first_experts(model)
            freeze(model)
        nl.shard(nl.transform(model, moe))
        mine = tiny.batch(tiny.rows(0, 8).chunk(4)[rank])
        for batch in nl.accumulate(model, [mine]):
            model(**batch).loss.backward()
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return {
            name: parity.gathered(p.grad, parameter_state(p).splits)
            for name, p in trainable.items()
        }

    used = reference.model.layers[0].mlp.experts.down_proj.grad.flatten(1).any(1)
    assert used.sum() == 2
    for gradients in nl.spmd.run(expert_parallel_gradients, 4):
        for name, parameter in reference.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("moe", [None, {"moe_all_to_all_dispatcher": False}], ids=["a2a", "ag"])
def test_batch_shapes_may_differ_between_ranks(moe):
    shapes = [(1, 5), (3, 16), (2, 9), (1, 2)]
    batches = [
        tiny.batch(tiny.rows(i, rows)[:, :length]) for i, (rows, length) in enumerate(shapes)
    ]
    reference = mixtures.build("mixtral", 4)
    targets = [rows * (length - 1) for rows, length in shapes]
    for batch, count in zip(batches, targets, strict=True):
        (reference(**batch).loss * count / sum(targets)).backward()

    def expert_parallel_gradients(rank):
        nl.init({EP: 4})
        model = nl.shard(mixtures.transformed("mixtral", 4, moe))
        for batch in nl.accumulate(model, [batches[rank]]):
            model(**batch).loss.backward()
        return parity.whole(model, lambda parameter: parameter.grad)

    for gradients in nl.spmd.run(expert_parallel_gradients, 4):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", [{EP: 2}, {EP: 4}, {EP: 2, SHARDS: 2}])
def test_gradient_norm_equals_the_unmodified_model(config):
    reference = mixtures.build("mixtral", 4)
    reference(**tiny.batch(tiny.rows(0, 8))).loss.backward()
    expected = nn.utils.get_total_norm([p.grad for p in reference.parameters()]).item()

    def norm(rank):
        nl.init(config)
        model = nl.shard(mixtures.transformed("mixtral", 4, None))
        for batch in nl.accumulate(model, [tiny.batch(tiny.rows(0, 8).chunk(4)[rank])]):
            model(**batch).loss.backward()
        return nl.clip_grad_norm_(model, 0.5), nl.clip_grad_norm_(model, 0.5)

    for before, after in nl.spmd.run(norm, 4):
        assert before == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(0.5, rel=1e-4)


def test_evaluation_logits_equal_the_unmodified_model():
    reference = mixtures.build("mixtral", 4).eval()
    ids = tiny.rows(0, 4)
    with torch.no_grad():
        expected = reference(ids).logits

    def logits(rank):
        nl.init({EP: 2})
        model = nl.shard(mixtures.transformed("mixtral", 4, None)).eval()
        with torch.no_grad():
            return model(ids.chunk(2)[rank]).logits

    torch.testing.assert_close(torch.cat(nl.spmd.run(logits, 2)), expected, atol=1e-5, rtol=0)


def test_model_state_records_the_expert_splits():
    def expert_splits(rank):
        nl.init({EP: 2})
        model = mixtures.transformed("mixtral", 4, None)
        assert isinstance(
            model.model.layers[0].mlp.experts,
            type(mixtures.build("mixtral", 4).model.layers[0].mlp.experts),
        )
        return model_state(model).layout.splits["model.layers.1.mlp.experts.down_proj"]

    for rank, (cut,) in enumerate(nl.spmd.run(expert_splits, 2)):
        assert (cut.axis, cut.dim, cut.size, cut.ranges) == ("expert", 0, 4, ((2 * rank, 2),))


def initial_values(rank, config):
    nl.init(config | {"random_seed": 5})
    with nl.deferred_init():
        model = mixtures.build("mixtral", 4)
    nl.shard(nl.transform(model))
    return parity.whole(model, lambda parameter: parameter.detach())


@pytest.mark.parametrize("config", [{EP: 2}, {EP: 4}, {EP: 2, SHARDS: 2}, TENSOR | {EP: 2}])
def test_deferred_initialization_equals_the_unmodified_model(config):
    untouched = mixtures.build("mixtral", 4)
    for found in nl.spmd.run(initial_values, 4, args=(config,)):
        for name, value in untouched.named_parameters():
            assert torch.equal(found[name], value), name


def train_and_checkpoint(rank, config, folder, steps):
    """Train for two steps and save, or load and train for one step."""
    mesh = nl.init(config)
    model = nl.shard(mixtures.transformed("mixtral", 4, None))
    optimizer = tiny.optimizer_for(model, "adamw")
    if steps == [2]:
        nl.load(folder, model, optimizer)
    for step in steps:
        mine = tiny.batch(tiny.rows(step, ROWS).chunk(mesh.data_ranks)[mesh.data_rank(rank)])
        for batch in nl.accumulate(model, [mine]):
            model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if steps != [2]:
        nl.save(folder, model, optimizer, step=2)
    return parity.whole(model, lambda parameter: parameter.detach())


@pytest.mark.parametrize("after", [(4, {EP: 4}), (2, {}), (4, {EP: 2, SHARDS: 2})])
def test_checkpoint_loads_in_another_layout(after, tmp_path):
    nl.spmd.run(train_and_checkpoint, 4, args=({EP: 2}, tmp_path / "step", [0, 1]))
    ranks, config = after
    _, _, expected = mixtures.train_alone("mixtral", 4, ROWS, steps=3)
    for found in nl.spmd.run(train_and_checkpoint, ranks, args=(config, tmp_path / "step", [2])):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)
