"""Checkpoints in a bucket: what they are on a disk, and whole or not there without a rename."""

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as values_of

import nearlinear as nl
from nearlinear import cli, runtime, schema, storage
from nearlinear.checkpoint import index, kept
from nearlinear.errors import CheckpointError, ConfigError, DataError
from nearlinear.spmd.failures import RankError
from nearlinear.storage import s3
from nearlinear.train import preflight
from nearlinear.train.config import TrainConfig
from tests.core.test_checkpoint import loads, on, saves, started, steps_of
from tests.support import bucket
from tests.support.bucket import BROKEN, HALF, Call, Door

PART = 64 * 2**10
RUN = "s3://my-bucket/runs/tiny"


@pytest.fixture
def door(aws_services, monkeypatch):
    """To a bucket whose objects go up and come down in small parts."""
    pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(s3, "PART", PART)
    with bucket.opened() as (door, address):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield door


def objects(services, prefix: str = "") -> dict[str, bytes]:
    """Everything in the bucket, as another client sees it."""
    client = services["s3"]
    found = client.list_objects_v2(Bucket="my-bucket", Prefix=prefix).get("Contents", [])
    return {
        each["Key"]: client.get_object(Bucket="my-bucket", Key=each["Key"])["Body"].read()
        for each in found
    }


def uploads(services) -> list[str]:
    """Keys of which there are parts that are no object."""
    found = services["s3"].list_multipart_uploads(Bucket="my-bucket").get("Uploads", [])
    return [each["Key"] for each in found]


def test_any_layout_reads_what_any_layout_wrote(door, aws_services):
    """And the objects are safetensors files that the library reads."""
    saved, after = on(4, saves, RUN, 2, "gpt2")[0]
    for others, theirs in ((1, 1), (2, 1), (4, 4)):
        for loaded, losses in on(others, loads, RUN, theirs, "gpt2"):
            assert all(torch.equal(loaded[name], value) for name, value in saved.items())
            assert losses == pytest.approx(after, abs=1e-6)
    there = objects(aws_services, "runs/tiny/")
    names = [f"runs/tiny/rank-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    assert sorted(there) == ["runs/tiny/index.json", *names]
    found = {name for key in names for name in values_of(there[key])}
    assert found >= {f"model/{name}" for name in saved if "." in name and "exp_avg" not in name
                     and not name.endswith(".step")}  # fmt: skip


def test_the_index_is_put_when_all_else_is_there(door, aws_services):
    on(2, saves, RUN, 2, "gpt2")
    puts = [call for call in door.calls if call.method == "PUT" or "uploadId" in call.query]
    assert puts[-1].key == "my-bucket/runs/tiny/index.json"
    parts = [call for call in puts if call.is_part]
    assert len(parts) > 4, "nothing went up in parts"
    ends = [call.key for call in puts if call.method == "POST"]
    assert sorted(ends) == sorted({call.key for call in parts}) and not uploads(aws_services)


def test_a_file_is_read_once_in_ranges(door):
    """Hashing wants all of it, and what a rank needs of it is taken on the way."""
    on(2, saves, RUN, 2, "gpt2")
    door.calls.clear()
    on(1, loads, RUN, 1, "gpt2")
    sizes = {name: file.bytes for name, file in index.read(RUN).files.items()}
    for name, size in sizes.items():
        asked = [call.range for call in door.calls if call.key.endswith(name) and call.range]
        whole = [f"bytes={at}-{min(at + PART, size) - 1}" for at in range(0, size, PART)]
        assert sorted(asked) == sorted(whole) and len(whole) > 1


def keeps(rank, folder, last=3):
    mesh, model, updates = started(2, "gpt2")
    for step in range(1, last + 1):
        steps_of(mesh, model, updates, rank, [step])
        kept.keep(folder, 2, step, model, updates)
    return str(kept.latest(folder))


def test_the_newest_are_kept_and_what_was_not_finished_goes(door, aws_services):
    client = aws_services["s3"]
    client.put_object(Bucket="my-bucket", Key="runs/tiny/step-00000000/rank-00000", Body=b"half")
    client.create_multipart_upload(Bucket="my-bucket", Key="runs/tiny/step-00000000/rank-00001")
    client.put_object(Bucket="my-bucket", Key="runs/tiny-2/step-00000000/mine", Body=b"other")
    assert set(on(2, keeps, RUN)) == {f"{RUN}/step-00000003"}
    assert kept.steps(RUN) == [2, 3]
    there = objects(aws_services)
    assert there["runs/tiny/latest"] == b"step-00000003\n"
    folders = {key.rpartition("/")[0] for key in there}
    assert folders == {"runs/tiny", "runs/tiny/step-00000002", "runs/tiny/step-00000003",
                       "runs/tiny-2/step-00000000"}  # fmt: skip
    assert not uploads(aws_services)
    gone = [call for call in door.calls if call.method == "DELETE" or "delete" in call.query]
    at = [call.key for call in gone].index("my-bucket/runs/tiny/step-00000001/index.json", 2)
    assert "delete" in gone[at + 1].query, "its index is deleted first"


def test_a_killed_ranks_parts_go_when_the_step_is_saved_again(door, aws_services):
    key = "runs/tiny/rank-00001-of-00002.safetensors"
    aws_services["s3"].create_multipart_upload(Bucket="my-bucket", Key=key)
    on(2, saves, RUN, 2, "gpt2")
    assert not uploads(aws_services)


def saves_then(rank, folder, error):
    """What the second save is told, and what is newest after it."""
    mesh, model, updates = started(2, "gpt2")
    kept.keep(folder, 2, 1, model, updates).wait()
    if rank == 0:
        error()
    steps_of(mesh, model, updates, rank, [1])  # no rank begins before
    with pytest.raises(CheckpointError) as caught:
        kept.keep(folder, 2, 2, model, updates).wait()
    return str(caught.value), str(kept.latest(folder))


def second(name: str, answer, part: bool = False):
    """A rule: what of the second step has ``name`` in its key is answered so when it is put."""

    def refuse(call: Call):
        of_it = "step-00000002" in call.key and name in call.key and call.method == "PUT"
        return answer if of_it and (call.is_part or not part) else None

    return refuse


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        (second("rank-00001", BROKEN, part=True), "rank 1 cannot write .*look at the network"),
        (second("rank-00001", (403, "AccessDenied")), "rank 1 cannot .*let this role do"),
        (second("rank-00000", (400, "ExpiredToken")), "rank 0 .*have expired: renew them"),
        (second("index", (503, "SlowDown")), "index.json cannot be written.*in a minute"),
    ],
)
def test_a_save_that_fails_midway_leaves_the_one_before(door, aws_services, refuse, words):
    before = {}

    def error():
        before.update(objects(aws_services, "runs/tiny/step-00000001/"))
        door.refuse = refuse

    (said, newest), (other, _) = on(2, saves_then, RUN, error)
    assert said == other and newest == f"{RUN}/step-00000001"
    assert re.search(words, said), said
    assert "checkpoints that were there before are as they were" in said
    assert objects(aws_services, "runs/tiny/step-00000001/") == before
    assert not uploads(aws_services) and kept.steps(RUN) == [1]


@pytest.fixture
def checkpoint(door):
    folder = f"{RUN}/step-00000002"
    on(2, saves, folder, 2, "gpt2")
    return folder


def refused(folder) -> str:
    with pytest.raises(RankError) as caught:
        on(2, loads, folder, 2, "gpt2")
    assert isinstance(caught.value.__cause__, CheckpointError)
    return str(caught.value.__cause__)


def replace(services, folder: str, name: str, data: bytes | None) -> None:
    key = f"{folder.removeprefix('s3://my-bucket/')}/{name}"
    if data is None:
        services["s3"].delete_object(Bucket="my-bucket", Key=key)
    else:
        services["s3"].put_object(Bucket="my-bucket", Key=key, Body=data)


def test_what_is_not_as_it_was_written_is_named(checkpoint, aws_services, capsys):
    name = "rank-00001-of-00002.safetensors"
    data = objects(aws_services)[f"runs/tiny/step-00000002/{name}"]
    replace(aws_services, checkpoint, name, data[:-1] + bytes([data[-1] ^ 1]))
    assert f"{checkpoint}/{name} has changed since it was written" in refused(checkpoint)
    assert cli.main(["checkpoint", "verify", checkpoint]) == 1
    assert f"FAULT {checkpoint}/{name} has changed" in capsys.readouterr().out
    replace(aws_services, checkpoint, name, b"\xff" * len(data))
    assert f"{checkpoint}/{name} has changed since it was written" in refused(checkpoint)
    replace(aws_services, checkpoint, name, data[:-8])
    assert f"{name} has {len(data) - 8} bytes instead of {len(data)}" in refused(checkpoint)
    replace(aws_services, checkpoint, name, None)
    assert f"{name} is missing" in refused(checkpoint)
    assert cli.main(["checkpoint", "verify", checkpoint]) == 1
    assert f"FAULT {checkpoint}/{name} is missing" in capsys.readouterr().out
    replace(aws_services, checkpoint, "index.json", None)
    assert "is no checkpoint, or was not finished" in refused(checkpoint)
    assert "does not exist" in refused(f"{RUN}/elsewhere")


def test_a_connection_that_breaks_is_tried_again(checkpoint, door):
    seen = set()

    def refuse(call: Call):
        if call.range and call.key not in seen:
            seen.add(call.key)
            return HALF

    door.refuse = refuse
    on(1, loads, checkpoint, 1, "gpt2")
    assert len(seen) == 2


def test_who_cannot_look_does_not_go_back_to_an_older_one(door):
    on(2, keeps, RUN, 2)
    door.refuse = lambda call: (403, "AccessDenied") if "step-00000002/index" in call.key else None
    with pytest.raises(RankError, match="s3:GetObject") as caught:
        on(2, lambda rank: nl.init({}) and kept.latest(RUN))
    assert isinstance(caught.value.__cause__, CheckpointError)


def test_commands(door, aws_services, tmp_path, capsys):
    on(2, keeps, RUN, 2)
    assert cli.main(["checkpoint", "inspect", RUN, "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["folder"] for each in told] == [f"{RUN}/step-0000000{n}" for n in (1, 2)]
    assert cli.main(["checkpoint", "verify", RUN]) == 0
    assert capsys.readouterr().out.count("ok    ") == 2
    one, two = (f"{RUN}/step-0000000{n}" for n in (1, 2))
    only = ["--only", "model/transformer.ln_f"]
    assert cli.main(["checkpoint", "diff", one, one, *only]) == 0
    assert cli.main(["checkpoint", "diff", one, two, *only]) == 1
    capsys.readouterr()
    assert cli.main(["checkpoint", "export", RUN, str(tmp_path / "hf")]) == 0
    exported = values_of((tmp_path / "hf" / "model.safetensors").read_bytes())
    files = [values_of(data) for key, data in objects(aws_services).items()
             if "step-00000002/rank" in key]  # fmt: skip
    name = "transformer.ln_f.weight"
    parts = [found[f"model/{name}"] for found in files if f"model/{name}" in found]
    assert torch.equal(exported[name], torch.cat(parts))
    assert cli.main(["checkpoint", "export", RUN, "s3://my-bucket/hf"]) == 2
    assert "is no folder of this machine's" in capsys.readouterr().err
    assert not [key for key in objects(aws_services) if key.startswith("hf")]


def test_a_run_goes_on_to_the_bit(door, small_run, tmp_path):
    small_run["train"]["eval_sequences"] = small_run["train"]["sample_tokens"] = 0

    def train(folder: str, **loop):
        config = small_run | {"checkpoint": {"folder": folder, "every": 2}}
        try:
            return nl.Trainer(config | {"train": small_run["train"] | loop}).fit()
        finally:
            runtime.shutdown()

    straight = train(str(tmp_path / "straight"))
    train(RUN, stop_after=3)
    assert kept.steps(RUN) == [2, 3]
    resumed = train(RUN)
    assert (resumed.steps, resumed.loss) == (straight.steps, straight.loss)
    on_disk = tmp_path / "straight" / "step-00000006"
    for name, file in index.read(on_disk).files.items():
        written = values_of((storage.at(RUN) / "step-00000006" / name).read())
        expected = values_of((on_disk / name).read_bytes())
        assert all(torch.equal(written[key], value) for key, value in expected.items())
        assert file == index.digest(f"{RUN}/step-00000006/{name}")


def broken_account(monkeypatch, door: Door, fault: str) -> str:
    if fault == "bucket":
        return "s3://no-such-bucket/run"
    if fault == "credentials":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    elif fault == "network":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    elif fault == "boto3":
        monkeypatch.setenv("AWS_APP_ID", "another")  # another client
        monkeypatch.setitem(sys.modules, "boto3.session", None)
    else:
        door.refuse = lambda call: (403, fault)
    return RUN


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("bucket", "there is no such bucket: create it, or mend the name"),
        ("credentials", "there are no AWS credentials"),
        ("network", "look at the network and AWS_ENDPOINT_URL"),
        ("boto3", r'pip install "nearlinear\[s3\]"'),
        ("AccessDenied", "let this role do s3:ListBucket"),
        ("ExpiredToken", "the credentials have expired"),
        ("PermanentRedirect", "in another region"),
    ],
)
def test_what_is_wrong_is_said_before_and_during_a_run(door, monkeypatch, fault, words, small_run):
    folder = broken_account(monkeypatch, door, fault)
    small_run["checkpoint"] = {"folder": folder}
    with pytest.raises(ConfigError, match=f"checkpoint.folder = .*{words}"):
        preflight.check(schema.build(TrainConfig, small_run), 1)
    with pytest.raises(CheckpointError, match=words):
        kept.steps(folder)
    with pytest.raises(RankError, match=words):
        on(2, saves, folder, 2, "gpt2")


def test_names(tmp_path):
    assert str(storage.at(Path("s3://bucket/run") / "step")) == "s3://bucket/run/step"
    assert str(storage.at("s3://bucket/a//b/")) == "s3://bucket/a/b"
    assert storage.at("s3://bucket/a").parent == storage.at("s3://bucket")
    assert storage.at(str(tmp_path)).path == tmp_path
    for name, words in (("gs://bucket/run", "s3://bucket/prefix"), ("s3://", "names no bucket")):
        for kept_there in (CheckpointError, DataError):  # either may lie there
            with pytest.raises(kept_there, match=words):
                storage.at(name)


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    assert kept.steps(tmp_path / "nowhere") == []
    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(CheckpointError, match="cannot be listed .*mend its permissions"):
        kept.steps(tmp_path)


def test_a_runs_own_folder_is_on_this_machine(small_run):
    small_run["run"]["folder"] = "s3://my-bucket/run"
    with pytest.raises(ConfigError, match="run.folder = s3://my-bucket/run is no folder of this"):
        preflight.check(schema.build(TrainConfig, small_run), 1)


@pytest.mark.slow
def test_a_script_that_ends_waits_for_its_last_checkpoint(door):
    """The main thread is over while parts still go up."""
    script = """
        import torch, nearlinear as nl
        from nearlinear.storage import s3
        from tests.support import tiny
        s3.PART = 65536
        nl.init({})
        model = nl.shard(tiny.MODELS["gpt2"]())
        nl.save("s3://my-bucket/last", model, tiny.optimizer_for(model, "adamw"), step=7)
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert index.read("s3://my-bucket/last").step == 7
