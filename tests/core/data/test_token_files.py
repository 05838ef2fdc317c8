"""Token files of other projects read in place, and shards opened by megatron-core."""

import json
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.data.dataset import TokenDataset
from nearlinear.data.masking import Masks, make_batch
from nearlinear.data.source import DocumentEnds, DocumentIndex, DocumentsByToken, NoSplit
from nearlinear.errors import DataError
from tests.core.data.test_data_dataset import write_dataset


def write_pair(path, documents, dtype="<u2"):
    """Write a .bin/.idx pair like Megatron's IndexedDatasetBuilder and return the token stream.

    Each document is a list of sequences.
    """
    sequences = [np.array(s, dtype=dtype) for document in documents for s in document]
    lengths = np.array([len(s) for s in sequences], dtype="<i4")
    size = np.dtype(dtype).itemsize
    offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * size
    firsts = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(s.tobytes() for s in sequences))
    code = {"<u2": 8, "<i4": 4, "<i8": 5}[dtype]
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sequences), len(firsts))
    arrays = [lengths.tobytes(), offsets.astype("<i8").tobytes(), firsts.tobytes()]
    path.with_suffix(".idx").write_bytes(b"".join([header, *arrays]))
    return np.concatenate(sequences).astype(np.int64)


DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=9), min_size=1, max_size=4),
    min_size=1,
    max_size=12,
)


def check_documents(index, lengths, data):
    """Check all lengths, the starts in a range, and the lengths of consecutive documents."""
    assert index.lengths().tolist() == lengths
    begins = (np.cumsum(lengths) - lengths).tolist()
    start = data.draw(st.integers(0, sum(lengths) - 1))
    stop = data.draw(st.integers(start + 1, sum(lengths)))
    assert index.inside(start, stop) == [b for b in begins if start < b < stop]
    first = data.draw(st.integers(0, len(lengths)))
    end = data.draw(st.integers(first, len(lengths)))
    start, stop = sum(lengths[:first]), sum(lengths[:end])
    assert index.lengths(start, stop).tolist() == lengths[first:end]


@settings(max_examples=60, deadline=None)
@given(documents=DOCUMENTS, dtype=st.sampled_from(["<u2", "<i4"]), data=st.data())
def test_index_combines_sequences_into_documents(tmp_path_factory, documents, dtype, data):
    path = tmp_path_factory.mktemp("pair") / "text_document.bin"
    stream = write_pair(path, documents, dtype)
    index = DocumentIndex(path.with_suffix(".idx"), path.stat().st_size)
    check_documents(index, [sum(map(len, document)) for document in documents], data)
    tokens = TokenDataset(path, sequence_length=1, vocab_size=1000)
    assert tokens.windows(np.arange(len(tokens)))[:, 0].tolist() == stream.tolist()


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), data=st.data())
def test_documents_are_delimited_by_the_end_token(lengths, data):
    tokens = np.concatenate([[*[5] * (length - 1), 7] for length in lengths]).astype("<u2")
    check_documents(DocumentsByToken(tokens, 7), lengths, data)
    assert DocumentsByToken(tokens[:-1], 7).lengths().sum() == len(tokens) - 1


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), max_size=12).filter(any), data=st.data())
def test_documents_are_delimited_by_their_ends(tmp_path_factory, lengths, data):
    path = tmp_path_factory.mktemp("ends") / "x.ds.index"
    path.write_bytes(np.cumsum(lengths).astype("<u8").tobytes())
    found = DocumentEnds(path)
    assert (found.documents, found.tokens) == (len(lengths), sum(lengths))
    check_documents(found, [length for length in lengths if length], data)


def test_paths_of_files_prefixes_and_folders_are_accepted(tmp_path):
    first = write_pair(tmp_path / "m/a_document.bin", [[[1, 2, 3]], [[4, 5], [6]]])
    second = write_pair(tmp_path / "m/b_document.bin", [[[7, 8, 9, 10]]])
    both = np.concatenate([first, second])
    for path, expected in (
        (tmp_path / "m", both),
        (tmp_path / "m/a_document", first),
        (tmp_path / "m/b_document.bin", second),
    ):
        found = TokenDataset(path, sequence_length=2, vocab_size=50)
        assert found.windows(np.arange(len(found))).ravel().tolist() == expected.tolist()
    assert (found.manifest.vocab_size, found.manifest.eos_id) == (50, 49)
    for split in ("train", "val"):
        np.arange(20, dtype="<u2").tofile(tmp_path / f"{split}.bin")
        nano = TokenDataset(tmp_path, split, sequence_length=10)
        assert nano[1].tolist() == list(range(10, 20))
    assert (nano.manifest.vocab_size, nano.manifest.eos_id) == (50_257, 50_256)
    assert (
        nano.path == tmp_path and pickle.loads(pickle.dumps(nano))[1].tolist() == nano[1].tolist()
    )
    with pytest.raises(DataError, match="has no split 'val': put a val.bin beside"):
        TokenDataset(tmp_path / "m/a_document", "val", sequence_length=2)
    with pytest.raises(DataError, match="has no tokenizer: set train"):
        nano.tokenizer()


def test_megatron_pair_supports_packing_and_masks(tmp_path):
    write_pair(tmp_path / "x.bin", [[[1, 2], [3]], [[4, 5, 9]], [[6] * 9]])
    options = {"sequence_length": 8, "vocab_size": 10, "cache": tmp_path / "cache"}
    found = make_batch(
        TokenDataset(tmp_path / "x.bin", packing="best_fit", **options),
        np.arange(2),
        Masks(documents=True),
    )
    assert found["input_ids"].tolist() == [[6] * 8, [1, 2, 3, 4, 5, 9, 6, 9]]
    assert found["position_ids"].tolist()[1] == [0, 1, 2, 0, 1, 2, 0, 0]


def write_by_datatrove(folder, documents, token_size=2):
    """Write documents to a .ds file, its index and its metadata with datatrove's own class."""
    tokenizer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    options = {"tokenizer_name_or_path": "gpt2", "save_final_metadata": True}
    file = tokenizer.TokenizedFile(str(folder), "00000_x.ds", token_size=token_size, **options)
    for document in documents:
        file.write(document, None)
    file.close()
    return folder / "00000_x.ds"


@pytest.mark.parametrize("token_size", [2, 4])
def test_files_of_datatrove_are_read_with_their_documents(tmp_path, token_size):
    documents = [[1, 2, 3], [4, 5, 9], [6] * 9]  # 9 ends one of them, the index all
    file = write_by_datatrove(tmp_path / "ds", documents, token_size)
    options = {"sequence_length": 8, "vocab_size": 10, "cache": tmp_path / "cache"}
    for without in (".none", ".metadata", ".index"):
        file.with_name(file.name + without).unlink(missing_ok=True)
        if without == ".index":  # then the EOS id ends documents
            file.with_name(file.name + ".metadata").write_text(f"gpt2|{token_size}\n15\n15 T")
        for path in (tmp_path / "ds", file):
            dataset = TokenDataset(path, packing="best_fit", **options)
            found = make_batch(dataset, np.arange(2), Masks(documents=True))
            assert found["input_ids"].tolist() == [[6] * 8, [1, 2, 3, 4, 5, 9, 6, 9]]
            starts = [0, 1, 2, 0, 1, 2, 0, 0] if without != ".index" else [0, 1, 2, 3, 4, 5, 0, 0]
            assert found["position_ids"].tolist()[1] == starts


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4", "<i8"])
def test_arrays_are_read_with_and_without_a_header(tmp_path, dtype):
    ids = np.arange(3000) % 1000
    np.save(tmp_path / "train.npy", ids.astype(dtype))
    headed = TokenDataset(tmp_path, sequence_length=10, vocab_size=1000)
    assert headed.windows(np.arange(300)).ravel().tolist() == ids.tolist()
    vocabulary = {"<u2": 1000, "<u4": 100_278}.get(dtype)
    if vocabulary:
        ids.astype(dtype).tofile(tmp_path / "train.npy")
        raw = TokenDataset(tmp_path, sequence_length=10, vocab_size=vocabulary, eos_id=999)
        assert raw.windows(np.arange(300)).ravel().tolist() == ids.tolist()
        assert raw.source.documents(0).lengths().tolist() == [1000] * 3


def refusal(path, **options):
    """Return the message of the error that a dataset of unsuitable files raises."""
    with pytest.raises(DataError) as caught:
        TokenDataset(path, sequence_length=2, **options)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_chunks_of_litdata_are_read_in_their_order(tmp_path, no_torchvision, dtype):
    pytest.importorskip("litdata")
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    items = [np.arange(n, n + 40) for n in range(0, 960, 40)]
    writer = BinaryWriter(str(tmp_path), chunk_bytes=2 * 40 * np.dtype(dtype).itemsize + 64,
                          item_loader=TokensLoader(block_size=8))  # fmt: skip
    for number, item in enumerate(items):
        writer[number] = torch.from_numpy(item.astype(dtype))
    writer.done()
    writer.merge()
    assert len(list(tmp_path.glob("*-0-1*.bin"))) > 1  # chunk 10 comes after chunk 2
    found = TokenDataset(tmp_path, sequence_length=8, vocab_size=1000)
    assert found.windows(np.arange(len(found))).ravel().tolist() == [*range(960)]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_rows_of_streaming_are_read_in_place(tmp_path, no_torchvision, dtype):
    streaming = pytest.importorskip("streaming")
    columns = {"tokens": f"ndarray:{dtype}:16"}
    with streaming.MDSWriter(out=str(tmp_path), columns=columns, size_limit=1000) as writer:
        for start in range(0, 640, 16):
            writer.write({"tokens": np.arange(start, start + 16, dtype=dtype)})
    found = TokenDataset(tmp_path, sequence_length=8, vocab_size=1000)
    assert len(found.files) > 1
    assert found.windows(np.arange(len(found))).ravel().tolist() == [*range(640)]


def write_rows(folder, index):
    """Write six ids as one row, and an index."""
    (folder / "x.bin").write_bytes(struct.pack("<3I6H", 1, 12, 24, *range(6)))
    (folder / "index.json").write_text(json.dumps(index))


def litdata_index(**config):
    known = {"data_format": ["no_header_tensor:20"], "compression": None, "encryption": None}
    return {"chunks": [{"filename": "x.bin"}], "config": {**known, **config}}


def mds_index(**shard):
    known = {"format": "mds", "compression": None, "raw_data": {"basename": "x.bin"},
             "column_names": ["tokens"], "column_encodings": ["ndarray:uint16:6"]}  # fmt: skip
    return {"version": 2, "shards": [{**known, **shard}]}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (litdata_index(compression="zstd"), "is of compressed or encrypted chunks"),
        (litdata_index(data_format=["no_header_tensor:0"]), "of items ['no_header_tensor:0']: tok"),
        (litdata_index(data_format=["int", "str"]), "is of items ['int', 'str']"),
        (litdata_index(data_format=None), "is not an index of litdata or Streaming"),
        ({"chunks": [], "config": {}}, "is not an index of litdata or Streaming"),
        (mds_index(compression="zstd"), "is of compressed shards: token ids are read in place"),
        (mds_index(column_encodings=["bytes"]), "is of rows bytes: token ids are one column"),
        (mds_index(column_encodings=["ndarray:uint16:6", "str"]), "of rows ndarray:uint16:6, str"),
        (mds_index(raw_data={"basename": "y.bin"}), "y.bin is missing, and"),
        ({"version": 2, "shards": []}, "is not an index of litdata or Streaming"),
        ({"version": 2}, "index.json is"),
        ([], "index.json is"),
    ],
)
def test_indexes_of_rows_that_are_no_ids_are_refused(tmp_path, index, message):
    write_rows(tmp_path, index)
    assert message in refusal(tmp_path)


@pytest.mark.parametrize("index", [litdata_index(), mds_index()])
def test_damaged_rows_are_refused(tmp_path, index):
    write_rows(tmp_path, index)
    assert TokenDataset(tmp_path, sequence_length=2)[2].tolist() == [4, 5]
    raw = (tmp_path / "x.bin").read_bytes()
    for bad in (raw[:-1], raw + b"\0", raw[:8], raw[:2], b"\xff" * 24):
        (tmp_path / "x.bin").write_bytes(bad)
        assert "x.bin is cut off or of another format: copy it again" in refusal(tmp_path)


def test_unsuitable_files_are_refused_with_the_reason(tmp_path):
    file = write_by_datatrove(tmp_path / "ds", [[1, 2], [3]])
    index = file.with_name(file.name + ".index")
    file.with_name(file.name + ".loss").write_bytes(b"\1\1\0")
    assert ".ds.loss excludes tokens from the loss" in refusal(file)
    file.with_name(file.name + ".loss").unlink()
    good = index.read_bytes()
    index.write_bytes(good[:8])
    assert "describes 2 tokens but 00000_x.ds has 3: the files do not" in refusal(file)
    index.write_bytes(good)
    described = file.with_name(file.name + ".metadata")
    described.write_text("gpt2|4\n3\n3 T")  # but the file has 6 bytes
    assert "does not hold uint32 tokens" in refusal(file)
    described.write_text("gpt2|2\n3\n3 T")
    index.write_bytes(good[:9])
    assert "is not an index of document ends" in refusal(file)
    for other in (".index", ".metadata"):
        file.with_name(file.name + other).unlink()
    assert "does not say whether a token has 2 or 4 bytes" in refusal(file)
    write_by_datatrove(tmp_path / "ds", [[1, 2], [3]])
    np.arange(4, dtype="<u2").tofile(tmp_path / "ds/00001_x.ds")
    assert "00001_x.ds.index is missing beside its tokens" in refusal(tmp_path / "ds")
    array = tmp_path / "x.npy"
    np.arange(4, dtype="<u2").tofile(array)
    for options in ({}, {"vocab_size": 9}, {"eos_id": 8}):
        assert "no header, like OLMo's files: set data.vocab_size and" in refusal(array, **options)
    np.save(array, np.zeros((2, 3), "<u2"))
    assert "an array [2, 3] of uint16: token ids are" in refusal(array)
    np.save(array, np.zeros(3))
    assert "an array [3] of float64" in refusal(array)
    np.save(array, np.array(["x"], dtype=object))
    assert "is not an array of NumPy" in refusal(array)
    np.save(array, np.arange(40))
    assert "has ids from 0 to 39, but the vocabulary has 30" in refusal(array, vocab_size=30)
    np.save(array, np.arange(-1, 5))
    assert "has ids from -1 to 4" in refusal(array)


def test_damaged_pair_is_reported_with_its_cause(tmp_path):
    write_pair(tmp_path / "x.bin", [[[1, 2, 3]], [[4]]])
    file, index = tmp_path / "x.bin", tmp_path / "x.idx"
    good = index.read_bytes()

    for bad in (good[:-8], good[:20], b"", b"X" + good[1:], good + b"\0" * 8):
        index.write_bytes(bad)
        assert "x.idx is not a document index" in refusal(file)
    index.write_bytes(good)
    file.write_bytes(bytes(10))
    assert "describes 8 bytes but its .bin file has 10: the files do not" in refusal(
        tmp_path / "x.bin"
    )
    write_pair(file, [[[1, 2, 3]]], "<i8")
    assert "of uint16 or int32 tokens" in refusal(file)


def test_empty_file_is_reported(tmp_path):
    for name in ("a", "b"):
        np.arange(20, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    (tmp_path / "b.bin").write_bytes(b"")
    with pytest.raises(DataError, match="b.bin is empty: copy it again, or remove it"):
        TokenDataset(tmp_path, sequence_length=4)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(NoSplit, match="split 'train' of .* is empty"):
        TokenDataset(tmp_path, sequence_length=4)


def test_changed_file_changes_the_fingerprint(tmp_path):
    write_pair(tmp_path / "x.bin", [[[1, 2, 3, 4]]])
    before = TokenDataset(tmp_path / "x.bin", sequence_length=2).fingerprint
    write_pair(tmp_path / "x.bin", [[[1, 2, 3, 5]]])
    assert TokenDataset(tmp_path / "x.bin", sequence_length=2).fingerprint != before


def test_channel_path_resolves_to_the_input_folder(tmp_path, monkeypatch):
    stream = write_dataset(tmp_path / "books", [9] * 8)
    with pytest.raises(DataError, match="no such channel .*/opt/ml/input/data/my-books is not"):
        TokenDataset("channel:my-books", sequence_length=8)
    monkeypatch.setenv("SM_CHANNEL_MY_BOOKS", str(tmp_path / "books"))
    found = TokenDataset("channel:my-books", sequence_length=8, verify="size")
    assert found[0].tolist() == stream[:8].tolist()


def test_training_runs_on_nanogpt_files(small_run, tmp_path):
    ids = np.random.default_rng(0).integers(0, 300, 5000)
    for split in ("train", "val"):
        ids.astype("<u2").tofile(tmp_path / f"{split}.bin")
    small_run["data"] |= {"path": str(tmp_path), "vocab_size": 300, "eos_id": 299}
    small_run["train"]["sample_tokens"] = 0
    (result,) = nl.spmd.run(lambda rank: nl.Trainer(train_config.load(small_run)).fit(), 1)
    assert result.steps == 6 and result.eval_loss < 6


def test_megatron_core_opens_nearlinear_shards(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    lengths = [30, 5, 1, 17, 64, 2]
    for vocab_size in (60_000, 70_000):  # two-byte and four-byte tokens
        folder = tmp_path / str(vocab_size)
        stream = write_dataset(folder, lengths, shard_tokens=200, vocab_size=vocab_size)
        theirs = indexed.IndexedDataset(str(folder / "train/shard-00000"))
        assert len(theirs) == len(lengths)
        assert theirs.sequence_lengths.tolist() == lengths
        assert theirs.document_indices.tolist() == list(range(len(lengths) + 1))
        assert np.concatenate([theirs[i] for i in range(len(theirs))]).tolist() == stream.tolist()
        assert theirs.get(4, offset=3, length=5).tolist() == stream[56:61].tolist()
