import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from nearlinear.data import format
from nearlinear.data.format import Checksums, Manifest, ShardWriter, dtype_for, verify
from nearlinear.data.format.shards import flipped_bit
from nearlinear.errors import DataError

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12], [1, 2, 3], [4]]


def write_dataset(folder, documents=DOCUMENTS, vocab_size=100, shard_tokens=6, **identity):
    """Write a dataset with integer documents in split train and one document in split val."""
    import hashlib

    splits = {}
    for split, docs in (("train", documents), ("val", [[3, 3]])):
        writer = ShardWriter(
            folder, split, vocab_size=vocab_size, eos_id=0, shard_tokens=shard_tokens
        )
        for ids in docs:
            writer.add(ids)
        splits[split] = writer.close()
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.json").write_text("{}")
    tokenizer = {"name": "t", "file": "tokenizer/tokenizer.json"}
    tokenizer["sha256"] = hashlib.sha256(b"{}").hexdigest()
    Manifest(vocab_size, 0, tokenizer, splits, **identity).write(folder)
    return folder


def parse_index(raw):
    """Parse a Megatron .idx file from its published layout, independently of nearlinear."""
    assert raw[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack_from("<QBQQ", raw, 9)
    at, out = 34, [version, code]
    for kind, size, count in (("i", 4, sequences), ("q", 8, sequences), ("q", 8, documents)):
        out.append(list(struct.unpack_from(f"<{count}{kind}", raw, at)))
        at += size * count
    assert at == len(raw)
    return out


@pytest.mark.parametrize(
    ("vocab_size", "name"),
    [(256, "uint16"), (50_257, "uint16"), (65_536, "uint16"), (65_537, "uint32"),
     (128_256, "uint32")],
)  # fmt: skip
def test_dtype_is_the_narrowest_for_the_largest_id(tmp_path, vocab_size, name):
    assert dtype_for(vocab_size).name == name
    write_dataset(tmp_path, [[1, vocab_size - 1]], vocab_size)
    raw = (tmp_path / "train/shard-00000.bin").read_bytes()
    width = "H" if name == "uint16" else "I"
    assert struct.unpack(f"<3{width}", raw) == (1, vocab_size - 1, 0)
    assert json.loads((tmp_path / "index.json").read_text())["dtype"] == name


def test_document_longer_than_int32_is_rejected(tmp_path):
    most = 2**31 - 1
    raw = format.encode_index(np.array([most, 1]), np.dtype("<u2"))
    assert parse_index(raw)[2:4] == [[most, 1], [0, 2 * most]]
    refusal = r"has 2147483648 tokens, more than the maximum of a shard index \(2147483647\): split"
    with pytest.raises(DataError, match=refusal):
        format.encode_index(np.array([5, most + 1]), np.dtype("<u2"))
    writer = ShardWriter(tmp_path, "train", vocab_size=100, eos_id=0)
    with pytest.raises(DataError, match=refusal):
        writer.extend(np.zeros(3, np.uint32), np.array([2, most + 1], np.uint32))


@pytest.mark.parametrize(("vocab_size", "code", "width"), [(100, 8, 2), (70_000, 4, 4)])
def test_index_is_megatron_version_1(tmp_path, vocab_size, code, width):
    write_dataset(tmp_path, [[1, 2], [], [5, 6, 7]], vocab_size, shard_tokens=100)
    version, found_code, lengths, offsets, documents = parse_index(
        (tmp_path / "train/shard-00000.idx").read_bytes()
    )
    assert (version, found_code) == (1, code)
    assert lengths == [3, 1, 4]
    assert offsets == [0, 3 * width, 4 * width]
    assert documents == [0, 1, 2, 3]


def test_shards_roll_over_between_documents(tmp_path):
    write_dataset(tmp_path, [[1] * 3, [2], [3] * 20, [4], [5] * 3, [6] * 3], shard_tokens=6)
    shards = Manifest.read(tmp_path).splits["train"]
    assert [(s.tokens, s.documents) for s in shards] == [(6, 2), (21, 1), (6, 2), (4, 1)]
    assert [s.file for s in shards] == [f"train/shard-{i:05d}.bin" for i in range(4)]


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(1, 99), max_size=30), min_size=1, max_size=20),
    shard_tokens=st.integers(1, 60),
)
def test_stream_contains_every_document_followed_by_eos(tmp_path_factory, documents, shard_tokens):
    folder = write_dataset(tmp_path_factory.mktemp("d"), documents, shard_tokens=shard_tokens)
    manifest = verify(folder)
    stream = [np.fromfile(folder / s.file, "<u2") for s in manifest.splits["train"]]
    assert np.concatenate(stream).tolist() == [i for ids in documents for i in (*ids, 0)]
    assert manifest.total("documents", "train") == len(documents)
    assert manifest.total("tokens") == sum(len(ids) + 1 for ids in documents) + 3


def test_out_of_vocabulary_ids_are_rejected(tmp_path):
    writer = ShardWriter(tmp_path, "train", vocab_size=100, eos_id=0)
    with pytest.raises(DataError, match="token id 100 .* 100 entries"):
        writer.add([1, 100])
    with pytest.raises(DataError):
        writer.add([-1])


FILES = [
    "train/shard-00000.bin",
    "train/shard-00000.idx",
    "train/shard-00001.bin",
    "val/shard-00000.idx",
    "tokenizer/tokenizer.json",
]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_reported(tmp_path, name):
    path = write_dataset(tmp_path) / name
    good = path.read_bytes()
    for position in range(len(good)):
        raw = bytearray(good)
        bit = position % 8
        raw[position] ^= 1 << bit
        path.write_bytes(raw)
        where = f" in block 0 .*: bit {bit} of byte {position} is flipped" if "bin" in name else ""
        where = f" in 1 bytes, first at byte {position};" if "idx" in name else where
        with pytest.raises(DataError, match=f"{name} is .*{where}"):
            verify(tmp_path)
    path.write_bytes(good)
    verify(tmp_path)


def without_crcs(manifest):
    """Return the shards without their CRCs, which only help to locate a flipped bit."""
    return [replace(p, crcs=()) for shards in manifest.splits.values() for p in shards]


def test_flipped_manifest_bits_are_detected_or_harmless(tmp_path):
    path = write_dataset(tmp_path, source={"name": "x"}, settings={"seed": 1}) / "index.json"
    good, manifest = path.read_bytes(), verify(tmp_path)
    harmless = 0
    for position in range(len(good)):
        raw = bytearray(good)
        raw[position] ^= 1 << position % 7
        path.write_bytes(raw)
        try:
            found = verify(tmp_path)
        except DataError:
            continue
        harmless += 1
        assert found.fingerprint == manifest.fingerprint
        assert (without_crcs(found), found.eos_id) == (without_crcs(manifest), manifest.eos_id)
    assert harmless < len(good) / 3  # flips in totals, names and white space do no harm


@pytest.mark.parametrize("name", FILES[:4])
@pytest.mark.parametrize("full", [True, False])
def test_missing_truncated_and_oversized_files_are_reported(tmp_path, name, full):
    path = write_dataset(tmp_path) / name
    good = path.read_bytes()
    for damage, word in ((good[:-1], "truncated"), (b"", "truncated"), (good + b"x", "too long")):
        path.write_bytes(damage)
        with pytest.raises(DataError, match=f"{name} is {word}"):
            verify(tmp_path, full=full)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        verify(tmp_path, full=full)


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=70_000), st.data())
def test_crc_locates_a_flipped_bit(block, data):
    sums = Checksums()
    sums.update(block)
    sums = sums.finish()
    byte, bit = data.draw(st.integers(0, len(block) - 1)), data.draw(st.integers(0, 7))
    wrong = bytearray(block)
    wrong[byte] ^= 1 << bit
    assert flipped_bit(bytes(wrong), sums["crcs"][0], sums["blocks"][0]) == (byte, bit)
    wrong[byte] ^= 0xFF
    assert flipped_bit(bytes(wrong), sums["crcs"][0], sums["blocks"][0]) is None
    assert flipped_bit(block, sums["crcs"][0], sums["blocks"][0]) is None


def test_damaged_block_is_reported_with_number_and_byte_range(tmp_path):
    size = 5 * format.BLOCK_BYTES // 4
    documents = np.random.default_rng(0).integers(1, 99, (3, size // 2), dtype="<u2")
    write_dataset(tmp_path, documents, shard_tokens=10**9)
    shard = Manifest.read(tmp_path).splits["train"][0]
    raw = bytearray((tmp_path / shard.file).read_bytes())
    pieces = [raw[i : i + format.BLOCK_BYTES] for i in range(0, len(raw), format.BLOCK_BYTES)]
    assert list(shard.blocks) == [xxhash.xxh3_64_hexdigest(p) for p in pieces]
    assert list(shard.crcs) == [f"{zlib.crc32(p):08x}" for p in pieces]
    start, end = 3 * format.BLOCK_BYTES, len(raw)
    raw[-1] ^= 4
    (tmp_path / shard.file).write_bytes(raw)
    where = rf"block 3 \(bytes {start} to {end}\): bit 2 of byte {end - 1} is flipped"
    with pytest.raises(DataError, match=where):
        verify(tmp_path)
    raw[start:] = bytes(end - start)
    (tmp_path / shard.file).write_bytes(raw)
    with pytest.raises(DataError, match=rf"in block 3 \(bytes {start} to {end}\); copy it"):
        verify(tmp_path)


def test_extend_and_add_write_the_same_shards(tmp_path):
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 20, 50)
    tokens = rng.integers(1, 99, lengths.sum())
    tokens[np.cumsum(lengths) - 1] = 0
    one = ShardWriter(tmp_path / "one", "train", vocab_size=100, eos_id=0, shard_tokens=31)
    two = ShardWriter(tmp_path / "two", "train", vocab_size=100, eos_id=0, shard_tokens=31)
    for ids in np.split(tokens, np.cumsum(lengths)[:-1]):
        one.add(ids[:-1])
    for part in np.split(np.arange(50), [3, 3, 40]):
        first = lengths[: part[0]].sum() if len(part) else 0
        two.extend(tokens[first : first + lengths[part].sum()], lengths[part])
    shards = one.close()
    assert shards == two.close() and len(shards) > 10


def test_swapped_shards_are_reported(tmp_path):
    write_dataset(tmp_path, [[1, 2], [3, 4]], shard_tokens=3)
    one, two = tmp_path / "train/shard-00000.bin", tmp_path / "train/shard-00001.bin"
    raw = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(raw)
    verify(tmp_path, full=False)
    with pytest.raises(DataError, match="00000.bin is altered.*content of train/shard-00001.bin"):
        verify(tmp_path)


def test_files_of_another_dataset_are_reported(tmp_path):
    write_dataset(tmp_path, [[1, 2, 3], [4], [5] * 60, [6] * 5], shard_tokens=1000)
    index = tmp_path / "train/shard-00000.idx"
    good = index.read_bytes()
    index.write_bytes(format.encode_index(np.array([50, 10, 9, 4]), np.dtype("<u2")))
    with pytest.raises(DataError, match="00000.idx is of another shard: .*first at byte 34"):
        verify(tmp_path)
    index.write_bytes(good)
    (tmp_path / "tokenizer/tokenizer.json").write_text("{ }")
    with pytest.raises(DataError, match="tokenizer.json is not the tokenizer t that made these"):
        verify(tmp_path)
    (tmp_path / "tokenizer/tokenizer.json").write_text("{}")
    path = tmp_path / "index.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]  # as written by older versions
    path.write_text(json.dumps(manifest))
    verify(tmp_path)
    digest = manifest["splits"]["train"][0]["blocks"][0]
    path.write_text(path.read_text().replace(digest, "0" * 16))
    with pytest.raises(DataError, match="index.json is damaged: its checksum of block 0 of train"):
        verify(tmp_path)
    path.write_text(path.read_text().replace(f'"{"0" * 16}"', ""))
    with pytest.raises(DataError, match="index.json lists 0 of the 1 blocks of train/shard-00000"):
        verify(tmp_path)


def test_index_with_wrong_document_lengths_is_reported(tmp_path):
    write_dataset(tmp_path, [[1, 2], [3]], shard_tokens=100)
    path = tmp_path / "train/shard-00000.idx"
    raw = bytearray(path.read_bytes())
    struct.pack_into("<2i", raw, 34, 2, 3)  # same total: documents of 2 and 3 tokens, not 3 and 2
    path.write_bytes(raw)
    with pytest.raises(
        DataError, match="00000.idx .* disagrees with train/shard-00000.bin in 2 bytes"
    ):
        verify(tmp_path)


def test_verify_checks_only_the_given_splits(tmp_path):
    write_dataset(tmp_path)
    (tmp_path / "val/shard-00000.bin").unlink()
    verify(tmp_path, splits=("train",))
    with pytest.raises(DataError, match="val/shard-00000.bin is missing"):
        verify(tmp_path, splits=("val",))


def test_dataset_without_manifest_is_rejected(tmp_path):
    write_dataset(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    (tmp_path / "index.json").rename(tmp_path / "index.json.tmp")
    with pytest.raises(DataError, match="no index.json.*did not finish.*nearlinear data"):
        verify(tmp_path)


def test_manifest_errors_name_cause_and_remedy(tmp_path):
    with pytest.raises(DataError, match="no token shards at .*nowhere: .*nearlinear data"):
        Manifest.read(tmp_path / "nowhere")
    path = write_dataset(tmp_path) / "index.json"
    good = json.loads(path.read_text())
    for text in ("{", "[]", '{"name": "a web page"}'):
        path.write_text(text)
        with pytest.raises(DataError, match="not a token-shard manifest"):
            Manifest.read(tmp_path)
    path.write_text(json.dumps(good | {"version": 1}))
    with pytest.raises(DataError, match="version 1, this nearlinear reads .*version 2"):
        Manifest.read(tmp_path)
    for damaged in ({"splits": {"../x": good["splits"]["train"]}}, {"splits": 3}, {"eos_id": 9}):
        path.write_text(json.dumps(good | damaged))
        with pytest.raises(DataError, match="is damaged"):
            Manifest.read(tmp_path)


def test_fingerprint_ignores_provenance(tmp_path):
    def fingerprint(name, documents=DOCUMENTS, **identity):
        (tmp_path / name).mkdir()
        return Manifest.read(write_dataset(tmp_path / name, documents, **identity)).fingerprint

    one = fingerprint("a", source={"botocore": "1"}, libraries={"numpy": "1"}, settings={"s": 0})
    two = fingerprint("b", source={"botocore": "2"}, libraries={"numpy": "2"}, settings={"s": 1},
                      plan={"splits": [1]}, statistics={"documents": 1})  # fmt: skip
    assert one == two != fingerprint("c", [[1]])


def test_manifest_round_trips(tmp_path):
    write_dataset(tmp_path, settings={"seed": 3}, source={"name": "é"}, libraries={"numpy": "2"})
    manifest = Manifest.read(tmp_path)
    assert (manifest.vocab_size, manifest.eos_id) == (100, 0)
    assert manifest.settings == {"seed": 3} and manifest.source == {"name": "é"}
    (tmp_path / "copy").mkdir()
    manifest.write(tmp_path / "copy")
    assert Manifest.read(tmp_path / "copy") == manifest
