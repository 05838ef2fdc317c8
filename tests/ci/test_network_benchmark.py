"""`ci.benchmarks.network`: bytes over NICs, tables, figures and request validation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.benchmarks.network import __main__ as command
from ci.benchmarks.network import report
from ci.benchmarks.network.config import NetworkConfig, necessary_bytes, parse_rate, show_rate
from ci.emulation.cluster import unavailable_reason

ROOT = Path(__file__).resolve().parents[2]
needs_cluster = pytest.mark.skipif(
    unavailable_reason() is not None, reason=str(unavailable_reason())
)


def entry(label: str, ranks: int, size: int, used: float, **more) -> dict:
    """Return a result as recorded by a run."""
    place = {"operation": "all_gather", "ranks_per_node": ranks, "bytes_per_node": size}
    numbers = {"link_used": used, "link_used_at_best": used + 0.01, "median_us": 1e6 / used}
    rest = {"contender": label, "bytes": 4 * size, "sent_over_necessary": 1.004, "wrong": 0}
    return {**place, **numbers, **rest, **more}


RECORD = {
    "settings": {"nodes": 4, "rate_bits_per_second": 200_000_000},
    "results": [
        entry(label, ranks, size, used)
        for ranks in (1, 2, 8)
        for size in (65536, 1 << 20)
        for label, used in (("nearlinear", 0.94), ("gloo", 0.47))
    ],
}


def test_rates_are_parsed_in_the_notation_of_tc():
    assert parse_rate("200mbit") == 200_000_000 and parse_rate("1.5Gbit") == 1_500_000_000
    assert show_rate(200_000_000) == "200 Mbit/s" and show_rate(10**9) == "1 Gbit/s"
    for wrong in ("200", "200mbps", "0mbit", "-1mbit", "fast"):
        with pytest.raises(ValueError, match="200mbit"):
            parse_rate(wrong)


def test_necessary_bytes_are_independent_of_the_ranks_per_node():
    assert necessary_bytes("all_gather", 4, 1000) == 3000
    assert necessary_bytes("reduce_scatter", 4, 1000) == 3000
    assert necessary_bytes("all_reduce", 4, 1000) == 6000


def test_config_round_trips_through_json():
    config = NetworkConfig(("all_gather",), (65536,), ("gloo",), ("this",), 10**9, 3, 0.1, 60.0)
    assert NetworkConfig.from_json(config.to_json()) == config


def test_rows_align_with_the_table_head():
    head = report.table_head("all_gather", 4, 2, 200_000_000, ["nearlinear", "gloo"])
    row = report.table_row(RECORD["results"][:2])
    assert "4 nodes x 2 ranks, 200 Mbit/s" in head
    assert [len(line) for line in head.splitlines()[-2:]] == [len(row)] * 2
    assert "94.0 % (95.0)" in row and "47.0 % (48.0)" in row
    assert row.split("|")[-2].strip() == "2.00"  # gloo took twice as long
    assert "3 WRONG" in report.table_row([entry("a", 1, 65536, 0.5, wrong=3)])


def test_figure_has_a_panel_per_layout_and_a_line_per_backend(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = report.draw(RECORD)
    assert [ax.get_title() for ax in drawn.axes] == [
        "1 rank per node",
        "2 ranks per node",
        "8 ranks per node",
    ]
    for ax in drawn.axes:
        lines = {line.get_label(): line for line in ax.lines}
        assert list(lines["nearlinear"].get_xdata()) == [4 * 65536, 4 << 20]
        assert list(lines["gloo"].get_ydata()) == [47.0, 47.0]
    more = {**RECORD, "results": [*RECORD["results"], entry("gloo", 1, 65536, 0.3)]}
    more["results"][-1]["operation"] = "all_reduce"
    report.save(more, tmp_path / "net.svg")
    assert {path.name for path in tmp_path.iterdir()} == {"net.svg", "net_all_reduce.svg"}


@needs_cluster
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "200mbps"], "such as 200mbit"),
        (["--sizes", "12", "--ranks", "2"], "multiple of 4 bytes x 2 ranks"),
        (["--nodes", "1"], "--nodes: must be at least 2"),
        (["--ranks", "0"], "--ranks: must be at least 1"),
        (["--backends", "carrier_pigeon"], "carrier_pigeon"),
        (["--json", "no/such/folder/file.json"], "there is no folder"),
        (["--plot", "figure.txt"], "must end in"),
    ],
)
def test_invalid_requests_are_rejected_before_a_rank_starts(words, message, capsys, monkeypatch):
    monkeypatch.setattr(command, "Cluster", lambda *_: pytest.fail("a cluster was created"))
    assert command.main(words) == 2
    assert message in capsys.readouterr().err


def test_unsuitable_machine_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(
        "ci.emulation.cluster.nodes.unavailable_reason", lambda: "An emulated cluster needs root."
    )
    assert command.main([]) == 2
    assert "needs root" in capsys.readouterr().err


@needs_cluster
@pytest.mark.slow
def test_nearlinear_sends_only_the_necessary_bytes(tmp_path):
    """NIC counters; gloo's reduce-scatter shows that excess bytes are detected."""
    # At this rate no queue overflows on a busy machine; dropped packets would be sent twice.
    words = ["--nodes", "2", "--ranks", "2", "--rate", "10gbit", "--sizes", "256K", "--blocks", "2"]
    words += ["--block-ms", "20", "--ops", "all_gather", "reduce_scatter"]
    words += ["--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.svg")]
    done = subprocess.run(
        [sys.executable, "-m", "ci.benchmarks.network", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["command"].startswith("python -m ci.benchmarks.network --nodes 2")
    found = {(e["operation"], e["contender"]): e for e in record["results"]}
    assert len(found) == 4 and not any(e["wrong"] for e in found.values())
    for operation in ("all_gather", "reduce_scatter"):
        ours = found[operation, "nearlinear"]
        assert ours["necessary_bytes"] == 256 * 1024 and ours["bytes"] == 512 * 1024
        for ratio in ("sent_over_necessary", "received_over_necessary"):
            # On busy cores a block has few calls, and TCP may send a segment of 64 KiB twice.
            assert 1 <= ours[ratio] <= 1.25, ours
    assert found["reduce_scatter", "gloo"]["sent_over_necessary"] > 1.5
    assert (tmp_path / "run.svg").exists() and "gloo/nearlinear time" in done.stdout


@needs_cluster
@pytest.mark.slow
def test_failed_rank_fails_the_run(tmp_path):
    words = ["--nodes", "2", "--ranks", "1", "--rate", "1gbit", "--sizes", "64K", "--blocks", "1"]
    (tmp_path / "broken_plugin.py").write_text(
        "import os\nif os.environ.get('RANK') == '1':\n    raise ImportError('rank 1 is broken')\n"
    )
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "ci.benchmarks.network", *words, "--import", "broken_plugin"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "rank 1 is broken" in done.stderr and "ended with exit code" in done.stderr
