import logging
import pickle
import struct
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.data import source as dataset_module
from nearlinear.data.dataset import TokenDataset
from nearlinear.data.format import Manifest, Shard, ShardWriter, encode_index
from nearlinear.data.loader import Loader
from nearlinear.data.masking import Masks
from nearlinear.errors import DataError


def write_dataset(folder, lengths, shard_tokens=50, vocab_size=60_000):
    """Write documents of the given lengths, EOS included, and return the token stream.

    The token at stream position p is p + 1, except for EOS (0).
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, "train", vocab_size=vocab_size, eos_id=0,
                         shard_tokens=shard_tokens)  # fmt: skip
    stream = []
    for length in lengths:
        ids = [len(stream) + i + 1 for i in range(length - 1)]
        writer.add(ids)
        stream += [*ids, 0]
    splits = {"train": writer.close(), "val": ()}
    tokenizer = {"name": "t", "file": "tokenizer/tokenizer.json", "sha256": "0"}
    Manifest(vocab_size, 0, tokenizer, splits).write(folder)
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "tokenizer/tokenizer.json").write_text("{}")
    return np.array(stream)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    shard_tokens=st.integers(1, 80),
    sequence_length=st.integers(1, 70),
    vocab_size=st.sampled_from([60_000, 70_000]),
    data=st.data(),
)
def test_windows_are_slices_of_the_stream(
    tmp_path_factory, lengths, shard_tokens, sequence_length, vocab_size, data
):
    folder = tmp_path_factory.mktemp("d")
    stream = write_dataset(folder, lengths, shard_tokens, vocab_size)
    if len(stream) < sequence_length:
        with pytest.raises(DataError, match=f"holds {len(stream)} tokens, fewer than one window"):
            TokenDataset(folder, sequence_length=sequence_length, verify="size")
        return
    tokens = TokenDataset(folder, sequence_length=sequence_length, verify="size")
    n = len(stream) // sequence_length
    expected = stream[: n * sequence_length].reshape(n, sequence_length)
    assert len(tokens) == n
    chosen = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    windows = tokens.windows(chosen)
    assert windows.dtype == np.int64 and windows.shape == (len(chosen), sequence_length)
    assert np.array_equal(windows, expected[chosen].reshape(windows.shape))
    assert np.array_equal(tokens[n - 1], expected[-1]) and np.array_equal(tokens[-n], expected[0])
    assert tokens.document_lengths().tolist() == lengths


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "d", [30] * 8)
    path = tmp_path / "d"
    # The real hash of the tokenizer, so that a full check passes.
    import dataclasses
    import hashlib

    manifest = Manifest.read(path)
    tokenizer = manifest.tokenizer | {"sha256": hashlib.sha256(b"{}").hexdigest()}
    dataclasses.replace(manifest, tokenizer=tokenizer).write(path)
    return path


def test_out_of_range_index_raises(folder):
    tokens = TokenDataset(folder, sequence_length=50)
    for index in (len(tokens), -len(tokens) - 1):
        with pytest.raises(IndexError):
            tokens[index]
        with pytest.raises(IndexError):
            tokens.windows([0, index])


def test_pickling_reopens_the_files(folder):
    tokens = TokenDataset(folder, sequence_length=7)
    raw = pickle.dumps(tokens)
    assert len(raw) < 500
    assert np.array_equal(pickle.loads(raw)[3], tokens[3])


def test_errors_name_cause_and_remedy(folder, tmp_path):
    for match, path, options in (
        ("no token shards at .*nearlinear data", tmp_path / "none", {}),
        ("no index.json.*nearlinear data", tmp_path, {}),
        ("no split 'test': it has train, val", folder, {"split": "test"}),
        ("split 'val' of .* is empty.*--val-fraction", folder, {"split": "val"}),
        ("use a sequence_length of at most 240", folder, {"sequence_length": 241}),
        ("give at least 1", folder, {"sequence_length": 0}),
        ("use 'auto', 'full' or 'size'", folder, {"verify": "yes"}),
    ):
        with pytest.raises(DataError, match=match):
            TokenDataset(path, **{"sequence_length": 8, **options})


@pytest.mark.parametrize("mode", ["auto", "full"])
def test_altered_shard_is_rejected(folder, mode):
    path = folder / "train/shard-00003.bin"
    raw = bytearray(path.read_bytes())
    raw[11] ^= 4
    path.write_bytes(raw)
    TokenDataset(folder, sequence_length=8, verify="size")
    with pytest.raises(DataError, match="shard-00003.bin is altered"):
        TokenDataset(folder, sequence_length=8, verify=mode)


def test_large_splits_are_checked_by_size_and_log_one_line(folder, monkeypatch, caplog):
    monkeypatch.setattr(dataset_module, "_FULL_CHECK_BYTES", 100)
    with caplog.at_level(logging.INFO, "nearlinear.data"):
        for _ in range(3):
            TokenDataset(folder, sequence_length=8)
    assert len(caplog.records) == 1 and "nearlinear data verify" in caplog.text
    (folder / "train/shard-00001.bin").write_bytes(b"xx")
    with pytest.raises(DataError, match="shard-00001.bin is truncated"):
        TokenDataset(folder, sequence_length=8)


def test_concurrent_threads_verify_the_files_once(folder, monkeypatch):
    calls, results = [], []
    real = dataset_module.verify
    monkeypatch.setattr(
        dataset_module, "verify", lambda *a, **k: (calls.append(k["full"]), real(*a, **k))
    )

    def rank():
        results.append(TokenDataset(folder, sequence_length=8).windows(np.arange(30)).sum())

    threads = [threading.Thread(target=rank) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(set(results)) == 1
    assert calls == [True]
    TokenDataset(folder, sequence_length=8, verify="size")  # a full check covers sizes
    assert calls == [True]
    path = folder / "train/shard-00000.bin"
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)  # a changed file is checked again
    with pytest.raises(DataError, match="shard-00000.bin is altered"):
        TokenDataset(folder, sequence_length=8)


def test_reading_shards_does_not_import_torch():
    code = "import nearlinear.data.dataset, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def sparse_dataset(folder, shards, tokens, documents):
    """Write shards as sparse files, with indexes that hold only the first and last documents."""
    (folder / "train").mkdir(parents=True)
    parts = []
    for number in range(shards):
        path = folder / f"train/shard-{number:05d}.bin"
        with open(path, "wb") as file:
            file.truncate(2 * tokens)
        with open(path.with_suffix(".idx"), "wb") as file:
            header = encode_index(np.empty(0, "<i4"), np.dtype("<u2"))[:18]
            file.write(header + struct.pack("<QQ", documents, documents + 1))
            file.seek(34 + 4 * (documents - 1))
            file.write(struct.pack("<i", tokens))
            file.truncate(34 + 20 * documents + 8)
        parts.append(
            Shard(
                f"train/{path.name}", tokens, documents, 2 * tokens, "0", 42 + 20 * documents, "0"
            )
        )
    tokenizer = {"name": "t", "file": "tokenizer/tokenizer.json", "sha256": "0"}
    Manifest(60_000, 0, tokenizer, {"train": tuple(parts)}).write(folder)


@pytest.mark.parametrize("position", [0, 10**12])
@pytest.mark.parametrize("masks", [Masks(), Masks(documents=True)])
def test_opening_ten_billion_tokens_maps_only_shards_of_the_first_batch(
    tmp_path, monkeypatch, position, masks
):
    """Opening a dataset and reading one batch maps only the shards of that batch."""
    sparse_dataset(tmp_path / "d", shards=100, tokens=10**8, documents=10**5)
    mapped, real = [], np.memmap
    monkeypatch.setattr(
        "numpy.memmap", lambda path, *a, **k: (mapped.append(path.name), real(path, *a, **k))[1]
    )
    tracemalloc.start()
    tokens = TokenDataset(tmp_path / "d", sequence_length=2048)
    assert tokens.tokens == 10**10 and mapped == []
    loader = Loader(tokens, 4, 1, 3, 8, masks=masks)
    loader.load_state_dict(loader.state_dict() | {"next_sample": position})
    assert next(loader)[0]["input_ids"].shape == (4, 2048)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 1 <= len(mapped) <= 4 * (1 + masks.documents)
    assert peak < 2**22  # the data has 20 GB of tokens and 200 MB of indexes
