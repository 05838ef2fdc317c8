"""Experts divided among ranks train like the untouched model, and travel as little as they must."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import nearlinear as nl
from nearlinear.parallel import layout
from nearlinear.parallel.expert import parallel_experts
from nearlinear.parallel.layout import cuts_of
from tests.support import mixtures, parity, tiny
from tests.support.processes import in_turn
from tests.support.releases import needs_hooks

ROWS = 32
EP = "expert_parallel_degree"
SHARDS = "hybrid_shard_degree"
TENSOR = {"tensor_parallel_degree": 2}


def trained(ranks, kind, experts, config, *, processes=False, accumulation=1, **options):
    """The largest difference of any rank's run from the untouched model's."""
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
def test_three_steps_equal_the_untouched_model(ranks, experts, config, moe):
    changes = {"hidden_size": 48} if ranks == 6 else {}
    assert trained(ranks, "mixtral", experts, config, moe=moe, changes=changes) < 1e-5


@pytest.mark.parametrize("two_hop", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {EP: 2, SHARDS: 4},
        {EP: 4, SHARDS: 4},  # no rank shares its experts' states, replicas do
        {EP: 2, SHARDS: 4, "overlap_communication": False},
        {EP: 2, SHARDS: 8, "prefetch_depth": 0, "sdp_max_live_parameters": 0},
        {EP: 2, SHARDS: 4, "prefetch_depth": 3, "sdp_max_live_parameters": 0},
        {EP: 2, SHARDS: 8, "hierarchical_all_gather": "on", "ranks_per_node": 4},
    ],
    ids=lambda config: "-".join(map(str, config.values())),
)
def test_uneven_micro_batches_in_every_way_of_communicating(config, two_hop):
    found = trained(8, "mixtral", 4, config, accumulation=2, two_hop=two_hop)
    assert found < 1e-5


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_other_stacked_mixtures(kind):
    assert trained(4, kind, 4, {EP: 2}) < 2e-5


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_models_own_ways_to_compute(implementation):
    changes = {"implementation": implementation}
    assert trained(4, "mixtral", 8, {EP: 4}, changes=changes) < 1e-5


def test_activations_that_are_computed_again():
    assert trained(2, "mixtral", 4, {EP: 2}, changes={"checkpointing": True}) < 1e-5


@pytest.mark.parametrize("moe", [None, {"moe_all_to_all_dispatcher": False}], ids=["a2a", "ag"])
def test_with_tensor_parallelism(moe):
    config = TENSOR | {EP: 2, SHARDS: 2}
    assert trained(8, "mixtral", 4, config, moe=moe, accumulation=2) < 1e-5


@pytest.mark.slow
def test_processes_over_gloo():
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


def test_two_processes_over_gloo():
    assert trained(2, "mixtral", 4, {EP: 2}, accumulation=2, processes=True) < 1e-5


def test_bf16_stays_near_the_model_sharded_as_it_is():
    """Both compute in bfloat16, in other orders: 8 bits of mantissa, so a few parts in 256."""

    def gradients(rank, config):
        return mixtures.train_divided(rank, "mixtral", 4, config, ROWS, precision="bf16")

    (losses, found, _), *_ = nl.spmd.run(gradients, 4, args=({EP: 2},))
    (expected_losses, expected, _), *_ = nl.spmd.run(gradients, 4, args=({},))
    assert losses == pytest.approx(expected_losses, abs=2e-3)
    for name, value in expected.items():
        assert (found[name] - value).norm() < 0.03 * value.norm(), name


def test_bf16_leaves_the_routers_weights_alone():
    def seen(rank, config):
        nl.init({**config, "bf16": True})
        model = nl.shard(mixtures.transformed("mixtral", 4, None))
        given = []
        model.model.layers[0].mlp.experts.register_forward_pre_hook(
            lambda module, args: given.append([value.dtype for value in args])
        )
        model(tiny.rows(0, 2))
        return given

    wanted = nl.spmd.run(seen, 2, args=({},))  # what they are where experts are no unit
    assert nl.spmd.run(seen, 2, args=({EP: 2},)) == wanted
    assert wanted[0] == [[torch.bfloat16, torch.int64, torch.float32]]


@pytest.mark.parametrize("overlap", [True, False])
def test_replicas_of_experts_meet_once_per_step(overlap):
    def counted(rank, two_hop):
        nl.init({EP: 2, SHARDS: 2, "overlap_communication": overlap})
        model = nl.shard(mixtures.transformed("mixtral", 4, None))
        batches = [tiny.batch(tiny.rows(i, 2)) for i in range(3)]
        with nl.count_collectives() as counts:
            for batch in nl.accumulate(model, batches, two_hop=two_hop):
                model(**batch).loss.backward()
        return counts.calls["all_reduce"]

    weights, units = 1, 5  # one of targets; two blocks, their experts, the root
    assert nl.spmd.run(counted, 4, args=(True,)) == [weights + units] * 4
    assert nl.spmd.run(counted, 4, args=(False,)) == [weights + 3 * units] * 4


@pytest.mark.parametrize(
    ("experts", "config", "divided", "sharded"),
    [
        (8, {EP: 2}, 2, 8),
        (8, {EP: 8}, 8, 8),
        (8, {EP: 2, SHARDS: 4}, 2, 4),
        (4, {EP: 2}, 2, 8),  # more ranks share an expert than there are experts
        (8, TENSOR | {EP: 2}, 4, 8),
    ],
)
def test_every_rank_holds_its_part_of_the_experts(experts, config, divided, sharded):
    def held(rank):
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
    assert nl.spmd.run(held, 8) == [(whole // divided, whole // sharded)] * 8


@needs_hooks
@pytest.mark.parametrize("live", [0, 10**9])
def test_experts_are_gathered_and_kept_with_their_blocks(live):
    def gathers(rank, config):
        nl.init({SHARDS: 4, "sdp_max_live_parameters": live} | config)
        model = nl.shard(mixtures.transformed("mixtral", 4, None, num_hidden_layers=4))
        with nl.count_collectives() as counts:
            for batch in nl.accumulate(model, [tiny.batch(tiny.rows(i, 2)) for i in range(3)]):
                model(**batch).loss.backward()
        return counts.calls["all_gather"]

    (as_they_are, *_), (divided, *_) = (nl.spmd.run(gathers, 4, args=(c,)) for c in ({}, {EP: 2}))
    root = 1
    assert divided - root == 2 * (as_they_are - root)


@needs_hooks
@pytest.mark.parametrize("again", [0, 1], ids=["kept", "computed-again"])
@pytest.mark.parametrize(("shards", "gathers"), [(2, 3), (4, 5)])
def test_communication_of_a_step(shards, gathers, again):
    layers = 2

    def counted(rank):
        nl.init({EP: 2, SHARDS: shards, "sdp_max_live_parameters": 0})
        shape = {"num_hidden_layers": layers, "checkpointing": bool(again)}
        model = nl.shard(mixtures.transformed("mixtral", 4, None, **shape))
        batch = tiny.batch(tiny.rows(0, 2))
        model(**batch).loss.backward()  # groups are made on first use
        with nl.count_collectives() as forward:
            loss = model(**batch).loss
        with nl.count_collectives() as backward:
            loss.backward()
        return forward, backward

    for forward, backward in nl.spmd.run(counted, shards):
        assert forward.calls["all_to_all"] == layers * 3  # sizes, tokens, results
        assert backward.calls["all_to_all"] == layers * (2 + 3 * again)  # their gradients
        # each block, the root, and experts that several ranks share
        assert forward.calls["all_gather"] == gathers
        assert backward.calls["reduce_scatter"] == gathers
        assert forward.calls["all_reduce"] == backward.calls["all_reduce"] == 0


def test_communication_without_all_to_all():
    def counted(rank):
        nl.init({EP: 2})
        model = nl.shard(mixtures.transformed("mixtral", 4, {"moe_all_to_all_dispatcher": False}))
        with nl.count_collectives() as counts:
            model(**tiny.batch(tiny.rows(0, 2)))
        return counts.calls

    for calls in nl.spmd.run(counted, 2):
        assert calls["all_to_all"] == 0
        assert calls["reduce_scatter"] == 2
        assert calls["all_gather"] == 3 + 2 * 4  # units; sizes, experts, weights and tokens


def send_all_to_the_first(model: nn.Module) -> None:
    """Routers without an opinion: every token takes the same two experts, with equal weights."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.zero_()


@pytest.mark.parametrize("only_experts", [False, True], ids=["all", "only-experts-trained"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("moe", [None, {"moe_all_to_all_dispatcher": False}], ids=["a2a", "ag"])
def test_all_tokens_to_one_rank(moe, implementation, only_experts):
    """The others' experts get none, and zeros for gradients; their backward waits for nobody."""

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not only_experts or "experts" in name)

    reference = mixtures.build("mixtral", 4, implementation=implementation)
    send_all_to_the_first(reference)
    freeze(reference)
    reference(**tiny.batch(tiny.rows(0, 8))).loss.backward()

    def divided(rank):
        nl.init({EP: 4})
        with nl.spmd.one_at_a_time(seed=0):
            model = mixtures.build("mixtral", 4, implementation=implementation)
            send_all_to_the_first(model)
            freeze(model)
        nl.shard(nl.transform(model, moe))
        mine = tiny.batch(tiny.rows(0, 8).chunk(4)[rank])
        for batch in nl.accumulate(model, [mine]):
            model(**batch).loss.backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return {name: parity.gathered(p.grad, cuts_of(p)) for name, p in trained.items()}

    used = reference.model.layers[0].mlp.experts.down_proj.grad.flatten(1).any(1)
    assert used.sum() == 2
    for gradients in nl.spmd.run(divided, 4):
        for name, parameter in reference.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("moe", [None, {"moe_all_to_all_dispatcher": False}], ids=["a2a", "ag"])
def test_batches_of_different_shapes(moe):
    shapes = [(1, 5), (3, 16), (2, 9), (1, 2)]
    batches = [
        tiny.batch(tiny.rows(i, rows)[:, :length]) for i, (rows, length) in enumerate(shapes)
    ]
    reference = mixtures.build("mixtral", 4)
    targets = [rows * (length - 1) for rows, length in shapes]
    for batch, count in zip(batches, targets, strict=True):
        (reference(**batch).loss * count / sum(targets)).backward()

    def divided(rank):
        nl.init({EP: 4})
        model = nl.shard(mixtures.transformed("mixtral", 4, moe))
        for batch in nl.accumulate(model, [batches[rank]]):
            model(**batch).loss.backward()
        return parity.whole(model, lambda parameter: parameter.grad)

    for gradients in nl.spmd.run(divided, 4):
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", [{EP: 2}, {EP: 4}, {EP: 2, SHARDS: 2}])
def test_the_norm_of_gradients_is_that_of_the_whole_model(config):
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


def test_evaluation_equals_the_untouched_model():
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


def test_which_experts_a_rank_has_is_on_record():
    def cuts(rank):
        nl.init({EP: 2})
        model = mixtures.transformed("mixtral", 4, None)
        assert isinstance(
            model.model.layers[0].mlp.experts,
            type(mixtures.build("mixtral", 4).model.layers[0].mlp.experts),
        )
        return layout.of(model).cuts["model.layers.1.mlp.experts.down_proj"]

    for rank, (cut,) in enumerate(nl.spmd.run(cuts, 2)):
        assert (cut.axis, cut.dim, cut.size, cut.mine) == ("expert", 0, 4, ((2 * rank, 2),))


def started(rank, config):
    nl.init(config | {"random_seed": 5})
    with nl.delayed_init():
        model = mixtures.build("mixtral", 4)
    nl.shard(nl.transform(model))
    return parity.whole(model, lambda parameter: parameter.detach())


@pytest.mark.parametrize("config", [{EP: 2}, {EP: 4}, {EP: 2, SHARDS: 2}, TENSOR | {EP: 2}])
def test_delayed_values_are_those_of_the_untouched_model(config):
    untouched = mixtures.build("mixtral", 4)
    for found in nl.spmd.run(started, 4, args=(config,)):
        for name, value in untouched.named_parameters():
            assert torch.equal(found[name], value), name


def saved(rank, config, folder, steps):
    """Train for two steps and save, or load and train for one."""
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
def test_checkpoints_move_between_layouts(after, tmp_path):
    nl.spmd.run(saved, 4, args=({EP: 2}, tmp_path / "step", [0, 1]))
    ranks, config = after
    _, _, expected = mixtures.train_alone("mixtral", 4, ROWS)
    for found in nl.spmd.run(saved, ranks, args=(config, tmp_path / "step", [2])):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)
