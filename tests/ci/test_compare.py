"""`ci.benchmarks.compare`: arithmetic, validation, and a small comparison of all systems."""

import itertools
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.benchmarks.compare import __main__ as command
from ci.benchmarks.compare import peers, race, report, run, sweep, trace, traffic, training
from ci.benchmarks.compare.config import CompareConfig
from ci.benchmarks.compare.systems import LADDERS, SYSTEMS
from ci.emulation.cluster import unavailable_reason


def record(system, step, seconds, loss=2.0, timed=True):
    return {
        "system": system,
        "step": step,
        "seconds": seconds,
        "sent_bytes": 3 * 2**20,
        "loss": loss,
        "timed": timed,
    }


def test_table_shows_medians_and_their_ratios():
    records = [record("fsdp2", 0, 90.0, timed=False)]
    records += [record("fsdp2", step, seconds) for step, seconds in enumerate((4.0, 6.0, 5.0), 1)]
    records += [record("ours", step, seconds) for step, seconds in enumerate((2.0, 9.0, 2.5), 1)]
    _, _, fsdp2, ours = report.render(CompareConfig(systems=()), records).splitlines()
    assert fsdp2.split(" | ")[1:] == ["5.00", "4.00-6.00", "3.0", "560.5", "1.00x |"]
    assert ours.split(" | ")[1:] == ["2.50", "2.00-9.00", "3.0", "199.0", "2.00x |"]


def test_systems_with_deviating_losses_are_reported():
    records = [record(name, 1, 1.0) for name in ("fsdp2", "hybrid", "ours")]
    assert report.deviating_systems(records) == []
    records += [record("compute", 1, 1.0, loss=3.0)]  # has no communication and may deviate
    records += [record("ours_nl", 1, 1.0, loss=2.001)]
    assert report.deviating_systems(records) == ["ours_nl"]


def test_config_round_trips_through_json():
    config = CompareConfig(systems=("ours", "fsdp2"), nodes=3, rate="200mbit")
    assert CompareConfig.from_json(config.to_json()) == config


def test_systems_with_the_same_default_backend_share_processes():
    names = ["ours", "zero3", "fsdp2", "mics"]
    assert run.group_systems(names) == [["ours", "fsdp2"], ["zero3"], ["mics"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--systems", "hare"], "--systems: unknown hare. Choose from"),
        (["--contestants", "hare"], "--systems: unknown hare. Choose from"),
        (["--systems", "ours", "--shard", "3"], "--shard 3 does not divide 4 ranks"),
        (["--systems", "ours", "--json", "/nowhere/x.json"], "no folder /nowhere"),
        (["--systems", "ours", "--steps", "0"], "steps: 0; must be at least 1"),
        (["--quick", "--steps", "0", "--figures", "/dev/null/no"], "steps: 0; must be at least 1"),
        (["--systems", "ours", "--nodes", "0"], "nodes: 0; must be at least 1"),
    ],
)
def test_invalid_requests_are_rejected(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr("ci.emulation.cluster.nodes.unavailable_reason", lambda: None)
    assert command.main(arguments) == 2
    assert words in capsys.readouterr().err


SMALL = {"layers": 2, "width": 48, "heads": 2, "vocabulary": 128, "sequence": 16, "micro_batch": 1}
SMOKE = ("compute", "zero3", "fsdp2", "fsdp2_nl", "hybrid", "two_hop", "ours", "ours_nl_lean")


@pytest.mark.slow
@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_all_systems_train_the_same_model():
    names = tuple(name for name in SMOKE if peers.is_installed(SYSTEMS[name].requires))
    config = CompareConfig(systems=names, nodes=2, rate="1gbit", steps=1, **SMALL)
    records = run.run_comparison(config, timelines=True)
    assert len(records) == 3 * len(names)
    assert report.deviating_systems(records) == []
    sent = {each["system"]: each["sent_bytes"] for each in records if each["timed"]}
    assert sent["compute"] < sent["ours_nl_lean"] < sent["fsdp2_nl"] < sent["fsdp2"]
    for each in records:
        if each["step"] == 2:
            kinds = {kind for kind, found in each["spans"].items() if found}
            expected = set() if each["system"] == "compute" else {"gather", "reduce"}
            assert expected | {"compute"} <= kinds, each


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_unit_sizes_equal_those_of_the_model(model):
    config = CompareConfig(systems=(), model=model)
    model = training.build_model(config)
    blocks = [sum(p.numel() for p in block.parameters()) for block in training.blocks_of(model)]
    root = sum(p.numel() for p in model.parameters()) - sum(blocks)
    assert traffic.unit_sizes(config) == (root, *blocks)


def test_runs_of_the_race_pair_every_cluster_rate_and_accumulation():
    configs = race.run_configs(steps=3)
    for keys in itertools.combinations(("world", "rate", "accumulation"), 2):
        assert len({tuple(getattr(c, key) for key in keys) for c in configs}) >= len(configs) - 3
    assert len({(c.nodes, c.ranks_per_node, c.rate) for c in configs}) == 9
    assert {c.model for c in configs} == {"gpt2", "llama"}
    one_group = configs[-1]  # hybrid sharding of one group is full sharding
    assert one_group.shard == one_group.world and "hybrid_nl" not in one_group.systems
    slow = replace(configs[0], accumulation=8)
    assert "fsdp2_nl" not in race.contestants(slow) and "ours_nl" in race.contestants(slow)


def test_race_compares_the_fastest_systems_within_each_budget(tmp_path):
    config = CompareConfig(systems=())
    size = 4 * sum(traffic.unit_sizes(config))
    measured = {  # seconds, peak in sizes of the parameters
        "ddp_nl": (5.0, 5.9), "fsdp2_once": (6.2, 4.2), "fsdp2_nl": (9.0, 2.9),
        "ours_nl_lean": (7.5, 2.8), "ours_nl_once": (5.2, 4.3), "ours_once": (6.0, 4.9),
        "ours_nl_whole": (5.0, 5.8),
    }  # fmt: skip
    rows = [
        {"system": name, "step": step, "seconds": seconds, "timed": step == 0, "loss": 1.0,
         **({"peak_bytes": peak * size} if step else {})}
        for name, (seconds, peak) in measured.items()
        for step in range(2)
    ]  # fmt: skip
    runs = [{"config": asdict(config), "results": rows}]
    found = {cell.budget: cell for cell in race.cells(runs)}
    assert [(c.ours, c.other) for c in found.values()] == [
        ("ours_nl_lean", "fsdp2_nl"),
        ("ours_nl_lean", "fsdp2_once"),
        ("ours_nl_once", "fsdp2_once"),
        ("ours_nl_whole", "ddp_nl"),
    ]
    assert found[3.0].ratio == pytest.approx(9.0 / 7.5) and found[6.0].ratio == 1.0
    assert [cell.gathered_fits for cell in found.values()] == [False, True, True, True]
    on_gloo = {cell.budget: (cell.ours, cell.other) for cell in race.cells(runs, gloo_only=True)}
    assert on_gloo[3.0] == (None, None) and on_gloo[6.0] == ("ours_once", "fsdp2_once")
    shown = race.render(runs)
    assert "Geometric mean over all cells (4)" in shown and "1.20x" in shown
    report.save(report.plot_fronts(runs, race.OURS), tmp_path / "race.svg")
    assert "accumulation" in (tmp_path / "race.svg").read_text()


def test_race_runs_heats_and_a_final_of_the_fastest_and_continues_its_file(
    tmp_path, monkeypatch, capsys
):
    ran = []
    one, two = race.run_configs(steps=3)[:2]
    slowest = one.systems[-1]

    def run_comparison(config):
        ran.append(config)
        measured = {"peak_bytes": 2**26} if config.memory else {}
        return [
            record(name, 0, 2.0 if name == slowest else 1.0) | measured | {"cpu_seconds": 1.0}
            for name in config.systems
        ]

    monkeypatch.setattr(race, "run_comparison", run_comparison)
    monkeypatch.setattr(race, "exit_status", lambda command, _: command())  # starts no cluster
    file = tmp_path / "race.json"
    assert race.main(["--json", str(file), "--runs", "0"]) == 0
    *heats, final = ran
    assert all(len(heat.systems) <= race.IN_A_HEAT + 1 and heat.steps == 1 for heat in heats)
    assert sorted(name for heat in heats for name in heat.systems[1:]) == sorted(one.systems[1:])
    assert final.steps == 3 and slowest not in final.systems and final.systems[0] == "compute"
    assert race.main(["--json", str(file), "--runs", "0", "1"]) == 0
    runs = json.loads(file.read_text())["runs"]
    assert [CompareConfig.from_fields(run["config"]) for run in runs] == [one, two]
    for system, timed_in_heat in ((slowest, True), (final.systems[1], False)):
        timed = {r.get("heat", False) for r in runs[0]["results"]
                 if r["system"] == system and r["timed"]}  # fmt: skip
        assert timed == {timed_in_heat}
    assert slowest not in {
        name for cell in race.cells(runs[:1]) for name in (cell.ours, cell.other)
    }
    ran.clear()  # a system has joined since the first run was measured
    joined = one.systems[1]
    runs[0]["results"] = [  # on a day on which the machine was faster
        r | {"seconds": r["seconds"] / 2} for r in runs[0]["results"] if r["system"] != joined
    ]
    file.write_text(json.dumps({"runs": runs}))
    assert race.main(["--json", str(file), "--runs", "0"]) == 0
    heat, final = ran
    assert heat.systems == ("compute", joined) and joined in final.systems
    assert len(json.loads(file.read_text())["runs"]) == 2


def test_minimum_bytes_equal_a_manual_count():
    """4 nodes x 1 rank, shard groups of 2; GPT-2 of 17.4M parameters."""
    config = CompareConfig(systems=())
    root, *blocks = traffic.unit_sizes(config)
    model_bytes = 4 * (root + sum(blocks))
    full = traffic.minimum_bytes(config, traffic.full_shard(config))
    assert full == pytest.approx(0.75 * (3 * 4 * model_bytes - 4 * 4 * root))
    hybrid, two_hop = (
        traffic.minimum_bytes(config, count(config)) for count in (traffic.hybrid, traffic.two_hop)
    )
    # Replicas all-reduce half the model each: 2 * (2 - 1) / 2 of it, four times or once.
    assert hybrid - two_hop == pytest.approx(3 * model_bytes / 2)
    once = traffic.minimum_bytes(config, traffic.gather_once(config))
    assert once == pytest.approx((1 + 4) * model_bytes / 2 + model_bytes / 2)


def test_replicas_on_one_node_send_nothing():
    config = CompareConfig(systems=(), nodes=2, ranks_per_node=2, shard=2)
    minimum = traffic.minimum_bytes(config, traffic.gather_once(config))
    assert minimum == 4 * sum(traffic.unit_sizes(config))
    one_node = CompareConfig(systems=(), nodes=1, ranks_per_node=4, shard=2)
    assert traffic.minimum_bytes(one_node, traffic.two_hop(one_node)) == 0


class Event:
    """A profiler event; times in microseconds."""

    def __init__(self, name, begin, end, thread=1):
        self.name, self.thread = name, thread
        self.time_range = SimpleNamespace(start=begin, end=end)


STEP = Event("the step", 1_000_000, 9_000_000)


def test_trace_reads_collectives_from_gloo_threads():
    found = trace.spans_of_events(
        [
            STEP,
            Event("aten::mm", 1_000_000, 2_000_000),
            Event("aten::mm", 1_000_000, 2_000_000, thread=2),
            Event("c10d::_reduce_scatter_base_", 2_000_000, 2_000_100),
            Event("c10d::allreduce_", 2_000_200, 2_000_300),
            Event("gloo:all_gather", 1_500_000, 2_500_000, thread=3),
            Event("gloo:all_reduce", 3_000_000, 4_000_000, thread=3),
            Event("gloo:all_reduce", 4_000_000, 6_000_000, thread=3),
        ]
    )
    assert found == {
        "compute": [(0, 1)],
        "gather": [(0.5, 1.5)],
        "reduce": [(2, 3)],
        "second_hop": [(3, 5)],
    }


def test_trace_reads_blocking_and_gloo_collectives_of_one_step():
    found = trace.spans_of_events(
        [
            STEP,
            Event("c10d::_allgather_base_", 2_000_000, 3_000_000),
            Event("c10d::_reduce_scatter_base_", 4_000_000, 5_000_000),
            Event("c10d::allreduce_", 5_000_000, 5_000_100),
            Event("gloo:all_reduce", 6_000_000, 7_000_000, thread=3),
        ]
    )
    assert found == {
        "compute": [],
        "gather": [(1, 2)],
        "reduce": [(3, 4)],
        "second_hop": [(5, 6)],
    }


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 1)), max_size=30))
def test_merged_spans_are_disjoint_and_cover_all_long_spans(pieces):
    raw = [(begin, begin + length) for begin, length in pieces]
    found = trace.merge_spans(raw)
    assert all(b < e for b, e in found)
    assert all(one[1] < other[0] for one, other in zip(found, found[1:], strict=False))
    for begin, end in raw:
        inside = any(b - 1e-3 <= begin and end <= e + 1e-3 for b, e in found)
        assert inside or end - begin <= trace.MIN_LENGTH + 1e-6


def test_quick_runs_fewer_steps_unless_steps_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "QUICK_FOLDER", tmp_path)

    def steps(*arguments):
        return command.config_from_options(command.build_parser().parse_args(arguments)).steps

    assert steps("--quick") == command.QUICK_STEPS < steps() == CompareConfig.steps
    assert steps("--quick", "--steps", "7") == steps("--steps", "7") == 7


def test_ladder_option_selects_the_systems_of_both_ladders():
    options = command.build_parser().parse_args(["--ladder"])
    names = command.config_from_options(options).systems
    assert names[0] == "compute" and len(set(names)) == len(names)
    assert set(names) == {"compute", *(name for rungs in LADDERS.values() for name in rungs)}


def test_attribution_shows_the_gain_of_each_part():
    rungs = list(LADDERS["the backend last"])
    records = [record(name, 1, 2.0**-place) for place, name in enumerate(rungs)]
    *_, last = report.attribution(records).splitlines()
    assert last.split(" | ")[1:] == [f"{2.0**-6:.2f}", "2.00x", "64.00x |"]
    assert report.attribution(records[:-1]) == ""


def test_every_rung_is_a_system():
    assert {name for rungs in LADDERS.values() for name in rungs} <= set(SYSTEMS)


def test_every_system_has_an_adapter():
    assert {system.library for system in SYSTEMS.values()} == set(training.ADAPTERS)


def test_efficiency_is_compute_time_over_step_time():
    runs = [
        {"config": {"nodes": n, "rate": "1500mbit"},
         "results": [record("compute", 1, 1.0), record("ours_nl", 1, s)]}
        for n, s in ((1, 1.0), (4, 1.25))
    ]  # fmt: skip
    assert sweep.points(runs, over_nodes=True) == {"ours_nl": [(1, 1.0), (4, 0.8)]}
    assert sweep.points(runs, over_nodes=False)["ours_nl"][1] == (1.5, 0.8)
    assert sweep.render(runs).splitlines()[-1] == "| 4 | 1500mbit | 80% |"


def test_scaled_links_are_as_slow_as_the_shared_cores(monkeypatch):
    monkeypatch.setattr(sweep.os, "cpu_count", lambda: 2)
    rates = [sweep.shared_core_rate("1gbit", ranks) for ranks in (1, 2, 4, 8)]
    assert rates == ["1000mbit", "1000mbit", "500mbit", "250mbit"]


def test_sweep_compares_on_every_cluster(tmp_path, monkeypatch, capsys):
    configs = []

    def run_comparison(config):
        configs.append(config)
        return [record(name, 1, 1.0 + config.nodes) for name in config.systems]

    monkeypatch.setattr("ci.emulation.cluster.nodes.unavailable_reason", lambda: None)
    monkeypatch.setattr(sweep, "run_comparison", run_comparison)
    path = tmp_path / "scaling.json"
    words = ["--nodes", "1", "8", "--systems", "ours_nl", "--json", str(path)]
    assert sweep.main([*words, "--figures", str(tmp_path)]) == 0
    assert [(c.nodes, c.shard, c.systems) for c in configs] == [
        (1, 1, ("compute", "ours_nl")),
        (8, 2, ("compute", "ours_nl")),
    ]
    assert "| 8 | 1gbit | 100% |" in capsys.readouterr().out
    assert (tmp_path / "scaling.svg").exists()
    assert [one["config"]["nodes"] for one in json.loads(path.read_text())["runs"]] == [1, 8]
    assert sweep.main(["--nodes", "3", "--shard", "2"]) == 2
    assert sweep.main(["--rates", "1000"]) == 2


def test_rate_without_a_unit_is_rejected():
    with pytest.raises(ValueError, match="such as 200mbit"):
        sweep.gigabits("1000")


def test_figures_are_drawn(tmp_path):
    records = [record("fsdp2", 1, 2.0), record("ours", 1, 1.0)]
    traced = {"spans": {"compute": [(0.0, 0.5)], "gather": [(0.1, 0.2)]}, "timed": False}
    records += [{**one, **traced} for one in records]
    for figure in (
        report.plot_step_times(records),
        report.plot_timelines(records),
        report.plot_efficiency({"ours": [(1, 1.0), (4, 0.8)]}, "nodes"),
    ):
        path = tmp_path / "figure.svg"
        report.save(figure, path)
        assert path.stat().st_size > 5000
