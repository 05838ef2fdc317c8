"""`ci.benchmarks.offload`: a small run reports all methods."""

import json

import nearlinear as nl
from ci.benchmarks import offload

SMALL = (
    "--vocabulary 512 --width 32 --heads 2 --layers 5 --sequence 512 --batch 2 --steps 1 "
    "--horizon 1 --json"
)


def test_small_run_reports_every_method(capsys):
    def on_rank(rank):
        return offload.main(SMALL.split())

    assert nl.spmd.run(on_rank, 1) == [0]
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[:1] == "{"]
    assert [row["way"] for row in rows] == list(offload.METHODS)
    assert rows[0]["ratio"] == 1 and all(row["step_seconds"] > 0 for row in rows)
    assert [row["host_gib"] > 0 for row in rows] == [False, True, False]
