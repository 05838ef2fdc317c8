"""Checkpoints on S3: same content as on disk, atomic without a rename, errors with a remedy."""

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
from safetensors.torch import load as load_bytes

import nearlinear as nl
from nearlinear import cli, storage
from nearlinear.checkpoint import index, resume, save
from nearlinear.config.parallel import schema
from nearlinear.config.train import TrainConfig
from nearlinear.distributed import runtime
from nearlinear.errors import (
    CheckpointDamaged,
    CheckpointError,
    ConfigError,
    DataError,
    RankError,
)
from nearlinear.storage import s3
from nearlinear.train import preflight
from tests.core.checkpoint.test_save_and_load import (
    build,
    load_and_train,
    run_on,
    save_and_train,
    train_steps,
)
from tests.support import bucket
from tests.support.bucket import BROKEN, HALF, Call, S3Proxy

PART = 64 * 2**10
RUN = "s3://my-bucket/runs/tiny"


@pytest.fixture
def s3_proxy(aws_services, monkeypatch):
    """Serve a bucket with small transfer parts; return the proxy in front of it."""
    pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(s3, "PART_BYTES", PART)
    with bucket.opened() as (proxy, address):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield proxy


def objects(services, prefix: str = "") -> dict[str, bytes]:
    """Return all objects of the bucket, read by an independent client."""
    client = services["s3"]
    found = client.list_objects_v2(Bucket="my-bucket", Prefix=prefix).get("Contents", [])
    return {
        each["Key"]: client.get_object(Bucket="my-bucket", Key=each["Key"])["Body"].read()
        for each in found
    }


def incomplete_uploads(services) -> list[str]:
    """Return keys of incomplete multipart uploads."""
    found = services["s3"].list_multipart_uploads(Bucket="my-bucket").get("Uploads", [])
    return [each["Key"] for each in found]


def test_s3_checkpoint_loads_in_any_layout(s3_proxy, aws_services):
    """Load on other layouts, and read the objects with the safetensors library."""
    saved, after = run_on(4, save_and_train, RUN, 2, "gpt2")[0]
    for others, theirs in ((1, 1), (2, 1), (4, 4)):
        for loaded, losses in run_on(others, load_and_train, RUN, theirs, "gpt2"):
            assert all(torch.equal(loaded[name], value) for name, value in saved.items())
            assert losses == pytest.approx(after, abs=1e-6)
    there = objects(aws_services, "runs/tiny/")
    names = [f"runs/tiny/rank-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    assert sorted(there) == ["runs/tiny/index.json", *names]
    found = {name for key in names for name in load_bytes(there[key])}
    assert found >= {f"model/{name}" for name in saved if "." in name and "exp_avg" not in name
                     and not name.endswith(".step")}  # fmt: skip


def test_index_is_uploaded_last(s3_proxy, aws_services):
    run_on(2, save_and_train, RUN, 2, "gpt2")
    puts = [call for call in s3_proxy.calls if call.method == "PUT" or "uploadId" in call.query]
    assert puts[-1].key == "my-bucket/runs/tiny/index.json"
    parts = [call for call in puts if call.is_part]
    assert len(parts) > 4, "no file was uploaded in parts"
    ends = [call.key for call in puts if call.method == "POST"]
    assert sorted(ends) == sorted({call.key for call in parts})
    assert not incomplete_uploads(aws_services)


def test_load_reads_each_byte_range_once(s3_proxy):
    """Hashing reads the whole file; the rank copies its tensors in the same pass."""
    run_on(2, save_and_train, RUN, 2, "gpt2")
    s3_proxy.calls.clear()
    run_on(1, load_and_train, RUN, 1, "gpt2")
    sizes = {name: file.bytes for name, file in index.read(RUN).files.items()}
    for name, size in sizes.items():
        ranges = [call.range for call in s3_proxy.calls if call.key.endswith(name) and call.range]
        whole = [f"bytes={at}-{min(at + PART, size) - 1}" for at in range(0, size, PART)]
        assert sorted(ranges) == sorted(whole) and len(whole) > 1


def save_and_prune_steps(rank, folder, last=3):
    mesh, model, updates = build(2, "gpt2")
    for step in range(1, last + 1):
        train_steps(mesh, model, updates, rank, [step])
        pending = save.save_and_prune(folder, 2, step, model, updates)
    return str(pending.wait())


def test_retention_keeps_newest_and_deletes_unfinished_checkpoints(s3_proxy, aws_services):
    client = aws_services["s3"]
    client.put_object(Bucket="my-bucket", Key="runs/tiny/step-00000000/rank-00000", Body=b"half")
    client.create_multipart_upload(Bucket="my-bucket", Key="runs/tiny/step-00000000/rank-00001")
    client.put_object(Bucket="my-bucket", Key="runs/tiny-2/step-00000000/mine", Body=b"other")
    assert set(run_on(2, save_and_prune_steps, RUN)) == {f"{RUN}/step-00000003"}
    assert save.steps(RUN) == [2, 3]
    there = objects(aws_services)
    assert there["runs/tiny/latest"] == b"step-00000003\n"
    folders = {key.rpartition("/")[0] for key in there}
    assert folders == {"runs/tiny", "runs/tiny/step-00000002", "runs/tiny/step-00000003",
                       "runs/tiny-2/step-00000000"}  # fmt: skip
    assert not incomplete_uploads(aws_services)
    deletions = [
        call for call in s3_proxy.calls if call.method == "DELETE" or "delete" in call.query
    ]
    at = [call.key for call in deletions].index("my-bucket/runs/tiny/step-00000001/index.json", 2)
    assert "delete" in deletions[at + 1].query, "the index must be deleted first"


def test_save_removes_incomplete_uploads_of_a_killed_rank(s3_proxy, aws_services):
    key = "runs/tiny/rank-00001-of-00002.safetensors"
    aws_services["s3"].create_multipart_upload(Bucket="my-bucket", Key=key)
    run_on(2, save_and_train, RUN, 2, "gpt2")
    assert not incomplete_uploads(aws_services)


def save_with_failing_second_step(rank, folder, error):
    """Save twice; return the error of the second save and the complete steps."""
    mesh, model, updates = build(2, "gpt2")
    save.save_and_prune(folder, 2, 1, model, updates).wait()
    if rank == 0:
        error()
    # The collectives of a step keep the other rank from saving before error() has run.
    train_steps(mesh, model, updates, rank, [1])
    with pytest.raises(CheckpointError) as caught:
        save.save_and_prune(folder, 2, 2, model, updates).wait()
    return str(caught.value), save.steps(folder)


def fail_second_step(name: str, answer, part: bool = False):
    """Return a rule that answers uploads of keys with ``name`` in the second step."""

    def refuse(call: Call):
        matches = "step-00000002" in call.key and name in call.key and call.method == "PUT"
        return answer if matches and (call.is_part or not part) else None

    return refuse


@pytest.mark.parametrize(
    ("refuse", "pattern"),
    [
        (
            fail_second_step("rank-00001", BROKEN, part=True),
            "rank 1 cannot write .*check the network",
        ),
        (fail_second_step("rank-00001", (403, "AccessDenied")), "rank 1 cannot .*allow this role"),
        (
            fail_second_step("rank-00000", (400, "ExpiredToken")),
            "rank 0 .*have expired: renew them",
        ),
        (fail_second_step("index", (503, "SlowDown")), "index.json cannot be written.*in a minute"),
    ],
)
def test_failed_save_keeps_the_previous_checkpoint(s3_proxy, aws_services, refuse, pattern):
    before = {}

    def error():
        before.update(objects(aws_services, "runs/tiny/step-00000001/"))
        s3_proxy.refuse = refuse

    (message, newest), (other, _) = run_on(2, save_with_failing_second_step, RUN, error)
    assert message == other and newest == [1]
    assert re.search(pattern, message), message
    assert "earlier checkpoints are unchanged" in message
    assert objects(aws_services, "runs/tiny/step-00000001/") == before
    assert not incomplete_uploads(aws_services) and save.steps(RUN) == [1]


@pytest.fixture
def checkpoint(s3_proxy):
    folder = f"{RUN}/step-00000002"
    run_on(2, save_and_train, folder, 2, "gpt2")
    return folder


def load_error(folder) -> str:
    with pytest.raises(RankError) as caught:
        run_on(2, load_and_train, folder, 2, "gpt2")
    assert isinstance(caught.value.__cause__, CheckpointError)
    return str(caught.value.__cause__)


def replace(services, folder: str, name: str, data: bytes | None) -> None:
    key = f"{folder.removeprefix('s3://my-bucket/')}/{name}"
    if data is None:
        services["s3"].delete_object(Bucket="my-bucket", Key=key)
    else:
        services["s3"].put_object(Bucket="my-bucket", Key=key, Body=data)


def test_changed_truncated_and_missing_files_are_named(checkpoint, aws_services, capsys):
    name = "rank-00001-of-00002.safetensors"
    data = objects(aws_services)[f"runs/tiny/step-00000002/{name}"]
    replace(aws_services, checkpoint, name, data[:-1] + bytes([data[-1] ^ 1]))
    assert f"{checkpoint}/{name} has changed since it was written" in load_error(checkpoint)
    assert cli.main(["checkpoint", "verify", checkpoint]) == 1
    assert f"FAULT {checkpoint}/{name} has changed" in capsys.readouterr().out
    replace(aws_services, checkpoint, name, b"\xff" * len(data))
    assert f"{checkpoint}/{name} has changed since it was written" in load_error(checkpoint)
    replace(aws_services, checkpoint, name, data[:-8])
    assert f"{name} has {len(data) - 8} bytes instead of {len(data)}" in load_error(checkpoint)
    replace(aws_services, checkpoint, name, None)
    assert f"{name} is missing" in load_error(checkpoint)
    assert cli.main(["checkpoint", "verify", checkpoint]) == 1
    assert f"FAULT {checkpoint}/{name} is missing" in capsys.readouterr().out
    replace(aws_services, checkpoint, "index.json", None)
    assert "is not a complete checkpoint" in load_error(checkpoint)
    assert "does not exist" in load_error(f"{RUN}/elsewhere")


def test_broken_connection_is_retried(checkpoint, s3_proxy):
    seen = set()

    def refuse(call: Call):
        if call.range and call.key not in seen:
            seen.add(call.key)
            return HALF

    s3_proxy.refuse = refuse
    run_on(1, load_and_train, checkpoint, 1, "gpt2")
    assert len(seen) == 2


def resume_from(rank, folder):
    _, model, updates = build(2, "gpt2")
    return resume.resume(storage.as_path(folder), model, updates, {})


def test_resume_raises_instead_of_falling_back_without_permission(s3_proxy):
    run_on(2, save_and_prune_steps, RUN, 2)
    denied = (403, "AccessDenied")
    s3_proxy.refuse = lambda call: denied if "step-00000002/index" in call.key else None
    with pytest.raises(RankError, match="s3:GetObject") as caught:
        run_on(2, resume_from, RUN)
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert not isinstance(caught.value.__cause__, CheckpointDamaged)
    s3_proxy.refuse = lambda call: None
    assert run_on(2, resume_from, RUN) == [2, 2]


def test_checkpoint_commands_accept_s3_urls(s3_proxy, aws_services, tmp_path, capsys):
    run_on(2, save_and_prune_steps, RUN, 2)
    assert cli.main(["checkpoint", "inspect", RUN, "--json"]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["folder"] for each in reports] == [f"{RUN}/step-0000000{n}" for n in (1, 2)]
    assert cli.main(["checkpoint", "verify", RUN]) == 0
    assert capsys.readouterr().out.count("ok    ") == 2
    one, two = (f"{RUN}/step-0000000{n}" for n in (1, 2))
    only = ["--only", "model/transformer.ln_f"]
    assert cli.main(["checkpoint", "diff", one, one, *only]) == 0
    assert cli.main(["checkpoint", "diff", one, two, *only]) == 1
    capsys.readouterr()
    assert cli.main(["checkpoint", "export", RUN, str(tmp_path / "hf")]) == 0
    exported = load_bytes((tmp_path / "hf" / "model.safetensors").read_bytes())
    files = [load_bytes(data) for key, data in objects(aws_services).items()
             if "step-00000002/rank" in key]  # fmt: skip
    name = "transformer.ln_f.weight"
    parts = [found[f"model/{name}"] for found in files if f"model/{name}" in found]
    assert torch.equal(exported[name], torch.cat(parts))
    assert cli.main(["checkpoint", "export", RUN, "s3://my-bucket/hf"]) == 2
    assert "is not a local directory" in capsys.readouterr().err
    assert not [key for key in objects(aws_services) if key.startswith("hf")]


def test_resume_from_s3_is_bit_identical(s3_proxy, small_run, tmp_path):
    small_run["train"]["eval_sequences"] = small_run["train"]["sample_tokens"] = 0

    def train(folder: str, **loop):
        config = small_run | {"checkpoint": {"folder": folder, "every": 2}}
        try:
            return nl.Trainer(config | {"train": small_run["train"] | loop}).fit()
        finally:
            runtime.shutdown()

    uninterrupted = train(str(tmp_path / "uninterrupted"))
    train(RUN, stop_after=3)
    assert save.steps(RUN) == [2, 3]
    resumed = train(RUN)
    assert (resumed.steps, resumed.loss) == (uninterrupted.steps, uninterrupted.loss)
    on_disk = tmp_path / "uninterrupted" / "step-00000006"
    for name, file in index.read(on_disk).files.items():
        written = load_bytes((storage.as_path(RUN) / "step-00000006" / name).read())
        expected = load_bytes((on_disk / name).read_bytes())
        assert all(torch.equal(written[key], value) for key, value in expected.items())
        assert file == index.hash_file(f"{RUN}/step-00000006/{name}")


def misconfigure_s3(monkeypatch, s3_proxy: S3Proxy, fault: str) -> str:
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
        monkeypatch.setenv("AWS_APP_ID", "another")  # bypasses the cached client
        monkeypatch.setitem(sys.modules, "boto3.session", None)
    else:
        s3_proxy.refuse = lambda call: (403, fault)
    return RUN


@pytest.mark.parametrize(
    ("fault", "pattern"),
    [
        ("bucket", "the bucket does not exist: create it, or correct its name"),
        ("credentials", "no AWS credentials found"),
        ("network", "check the network and AWS_ENDPOINT_URL"),
        ("boto3", r'pip install "nearlinear\[s3\]"'),
        ("AccessDenied", "allow this role s3:ListBucket"),
        ("ExpiredToken", "the credentials have expired"),
        ("PermanentRedirect", "in another region"),
    ],
)
def test_access_errors_name_the_remedy_before_and_during_a_run(
    s3_proxy, monkeypatch, fault, pattern, small_run
):
    folder = misconfigure_s3(monkeypatch, s3_proxy, fault)
    small_run["checkpoint"] = {"folder": folder}
    with pytest.raises(ConfigError, match=f"checkpoint.folder = .*{pattern}"):
        preflight.check_run(schema.build(TrainConfig, small_run), 1)
    with pytest.raises(CheckpointError, match=pattern):
        save.steps(folder)
    with pytest.raises(RankError, match=pattern):
        run_on(2, save_and_train, folder, 2, "gpt2")


def test_as_path_parses_urls_and_rejects_other_schemes(tmp_path):
    assert str(storage.as_path(Path("s3://bucket/run") / "step")) == "s3://bucket/run/step"
    assert str(storage.as_path("s3://bucket/a//b/")) == "s3://bucket/a/b"
    assert storage.as_path("s3://bucket/a").parent == storage.as_path("s3://bucket")
    assert storage.as_path(str(tmp_path)).path == tmp_path
    for name, pattern in (("gs://bucket/run", "s3://bucket/prefix"), ("s3://", "names no bucket")):
        for error in (CheckpointError, DataError):  # StorageError is both
            with pytest.raises(error, match=pattern):
                storage.as_path(name)


def test_steps_raises_if_folder_cannot_be_listed(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied")

    assert save.steps(tmp_path / "nowhere") == []
    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(CheckpointError, match="cannot be listed .*fix its permissions"):
        save.steps(tmp_path)


def test_run_folder_on_s3_raises(small_run):
    small_run["run"]["folder"] = "s3://my-bucket/run"
    with pytest.raises(ConfigError, match="run.folder = s3://my-bucket/run is not a local dir"):
        preflight.check_run(schema.build(TrainConfig, small_run), 1)


@pytest.mark.slow
def test_script_exit_waits_for_the_pending_checkpoint(s3_proxy):
    """End the main thread while parts are still being uploaded."""
    script = """
        import torch, nearlinear as nl
        from nearlinear.storage import s3
        from tests.support import tiny
        s3.PART_BYTES = 65536
        nl.init({})
        model = nl.shard(tiny.MODELS["gpt2"]())
        nl.save("s3://my-bucket/last", model, tiny.optimizer_for(model, "adamw"), step=7)
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert index.read("s3://my-bucket/last").step == 7
