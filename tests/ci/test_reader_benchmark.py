"""The reader's benchmark: one small run of each kind."""

import json

from ci.benchmarks.reader import __main__ as command
from ci.benchmarks.reader import start


def test_every_reader_is_checked_and_compared(capsys):
    small = ["--tokens", "60000", "--lengths", "64", "--rounds", "1", "--seconds", "0.01", "--json"]
    assert command.main(small) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines() if row[:1] == "{"]
    assert [row["reader"] for row in rows] == list(command.readers.READERS)
    assert rows[0]["ratio"] == 1 and all(row["tokens_per_s"] > 0 for row in rows)


def test_starts_are_of_every_way_and_position(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start, "SHARDS", 3)
    monkeypatch.setattr(start, "POSITIONS", (2.9,))
    monkeypatch.setattr(start, "WAYS", {"best fit, masked": start.WAYS["best fit, masked"]})
    start.report(tmp_path, 10**6, [128], as_json=True)
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [(row["cache"], row["epochs"]) for row in rows] == [("empty", 2.9), ("kept", 2.9)]
    assert all(row["seconds"] > 0 and row["mib"] >= 0 for row in rows)
    assert list((tmp_path / "start-cache").glob("packing/*/groups.npy"))
