"""Reports of the flight recorder on files of failed ranks; torch's analyzer on the same files."""

import json
import os
import time

import pytest
import torch
import torch.distributed as dist

from nearlinear_collectives import flight_recorder
from tests.collectives.ranks import BACKEND

pytestmark = pytest.mark.skipif(BACKEND != "nearlinear", reason="about nearlinear's recorder")


def fail(rank, prefix, how):
    """Make three calls; rank 2 leaves out the last one, or makes another one."""
    os.environ["NEARLINEAR_COLLECTIVES_TRACE"] = prefix
    try:
        dist.broadcast(torch.ones(5), 0)
        dist.barrier()
        if how == "message" and rank == 1:
            dist.recv(torch.empty(7), 2)
        elif rank < 2 and how != "message":
            dist.all_reduce(torch.ones(1000))
        elif how == "other call":
            dist.all_gather([torch.empty(4)] * 3, torch.ones(4))
        else:
            time.sleep(4)
    except RuntimeError as error:
        return str(error)
    finally:
        del os.environ["NEARLINEAR_COLLECTIVES_TRACE"]


def explained(pool, tmp_path, capsys, how):
    prefix = str(tmp_path / "trace_")
    pool.run(fail, prefix, how, ranks=3, timeout=2, limit=20, discard=True)
    assert flight_recorder.main([prefix, "--torch", str(tmp_path / "torch")]) == 0
    return capsys.readouterr().out


def test_rank_that_did_not_call_has_no_file(pool, tmp_path, capsys):
    said = explained(pool, tmp_path, capsys, "no call")
    first, *ranks = said.splitlines()
    assert first.endswith("of ranks [0, 1, 2]: all_reduce #3 of 1000 x float32 is incomplete")
    assert "rank 0: failed" in ranks[0] and "rank 2 (host" in ranks[0], said
    assert ranks[2] == "  rank 2: no file; it is stuck elsewhere, or has ended"


def test_rank_that_made_another_call_is_named(pool, tmp_path, capsys):
    said = explained(pool, tmp_path, capsys, "other call")
    assert "all_reduce #3 of 1000 x float32 is incomplete" in said
    assert "  rank 2: called all_gather #3 of 4 x float32 instead; failed" in said


def test_open_messages_are_listed(pool, tmp_path, capsys):
    said = explained(pool, tmp_path, capsys, "message")
    assert "rank 1, group " in said and "receive #1 of 7 x float32 is failed" in said
    assert "timeout after" in said and "incomplete" not in said


def test_rank_behind_the_others_is_named():
    done = {"group": "g", "count": 3, "dtype": "int8", "reduce": "sum", "root": -1, "detail": ""}
    calls = [{**done, "operation": "all_reduce", "sequence": n, "state": "done"} for n in (1, 2)]
    running = {**calls[1], "state": "running"}
    dumps = {
        0: {"rank": 0, "groups": {"g": [0, 4]}, "operations": [calls[0], running]},
        4: {"rank": 4, "groups": {"g": [0, 4]}, "operations": calls[:1]},
    }
    assert flight_recorder.explain(dumps) == [
        "group g of ranks [0, 4]: all_reduce #2 of 3 x int8 is incomplete",
        "  rank 0: running",
        "  rank 4: has not called it; its last is all_reduce #1 of 3 x int8",
    ]
    dumps[0]["operations"][1] = calls[1]
    dumps[4]["operations"] = calls
    assert flight_recorder.explain(dumps) == ["every recorded operation is done"]


def test_torch_reads_the_files(pool, tmp_path, capsys):
    """Run torch's analyzer, and its list of entries, to the end."""
    analyzer = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    explained(pool, tmp_path, capsys, "other call")
    analyzer.main([str(tmp_path / "torch"), "--prefix", "trace_"])
    listed = ["--just_print_entries", "--prefix", "trace_"]
    with pytest.raises(SystemExit):
        analyzer.main([str(tmp_path / "torch"), *listed])


def test_missing_and_damaged_files_are_named(tmp_path, capsys):
    prefix = str(tmp_path / "trace_")
    assert flight_recorder.main([prefix]) == 2
    assert "was NEARLINEAR_COLLECTIVES_TRACE set" in capsys.readouterr().err
    (tmp_path / "trace_3").write_text(json.dumps({"rank": 3})[:-1])
    assert flight_recorder.main([prefix]) == 2
    assert f"{prefix}3 is not a complete trace" in capsys.readouterr().err
