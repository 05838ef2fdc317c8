"""`nearlinear tune --machine`: what it measures, its file, and the planner that reads it."""

import dataclasses
import os

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear import cli, runtime
from nearlinear.errors import ConfigError
from nearlinear.plan import answer, hardware, links, machine, parameters
from nearlinear.plan.contention import MEASURED, Contention
from nearlinear.plan.groups import Group
from nearlinear.plan.machine import ALL_GATHER, ALL_REDUCE, EXCHANGE, REDUCE_SCATTER, Collective
from nearlinear.train import config as train_config
from nearlinear.tune import contention, rates
from nearlinear.tune import machine as tuned
from tests.support.releases import needs_hooks

MIB = 2.0**20
LATENCY, BYTES_PER_SECOND = 1e-3, 125e6


def timed(kind, ranks, nodes, sharing=1, backend="gloo", factor=1.0):
    """Points of a link of `BYTES_PER_SECOND` for every node, with a pause for every other rank."""
    crossing = (ranks - 1) / ranks * (sharing if nodes > 1 else 1)

    def seconds(size):
        return factor * ((ranks - 1) * LATENCY + size * crossing / BYTES_PER_SECOND)

    points = [[size, seconds(size)] for size in (MIB / 16, MIB, 8 * MIB)]
    return Collective(kind, backend, ranks, nodes, sharing, points)


def a_node(**changes):
    rows = [
        timed(kind, ranks, nodes, factor=factor)
        for ranks, nodes in ((2, 2), (4, 4), (2, 1))
        for kind, factor in ((ALL_GATHER, 1.0), (REDUCE_SCATTER, 2.0), (EXCHANGE, 1.5),
                             (ALL_REDUCE, 2.0))
    ]  # fmt: skip
    rows += [
        timed(kind, 2, 2, backend="nearlinear", factor=factor)
        for kind, factor in ((ALL_GATHER, 0.5), (REDUCE_SCATTER, 1.0), (ALL_REDUCE, 1.0))
    ]
    gpu = hardware.Accelerator(
        name="device",
        peak_tflops={"fp32": 0.05},
        memory_gib=8.0,
        hbm_gb_s=10.0,
        link_gb_s=1.0,
        host_gb_s=4.0,
        multiprocessors=1,
        watts=0.0,
        sources=[],
        matmul_tflops={"fp32": 0.05},
        products={"fp32": [[128.0, 0.02], [512.0, 0.05], [1024.0, 0.05]]},
    )
    known = {
        "name": "here",
        "gpu": gpu,
        "gpus": 1,
        "network_gbps": 1.0,
        "sources": ["a test"],
        "measured": {"matmul_share": 1.0, "memory_share": 1.0, "straggler": 0.0},
        "contention": [
            Contention("gloo", 2, 2, 1),
            Contention("nearlinear", 2, 2, 1, turn_share=0.5, borrowed_share=0.2),
            Contention("nearlinear", 2, 1, 1, turn_seconds=0.25, borrowed_seconds=0.125),
        ],
        "collectives": rows,
    }
    return hardware.Node(**known | changes)


RUN = {"model": {"preset": "gpt2-tiny"}, "batch": {"accumulation": 4}}


def planned(node, nodes=4, run=None, settings=()):
    config = train_config.load(run or RUN, settings, environment={})
    return answer.plan(config, hardware.Cluster(node, nodes))


def test_a_file_holds_what_was_measured(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(tuned.to_toml(a_node()), encoding="utf-8")
    assert machine.read(path) == a_node()
    cluster = hardware.parse_cluster(f"{path}:3")
    assert cluster.world == 3 and cluster.node == a_node()


def test_sizes_between_and_beyond_are_in_straight_lines():
    row = timed(ALL_GATHER, 2, 2)
    for size in (MIB / 16, MIB / 2, MIB, 3 * MIB, 8 * MIB, 100 * MIB):
        assert row.seconds(size) == pytest.approx(LATENCY + size / 2 / BYTES_PER_SECOND)
    assert row.seconds(0) >= row.points[0][1] / 2  # never nothing


@pytest.mark.parametrize(
    ("ranks", "nodes", "sharing"), [(2, 2, 1), (4, 4, 1), (8, 8, 1), (2, 2, 2)]
)
def test_groups_that_were_not_measured_follow_from_those_that_were(ranks, nodes, sharing):
    found = links.MeasuredLinks(a_node(), "gloo", exchanged=False)
    expected = timed(ALL_GATHER, ranks, nodes, sharing).seconds(8 * MIB)
    assert found.gather(8 * MIB, Group(ranks, nodes, sharing)) == pytest.approx(expected, rel=0.02)


def test_reductions_are_what_runs_them():
    by_exchange, own = (links.MeasuredLinks(a_node(), "gloo", e) for e in (True, False))
    pair = Group(2, 2, 1)
    gather = own.gather(MIB, pair)
    assert own.scatter(MIB, pair) == pytest.approx(2 * gather)
    assert by_exchange.scatter(MIB, pair) == pytest.approx(1.5 * gather)
    assert own.reduce(MIB, pair) == pytest.approx(2 * gather)
    assert own.gather(MIB, Group(1, 1, 1)) == 0.0
    other = links.MeasuredLinks(a_node(), "nearlinear", exchanged=True)
    assert other.gather(MIB, pair) == pytest.approx(gather / 2)
    unknown = links.MeasuredLinks(a_node(), "auto", exchanged=True)
    assert unknown.gather(MIB, pair) == gather  # of whichever was first


def test_two_stages_cross_nodes_once():
    found = links.MeasuredLinks(a_node(), "gloo", exchanged=False)
    four = Group(4, 2, 1)
    staged = found.gather(8 * MIB, four, hierarchical=True)
    across = found.gather(4 * MIB, Group(2, 2, 2))
    inside = found.gather(4 * MIB, Group(2, 1, 1))
    assert staged == pytest.approx(across + 2 * inside)


def test_a_group_of_a_kind_that_nobody_measured_is_refused():
    rows = [row for row in a_node().collectives if row.nodes > 1]
    found = links.MeasuredLinks(a_node(collectives=rows), "gloo", exchanged=False)
    with pytest.raises(ConfigError, match="without any all-gather inside a node"):
        found.gather(MIB, Group(2, 1, 1))


def test_rates_of_products_go_by_their_size():
    rate = machine.BySize([[128.0, 0.02], [512.0, 0.08]]).rate
    assert rate(64, 64, 64) == pytest.approx(0.02e12)
    assert rate(512, 512, 512) == rate(4096, 4096, 4096) == pytest.approx(0.08e12)
    assert rate(256, 256, 256) == rate(64, 256, 1024) == pytest.approx(0.04e12)


def test_the_planner_goes_by_what_was_measured():
    node = a_node()
    found = planned(node)
    assert parameters.on(node).straggler == 0.0 and parameters.on(node).matmul_share == 1.0
    assert parameters.on(node).flash_share == parameters.load().flash_share
    slow = [dataclasses.replace(row, points=[[s, 3 * t] for s, t in row.points])
            for row in node.collectives]  # fmt: skip
    assert planned(dataclasses.replace(node, collectives=slow)).seconds > found.seconds
    products = {"fp32": [[edge, 2 * rate] for edge, rate in node.gpu.products["fp32"]]}
    quick = dataclasses.replace(node, gpu=dataclasses.replace(node.gpu, products=products))
    assert planned(quick).step.busy["compute"] < found.step.busy["compute"]


def test_what_may_stay_gathered_is_gathered_once_per_step():
    apart = ["parallel.overlap_communication=false"]  # nothing beside computation
    one, few, many = (
        planned(a_node(), settings=[*apart, f"batch.accumulation={n}"]) for n in (1, 3, 20)
    )
    busy = one.step.busy
    each = busy["compute"] + busy["reduce-scatter"]
    for more in (few, many):
        again = more.work.passes - 1
        assert more.seconds == pytest.approx(one.seconds + again * each)
        assert more.step.busy["all-gather"] == pytest.approx(busy["all-gather"])
        assert more.step.exposed["all-gather"] == pytest.approx(busy["all-gather"])
        assert more.step.busy["compute"] == pytest.approx((1 + again) * busy["compute"])
    freed = [*apart, "parallel.sdp_max_live_parameters=0", "batch.accumulation=20"]
    assert planned(a_node(), settings=freed).seconds > many.seconds


def test_what_collectives_cost_goes_by_where_their_ranks_stand():
    known, other = (links.MeasuredLinks(a_node(), name, True) for name in ("nearlinear", "auto"))
    across, inside = Group(8, 4, 2), Group(2, 1, 1)
    assert known.lost_in_turn(across, 10.0, 2) == 5.0
    assert known.lost_beside(across, 10.0, 2) == 2.0
    assert known.lost_in_turn(inside, 10.0, 2) == 0.5
    assert known.lost_beside(inside, 10.0, 2) == 0.25
    assert known.lost_beside(Group(1, 1, 1), 10.0, 2) == 0.0  # there is nobody to send to
    assert other.lost_in_turn(across, 10.0, 2) == 0.0  # as whichever was first
    assert other.lost_in_turn(inside, 10.0, 2) == 0.0  # nobody measured it


APART = ["parallel.overlap_communication=false"]


def costing(cost: dict, *places):
    """A node on which collectives cost so much, at these places alone."""
    return a_node(contention=[Contention("gloo", *place, **cost) for place in places])


@pytest.mark.parametrize("settings, most", [(APART, 1.5), ([], 1.2)])
def test_cores_that_compute_and_move_bytes_do_both_slower(settings, most):
    shared = {"turn_share": 0.5, "borrowed_share": 0.2}
    before, after = (
        planned(costing(each, (4, 4, 1)), settings=settings).step.busy for each in ({}, shared)
    )
    longer = after["compute"] / before["compute"]
    assert longer == pytest.approx(most) if settings else 1 < longer <= most
    assert after["reduce-scatter"] == pytest.approx(before["reduce-scatter"])


def test_the_second_hop_takes_cores_too():
    """Shards inside a node, replicas across: only what is between nodes costs here."""
    settings = ["parallel.hybrid_shard_degree=2"]
    alone, shared = (
        planned(
            dataclasses.replace(costing(cost, (2, 2, 2)), gpus=2), nodes=2, settings=settings
        ).step.busy["compute"]
        for cost in ({}, {"borrowed_share": 0.5})
    )
    assert shared > alone


@pytest.mark.parametrize("key, settings", [("turn_seconds", APART), ("borrowed_seconds", [])])
def test_what_every_collective_costs_goes_with_their_number(key, settings):
    """Two gathers and a reduction of a block in a pass: one gather and a reduction where it stays
    gathered for all passes; and of a step one second hop."""
    cost = 1e-3

    def more(*settings, degree=2, passes=4):
        settings = [f"parallel.hybrid_shard_degree={degree}", f"batch.accumulation={passes}",
                    *settings]  # fmt: skip
        before, after = (
            planned(costing({key: each}, (4, 4, 1)), settings=settings) for each in (0.0, cost)
        )
        share = after.step.busy["compute"] / before.step.busy["compute"] - 1
        parts = before.step.parts
        block = parts.compute
        each = block.forward.total + block.again.total + block.backward.total
        moving = parts.reduce_block + parts.join_block / passes
        moving += parts.gather_block * (2 if freed in settings else 1 / passes)
        assert share > 0
        return share * (each if key == "turn_seconds" else max(each, moving)) / cost

    freed = "parallel.sdp_max_live_parameters=0"
    assert more(*settings, freed, degree=4) == pytest.approx(3, rel=1e-3)
    assert more(*settings, freed) == pytest.approx(3.25, rel=1e-3)
    assert more(*settings, degree=4) == pytest.approx(1.25, rel=1e-3)


def test_new_memory_costs_where_its_pages_are_cleared():
    """Gradients of every pass, and of a sharded model what is reduced, unless that is kept."""
    passes, seconds = 4, 1.0  # for each GB

    def more(*settings):
        before, after = (
            planned(
                a_node(measured={**a_node().measured, "fresh_seconds": each}, contention=[]),
                settings=[f"batch.accumulation={passes}", *settings],
            )
            for each in (0.0, seconds)
        )
        parameters = before.work.shape.layers * before.step.parts.block
        return (after.step.busy["compute"] - before.step.busy["compute"]) / (4e-9 * parameters)

    alone = more("parallel.hybrid_shard_degree=1")
    kept, freed = (more(*APART, f"parallel.sdp_max_live_parameters={most}") for most in (10**9, 0))
    here = more(*APART, "parallel.communication_backend='nearlinear'")
    assert alone > passes * seconds
    assert freed > kept > here > alone
    assert parameters.load().fresh_seconds == 0.0  # GPUs keep theirs


@given(st.floats(0, 2), st.floats(0, 0.1), st.floats(0.1, 5), st.floats(0.1, 5))
def test_two_losses_tell_what_goes_with_number_and_what_with_size(share, seconds, large, small):
    assume(abs(large * 24 - small * 6) > 0.1)
    lost = share * large + 6 * seconds, share * small + 24 * seconds
    found = contention.shares(lost, (large, small), (6, 24))
    assert found == pytest.approx((share, seconds), abs=1e-6)


@pytest.mark.parametrize("lost, expected", [
    ((0.6, 0.1), (0.6 / 1.0, 0.0)),  # far fewer seconds than the number says
    ((0.0, 2.4), (0.0, 0.1 * 24 * 24 / (6 * 6 + 24 * 24))),
    ((-0.5, -0.1), (0.0, 0.0)),
])  # fmt: skip
def test_what_is_lost_is_never_below_nothing(lost, expected):
    share, seconds = contention.shares(lost, (1.0, 0.0), (6, 24))
    assert (share, seconds) == pytest.approx(expected, abs=0.03)


def test_a_machine_is_a_key_of_the_config(tmp_path, capsys):
    path, run = tmp_path / "here.toml", tmp_path / "run.toml"
    path.write_text(tuned.to_toml(a_node()), encoding="utf-8")
    run.write_text('[model]\npreset = "gpt2-tiny"\n', encoding="utf-8")
    said = []
    tables = tuned.to_toml(a_node()).replace("[gpu.", "[plan.machine.gpu.")
    tables = tables.replace("[node.", "[plan.machine.node.")
    for text, flags in (
        ("", ["--cluster", f"{path}:4"]),
        (f'[plan]\ncluster = "{path}:4"\n', []),
        (f'[plan]\ncluster = "here:4"\n{tables}', []),
    ):
        run.write_text(f'[model]\npreset = "gpt2-tiny"\n{text}', encoding="utf-8")
        assert cli.main(["plan", str(run), *flags]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] and "4 x here, 4 device" in said[0]


GOOD = tuned.to_toml(a_node())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a table [gpu.NAME] and one [node.NAME]"),
        (GOOD.replace('gpu = "device"', 'gpu = "other"'), "needs gpu = one of device"),
        (GOOD.replace("gpus = 1", "gpu_count = 1"), "unknown key 'gpu_count'"),
        (GOOD.replace("hbm_gb_s = 10.0", "hbm_gb_s = 'fast'"), "expected a number"),
        (GOOD.replace("straggler = 0.0", "stragler = 0.0"), "did you mean 'straggler'"),
        (GOOD.replace("ranks = 4", "ranks = 1"), "a collective between 1 ranks"),
        (GOOD.replace("[65536.0, 0.0", "[65536.0, -0.0"), "both above 0"),
        (GOOD.replace("128.0, 0.02", "128.0, 0.0"), "[edge, TFLOPS]"),
        ("[gpu", "not valid TOML"),
        (GOOD.replace('gpu = "device"', 'gpu = ["device"]'), "needs gpu = one of device"),
        (GOOD.replace("hbm_gb_s = 10.0", "hbm_gb_s = 0.0"), "hbm_gb_s = 0: must be a number above"),
        (GOOD.replace("memory_gib = 8.0", "memory_gib = nan"), "memory_gib = nan"),
        (GOOD.replace("multiprocessors = 1", "multiprocessors = 0"), "multiprocessors = 0"),
        (GOOD.replace("peak_tflops]  #", "peak_tflops]\nbf16 = inf #"), "peak_tflops.bf16 = inf"),
        (GOOD.replace("held_to_watts = 0.0", "held_to_watts = 9.0"), "watts = 0: must be a number"),
        (GOOD.replace("gpus = 1", "gpus = 0"), "gpus = 0"),
        (GOOD.replace("network_gbps = 1.0", "network_gbps = -1.0"), "network_gbps = -1"),
        (GOOD.replace("gpus = 1", "gpus = 1\nusd_per_hour = -3"), "usd_per_hour = -3"),
        (GOOD.replace("matmul_share = 1.0", "matmul_share = 0.0"), "matmul_share = 0"),
        (GOOD.replace("straggler = 0.0", "straggler = nan"), "straggler = nan"),
        (GOOD.replace("128.0, 0.02", "512.0, 0.02"), "each edge above the one before"),
        (GOOD.replace("[1048576.0,", "[65536.0,"), "each size above the one before"),
        (GOOD.replace('kind = "exchange"', 'kind = "gather"'), "allowed are"),
        (GOOD.replace("turn_share = 0.5", "turn_share = -0.5"), "contention.turn_share = -0.5"),
        (GOOD.replace("turn_share = 0.5", "turn_part = 0.5"), "unknown key 'turn_part'"),
        (GOOD.replace("sharing = 1", "sharing = 0", 1), "0 at once: measure again"),
        (
            GOOD[: GOOD.index("\n[[")] + '\n[node."here".contention.gloo]\nturn_share = 0.1\n',
            "contention",
        ),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, capsys, text, words):
    path = tmp_path / "here.toml"
    path.write_text(text, encoding="utf-8")
    assert cli.main(["plan", "--cluster", f"{path}:2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err and "here.toml" in err, err


def test_links_may_be_missing_only_where_they_were_measured(tmp_path):
    """A rank alone has none to measure; a data sheet has them."""
    path = tmp_path / "here.toml"
    text = GOOD.replace("link_gb_s = 1.0", "link_gb_s = 0.0")
    path.write_text(text, encoding="utf-8")
    assert machine.read(path).gpu.link_gb_s == 0
    begin = text.index('[node."here".measured]')
    path.write_text(text[:begin], encoding="utf-8")
    with pytest.raises(ConfigError, match="link_gb_s = 0: must be a number above 0"):
        machine.read(path)


@pytest.fixture
def quickly(monkeypatch):
    """Chunks too short to tell a rate by, and no job left behind."""
    monkeypatch.setattr(rates, "CHUNK", 1e-3)
    monkeypatch.setitem(rates.EDGES, "cpu", (16, 32))
    yield
    runtime.shutdown()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--machine", "here.json"], "must end in .toml"),
        (["--machine", "{folder}/here.toml", "--json", "{folder}/x.json"], "for any: give one"),
        (["--machine", "{folder}/here.toml", "--rounds", "0"], "--rounds 0"),
        (["--machine", "/proc/nowhere/here.toml"], "cannot be written"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, flags, words):
    assert cli.main(["tune", *(flag.format(folder=tmp_path) for flag in flags)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err, err


def test_one_rank_measures_itself_and_can_be_planned_on(tmp_path, capsys, quickly):
    path = tmp_path / "here.toml"
    assert cli.main(["tune", "--machine", str(path), "--rounds", "1"]) == 0
    assert "products, TFLOPS" in capsys.readouterr().out
    node = machine.read(path)
    assert node.collectives == [] and node.gpus == 1 and node.gpu.hbm_gb_s > 0
    assert {p: [e for e, _ in points] for p, points in node.gpu.products.items()} == {
        "fp32": [16, 32], "bf16": [16, 32]}  # fmt: skip
    assert 0 < node.measured["flash_share"] <= 1
    assert node.contention == [] and node.measured["fresh_seconds"] >= 0
    assert cli.main(["plan", "--cluster", f"{path}:1"]) == 0
    assert cli.main(["plan", "--cluster", f"{path}:2"]) == 2  # no network was measured
    assert "run nearlinear tune --machine on ranks that stand so" in capsys.readouterr().err


def on_two_nodes(rank):
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    rates.CHUNK, rates.EDGES["cpu"] = 1e-3, (16, 32)
    return tuned.measure(train_config.load({}), "here", 1)


@needs_hooks
@pytest.mark.slow
def test_ranks_on_two_nodes_measure_every_group_they_may_have():
    found = nl.spmd.run(on_two_nodes, 4, processes=True)
    node = found[0]
    assert all(other.collectives == node.collectives for other in found)
    seen = {(r.ranks, r.nodes, r.sharing) for r in node.collectives}
    assert seen == {(4, 2, 1), (2, 1, 1), (2, 2, 2)}
    gloo = {r.kind for r in node.collectives if r.backend == "gloo"}
    assert gloo == {ALL_GATHER, REDUCE_SCATTER, EXCHANGE, ALL_REDUCE}
    assert node.gpus == 2 and node.network_gbps > 0 and node.gpu.link_gb_s > 0
    places = {(r.backend, r.ranks, r.nodes, r.sharing) for r in node.collectives}
    assert {(r.backend, r.ranks, r.nodes, r.sharing) for r in node.contention} == places
    assert all(getattr(row, name) >= 0 for row in node.contention for name in MEASURED)
    plan = planned(node, nodes=8, settings=["parallel.hybrid_shard_degree=4"])
    assert plan.work.mesh.replicate == 4 and plan.seconds > 0


@pytest.mark.gpu
def test_a_gpu_measures_itself(tmp_path):
    import torch

    path = tmp_path / "here.toml"
    flags = ["--set", "run.nproc=1", "--rounds", "2"]
    try:
        assert cli.main(["tune", "--machine", str(path), *flags]) == 0
    finally:
        runtime.shutdown()
    node = machine.read(path)
    properties = torch.cuda.get_device_properties(0)
    assert node.gpu.memory_gib == properties.total_memory / 2**30
    assert node.gpu.multiprocessors == properties.multi_processor_count
    assert set(node.gpu.products) == {"fp32", "fp16", "bf16"}
    assert node.gpu.host_gb_s > 0
    found = planned(node, nodes=1, settings=["parallel.bf16=true"])
    assert found.seconds > 0 and 0 < found.mfu < 1
