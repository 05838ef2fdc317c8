import json

import numpy as np
import pytest

import data_prep
from data_prep.__main__ import main
from data_prep.report import document_lengths
from data_prep.statistics import SEQUENCE_LENGTHS
from nearlinear.data.format import Manifest

TEXTS = [f"Document {i} says {'word ' * (i * i % 1700)}end." for i in range(120)]


@pytest.fixture
def folder(tmp_path, source):
    data_prep.prepare(source([*TEXTS, *TEXTS[:7]]), tmp_path / "d", progress=False)
    return tmp_path / "d"


def test_statistics_are_those_of_the_documents(folder):
    found, lengths = Manifest.read(folder).statistics, document_lengths(folder)
    assert found["documents"] == len(lengths) == len(TEXTS) + 7
    assert found["tokens"] == lengths.sum() and found["longest"] == lengths.max()
    assert found["text_bytes"] == sum(map(len, [*TEXTS, *TEXTS[:7]]))
    assert found["duplicates"]["documents"] == 7
    edges = [*found["length_histogram"]["at_least"], 10**9]
    expected, _ = np.histogram(lengths, edges)
    assert found["length_histogram"]["documents"] == expected.tolist()
    assert edges[:8] == [1, 2, 3, 4, 6, 8, 11, 16]
    for length in SEQUENCE_LENGTHS:
        kept = found["kept"][str(length)]
        assert kept["concat"] == lengths.sum() // length * length
        assert kept["one_document"] == np.minimum(lengths, length).sum()
        assert kept["truncate"] == length * (lengths - 1 >= length).sum()  # without EOS


def test_stats_and_report(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    assert main(["stats", str(folder), "--report", str(page)]) == 0
    said = capsys.readouterr().out
    assert "127 documents" in said and "exact duplicates: 7 documents" in said
    assert page.read_text().count("data:image/png;base64,") == 4
    assert "What each way of packing keeps" in page.read_text()
    assert main(["stats", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == Manifest.read(folder).statistics
