"""Preparation from and to S3, with the guarantees of a disk."""

import gzip
import json
import logging
import random
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data_prep
from data_prep import output, pool, report
from data_prep.__main__ import main
from data_prep.sources import source as splitting
from data_prep.sources.files import RemoteFile
from nearlinear import storage
from nearlinear.data.format import Manifest, verify
from nearlinear.errors import DataError, NearlinearError
from nearlinear.storage import s3
from tests.support import bucket

pytest.importorskip("moto.server")

TEXT, OUT = "s3://my-bucket/text", "s3://my-bucket/tokens/mine"
OPTIONS = {"progress": False, "val_fraction": 0.2, "workers": 1, "backends": ("tokenizers",)}


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    monkeypatch.setattr(splitting, "SPLIT_BYTES", 1500)


@pytest.fixture
def door(aws_services, monkeypatch):
    """Open a bucket with small multipart uploads and ranges."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(s3, "PART_BYTES", 1024)
    with bucket.opened() as (door, address):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield door


@pytest.fixture
def text(tmp_path, aws_services):
    """Write two files of documents with duplicates, locally and to the bucket."""
    folder = tmp_path / "text"
    folder.mkdir()
    draw = random.Random(0)
    texts = [" ".join(draw.choices("abcdefg", k=draw.randint(1, 60))) for _ in range(60)]
    rows = [json.dumps({"text": text}) + "\n" for text in [*texts, *texts[:9]]]
    (folder / "a.jsonl").write_text("".join(rows[:50]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(rows[50:]).encode()))
    for path in folder.iterdir():
        aws_services["s3"].upload_file(str(path), "my-bucket", f"text/{path.name}")
    return folder


@pytest.fixture
def local(text, tmp_path, toy_vocab):
    data_prep.prepare(
        data_prep.sources.jsonl(text),
        tmp_path / "local",
        tokenizer=toy_vocab,
        **OPTIONS,
        dedup="exact",
    )
    return tmp_path / "local"


def prepare(toy_vocab, **options):
    source = data_prep.sources.jsonl(options.pop("text", TEXT))
    options = {**OPTIONS, "dedup": "exact", **options}
    return data_prep.prepare(source, OUT, tokenizer=toy_vocab, **options)


def there(services, prefix="tokens/"):
    client = services["s3"]
    found = client.list_objects_v2(Bucket="my-bucket", Prefix=prefix).get("Contents", [])
    return {
        each["Key"].removeprefix(prefix): client.get_object(Bucket="my-bucket", Key=each["Key"])[
            "Body"
        ].read()
        for each in found
    }


def shards(files):
    """Select the files that contain no paths or times."""
    return {name: raw for name, raw in files.items() if not name.endswith(".json")}


def on_disk(folder):
    return {f"mine/{path.relative_to(folder)}": path.read_bytes()
            for path in folder.rglob("*") if path.is_file()}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_bucket_dataset_equals_local_dataset(local, door, aws_services, toy_vocab, workers):
    manifest = prepare(toy_vocab, workers=workers)
    found = there(aws_services)
    assert shards(found) == shards(on_disk(local)) and len(shards(found)) > 8
    assert sorted(found) == sorted(on_disk(local))
    assert manifest.fingerprint == Manifest.read(local).fingerprint
    assert manifest.statistics == Manifest.read(local).statistics
    assert found["mine/tokenizer/tokenizer.json"] == open(toy_vocab, "rb").read()
    puts = [call for call in door.calls if call.method == "PUT" or "uploadId" in call.query]
    assert puts[-1].key == "my-bucket/tokens/mine/index.json"
    assert any(call.is_part for call in puts), "no multipart upload was used"
    before = len(door.calls)
    assert prepare(toy_vocab) == manifest, "a finished dataset is not prepared again"
    assert all(call.method in ("GET", "HEAD", "POST") for call in door.calls[before:])


def test_commands_read_datasets_in_a_bucket(local, door, toy_vocab, capsys):
    prepare(toy_vocab)
    assert verify(OUT) == Manifest.read(OUT)
    assert main(["verify", OUT]) == 0 and "every byte as written" in capsys.readouterr().out
    assert main(["stats", OUT]) == 0 and main(["inspect", OUT]) == 0
    said = capsys.readouterr().out
    assert report.stats(local).splitlines()[1:4] == report.stats(OUT).splitlines()[1:4]
    assert report.first_document(local) == report.first_document(OUT) != ""
    assert report.first_document(local) in said
    assert main(["export", OUT, "--format", "nanogpt", "--out", "x"]) == 2
    assert "is not a local directory" in capsys.readouterr().err


def test_resume_in_bucket_after_failure_of_any_request(
    local, door, aws_services, toy_vocab, monkeypatch
):
    prepare(toy_vocab)
    writes, expected = [], shards(there(aws_services))
    storage.as_path(OUT).rmtree()
    done, process_split = [], pool.process_split

    def refuse_from(first):
        def refuse(call):
            if call.method in ("PUT", "POST", "DELETE"):
                writes.append(call)
                return (403, "AccessDenied") if len(writes) >= first else None

        return refuse

    def doing(plan, number, *rest):
        done.append(number)
        return process_split(plan, number, *rest)

    monkeypatch.setattr(pool, "process_split", doing)
    stopped = 0
    for at in range(1, 1000, 25):
        writes.clear()
        door.refuse = refuse_from(at)
        try:
            prepare(toy_vocab)
        except NearlinearError as error:
            assert "AccessDenied" in str(error)
        else:
            break
        door.refuse = lambda call: None
        stopped += 1
        assert "mine/index.json" not in there(aws_services) or len(writes) > 100
        records = [name for name in there(aws_services) if name.endswith("record.json")]
        done.clear()
        prepare(toy_vocab)
        assert shards(there(aws_services)) == expected
        assert not [name for name in there(aws_services) if "partial" in name]
        if records:
            assert not {int(name.split("/")[-2]) for name in records} & set(done)
        storage.as_path(OUT).rmtree()
    assert stopped > 1


def test_concurrent_staging_in_bucket_keeps_uploads(text, aws_services, door, toy_vocab):
    """Uploads of a split without a record survive the end of a second preparation."""
    plan = data_prep.plan.PreparationPlan.create(
        data_prep.sources.jsonl(TEXT), data_prep.tokenizer.load(toy_vocab),
        val_fraction=0.2, seed=0, dedup=None, max_documents=None,
        max_tokens=None, shard_tokens=1000,
    )  # fmt: skip
    sent = storage.as_path(OUT + ".partial/splits/00000/train/shard-00000.bin")
    other = replace(plan, settings={**plan.settings, "seed": 1})
    with output.staging(OUT, plan, False):
        sent.put(b"12")
        with output.staging(OUT, plan, False):
            assert sent.size() == 2
        assert sent.size() == 2
    assert sent.size() == 2
    with output.staging(OUT, other, False):
        assert not (sent.parent).file_sizes()


def test_bucket_refuses_other_settings_with_the_difference(text, door, aws_services, toy_vocab):
    first = prepare(toy_vocab)
    with pytest.raises(DataError, match=r"other settings \(seed 0 -> 1\): pass --overwrite"):
        prepare(toy_vocab, seed=1)
    door.calls.clear()
    second = prepare(toy_vocab, seed=1, overwrite=True)
    assert second != first and verify(OUT) == second
    taken = [call.key for call in door.calls if call.method == "DELETE" or "delete" in call.query]
    laid = [n for n, call in enumerate(door.calls) if call.key.startswith("my-bucket/tokens/mine/")
            and call.method == "PUT"]  # fmt: skip
    assert taken[0] == "my-bucket/tokens/mine/index.json"
    assert [c.key for c in door.calls].index(taken[0]) < laid[0], (
        "the manifest is removed before other files change"
    )
    aws_services["s3"].put_object(Bucket="my-bucket", Key="text/a.jsonl", Body=b'{"text": "a"}\n')
    with pytest.raises(DataError, match="input .* -> .* bytes"):
        prepare(toy_vocab, seed=1)
    aws_services["s3"].put_object(Bucket="my-bucket", Key="mine/own", Body=b"mine")
    with pytest.raises(DataError, match="is not a folder of token shards"):
        data_prep.prepare(data_prep.sources.jsonl(text), "s3://my-bucket/mine", tokenizer=toy_vocab,
                          **OPTIONS)  # fmt: skip


def test_damage_in_bucket_is_named(text, door, aws_services, toy_vocab):
    prepare(toy_vocab)
    client = aws_services["s3"]
    key = "tokens/mine/train/shard-00001.bin"
    raw = bytearray(there(aws_services)["mine/train/shard-00001.bin"])
    raw[7] ^= 8
    client.put_object(Bucket="my-bucket", Key=key, Body=bytes(raw))
    with pytest.raises(DataError, match=r"s3://.*shard-00001\.bin is altered.*bit 3 of byte 7 is"):
        verify(OUT)
    client.put_object(Bucket="my-bucket", Key=key, Body=bytes(raw[:-2]))
    with pytest.raises(DataError, match=r"shard-00001\.bin is truncated"):
        prepare(toy_vocab)
    client.delete_object(Bucket="my-bucket", Key=key)
    with pytest.raises(DataError, match=r"shard-00001\.bin is missing"):
        verify(OUT, full=False)
    with pytest.raises(DataError, match="no token shards at s3://my-bucket/nothing"):
        verify("s3://my-bucket/nothing")


def test_every_file_type_is_read_from_a_bucket(tmp_path, door, aws_services):
    texts = [f"row {number} " + "x" * (number % 50) for number in range(300)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=50)
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as stream:
        stream.write(rows)
    (tmp_path / "a.txt").write_text("\n".join(texts))
    (tmp_path / "_SUCCESS").touch()
    for path in tmp_path.iterdir():
        aws_services["s3"].upload_file(str(path), "my-bucket", f"kinds/{path.name}")
    at, sources = "s3://my-bucket/kinds", data_prep.sources
    with pytest.raises(DataError, match=r"a\.txt \(not .parquet\) would not be read"):
        sources.parquet(at)
    for source in (
        sources.jsonl(at, allow_unread=True),
        sources.parquet(at, allow_unread=True),
        sources.text(at, document="line", allow_unread=True),
    ):
        assert len(source.unread) == 2
        assert len(source.inputs) == 1 and source.inputs[0].path.startswith("s3://")
        again = sources.rebuild(json.loads(json.dumps(source.spec)))
        found = [text for split in again.splits() for text in again.read(split)]
        assert found == texts
    assert len(sources.parquet(f"{at}/a.parquet").splits()) > 3
    with pytest.raises(DataError, match=r"no object s3://my-bucket/none, and no \.jsonl, "):
        sources.jsonl("s3://my-bucket/none")


def test_remote_file_matches_local_file(aws_services, tmp_path):
    raw = random.Random(1).randbytes(300_000)
    (tmp_path / "f").write_bytes(raw)
    aws_services["s3"].put_object(Bucket="my-bucket", Key="f", Body=raw)
    remote, draw = RemoteFile(storage.as_path("s3://my-bucket/f")), random.Random(2)
    with open(tmp_path / "f", "rb") as here:
        for _ in range(40):
            if draw.random() < 0.5:
                whence = draw.choice([0, 1, 2])
                offset = draw.randint(0, 300_100) if whence == 0 else draw.randint(-999, 999)
                where = max(0, here.tell() * (whence == 1) + offset + len(raw) * (whence == 2))
                assert remote.seek(offset, whence) == here.seek(where) == remote.tell()
            wanted = draw.choice([1, 100, 70_000])
            mine, its = b"", here.read(wanted)
            while len(mine) < len(its):
                mine += remote.read(wanted - len(mine))
            assert mine == its
