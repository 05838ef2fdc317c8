"""`nearlinear tune`: choices follow the measurements, estimates follow what training does."""

import dataclasses
import tomllib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.config import Config
from nearlinear.counts import count_collectives
from nearlinear.errors import ConfigError
from nearlinear.train import config as train_config
from nearlinear.tune import choose, estimate, memory, reasons, report, units
from nearlinear.tune.estimate import GATHER, GATHER_STAGED, JOIN, REDUCE, REDUCE_STAGED, Work
from tests.support import tiny

LAYERS, MICRO_BATCHES = 4, 3
ROOT, BLOCK = 1000, 100
MIB = 2**20
PICKED = (
    "hybrid_shard_degree communication_backend hierarchical_all_gather prefetch_depth "
    "sdp_max_live_parameters sdp_reduce_bucket_size"
).split()


def work(**changes) -> Work:
    """A root of 1000 parameters, four blocks of 100; a block computes for 3 ms."""
    values = {
        "root": ROOT,
        "blocks": (BLOCK,) * LAYERS,
        "gathered_bytes": 4,
        "activations": 0,
        "forward": 1e-3,
        "backward": 2e-3,
        "accumulation": MICRO_BATCHES,
    }
    return Work(**(values | changes))


def links(gather=0.0, reduce=0.0, join=0.0, **staged) -> dict:
    """Seconds of each collective, the same for both sizes."""
    seconds = {GATHER: gather, REDUCE: reduce, JOIN: join}
    seconds |= {{"gather": GATHER_STAGED, "reduce": REDUCE_STAGED}[k]: v for k, v in staged.items()}
    return {(kind, size): value for kind, value in seconds.items() for size in (ROOT, BLOCK)}


def staged_links(flat, two, flat_reduce=0.0, two_reduce=0.0) -> dict:
    return links(flat, flat_reduce) | {
        (kind, size): value
        for kind, value in ((GATHER_STAGED, two), (REDUCE_STAGED, two_reduce))
        for size in (ROOT, BLOCK)
    }


def job(world=4, memory=MIB, backend="gloo", **config) -> choose.Job:
    return choose.Job(world, memory, Config(**config), backend)


def picked(measured, job=None, work=None) -> dict[str, reasons.Setting]:
    job, work = job or globals()["job"](), work or globals()["work"]()
    found = choose.layouts(work, job, measured)
    return {s.key: s for s in reasons.settings(work, job, measured, found)}


# The choices: each flips when the measurement flips.


def test_the_backend_that_communicates_less():
    slow, fast = links(2e-3, 2e-3), links(1e-3, 1e-3)
    chosen = picked({(4, "gloo"): slow, (4, "nearlinear"): fast})["communication_backend"]
    assert chosen.value == "nearlinear" and chosen.previous == "auto"
    assert "over nearlinear" in chosen.reason and "over gloo" in chosen.reason
    chosen = picked({(4, "gloo"): fast, (4, "nearlinear"): slow})["communication_backend"]
    assert chosen.value == "auto"  # which is gloo here: the config stays as it is written


@pytest.mark.parametrize(("join", "degree"), [(1e-3, 2), (1.0, 4)])
def test_the_degree_with_the_least_communication(join, degree):
    measured = {(2, "gloo"): links(1e-3, 1e-3, join), (4, "gloo"): links(3e-3, 3e-3)}
    chosen = picked(measured, job(hybrid_shard_degree=1))["hybrid_shard_degree"]
    assert chosen.value == degree and chosen.previous == 1
    assert f"with {6 - degree}: " in chosen.reason


def test_all_ranks_are_written_as_they_were():
    measured = {(2, "gloo"): links(1.0), (4, "gloo"): links(1e-3)}
    assert picked(measured, job(hybrid_shard_degree=0))["hybrid_shard_degree"].value == 0
    assert picked(measured, job(hybrid_shard_degree=2))["hybrid_shard_degree"].value == 4


def test_a_degree_that_does_not_fit_is_named():
    model = work()
    least = {degree: estimate.needed(model, degree, 1) for degree in (1, 2, 4)}
    assert least[1] > least[2] > least[4]
    assert choose.degrees_that_fit(model, job(memory=least[1])) == [1, 2, 4]
    assert choose.degrees_that_fit(model, job(memory=least[1] - 1)) == [2, 4]
    with pytest.raises(ConfigError, match="start more ranks"):
        choose.degrees_that_fit(model, job(memory=least[4] - 1))
    measured = {(2, "gloo"): links(1e-3), (4, "gloo"): links(2e-3)}
    chosen = picked(measured, job(memory=least[1] - 1))["hybrid_shard_degree"]
    assert "with 1 it does not fit" in chosen.reason


@pytest.mark.parametrize(
    ("times", "way"),
    [
        (staged_links(2e-3, 1e-3), "on"),
        (staged_links(1e-3, 2e-3), "off"),
        (staged_links(1e-3, 1.2e-3, flat_reduce=5e-3, two_reduce=1e-3), "auto"),
        (staged_links(1e-3, 1.2e-3, flat_reduce=1e-3, two_reduce=5e-3), "off"),
        (staged_links(1e-3, 2e-3) | {(GATHER_STAGED, BLOCK): 0.5e-3}, "auto"),
    ],
)
def test_two_stages_where_they_are_faster(times, way):
    before = {"on": "off", "off": "auto", "auto": "on"}[way]
    chosen = picked({(4, "gloo"): times}, job(hierarchical_all_gather=before))
    assert chosen["hierarchical_all_gather"].value == way
    assert "two stages" in chosen["hierarchical_all_gather"].reason


def test_the_collectives_package_left_alone_gathers_in_one_stage():
    times = staged_links(2e-3, 1e-3)
    step = {
        way: choose.with_settings(work(), 4, "nearlinear", times, (way, 1, 0, 0)).step
        for way in ("off", "on", "auto")
    }
    assert step["auto"] == step["off"] != step["on"]
    assert picked({(4, "nearlinear"): times})["hierarchical_all_gather"].value == "on"
    slow = staged_links(3e-3, 1e-3, flat_reduce=1e-3, two_reduce=9e-3)
    tight = job(memory=estimate.needed(work(), 4, 3))
    chosen = choose.layout(work(), tight, 4, "nearlinear", slow)
    assert (chosen.way, chosen.depth) == ("off", 3)  # deep enough for one stage


def test_without_nodes_to_span_two_stages_have_no_effect():
    chosen = picked({(4, "gloo"): links(1e-3)}, job(hierarchical_all_gather="off"))
    assert chosen["hierarchical_all_gather"].value == "off"
    assert "no effect" in chosen["hierarchical_all_gather"].reason


@pytest.mark.parametrize(
    ("gather", "depth", "why"),
    [
        (0.5e-3, 1, "hides it"),
        (1.5e-3, 2, "begin earlier"),
        (2.5e-3, 3, "begin earlier"),
        (1.0, LAYERS - 1, "begin earlier"),
    ],
)
def test_gathers_longer_than_a_block_begin_earlier(gather, depth, why):
    chosen = picked({(4, "gloo"): links(gather)})["prefetch_depth"]
    assert chosen.value == depth and why in chosen.reason


def test_gathers_begin_as_early_as_memory_allows():
    model = work(blocks=(BLOCK,) * 12)
    for depth in range(1, choose.DEEPEST + 1):
        exactly = estimate.needed(model, 4, depth)
        assert choose.prefetch_depth(model, exactly, 4, gather=1.0) == depth
    assert choose.prefetch_depth(model, MIB, 4, gather=1.0) == choose.DEEPEST
    chosen = picked({(4, "gloo"): links(1.0)}, job(memory=estimate.needed(work(), 4, 1)))
    assert "no room" in chosen["prefetch_depth"].reason


def test_what_stays_gathered_grows_with_memory():
    model, depth = work(), 1
    rest = estimate.beside_gathered(model, 4)
    bucket = "sdp_reduce_bucket_size"

    def room(parameters):
        return rest + int(parameters * 4 / choose.LIVE_SHARE)

    def live(size):
        return choose.live_parameters(model, size, 4, depth)

    assert live(room(model.parameters)) == model.parameters
    assert live(room(model.parameters) - 8) == ROOT + BLOCK + 2 * BLOCK
    assert live(room(ROOT + 3 * BLOCK) - 8) == 0
    assert live(0) == 0
    for size, words in ((room(1400), "all 1,400"), (room(1300), "1 of 4"), (room(9), "no block")):
        asked = job(memory=size, sdp_max_live_parameters=7, **{bucket: 0})
        assert words in picked({(4, "gloo"): links()}, asked)["sdp_max_live_parameters"].reason


def test_an_allowance_with_the_same_effect_stays():
    asked = job(sdp_max_live_parameters=10**9)
    assert picked({(4, "gloo"): links()}, asked)["sdp_max_live_parameters"].value == 10**9


def test_gradients_under_way_take_a_quarter_of_what_is_left():
    model, key = work(), "sdp_reduce_bucket_size"
    least = estimate.needed(model, 4, 1)

    def chosen(bytes_left, measured=None, **config):
        asked = job(memory=least + bytes_left, **config)
        return picked({(4, "gloo"): measured or links()}, asked)[key]

    assert chosen(16 * model.parameters).value == 5 * 10**8  # no need to write another
    assert "all 1,400" in chosen(16 * model.parameters).reason
    assert chosen(16 * 1200).value == 1200 and "1,200" in chosen(16 * 1200).reason
    assert chosen(16 * 1200, sdp_reduce_bucket_size=1100).value == 1100
    assert "one unit's" in chosen(16 * 900).reason and "one unit's" in chosen(0).reason
    still = chosen(0, overlap_communication=False)
    assert still.value == 5 * 10**8 and "no effect" in still.reason
    layout = choose.layout(model, job(), 4, "gloo", links())
    reduced = (model.parameters - ROOT) * estimate.REDUCED_BYTES
    without = dataclasses.replace(job(), device="cuda")
    assert layout.memory - choose.layout(model, without, 4, "gloo", links()).memory == reduced


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=12).map(tuple)


@given(st.integers(0, 50), sizes, st.integers(0, 3), st.integers(0, 20_000))
def test_live_parameters_are_the_fewest_with_their_effect(root, blocks, depth, memory):
    model = work(root=root, blocks=blocks)
    live = choose.live_parameters(model, memory, 1, depth)
    free = memory - estimate.beside_gathered(model, 1)
    assert live * model.gathered_bytes <= choose.LIVE_SHARE * max(0, free)
    kept = estimate.kept_with(model, depth, live)
    assert (kept == 0) == (live == 0)
    if live:
        assert estimate.kept_with(model, depth, live - 1) < kept
        assert estimate.held(model, depth, kept) == live


seconds = st.floats(0, 1)


@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=6, max_size=6))
def test_no_other_layout_communicates_less(times):
    keys = [(degree, name) for degree in (1, 2, 4) for name in ("gloo", "nearlinear")]
    measured = {key: links(*row) for key, row in zip(keys, times, strict=True)}
    found = choose.layouts(work(), job(), measured)
    assert len(found) == 6
    best = choose.best(found)
    assert all(best.step.total <= layout.step.total for layout in found)
    for setting in reasons.settings(work(), job(), measured, found):
        assert setting.key in PICKED and setting.reason


def test_what_computation_can_hide():
    layout = choose.layout(work(), job(), 4, "gloo", links(1.0))
    assert choose.can_hide(work(), job(), layout) == work().compute == pytest.approx(0.036)
    assert choose.can_hide(work(), job(overlap_communication=False), layout) == 0
    alone = dataclasses.replace(layout, degree=1)
    assert choose.can_hide(work(), job(), alone) == 0
    on_gpu = dataclasses.replace(job(), device="cuda")
    assert choose.can_hide(work(), on_gpu, alone) == work().compute


def test_one_hop_joins_replicas_after_every_micro_batch():
    times = links(join=1e-3)
    once = estimate.communication(work(), times, 0, "auto").joins
    often = estimate.communication(work(two_hop=False), times, 0, "auto").joins
    assert often == pytest.approx(MICRO_BATCHES * once) and once == pytest.approx(5e-3)


# The estimates: against what a sharded model does.


def one_step(rank, degree, live, layers, micro_batches):
    """Calls and bytes of a step's collectives, and the units they were for."""
    nl.init({"hybrid_shard_degree": degree, "sdp_max_live_parameters": live})
    with nl.spmd.one_at_a_time(seed=0):
        model = tiny.gpt2(layers)
    found = units.units_of(model)
    nl.shard(model)
    calls, size = Counter(), Counter()
    for batch in nl.accumulate(model, [tiny.batch(tiny.rows(0, 2))] * micro_batches):
        with count_collectives() as counts:
            model(**batch).loss.backward()
        calls += counts.calls
        size += counts.bytes
    return calls, size, found


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_gathers_and_reductions_are_those_of_training(share, layers, micro_batches):
    with nl.spmd.one_at_a_time(seed=0):
        total = sum(p.numel() for p in tiny.gpt2(layers).parameters())
    live = int(share * total)
    args = (4, live, layers, micro_batches)
    calls, size, found = nl.spmd.run(one_step, 4, args=args)[0]
    root, *blocks = (unit.parameters for unit in found)
    assert root + sum(blocks) == total
    model = work(root=root, blocks=tuple(blocks), accumulation=micro_batches)
    gathers = estimate.gathers(model, estimate.kept_with(model, 1, live))
    assert calls["all_gather"] == sum(gathers.values())
    padded = {unit.parameters: 4 * unit.shard(4) * 4 for unit in found}
    assert size["all_gather"] == sum(count * padded[unit] for unit, count in gathers.items())
    assert calls["reduce_scatter"] == micro_batches * (1 + layers)
    assert size["reduce_scatter"] == micro_batches * sum(padded[u.parameters] for u in found)


def test_limits_of_cgroups(tmp_path):
    def limited(folder, limit, used, stat, names):
        folder.mkdir(parents=True)
        for name, value in zip(names, (limit, used, stat), strict=True):
            (folder / name).write_text(f"{value}\n")

    two = ("memory.max", "memory.current", "memory.stat")
    one = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    limited(tmp_path / "job", 1000, 600, "anon 1\ninactive_file 100", two)
    limited(tmp_path / "job" / "step", "max", 600, "inactive_file 0", two)
    limited(tmp_path / "memory" / "job", 50, 60, "total_inactive_file 5", one)
    assert memory.cgroup_rooms("0::/job/step", tmp_path) == [500]
    assert memory.cgroup_rooms("4:memory:/job\n3:cpu:/", tmp_path) == [0]
    assert memory.cgroup_rooms("0::/elsewhere", tmp_path) == []
    assert memory.free_host_memory() > 0


def test_the_fragment_is_a_config():
    fragment = report.toml(list(picked({(2, "gloo"): links(1e-3)}).values()))
    assert list(tomllib.loads(fragment)["parallel"]) == PICKED
    assert train_config.load(tomllib.loads(fragment)).parallel.hybrid_shard_degree == 2
