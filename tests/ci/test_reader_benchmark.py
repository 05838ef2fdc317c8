"""`ci.benchmarks.reader` and `ci.benchmarks.reader_start`: one small run of each."""

import importlib.util
import json

from ci.benchmarks import reader, reader_start


def test_all_readers_are_checked_and_compared(capsys):
    small = ["--tokens", "60000", "--lengths", "64", "--rounds", "1", "--seconds", "0.01", "--json"]
    assert reader.main(small) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines() if row[:1] == "{"]
    expected = dict(reader.READERS)
    if importlib.util.find_spec("litdata") is None:
        del expected["litdata"]
    assert [row["reader"] for row in rows] == list(expected)
    assert rows[0]["ratio"] == 1 and all(row["tokens_per_s"] > 0 for row in rows)


def test_starts_cover_every_method_position_and_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reader_start, "SHARDS", 3)
    monkeypatch.setattr(reader_start, "POSITIONS", (2.9,))
    monkeypatch.setattr(
        reader_start, "METHODS", {"best fit, masked": reader_start.METHODS["best fit, masked"]}
    )
    reader_start.report(tmp_path, 10**6, [128], as_json=True)
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [(row["cache"], row["epochs"]) for row in rows] == [("empty", 2.9), ("kept", 2.9)]
    assert all(row["seconds"] > 0 and row["mib"] >= 0 for row in rows)
    assert list((tmp_path / "start-cache").glob("packing/*/groups.npy"))
