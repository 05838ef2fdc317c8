"""Benchmark results are compared only for equal ids."""

import json

import numpy as np
import pytest

from data_prep import bench
from data_prep.__main__ import main

IDS = np.array([5, 6, 50256, 7, 50256], np.uint16)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Replace the tools by stand-ins; return the ids each one writes, and a command line."""
    written = {"nearlinear": IDS, "nanogpt": IDS, "datatrove": IDS[[3, 4, 0, 1, 2]]}
    files = {"nearlinear": "tokens/train/shard-00000.bin", "nanogpt": "train.bin",
             "datatrove": "00000.ds"}  # fmt: skip

    seconds = iter([1.0, 0.5, 3.0])

    def write(name, file, out):
        path = out / files[name]
        path.parent.mkdir(parents=True)
        written[name].tofile(path)
        return {"cpu_seconds": next(seconds) if name == "nearlinear" else 4.0, "peak_mb": 1.0}

    monkeypatch.setattr(bench, "_measure", write)
    (tmp_path / "a.jsonl").write_text("{}")
    return written, ["bench", str(tmp_path / "a.jsonl"), "--peers", "nanogpt,datatrove"]


def test_bench_reports_ratios_for_equal_ids(tools, capsys):
    _, command = tools
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tools"]
    assert [found[name]["ratio"] for name in ("nanogpt", "datatrove")] == [4, 4]
    assert found["nearlinear"]["runs"] == [1.0, 0.5, 3.0] and found["datatrove"]["same_ids"]


def test_bench_fails_if_own_runs_differ(tools, monkeypatch, capsys):
    written, command = tools
    run = bench._measure

    def change(name, file, out):
        if name == "nanogpt":
            written["nearlinear"] = IDS + np.array([0, 0, 0, 1, 0], np.uint16)
        return run(name, file, out)

    monkeypatch.setattr(bench, "_measure", change)
    assert main(command) == 2
    assert "two preparations of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nanogpt", "datatrove"])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_bench_fails_for_a_peer_with_other_ids(tools, capsys, name, flags):
    written, command = tools
    written[name] = written[name] + np.array([0, 0, 0, 1, 0], np.uint16)
    assert main([*command, *flags]) == 2
    said = capsys.readouterr()
    assert f"error: {name} gave other ids than nearlinear for" in said.err
    assert said.out.count("DIFFER") == (not flags) and said.out.count("identical") == (not flags)
