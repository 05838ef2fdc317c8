"""Token shards in an S3 bucket: fetched ranges, block checksums and the shared cache."""

import errno
import logging
import os
import threading

import numpy as np
import pytest

import nearlinear as nl
from nearlinear.config import train as train_config
from nearlinear.data import bucket as bucket_module
from nearlinear.data.dataset import TokenDataset
from nearlinear.data.format import ShardWriter
from nearlinear.data.format import shards as shards_module
from nearlinear.data.format.manifest import Manifest
from nearlinear.data.loader import BlockShuffle, Loader
from nearlinear.data.masking import Masks
from nearlinear.errors import DataError
from tests.support import bucket

pytest.importorskip("moto.server")

BLOCK = 1024  # bytes, instead of 4 MiB
AT = "s3://my-bucket/tokens"


@pytest.fixture
def s3_proxy(aws_services, monkeypatch):
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    with bucket.opened() as (s3_proxy, address):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield s3_proxy


@pytest.fixture
def local(tmp_path, aws_services, monkeypatch):
    """8 KiB of tokens in three shards, in a local folder and in the bucket."""
    for module in (shards_module, bucket_module):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    folder = tmp_path / "tokens"
    writer = ShardWriter(folder, "train", vocab_size=60_000, eos_id=0, shard_tokens=1500)
    random = np.random.default_rng(0)
    while sum(p.tokens for p in writer._shards) < 3000:
        writer.add(random.integers(1, 60_000, random.integers(5, 200)))
    tokenizer = {"name": "t", "file": "tokenizer/tokenizer.json", "sha256": "0"}
    Manifest(60_000, 0, tokenizer, {"train": writer.close()}).write(folder)
    upload(aws_services["s3"], folder)
    return TokenDataset(folder, sequence_length=100, verify="size")


def upload(s3, folder, prefix="tokens"):
    for path in folder.rglob("*"):
        if path.is_file():
            s3.upload_file(str(path), "my-bucket", f"{prefix}/{path.relative_to(folder)}")


def remote(tmp_path, **options):
    return TokenDataset(AT, sequence_length=100, **{"cache": tmp_path / "cache"} | options)


def ranges(s3_proxy):
    return [(c.key, c.range) for c in s3_proxy.calls if c.range]


def test_windows_equal_the_local_folder(local, s3_proxy, tmp_path):
    found = remote(tmp_path)
    assert (len(found), found.fingerprint) == (len(local), local.fingerprint)
    assert not ranges(s3_proxy), "nothing is fetched that is not read"
    order = np.random.default_rng(1).permutation(len(local))
    one = order[:1]
    assert np.array_equal(found.windows(one), local.windows(one))
    assert len(ranges(s3_proxy)) <= 3
    assert np.array_equal(found.windows(order), local.windows(order))
    blocks = sum(len(shard.blocks) for shard in local.source.shards)
    assert 6 < len(ranges(s3_proxy)) == len(set(ranges(s3_proxy))) <= blocks
    before = len(ranges(s3_proxy))
    again = remote(tmp_path, verify="full")
    assert np.array_equal(again.windows(order), local.windows(order))
    assert len(ranges(s3_proxy)) == before, "what has come once is read from the cache"


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_batches_with_document_masks_equal_the_local_folder(local, s3_proxy, tmp_path, packing):
    here = TokenDataset(
        local.path, sequence_length=100, verify="size", packing=packing, cache=tmp_path / "other"
    )
    masks, blocks = Masks(documents=True), BlockShuffle(1, 2) if packing == "concat" else None
    options = {"masks": masks, "blocks": blocks, "data_rank": 0, "data_ranks": 1}
    loaders = [
        Loader(dataset, 3, 2, read_ahead=ahead, **options)
        for dataset, ahead in ((here, 0), (remote(tmp_path, packing=packing), 2))
    ]
    for _ in range(12):
        for mine, its in zip(*map(next, loaders), strict=True):
            assert all(np.array_equal(mine[name], its[name]) for name in mine)


def test_concurrent_ranks_fetch_each_block_once(local, s3_proxy, tmp_path):
    everything, found = np.arange(len(local)), []
    datasets = [remote(tmp_path) for _ in range(6)]
    threads = [
        threading.Thread(target=lambda d=d: found.append(d.windows(everything))) for d in datasets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(np.array_equal(f, local.windows(everything)) for f in found)
    assert len(ranges(s3_proxy)) == len(set(ranges(s3_proxy)))


def test_altered_block_is_rejected_by_name(local, aws_services, s3_proxy, tmp_path):
    body = bytearray((local.path / "train/shard-00001.bin").read_bytes())
    body[BLOCK + 7] ^= 16
    aws_services["s3"].put_object(
        Bucket="my-bucket", Key="tokens/train/shard-00001.bin", Body=bytes(body)
    )
    found = remote(tmp_path)
    with pytest.raises(
        DataError, match=rf"block 1 of {AT}/train/shard-00001\.bin \(from byte {BLOCK}\) is altered"
    ):
        found.windows(np.arange(len(found)))
    whole = [path for path in (tmp_path / "cache").rglob("1.block")]
    assert len(whole) <= 2, "a block that is not right is not kept"


def test_damaged_cached_blocks_are_fetched_again(local, s3_proxy, tmp_path):
    everything = np.arange(len(local))
    remote(tmp_path).windows(everything)
    blocks = sorted((tmp_path / "cache").rglob("*.block"))
    blocks[0].write_bytes(b"")
    blocks[1].write_bytes(blocks[1].read_bytes()[:-2])
    blocks[2].write_bytes(bytes(len(blocks[2].read_bytes())))
    before = len(ranges(s3_proxy))
    assert np.array_equal(remote(tmp_path).windows(everything), local.windows(everything))
    assert len(ranges(s3_proxy)) == before + 3


def test_cache_stays_within_its_limit_and_evicts_the_oldest_block(local, s3_proxy, tmp_path):
    found = remote(tmp_path, cache_gib=3 * BLOCK / 2**30)
    for window in [*range(len(local)), *range(len(local))]:
        assert np.array_equal(found.windows([window]), local.windows([window]))
        kept = list((tmp_path / "cache/blocks").rglob("*.block"))
        assert sum(path.stat().st_size for path in kept) <= 3 * BLOCK
    last = max(kept, key=lambda path: path.stat().st_mtime_ns)
    for path in kept:
        if path != last:
            os.utime(path, ns=(1, 1))
    found._stream.file.cache_clear()
    fresh = remote(tmp_path, cache_gib=3 * BLOCK / 2**30)
    fresh.windows([0])
    assert last.exists(), "the block used last stays"


def test_errors_name_cause_and_remedy(local, aws_services, s3_proxy, tmp_path):
    s3 = aws_services["s3"]
    with pytest.raises(
        DataError, match="s3://my-bucket/none/index.json does not exist: give a pre"
    ):
        TokenDataset("s3://my-bucket/none", sequence_length=8, cache=tmp_path)
    with pytest.raises(DataError, match="the bucket does not exist"):
        TokenDataset("s3://nobody/none", sequence_length=8, cache=tmp_path)
    with pytest.raises(DataError, match="has no split 'val'"):
        TokenDataset(AT, "val", sequence_length=8, cache=tmp_path)
    with pytest.raises(DataError, match=r"drop data\.vocab_size and data\.eos_id"):
        remote(tmp_path, vocab_size=7)
    s3.put_object(Bucket="my-bucket", Key="tokens/train/shard-00001.bin", Body=b"short")
    with pytest.raises(DataError, match=r"shard-00001\.bin has 5 of \d+ bytes: upload it again"):
        remote(tmp_path)
    s3.delete_object(Bucket="my-bucket", Key="tokens/train/shard-00001.bin")
    with pytest.raises(DataError, match=r"shard-00001\.bin is missing"):
        remote(tmp_path)


def test_training_from_a_bucket_equals_training_from_a_folder(
    small_run, token_folder, aws_services, s3_proxy, tmp_path
):
    upload(aws_services["s3"], token_folder)
    here = nl.spmd.run(lambda rank: nl.Trainer(train_config.load(small_run)).fit(), 1)[0]
    small_run["data"] |= {"path": AT, "cache": str(tmp_path / "cache"), "read_ahead": 1}
    there = nl.spmd.run(lambda rank: nl.Trainer(train_config.load(small_run)).fit(), 2)
    small = here.loss, here.sample
    assert there[0] == there[1] and there[0].sample
    small_run["parallel"] = {}
    small_run["run"]["folder"] = str(tmp_path / "run2")
    again = nl.spmd.run(lambda rank: nl.Trainer(train_config.load(small_run)).fit(), 1)[0]
    assert (again.loss, again.sample) == small


def small_disk(monkeypatch, folder, room, fault):
    """Make `os.replace` raise `fault` while the files in `folder` exceed `room` bytes.

    Returns:
        The list of refused target paths, extended on each refusal.
    """
    refused, whole = [], os.replace

    def replace(source, target):
        if sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) > room:
            refused.append(target)
            raise OSError(fault, os.strerror(fault))
        whole(source, target)

    monkeypatch.setattr(os, "replace", replace)
    return refused


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT])
def test_reads_continue_when_the_cache_disk_is_full(
    local, s3_proxy, tmp_path, monkeypatch, caplog, fault
):
    refused = small_disk(monkeypatch, tmp_path / "cache", 4 * BLOCK, fault)
    found, ever = remote(tmp_path), set()
    for window in [*range(len(local)), *range(len(local))]:
        assert np.array_equal(found.windows([window]), local.windows([window]))
        kept = set((tmp_path / "cache/blocks").glob("*/*.block"))
        ever |= kept
        assert 0 < len(kept) <= 5
    assert len(refused) > 1 and caplog.text.count("has no room left") == 1
    assert len(ever) > 5, "what is read takes the place of the oldest"
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_reads_continue_when_a_lock_file_does_not_fit(local, s3_proxy, tmp_path, monkeypatch):
    whole = os.open

    def full(path, *arguments):
        if "locks" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, *arguments)

    monkeypatch.setattr(os, "open", full)
    order = np.arange(len(local))
    assert np.array_equal(remote(tmp_path).windows(order), local.windows(order))
    monkeypatch.setattr(os, "open", lambda *a: (_ for _ in ()).throw(PermissionError(13, "no")))
    with pytest.raises(DataError, match=r"locks cannot be written \(no\): set data.cache to anot"):
        remote(tmp_path).windows(order)


@pytest.mark.parametrize("limit", [0, 3 * BLOCK])
def test_partial_files_of_a_killed_process_are_removed(local, s3_proxy, tmp_path, limit):
    folder = tmp_path / "cache/blocks/of-another-shard"
    folder.mkdir(parents=True)
    left, under_way = folder / ".7.block.f00.partial", folder / ".8.block.ba5.partial"
    for path in (left, under_way):
        path.write_bytes(bytes(BLOCK))
    os.utime(left, (1, 1))
    found = remote(tmp_path, cache_gib=limit / 2**30)
    for window in range(len(local)):
        found.windows([window])
        kept = sum(path.stat().st_size for path in folder.parent.glob("*/*.block"))
        assert kept + BLOCK <= limit or not limit, "what is not finished takes room, too"
    assert under_way.exists() and not left.exists()


def test_damaged_cached_index_is_replaced(local, s3_proxy, tmp_path):
    remote(tmp_path, packing="best_fit")
    copies = sorted((tmp_path / "cache/indexes").glob("*.idx"))
    assert copies
    for path in copies:
        raw = bytearray(path.read_bytes())
        raw[40] ^= 1
        path.write_bytes(raw)
    found = remote(tmp_path)
    assert np.array_equal(found.document_lengths(), local.document_lengths())
