"""Bottleneck between file system and loader: the report and its measurements."""

import json
import os

import pytest

from nearlinear import cli
from nearlinear.errors import ConfigError
from nearlinear.launch.fsx import throughput
from nearlinear.launch.fsx.throughput import (
    LoaderMeasurement,
    ReadMeasurement,
    TrainingDemand,
    format_bottleneck,
)
from tests.core.data.test_loader_reads import make_dataset


def system(mb_per_s: float) -> ReadMeasurement:
    return ReadMeasurement(int(mb_per_s * 1e6), 1.0, "bypassing the page cache")


def loader(tokens_per_s: float, amplification: float = 1.0) -> LoaderMeasurement:
    return LoaderMeasurement(int(tokens_per_s), 1.0, 2, amplification)


@pytest.mark.parametrize(
    ("measured", "needed", "words"),
    [
        # 1 Mtoken/s needs 2 MB/s
        (
            (system(500), loader(4e6)),
            TrainingDemand(1e6),
            "No bottleneck: the loader provides 4.0 times",
        ),
        (
            (system(500), loader(5e5)),
            TrainingDemand(1e6),
            "The loader is the bottleneck: it provides 50 %",
        ),
        (
            (system(500), loader(5e5)),
            TrainingDemand(1e6, num_ranks=8),
            "No bottleneck: the loader provides 4.0",
        ),
        (
            (system(1), loader(4e6)),
            TrainingDemand(1e6),
            "would read 2 MB/s of 1; use a faster file system",
        ),
        (
            (system(500), loader(4e6, 300)),
            TrainingDemand(1e6),
            "read 600 MB/s of 500; read in blocks",
        ),
        # limited by the file system, although training alone would fit
        (
            (system(105), loader(5e5, 100)),
            TrainingDemand(5.1e5),
            "The file system is the bottleneck",
        ),
        (
            (system(500), loader(4e6)),
            None,
            "The loader is the first bottleneck: training at more than",
        ),
        ((system(9), loader(4e6, 1.1)), None, "The file system is the first bottleneck"),
    ],
)
def test_bottleneck_is_one_sentence(measured, needed, words):
    said = format_bottleneck(*measured, needed)
    assert words in said and said.endswith(".") and said.count(". ") <= 1


def test_report_contains_measurements_and_cache_note():
    said = "\n".join(
        throughput.format_measurements(system(500), loader(4e6, 3), TrainingDemand(1e6, 2))
    )
    assert "500 MB/s sequential, over 476.8 MiB (bypassing the page cache)" in said
    assert "4,000,000 tokens/s, 8.0 MB/s" in said and "reads 3.0 bytes" in said
    assert "training, 2 ranks: 1,000,000 tokens/s, 2.0 MB/s" in said
    little = "\n".join(
        throughput.format_measurements(
            ReadMeasurement(10**6, 0.1, "bypassing the page cache"), None
        )
    )
    assert "too little for a reliable rate" in little and "loader was not measured" in little


def test_file_system_measurement_reads_every_byte_once(tmp_path):
    sizes = [
        0,
        1,
        5000,
        throughput.READ_SIZE,
        throughput.READ_SIZE + 1,
        3 * throughput.READ_SIZE + 12_345,
    ]
    files = []
    for number, size in enumerate(sizes):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(os.urandom(size))
    found = throughput.measure_file_system(files, seconds=60)
    assert found.num_bytes == sum(sizes) and found.bytes_per_s > 0


def test_pages_are_dropped_without_o_direct(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    real = os.open

    def refuse(path, flags, *rest):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(throughput.os, "open", refuse)
    found = throughput.measure_file_system([tmp_path / "file"], seconds=5)
    assert (found.num_bytes, found.cache_note) == (10_000, "after dropping cached pages")
    monkeypatch.delattr(throughput.os, "posix_fadvise")
    found = throughput.measure_file_system([tmp_path / "file"], seconds=5)
    assert found.cache_note == "possibly from the page cache"


def test_empty_folder_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="no files to read"):
        throughput.measure_file_system([])


def test_throughput_command_measures_the_loader_of_the_config(tmp_path, capsys):
    tokens, run = tmp_path / "tokens", tmp_path / "run"
    make_dataset(tokens, [24], length=2048, fill=True)
    run.mkdir()
    steps = [{"step": i, "loss": 1.0, "tokens_per_s": rate} for i, rate in enumerate([1, 40, 60])]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\ncontext = 2048\n[run]\nfolder = "{run}"\nnproc = 2\n[job]\nnodes = 4\n'
    )
    line = ["fsx", "throughput", str(tokens), "--config", str(config), "--seconds", "0.2"]
    assert cli.main(line) == 0
    usual = capsys.readouterr().out
    assert "training, 2 ranks: 10 tokens/s" in usual  # the median, divided by four machines
    assert "No bottleneck" in usual and "too little for a reliable rate" in usual
    assert cli.main([*line, "--set", "data.shuffle_block_mib=1", "--need", "1e15"]) == 0
    blocks = capsys.readouterr().out
    assert "training, 2 ranks: 1,000,000,000,000,000 tokens/s" in blocks
    assert "The file system is the bottleneck" in blocks
    assert cli.main([*line, "--seconds", "0"]) == 2
    assert "must be more than 0" in capsys.readouterr().err
