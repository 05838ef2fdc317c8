import io
import itertools
import json
import os
import shutil
import signal
import tarfile

import numpy as np
import pytest

import data_prep
from data_prep import export as exporting
from data_prep.arguments import FORMATS
from data_prep.export import export
from nearlinear.data import TokenDataset
from nearlinear.data.format import Manifest
from nearlinear.data.source import NoSplit
from nearlinear.errors import DataError

TEXTS = [f"Document {i} says {'word ' * (i % 7)}end." for i in range(300)]


@pytest.fixture
def folder(tmp_path, source):
    data_prep.prepare(source(TEXTS), tmp_path / "d", val_fraction=0.1, shard_tokens=700,
                      progress=False)  # fmt: skip
    return tmp_path / "d"


@pytest.fixture
def stream(folder):
    """Return a function that reads the concatenated tokens of train or val."""
    manifest = Manifest.read(folder)
    return lambda side: np.concatenate(
        [np.fromfile(folder / shard.file, manifest.dtype) for shard in manifest.splits[side]]
    )


@pytest.mark.parametrize("side", ["train", "val"])
def test_export_nanogpt_writes_one_file_of_ids(folder, stream, tmp_path, side):
    assert export(folder, tmp_path / "out", "nanogpt")["tokens"] == sum(
        len(stream(s)) for s in ("train", "val")
    )
    found = np.memmap(tmp_path / "out" / f"{side}.bin", dtype=np.uint16, mode="r")
    np.testing.assert_array_equal(found, stream(side))


def test_export_smp_json_rows_are_windows_of_the_stream(folder, stream, tmp_path):
    rows = export(folder, tmp_path / "out", "smp-json", 64)["rows"]
    found = []
    for side in ("train", "val"):
        (path,) = (tmp_path / "out" / side).glob(f"{side}_dataset_64_filtered_*.json")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert all(line["attention_mask"] == [1] * 64 for line in lines)
        ids = np.array([line["input_ids"] for line in lines]).reshape(-1)
        np.testing.assert_array_equal(ids, stream(side)[: len(ids)])
        assert len(stream(side)) - len(ids) < 64
        found += lines
    assert len(found) == rows


def test_export_arrow_loads_from_disk(folder, stream, tmp_path):
    datasets = pytest.importorskip("datasets")
    export(folder, tmp_path / "out", "hf-arrow", 64)
    found = datasets.load_from_disk(str(tmp_path / "out"))
    for side, name in (("train", "train"), ("val", "validation")):
        ids = np.array(found[name]["input_ids"])
        assert ids.shape[1] == 64
        np.testing.assert_array_equal(ids.reshape(-1), stream(side)[: ids.size])
        assert found[name][0]["labels"] == found[name][0]["input_ids"]
        assert found[name][0]["attention_mask"] == [1] * 64
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "train", "validation", "dataset_dict.json"
    }  # fmt: skip


def test_export_datatrove_is_read_by_datatrove(folder, stream, tmp_path):
    dataset = pytest.importorskip("datatrove.utils.dataset")
    export(folder, tmp_path / "out", "datatrove")
    shards = sorted((tmp_path / "out/train").glob("*.ds"))
    first = Manifest.read(folder).splits["train"][0]
    assert len(shards) > 1
    windows = dataset.DatatroveFileDataset(str(shards[0]), 31, token_size=2, return_positions=True)
    tokens = np.concatenate([windows[i]["input_ids"].numpy() for i in range(len(windows))])
    np.testing.assert_array_equal(tokens, stream("train")[: len(tokens)])
    positions = windows[0]["positions"].numpy()
    ends = np.flatnonzero(tokens[:31] == 50256)
    assert positions[0] == 0 and all(positions[ends + 1] == 0)
    assert first.tokens == np.fromfile(f"{shards[0]}.index", "<u8")[-1]


def litdata_chunks(folder, out, monkeypatch, side):
    monkeypatch.setattr(exporting, "_TOKENS_PER_CHUNK", 128)
    export(folder, out, "litdata")
    chunks = []
    for chunk in json.loads((out / side / "index.json").read_text())["chunks"]:
        raw = (out / side / chunk["filename"]).read_bytes()
        assert len(raw) == chunk["chunk_bytes"]
        assert np.frombuffer(raw, "<u4", 3).tolist() == [1, 12, len(raw)]
        chunks.append(np.frombuffer(raw, "<u2", offset=12))
        assert len(chunks[-1]) == chunk["dim"] <= 128
    return chunks


@pytest.mark.parametrize("side", ["train", "val"])
def test_export_litdata_writes_chunks_of_the_stream(folder, stream, tmp_path, monkeypatch, side):
    chunks = litdata_chunks(folder, tmp_path / "out", monkeypatch, side)
    np.testing.assert_array_equal(np.concatenate(chunks), stream(side))


@pytest.mark.parametrize("kind", ["litdata", "mds"])
@pytest.mark.parametrize("side", ["train", "val"])
def test_exported_rows_are_read_back_in_place(folder, stream, tmp_path, monkeypatch, kind, side):
    monkeypatch.setattr(exporting, "_TOKENS_PER_CHUNK", 128)
    monkeypatch.setattr(exporting, "_BYTES_PER_MDS_SHARD", 5 * 132)
    export(folder, tmp_path / "out", kind, 64)
    expected = stream(side)
    expected = expected[: len(expected) // 64 * 64].reshape(-1, 64)
    for path in (tmp_path / "out", tmp_path / "out" / side):
        split = side if path.name == "out" else "train"
        found = TokenDataset(path, split, sequence_length=64)
        assert len(found.files) > 1 or side == "val"
        np.testing.assert_array_equal(found.windows(np.arange(len(found))), expected)
    shutil.rmtree(tmp_path / "out/val")
    with pytest.raises(NoSplit, match="has no split 'val': put a folder val with its index there"):
        TokenDataset(tmp_path / "out", "val", sequence_length=64)


def test_export_litdata_is_read_by_litdata(folder, tmp_path, monkeypatch, no_torchvision):
    litdata = pytest.importorskip("litdata")
    chunks = litdata_chunks(folder, tmp_path / "out", monkeypatch, "train")
    reader = litdata.StreamingDataset(
        str(tmp_path / "out/train"), item_loader=litdata.TokensLoader(block_size=32)
    )
    whole = [part[: len(part) // 32 * 32] for part in chunks]
    rows = [reader[i].numpy() for i in range(len(reader))]
    np.testing.assert_array_equal(np.concatenate(rows), np.concatenate(whole))


def mds_rows(folder, out, monkeypatch, side):
    monkeypatch.setattr(exporting, "_BYTES_PER_MDS_SHARD", 5 * 132)
    export(folder, out, "mds", 64)
    rows, shards = [], json.loads((out / side / "index.json").read_text())["shards"]
    for shard in shards:
        raw = (out / side / shard["raw_data"]["basename"]).read_bytes()
        count, *offsets = np.frombuffer(raw, "<u4", shard["samples"] + 2).tolist()
        assert count == shard["samples"] <= 5 and offsets[-1] == len(raw)
        rows += [np.frombuffer(raw[a:b], "<u2") for a, b in itertools.pairwise(offsets)]
    return rows, shards


@pytest.mark.parametrize("side", ["train", "val"])
def test_export_mds_rows_are_windows_of_the_stream(folder, stream, tmp_path, monkeypatch, side):
    rows, _ = mds_rows(folder, tmp_path / "out", monkeypatch, side)
    expected = stream(side)
    whole = expected[: len(expected) // 64 * 64].reshape(-1, 64)
    np.testing.assert_array_equal(rows, whole)


def test_export_mds_is_read_by_streaming(folder, tmp_path, monkeypatch, no_torchvision):
    mds = pytest.importorskip("streaming.base.format")
    expected, shards = mds_rows(folder, tmp_path / "out", monkeypatch, "train")
    readers = [mds.reader_from_json(str(tmp_path / "out/train"), None, each) for each in shards]
    rows = [reader[i]["tokens"] for reader in readers for i in range(len(reader))]
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("side", ["train", "val"])
def test_export_webdataset_samples_are_windows_of_the_stream(
    folder, stream, tmp_path, monkeypatch, side
):
    monkeypatch.setattr(exporting, "_ROWS_PER_FILE", 7)
    export(folder, tmp_path / "out", "webdataset", 64)
    archives = sorted((tmp_path / "out" / side).iterdir())
    rows = []
    for path in archives:
        with tarfile.open(path) as archive:
            members = archive.getmembers()
            assert len(members) == 7 or path == archives[-1]
            contents = (archive.extractfile(member).read() for member in members)
            rows += [np.load(io.BytesIO(content)) for content in contents]
    expected = stream(side)
    whole = expected[: len(expected) // 64 * 64].reshape(-1, 64)
    np.testing.assert_array_equal(rows, whole)
    assert rows[0].dtype == np.uint16
    webdataset = pytest.importorskip("webdataset")
    theirs = webdataset.WebDataset([*map(str, archives)], shardshuffle=False).decode()
    np.testing.assert_array_equal([sample["tokens.npy"] for sample in theirs], whole)


def test_export_errors_name_cause_and_remedy(folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("1")
    with pytest.raises(DataError, match="full exists and is not an empty folder: name ano"):
        export(folder, tmp_path / "full", "nanogpt")
    with pytest.raises(DataError, match="full/x exists and is not an empty folder"):
        export(folder, tmp_path / "full/x", "nanogpt")
    with pytest.raises(DataError, match="no format 'csv': use smp-json"):
        export(folder, tmp_path / "out", "csv")
    with pytest.raises(DataError, match="sequence_length is 0"):
        export(folder, tmp_path / "out", "smp-json", 0)


def test_export_removes_leftovers_of_a_killed_export(folder, tmp_path):
    child = os.fork()
    if not child:
        exporting._append = lambda *each: os.kill(os.getpid(), signal.SIGKILL)
        export(folder, tmp_path / "out", "nanogpt")
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    (left,) = tmp_path.glob("out.*.tmp")
    other = left.rename(tmp_path / left.name.replace("out", "another"))
    left.mkdir()
    export(folder, tmp_path / "out", "nanogpt")
    assert {path.name for path in tmp_path.iterdir()} == {"d", "out", other.name}


@pytest.mark.parametrize("kind", FORMATS)
def test_export_is_atomic(folder, tmp_path, monkeypatch, kind):
    pytest.importorskip("datasets")
    out = tmp_path / "out"
    out.mkdir()
    read, reads = np.memmap, []

    def interrupted(*arguments, **options):
        reads.append(arguments)
        if len(reads) == 3:
            raise KeyboardInterrupt
        return read(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_append", lambda *each: interrupted(folder / "index.json"))
        patch.setattr(exporting.np, "memmap", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(folder, out, kind, 64)
    assert not list(out.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"d", "out"}
    export(folder, out, kind, 64)
    assert list(out.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {"d", "out"}
