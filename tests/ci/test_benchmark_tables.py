"""`ci.benchmarks.tables`: tables of pages equal the measured files.

The files themselves must name their command, use relative paths and contain no wrong element.
"""

import json
import re
import shutil

import pytest

from ci.benchmarks import tables

FILES = sorted(path for report in tables.REPORTS for path in report.folder.glob("*.json"))


def test_readmes_equal_the_measured_files():
    assert FILES
    assert tables.main(["--check"]) == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_name_their_command_and_hold_no_wrong_data(path):
    record = json.loads(path.read_text())
    command = record["command"].split()
    assert command[:2] == ["python", "-m"] and not any(word.startswith("/") for word in command)
    assert {"cpu", "cores"} <= record["machine"].keys() and "versions" in record
    results = record.get("results") or [turn for one in record["runs"] for turn in one["results"]]
    assert not sum(entry.get("wrong", 0) for entry in results)


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Copy the collectives' page and files."""
    report = tables.REPORTS[0]
    shutil.copytree(report.folder, tmp_path / "benchmarks")
    shutil.copy(report.page, tmp_path / "README.md")
    moved = tables.Report(tmp_path / "README.md", tmp_path / "benchmarks", report.relative_folder)
    monkeypatch.setattr(tables, "REPORTS", [moved])
    return tmp_path


def test_new_measurement_is_detected_and_rendered(copy):
    path = copy / "benchmarks" / "node_2.json"
    text = path.read_text()
    path.write_text(re.sub(r'"median_us": [\d.]+', '"median_us": 123456.0', text, count=1))
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert "123,456" in (copy / "README.md").read_text()
    assert tables.main(["--check"]) == 0
    path.write_text(text)
    assert tables.main([]) == 0
    assert "123,456" not in (copy / "README.md").read_text()  # old tables are replaced


def test_files_and_blocks_must_match(copy, capsys):
    (copy / "benchmarks" / "other.json").write_text("{}")
    assert tables.main([]) == 1
    assert "other.json" in capsys.readouterr().err
    (copy / "benchmarks" / "other.json").unlink()
    (copy / "benchmarks" / "mpi.json").unlink()
    assert tables.main(["--check"]) == 1
    assert "mpi.json" in capsys.readouterr().err


def test_file_of_another_command_is_rejected(copy, capsys):
    shutil.copy(copy / "benchmarks" / "node_2.json", copy / "benchmarks" / "node_4.json")
    assert tables.main([]) == 1
    assert "node_4.json: its command must contain" in capsys.readouterr().err


def rows(markdown: str) -> list[list[str]]:
    """Return the cells of a table's rows."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def results(key: str, numbers: dict, **place) -> list[dict]:
    return [{"contender": name, key: number, **place} for name, number in numbers.items()]


def test_collectives_table_compares_with_the_last_backend():
    place = {"operation": "all_gather", "pattern": "plain", "ranks": 2}
    times = results("median_us", {"nearlinear": 10.0, "gloo": 90.0}, bytes=65536, **place)
    times += results("median_us", {"nearlinear": 2500.0, "gloo": 10000.0}, bytes=1 << 20, **place)
    assert rows(tables.collectives({"results": times})) == [
        ["64 KiB", "10.0 / 90.0 (9.0x)"],
        ["1 MiB", "2,500 / 10,000 (4.0x)"],
        ["geometric mean", "**6.0x**"],
    ]


def test_step_table_compares_with_gloo():
    place = {"model": "34M", "ranks": 2, "min_ms": 90.0}
    times = results("median_ms", {"nearlinear": 100.0, "gloo": 450.0}, **place)
    assert rows(tables.steps({"results": times})) == [
        ["34M", "nearlinear", "100.0", "90.0", "4.50x"],
        ["34M", "gloo", "450.0", "90.0", "1.00x"],
    ]


def test_mpi_table_compares_the_engine_with_the_fastest_mpi_of_each_size():
    place = {"operation": "all_reduce", "ranks": 4}
    own = {"engine": 20.0, "engine:pool": 5.0}
    times = results("median_us", {**own, "mpich": 30.0, "impi": 25.0}, bytes=65536, **place)
    times += results("median_us", {**own, "mpich": 10.0, "impi": 25.0}, bytes=1 << 20, **place)
    for entry in results("median_us", {"engine": 8.0, "memcpy": 7.0, "memcpy:stream": 6.0}):
        times.append({**entry, "operation": "all_gather", "ranks": 4, "bytes": 65536})
    assert rows(tables.mpi({"results": times})) == [
        ["64 KiB", "20.0 / 25.0 (1.2x) impi", "8.0 / -", "75 %"],
        ["1 MiB", "20.0 / 10.0 (0.5x) mpich", "- / -", "-"],
    ]


def test_network_table_has_a_column_per_ranks_per_node():
    found = []
    for count in (1, 8):
        for size, used in ((65536, 0.9), (1 << 20, 0.95)):
            place = {"operation": "all_gather", "ranks_per_node": count, "bytes_per_node": size}
            shares = results("link_used", {"nearlinear": used, "gloo": used / count}, **place)
            for entry in shares:
                entry["sent_over_necessary"] = 1 + size / (1 << 22)
            found += shares
    record = {"settings": {"nodes": 4, "rate_bits_per_second": 10**9}, "results": found}
    text = tables.network(record)
    assert "4 nodes, 1 Gbit/s each" in text and "nearlinear / gloo" in text
    assert rows(text) == [
        ["64 KiB", "90.0 / 90.0", "90.0 / 11.2"],
        ["1 MiB", "95.0 / 95.0", "95.0 / 11.9"],
        ["maximum bytes sent / necessary", "1.25 / 1.25", "1.25 / 1.25"],
    ]


def test_long_commands_are_wrapped_and_stay_one_command():
    words = ["python", "-m", "ci.benchmarks.network", *(f"--word{i}" for i in range(30))]
    facts = {"cpu": "a", "cores": 2, "memory_gib": 1}
    text = tables._origin({"command": " ".join(words), "machine": facts, "versions": {}})
    command = text.split("```")[1].removeprefix("sh\n")
    assert max(map(len, command.splitlines())) <= 100
    assert command.replace("\\\n", "").split() == words
    assert all(line.lstrip().startswith(("python", "--")) for line in command.splitlines())
    assert "GiB." in text  # unknown load is omitted
