import json

import numpy as np
import pytest

import data_prep
from data_prep.__main__ import main
from data_prep.merge import SEQUENCE_LENGTHS
from data_prep.report import document_lengths
from nearlinear.data.dataset import TokenDataset
from nearlinear.data.format import Manifest, read_index

TEXTS = [f"Document {i} says {'word ' * (i * i % 1700)}end." for i in range(120)]


@pytest.fixture
def folder(tmp_path, source):
    data_prep.prepare(source([*TEXTS, *TEXTS[:7]]), tmp_path / "d", progress=False)
    return tmp_path / "d"


def test_statistics_match_the_documents(folder):
    found, lengths = Manifest.read(folder).statistics, document_lengths(folder)
    assert found["documents"] == len(lengths) == len(TEXTS) + 7
    assert found["tokens"] == lengths.sum() and found["longest"] == lengths.max()
    assert found["text_bytes"] == sum(map(len, [*TEXTS, *TEXTS[:7]]))
    assert found["duplicates"]["documents"] == 7
    edges = [*found["length_histogram"]["at_least"], 10**9]
    expected, _ = np.histogram(lengths, edges)
    assert found["length_histogram"]["documents"] == expected.tolist()
    assert edges[:8] == [1, 2, 3, 4, 6, 8, 11, 16]


def test_packing_statistics_match_token_datasets(tmp_path, source):
    """Compare train and val at every length, over several shards, with the datasets."""
    folder = tmp_path / "d"
    manifest = data_prep.prepare(source(TEXTS), folder, val_fraction=0.2, shard_tokens=20_000,
                                 progress=False)  # fmt: skip
    assert len(manifest.splits["train"]) > 2
    for side, found in manifest.statistics["kept"].items():
        lengths = np.concatenate([read_index(folder, shard, manifest.dtype)
                                  for shard in manifest.splits[side]])  # fmt: skip
        assert found["tokens"] == lengths.sum() == manifest.total("tokens", side)
        assert list(found["lengths"]) == [str(length) for length in SEQUENCE_LENGTHS]
        for length, kept in found["lengths"].items():
            length = int(length)
            assert kept["concat"] == lengths.sum() // length * length
            assert kept["truncate"] == length * (lengths - 1 >= length).sum()  # without EOS
            if length > 2048:
                continue
            for packing in ("best_fit", "one_document"):
                dataset = TokenDataset(folder, side, sequence_length=length, packing=packing,
                                       cache=tmp_path / "cache")  # fmt: skip
                assert kept[packing] == dataset.rows(np.arange(len(dataset))).filled.sum()


def test_packing_keeps_nearly_all_real_text(tmp_path):
    manifest = data_prep.prepare(data_prep.sources.botocore(), tmp_path / "d", max_documents=2000,
                                 val_fraction=0, progress=False)  # fmt: skip
    kept = manifest.statistics["kept"]["train"]
    assert kept["tokens"] == manifest.total("tokens") > 100_000
    assert list(kept["lengths"]) == ["512", "1024", "2048", "4096", "8192"]
    for length, found in kept["lengths"].items():
        assert found["best_fit"] >= 0.995 * kept["tokens"]
        assert kept["tokens"] - found["concat"] < int(length)
        assert found["truncate"] < 0.9 * kept["tokens"]


def test_cli_stats_writes_text_and_report(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    assert main(["stats", str(folder), "--report", str(page)]) == 0
    said = capsys.readouterr().out
    assert "127 documents" in said and "exact duplicates: 7 documents" in said
    (line,) = (line for line in said.splitlines() if line.split()[:1] == ["2048"])
    assert line.split()[2:] == ["100.00%", "100.00%", "0.00%"]
    assert page.read_text().count("data:image/png;base64,") == 4
    assert "Tokens kept by packing method" in page.read_text()
    assert main(["stats", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == Manifest.read(folder).statistics
