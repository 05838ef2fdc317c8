"""Which is the limit, file system or loader: the sentence, and the measurements behind it."""

import json
import os

import pytest

from nearlinear import cli
from nearlinear.errors import ConfigError
from nearlinear.launch.fsx import throughput
from nearlinear.launch.fsx.throughput import Loading, Needed, Sequential, verdict
from tests.core.test_loader_reads import make_dataset


def system(mb_per_s: float) -> Sequential:
    return Sequential(int(mb_per_s * 1e6), 1.0, "past the page cache")


def loader(tokens_per_s: float, amplification: float = 1.0) -> Loading:
    return Loading(int(tokens_per_s), 1.0, 2, amplification)


@pytest.mark.parametrize(
    ("measured", "needed", "words"),
    [
        # 1 Mtoken/s needs 2 MB/s
        ((system(500), loader(4e6)), Needed(1e6), "Neither limits: the loader gives 4.0 times"),
        ((system(500), loader(5e5)), Needed(1e6), "The loader limits: it gives 50 %"),
        ((system(500), loader(5e5)), Needed(1e6, ranks=8), "Neither limits: the loader gives 4.0"),
        ((system(1), loader(4e6)), Needed(1e6), "would fetch 2 MB/s of 1; take a faster one"),
        ((system(500), loader(4e6, 300)), Needed(1e6), "fetch 600 MB/s of 500; read in blocks"),
        # as slow as the file system lets it be, though the training alone would fit
        ((system(105), loader(5e5, 100)), Needed(5.1e5), "The file system limits"),
        ((system(500), loader(4e6)), None, "The loader is the first to limit: a training that"),
        ((system(9), loader(4e6, 1.1)), None, "The file system is the first to limit"),
    ],
)
def test_one_sentence_says_what_limits(measured, needed, words):
    said = verdict(*measured, needed)
    assert words in said and said.endswith(".") and said.count(". ") <= 1


def test_the_report_says_what_was_measured_and_how():
    said = "\n".join(throughput.report(system(500), loader(4e6, 3), Needed(1e6, 2)))
    assert "500 MB/s in order, over 476.8 MiB (past the page cache)" in said
    assert "4,000,000 tokens/s, 8.0 MB/s" in said and "fetches 3.0 bytes" in said
    assert "training, 2 ranks: 1,000,000 tokens/s, 2.0 MB/s" in said
    little = "\n".join(throughput.report(Sequential(10**6, 0.1, "past the page cache"), None))
    assert "little to tell a rate from" in little and "loader was not measured" in little


def test_every_byte_is_read_once(tmp_path):
    sizes = [0, 1, 5000, throughput.CALL, throughput.CALL + 1, 3 * throughput.CALL + 12_345]
    files = []
    for number, size in enumerate(sizes):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(os.urandom(size))
    found = throughput.sequential(files, seconds=60)
    assert found.bytes == sum(sizes) and found.rate > 0


def test_without_o_direct_pages_are_dropped(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    real = os.open

    def refuse(path, flags, *rest):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(throughput.os, "open", refuse)
    found = throughput.sequential([tmp_path / "file"], seconds=5)
    assert (found.bytes, found.how) == (10_000, "pages dropped before")
    monkeypatch.delattr(throughput.os, "posix_fadvise")
    found = throughput.sequential([tmp_path / "file"], seconds=5)
    assert found.how == "the page cache could not be kept out"


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no files to read"):
        throughput.sequential([])


def test_the_command_measures_the_loader_of_the_config(tmp_path, capsys):
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
    assert "training, 2 ranks: 10 tokens/s" in usual  # the median, of one of four machines
    assert "Neither limits" in usual and "little to tell a rate from" in usual
    assert cli.main([*line, "--set", "data.shuffle_block_mib=1", "--need", "1e15"]) == 0
    blocks = capsys.readouterr().out
    assert "training, 2 ranks: 1,000,000,000,000,000 tokens/s" in blocks
    assert "The file system limits" in blocks
    assert cli.main([*line, "--seconds", "0"]) == 2
    assert "give more than 0" in capsys.readouterr().err
