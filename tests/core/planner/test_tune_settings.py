"""Settings chosen by ``nearlinear tune``: predicted by the planner from measured timings."""

import dataclasses
import json
import tomllib

import pytest

from nearlinear.config import train as train_config
from nearlinear.errors import ConfigError
from nearlinear.planner import search
from nearlinear.planner.calibrate import rates
from nearlinear.planner.calibrate.settings import KEYS, choose_settings
from nearlinear.planner.cluster import Cluster
from nearlinear.planner.memory import estimate
from tests.core.planner.test_calibrate import a_node

GIB = 2**30
RUN = {
    "model": {"preset": "gpt2-tiny", "overrides": {"vocab_size": 256}},
    "batch": {"micro_batch_size": 2},
}


def config(**parallel):
    return train_config.load(RUN | {"parallel": parallel}, environment={})


def chosen(nodes=4, memory=8 * GIB, node=None, backend="gloo", **parallel):
    cluster = Cluster(node or a_node(), nodes)
    return choose_settings(config(**parallel), cluster, memory, 256, backend)


def slower(name: str, factor: float):
    node = a_node()
    rows = [
        dataclasses.replace(row, points=[[s, factor * t] for s, t in row.points])
        if row.backend == name
        else row
        for row in node.collectives
    ]
    return dataclasses.replace(node, collectives=rows)


def test_tune_picks_the_faster_backend():
    fast = {each.key: each for each in chosen().settings}["communication_backend"]
    assert fast.value == "nearlinear" and fast.previous == "auto"
    slow = {each.key: each for each in chosen(node=slower("nearlinear", 100.0)).settings}
    assert slow["communication_backend"].value == "auto"  # gloo here: kept as written


def test_real_steps_decide_between_the_best_predictions():
    """The measured order is the reverse of the prediction."""
    configs = []

    def measure(asked):
        configs.extend(asked)
        return [1.0 - 0.1 * number for number in range(len(asked))]

    cluster = Cluster(a_node(), 4)
    arguments = config(), cluster, 8 * GIB, 256, "gloo"
    predicted, found = choose_settings(*arguments), choose_settings(*arguments, measure, 4)
    parts = [tuple(each.settings[key] for key in (*KEYS[:2], KEYS[-1])) for each in found.finalists]
    assert len(set(parts)) == len(found.finalists) == len(configs) == 5  # and the config as it is
    assert found.finalists[0].settings == predicted.chosen.settings
    assert found.finalists[-1].settings["hybrid_shard_degree"] == 4  # as written: 0
    assert found.chosen == found.finalists[-1] and found.chosen.measured == pytest.approx(0.6)
    for each, measured in zip(found.finalists, configs, strict=True):
        assert {key: getattr(measured.parallel, key) for key in KEYS} == each.settings
    assert "fastest prediction is 66.7% slower than the fastest of 5" in str(found)
    assert "fastest of the first 3 predictions is 33.3% slower" in str(found)


def test_a_measured_tie_keeps_the_config():
    cluster = Cluster(a_node(), 4)
    found = choose_settings(
        config(), cluster, 8 * GIB, 256, "gloo", lambda asked: [1.0] * len(asked)
    )
    assert all(each.value == each.previous for each in found.settings)


def test_chosen_settings_are_the_fastest_that_fit():
    found = chosen()
    fitting = [each for each in found.candidates if each.fits]
    assert found.chosen.seconds <= 1.005 * min(each.seconds for each in fitting)
    assert {each.settings["hybrid_shard_degree"] for each in found.candidates} == {1, 2, 4}
    again = search.evaluate(found.tuned_config, found.cluster)
    assert again.seconds == pytest.approx(found.chosen.seconds, rel=0.01)


def test_settings_that_change_nothing_are_kept():
    before = chosen()
    tuned = before.tuned_config
    after = choose_settings(tuned, before.cluster, before.memory, 256, "nearlinear")
    assert after.chosen.settings == before.chosen.settings
    assert all(each.value == each.previous for each in after.settings)


def test_degrees_that_do_not_fit_are_excluded_and_named():
    least = {
        degree: estimate(
            config(hybrid_shard_degree=degree, sdp_max_live_parameters=0, prefetch_depth=1),
            4,
            vocabulary=256,
        ).peak
        for degree in (1, 2, 4)
    }
    assert least[1] > least[2] > least[4]
    found = chosen(memory=least[1] - 1)
    assert found.chosen.settings["hybrid_shard_degree"] > 1
    reason = {each.key: each.reason for each in found.settings}["hybrid_shard_degree"]
    assert "does not fit: 1" in reason
    with pytest.raises(ConfigError, match="the model does not fit.*Start more ranks"):
        chosen(memory=least[4] // 4)


def test_reduce_bucket_is_limited_by_the_free_memory():
    key = "sdp_reduce_bucket_size"
    wide = {each.key: each for each in chosen().settings}[key]
    assert wide.value == wide.previous == 5 * 10**8
    off = {each.key: each for each in chosen(overlap_communication=False).settings}[key]
    assert off.value == off.previous and "no effect" in off.reason


def test_result_is_a_config_fragment_and_plain_data():
    found = chosen()
    text = str(found)
    fragment = tomllib.loads(text[text.index("[parallel]") :])
    assert list(fragment["parallel"]) == [*KEYS, "sdp_reduce_bucket_size"]
    plain = json.loads(json.dumps(found.as_dict()))
    assert list(plain["settings"]) == [*KEYS, "sdp_reduce_bucket_size"]
    values = {key: each["value"] for key, each in plain["settings"].items()}
    assert fragment["parallel"] == values
    assert found.tuned_config.parallel == dataclasses.replace(config().parallel, **values)


def test_cgroup_limits_of_both_versions(tmp_path):
    def limited(folder, limit, used, stat, names):
        folder.mkdir(parents=True)
        for name, value in zip(names, (limit, used, stat), strict=True):
            (folder / name).write_text(f"{value}\n")

    two = ("memory.max", "memory.current", "memory.stat")
    one = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    limited(tmp_path / "job", 1000, 600, "anon 1\ninactive_file 100", two)
    limited(tmp_path / "job" / "step", "max", 600, "inactive_file 0", two)
    limited(tmp_path / "memory" / "job", 50, 60, "total_inactive_file 5", one)
    assert rates.cgroup_free_memory("0::/job/step", tmp_path) == [500]
    assert rates.cgroup_free_memory("4:memory:/job\n3:cpu:/", tmp_path) == [0]
    assert rates.cgroup_free_memory("0::/elsewhere", tmp_path) == []
    assert rates.free_host_memory() > 0
