"""``nearlinear tune --machine``: measurements, the machine file, and plans made from it."""

import dataclasses
import os
import tomllib

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear import cli
from nearlinear.config import train as train_config
from nearlinear.distributed import runtime
from nearlinear.errors import ConfigError
from nearlinear.planner import api
from nearlinear.planner.api import parse_cluster, read_measured_node
from nearlinear.planner.calibrate import rates
from nearlinear.planner.calibrate.collectives import split_cost
from nearlinear.planner.calibrate.command import measure_node, node_to_toml
from nearlinear.planner.cluster import (
    ALL_GATHER,
    ALL_REDUCE,
    CONTENTION_COSTS,
    EXCHANGE,
    REDUCE_SCATTER,
    Accelerator,
    Cluster,
    MeasuredCollective,
    MeasuredContention,
    Node,
)
from nearlinear.planner.compute_time import MeasuredMatmulRates
from nearlinear.planner.fitted_constants import constants_for, load_constants
from nearlinear.planner.network_time import MeasuredNetwork, RankGroup
from tests.support.releases import needs_hooks

MIB = 2.0**20
LATENCY, BYTES_PER_SECOND = 1e-3, 125e6


def timed(kind, ranks, nodes, sharing=1, backend="gloo", factor=1.0):
    """Timings of links with `BYTES_PER_SECOND` per node and `LATENCY` per peer."""
    crossing = (ranks - 1) / ranks * (sharing if nodes > 1 else 1)

    def seconds(size):
        return factor * ((ranks - 1) * LATENCY + size * crossing / BYTES_PER_SECOND)

    points = [[size, seconds(size)] for size in (MIB / 16, MIB, 8 * MIB)]
    return MeasuredCollective(kind, backend, ranks, nodes, sharing, points)


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
    gpu = Accelerator(
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
            MeasuredContention("gloo", 2, 2, 1),
            MeasuredContention("nearlinear", 2, 2, 1, turn_share=0.5, borrowed_share=0.2),
            MeasuredContention("nearlinear", 2, 1, 1, turn_seconds=0.25, borrowed_seconds=0.125),
        ],
        "collectives": rows,
    }
    return Node(**known | changes)


RUN = {"model": {"preset": "gpt2-tiny"}, "batch": {"accumulation": 4}}


def planned(node, nodes=4, run=None, settings=()):
    config = train_config.load(run or RUN, settings, environment={})
    return api.plan(config, Cluster(node, nodes))


def test_machine_file_round_trips(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(node_to_toml(a_node()), encoding="utf-8")
    assert read_measured_node(path) == a_node()
    cluster = parse_cluster(f"{path}:3")
    assert cluster.world == 3 and cluster.node == a_node()


def test_collective_timings_interpolate_linearly():
    row = timed(ALL_GATHER, 2, 2)
    for size in (MIB / 16, MIB / 2, MIB, 3 * MIB, 8 * MIB, 100 * MIB):
        assert row.seconds(size) == pytest.approx(LATENCY + size / 2 / BYTES_PER_SECOND)
    assert row.seconds(0) >= row.points[0][1] / 2  # the latency never vanishes


@pytest.mark.parametrize(
    ("ranks", "nodes", "sharing"), [(2, 2, 1), (4, 4, 1), (8, 8, 1), (2, 2, 2)]
)
def test_unmeasured_groups_are_scaled_from_measured_ones(ranks, nodes, sharing):
    found = MeasuredNetwork(a_node(), "gloo", exchanged=False)
    expected = timed(ALL_GATHER, ranks, nodes, sharing).seconds(8 * MIB)
    assert found.all_gather(8 * MIB, RankGroup(ranks, nodes, sharing)) == pytest.approx(
        expected, rel=0.02
    )


def test_reduce_scatter_uses_the_measured_implementation():
    by_exchange, own = (MeasuredNetwork(a_node(), "gloo", e) for e in (True, False))
    pair = RankGroup(2, 2, 1)
    gather = own.all_gather(MIB, pair)
    assert own.reduce_scatter(MIB, pair) == pytest.approx(2 * gather)
    assert by_exchange.reduce_scatter(MIB, pair) == pytest.approx(1.5 * gather)
    assert own.all_reduce(MIB, pair) == pytest.approx(2 * gather)
    assert own.all_gather(MIB, RankGroup(1, 1, 1)) == 0.0
    other = MeasuredNetwork(a_node(), "nearlinear", exchanged=True)
    assert other.all_gather(MIB, pair) == pytest.approx(gather / 2)
    unknown = MeasuredNetwork(a_node(), "auto", exchanged=True)
    assert unknown.all_gather(MIB, pair) == gather  # the first backend measured


def test_hierarchical_all_gather_crosses_nodes_once():
    found = MeasuredNetwork(a_node(), "gloo", exchanged=False)
    four = RankGroup(4, 2, 1)
    staged = found.all_gather(8 * MIB, four, hierarchical=True)
    across = found.all_gather(4 * MIB, RankGroup(2, 2, 2))
    inside = found.all_gather(4 * MIB, RankGroup(2, 1, 1))
    assert staged == pytest.approx(across + 2 * inside)


def test_unmeasured_kind_of_group_raises():
    rows = [row for row in a_node().collectives if row.nodes > 1]
    found = MeasuredNetwork(a_node(collectives=rows), "gloo", exchanged=False)
    with pytest.raises(ConfigError, match="no measured all-gather inside a node"):
        found.all_gather(MIB, RankGroup(2, 1, 1))


def test_matmul_rate_interpolates_by_size():
    rate = MeasuredMatmulRates([[128.0, 0.02], [512.0, 0.08]]).rate
    assert rate(64, 64, 64) == pytest.approx(0.02e12)
    assert rate(512, 512, 512) == rate(4096, 4096, 4096) == pytest.approx(0.08e12)
    assert rate(256, 256, 256) == rate(64, 256, 1024) == pytest.approx(0.04e12)


def test_planner_uses_measured_rates():
    node = a_node()
    found = planned(node)
    assert constants_for(node).straggler == 0.0 and constants_for(node).matmul_share == 1.0
    assert constants_for(node).flash_share == load_constants().flash_share
    slow = [dataclasses.replace(row, points=[[s, 3 * t] for s, t in row.points])
            for row in node.collectives]  # fmt: skip
    assert planned(dataclasses.replace(node, collectives=slow)).seconds > found.seconds
    products = {"fp32": [[edge, 2 * rate] for edge, rate in node.gpu.products["fp32"]]}
    quick = dataclasses.replace(node, gpu=dataclasses.replace(node.gpu, products=products))
    assert planned(quick).step.busy["compute"] < found.step.busy["compute"]


@pytest.mark.parametrize("reduction", ["auto", "micro_batch"])
def test_resident_blocks_are_gathered_once_per_step(reduction):
    """And reduced once, unless every micro-batch is to be reduced."""
    apart = [
        "parallel.overlap_communication=false",
        f"parallel.gradient_reduction={reduction!r}",
    ]
    one, few, many = (
        planned(a_node(), settings=[*apart, f"batch.accumulation={n}"]) for n in (1, 3, 20)
    )
    busy = one.step.busy
    each = busy["compute"] + busy["reduce-scatter"] * (reduction == "micro_batch")
    for more in (few, many):
        again = more.work.micro_batches - 1
        assert more.seconds == pytest.approx(one.seconds + again * each)
        assert more.step.busy["all-gather"] == pytest.approx(busy["all-gather"])
        assert more.step.exposed["all-gather"] == pytest.approx(busy["all-gather"])
        assert more.step.busy["compute"] == pytest.approx((1 + again) * busy["compute"])
    freed = [*apart, "parallel.sdp_max_live_parameters=0", "batch.accumulation=20"]
    assert planned(a_node(), settings=freed).seconds > many.seconds


def test_contention_depends_on_rank_placement():
    known, other = (MeasuredNetwork(a_node(), name, True) for name in ("nearlinear", "auto"))
    across, inside = RankGroup(8, 4, 2), RankGroup(2, 1, 1)
    assert known.interleaved_cost(across, 10.0, 2) == 5.0
    assert known.concurrent_cost(across, 10.0, 2) == 2.0
    assert known.interleaved_cost(inside, 10.0, 2) == 0.5
    assert known.concurrent_cost(inside, 10.0, 2) == 0.25
    assert known.concurrent_cost(RankGroup(1, 1, 1), 10.0, 2) == 0.0  # a single rank
    assert other.interleaved_cost(across, 10.0, 2) == 0.0  # the first backend measured
    assert other.interleaved_cost(inside, 10.0, 2) == 0.0  # not measured


APART = ["parallel.overlap_communication=false"]


def costing(cost: dict, *places):
    """Return a node with contention costs for some placements only."""
    return a_node(contention=[MeasuredContention("gloo", *place, **cost) for place in places])


@pytest.mark.parametrize("settings, most", [(APART, 1.5), ([], 1.2)])
def test_contention_slows_compute(settings, most):
    shared = {"turn_share": 0.5, "borrowed_share": 0.2}
    before, after = (
        planned(costing(each, (4, 4, 1)), settings=settings).step.busy for each in ({}, shared)
    )
    longer = after["compute"] / before["compute"]
    assert longer == pytest.approx(most) if settings else 1 < longer <= most
    assert after["reduce-scatter"] == pytest.approx(before["reduce-scatter"])


def test_all_reduce_over_replicas_slows_compute():
    """Shard groups are inside a node, replicas across nodes: only inter-node contention counts."""
    settings = ["parallel.hybrid_shard_degree=2"]
    alone, shared = (
        planned(
            dataclasses.replace(costing(cost, (2, 2, 2)), gpus=2), nodes=2, settings=settings
        ).step.busy["compute"]
        for cost in ({}, {"borrowed_share": 0.5})
    )
    assert shared > alone


@pytest.mark.parametrize("key, settings", [("turn_seconds", APART), ("borrowed_seconds", [])])
def test_cost_per_collective_scales_with_their_number(key, settings):
    """Expect two all-gathers and one reduce-scatter per block and micro-batch.

    A resident block has a single all-gather per step, and a single reduce-scatter if its gradients
    stay unreduced; every step has one second hop."""
    cost = 1e-3

    def more(*settings, degree=2, passes=4):
        settings = [f"parallel.hybrid_shard_degree={degree}", f"batch.accumulation={passes}",
                    *settings]  # fmt: skip
        before, after = (
            planned(costing({key: each}, (4, 4, 1)), settings=settings) for each in (0.0, cost)
        )
        share = after.step.busy["compute"] / before.step.busy["compute"] - 1
        parts = before.step.blocks
        block = parts.compute
        each = block.forward.total + block.recompute.total + block.backward.total
        moving = parts.block_reduce_scatter + parts.block_all_reduce / passes
        moving += parts.block_all_gather * (2 if freed in settings else 1 / passes)
        assert share > 0
        return share * (each if key == "turn_seconds" else max(each, moving)) / cost

    freed = "parallel.sdp_max_live_parameters=0"
    assert more(*settings, freed, degree=4) == pytest.approx(3, rel=1e-3)
    assert more(*settings, freed) == pytest.approx(3.25, rel=1e-3)
    assert more(*settings, degree=4) == pytest.approx(0.5, rel=1e-3)
    reduced = "parallel.gradient_reduction='micro_batch'"
    assert more(*settings, reduced, degree=4) == pytest.approx(1.25, rel=1e-3)


def test_first_writes_to_memory_cost_time():
    """First writes: gradients of every micro-batch, and reduction buffers that are not reused."""
    passes, seconds = 4, 1.0  # seconds per GB

    def more(*settings):
        before, after = (
            planned(
                a_node(measured={**a_node().measured, "fresh_seconds": each}, contention=[]),
                settings=[f"batch.accumulation={passes}", *settings],
            )
            for each in (0.0, seconds)
        )
        parameters = before.work.shape.layers * before.step.blocks.block_parameters
        return (after.step.busy["compute"] - before.step.busy["compute"]) / (4e-9 * parameters)

    alone = more("parallel.hybrid_shard_degree=1")
    kept, freed = (more(*APART, f"parallel.sdp_max_live_parameters={most}") for most in (10**9, 0))
    here = more(*APART, "parallel.communication_backend='nearlinear'")
    assert alone > passes * seconds
    assert freed > kept > here > alone
    assert load_constants().fresh_seconds == 0.0  # GPUs reuse memory


@given(st.floats(0, 2), st.floats(0, 0.1), st.floats(0.1, 5), st.floats(0.1, 5))
def test_split_cost_separates_size_from_number(share, seconds, large, small):
    assume(abs(large * 24 - small * 6) > 0.1)
    lost = share * large + 6 * seconds, share * small + 24 * seconds
    found = split_cost(lost, (large, small), (6, 24))
    assert found == pytest.approx((share, seconds), abs=1e-6)


@pytest.mark.parametrize("lost, expected", [
    ((0.6, 0.1), (0.6 / 1.0, 0.0)),  # the number of calls does not explain the loss
    ((0.0, 2.4), (0.0, 0.1 * 24 * 24 / (6 * 6 + 24 * 24))),
    ((-0.5, -0.1), (0.0, 0.0)),
])  # fmt: skip
def test_split_cost_is_never_negative(lost, expected):
    share, seconds = split_cost(lost, (1.0, 0.0), (6, 24))
    assert (share, seconds) == pytest.approx(expected, abs=0.03)


def test_config_may_contain_a_measured_machine(tmp_path, capsys):
    path, run = tmp_path / "here.toml", tmp_path / "run.toml"
    path.write_text(node_to_toml(a_node()), encoding="utf-8")
    run.write_text('[model]\npreset = "gpt2-tiny"\n', encoding="utf-8")
    said = []
    tables = node_to_toml(a_node()).replace("[gpu.", "[plan.machine.gpu.")
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


GOOD = node_to_toml(a_node())


def test_file_of_an_earlier_version_is_read():
    older = GOOD.replace("watts = 0.0", "watts = 0.0\nheld_to_watts = 0.0")
    assert api.node_from_tables(tomllib.loads(older), "here.toml") == a_node()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a table [gpu.NAME] and one [node.NAME]"),
        (GOOD.replace('gpu = "device"', 'gpu = "other"'), "needs gpu = one of device"),
        (GOOD.replace("gpus = 1", "gpu_count = 1"), "unknown key 'gpu_count'"),
        (GOOD.replace("hbm_gb_s = 10.0", "hbm_gb_s = 'fast'"), "expected a number"),
        (GOOD.replace("straggler = 0.0", "stragler = 0.0"), "did you mean 'straggler'"),
        (GOOD.replace("ranks = 4", "ranks = 1"), "collective between 1 ranks"),
        (GOOD.replace("[65536.0, 0.0", "[65536.0, -0.0"), "above 0"),
        (GOOD.replace("128.0, 0.02", "128.0, 0.0"), "[edge, TFLOPS]"),
        ("[gpu", "not valid TOML"),
        (GOOD.replace('gpu = "device"', 'gpu = ["device"]'), "needs gpu = one of device"),
        (GOOD.replace("hbm_gb_s = 10.0", "hbm_gb_s = 0.0"), "hbm_gb_s = 0: must be a number above"),
        (GOOD.replace("memory_gib = 8.0", "memory_gib = nan"), "memory_gib = nan"),
        (GOOD.replace("multiprocessors = 1", "multiprocessors = 0"), "multiprocessors = 0"),
        (GOOD.replace("peak_tflops]  #", "peak_tflops]\nbf16 = inf #"), "peak_tflops.bf16 = inf"),
        (GOOD.replace("watts = 0.0", "watts = -1.0"), "watts = -1: must be a number"),
        (GOOD.replace("gpus = 1", "gpus = 0"), "gpus = 0"),
        (GOOD.replace("network_gbps = 1.0", "network_gbps = -1.0"), "network_gbps = -1"),
        (GOOD.replace("gpus = 1", "gpus = 1\nusd_per_hour = -3"), "usd_per_hour = -3"),
        (GOOD.replace("matmul_share = 1.0", "matmul_share = 0.0"), "matmul_share = 0"),
        (GOOD.replace("straggler = 0.0", "straggler = nan"), "straggler = nan"),
        (GOOD.replace("128.0, 0.02", "512.0, 0.02"), "ascending edges"),
        (GOOD.replace("[1048576.0,", "[65536.0,"), "ascending sizes"),
        (GOOD.replace('kind = "exchange"', 'kind = "gather"'), "allowed are"),
        (GOOD.replace("turn_share = 0.5", "turn_share = -0.5"), "contention.turn_share = -0.5"),
        (GOOD.replace("turn_share = 0.5", "turn_part = 0.5"), "unknown key 'turn_part'"),
        (GOOD.replace("sharing = 1", "sharing = 0", 1), "0 at once. Measure again"),
        (
            GOOD[: GOOD.index("\n[[")] + '\n[node."here".contention.gloo]\nturn_share = 0.1\n',
            "contention",
        ),
    ],
)
def test_invalid_machine_file_is_reported_in_one_line(tmp_path, capsys, text, words):
    path = tmp_path / "here.toml"
    path.write_text(text, encoding="utf-8")
    assert cli.main(["plan", "--cluster", f"{path}:2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err and "here.toml" in err, err


def test_measured_node_may_lack_links(tmp_path):
    """A single rank cannot measure links, but a data sheet must have them."""
    path = tmp_path / "here.toml"
    text = GOOD.replace("link_gb_s = 1.0", "link_gb_s = 0.0")
    path.write_text(text, encoding="utf-8")
    assert read_measured_node(path).gpu.link_gb_s == 0
    begin = text.index('[node."here".measured]')
    path.write_text(text[:begin], encoding="utf-8")
    with pytest.raises(ConfigError, match="link_gb_s = 0: must be a number above 0"):
        read_measured_node(path)


@pytest.fixture
def quickly(monkeypatch):
    """Use measurements too short for exact rates."""
    monkeypatch.setattr(rates, "CHUNK_SECONDS", 1e-3)
    monkeypatch.setitem(rates.EDGES, "cpu", (16, 32))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--machine", "here.json"], "must end in .toml"),
        (["--machine", "{folder}/here.toml", "--json", "{folder}/x.json"], "Give only one of them"),
        (["--machine", "{folder}/here.toml", "--rounds", "0"], "--rounds 0"),
        (["--machine", "/proc/nowhere/here.toml"], "cannot be written"),
    ],
)
def test_tune_machine_reports_a_mistake_in_one_line(tmp_path, capsys, flags, words):
    assert cli.main(["tune", *(flag.format(folder=tmp_path) for flag in flags)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err, err


def test_one_rank_measures_a_machine_for_the_planner(tmp_path, capsys, quickly):
    path = tmp_path / "here.toml"
    assert cli.main(["tune", "--machine", str(path), "--rounds", "1"]) == 0
    assert "matrix products, TFLOPS" in capsys.readouterr().out
    node = read_measured_node(path)
    assert node.collectives == [] and node.gpus == 1 and node.gpu.hbm_gb_s > 0
    assert {p: [e for e, _ in points] for p, points in node.gpu.products.items()} == {
        "fp32": [16, 32], "bf16": [16, 32]}  # fmt: skip
    assert 0 < node.measured["flash_share"] <= 1
    assert node.contention == [] and node.measured["fresh_seconds"] >= 0
    assert cli.main(["plan", "--cluster", f"{path}:1"]) == 0
    assert cli.main(["plan", "--cluster", f"{path}:2"]) == 2  # no network was measured
    assert "Run nearlinear tune --machine on ranks with that placement" in capsys.readouterr().err


def on_two_nodes(rank):
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    rates.CHUNK_SECONDS, rates.EDGES["cpu"] = 1e-3, (16, 32)
    nl.init({})
    return measure_node(runtime.current(), "here", 1)


@needs_hooks
@pytest.mark.slow
def test_two_nodes_measure_every_kind_of_group():
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
    assert all(getattr(row, name) >= 0 for row in node.contention for name in CONTENTION_COSTS)
    plan = planned(node, nodes=8, settings=["parallel.hybrid_shard_degree=4"])
    assert plan.work.mesh.replicate == 4 and plan.seconds > 0


@pytest.mark.gpu
def test_gpu_measurement(tmp_path):
    import torch

    path = tmp_path / "here.toml"
    flags = ["--set", "run.nproc=1", "--rounds", "2"]
    assert cli.main(["tune", "--machine", str(path), *flags]) == 0
    node = read_measured_node(path)
    properties = torch.cuda.get_device_properties(0)
    assert node.gpu.memory_gib == properties.total_memory / 2**30
    assert node.gpu.multiprocessors == properties.multi_processor_count
    assert set(node.gpu.products) == {"fp32", "fp16", "bf16"}
    assert node.gpu.host_gb_s > 0
    found = planned(node, nodes=1, settings=["parallel.bf16=true"])
    assert found.seconds > 0 and 0 < found.mfu < 1
