"""``nearlinear data push`` uploads a prepared folder to S3 (moto); a repeat sends the rest."""

import json

import pytest

from data_prep.__main__ import main
from nearlinear.data.dataset import TokenDataset

pytest.importorskip("boto3")
ADDRESS = "s3://my-bucket/tokens/mine"


def test_pushed_folder_is_readable_and_a_repeated_push_sends_the_manifest_only(
    aws_services, token_folder, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["push", str(token_folder), ADDRESS]) == 0
    said = capsys.readouterr().out
    assert f'[job.inputs.train] s3 = "{ADDRESS}"' in said
    files = {p.relative_to(token_folder).as_posix(): p.stat().st_size
             for p in token_folder.rglob("*") if p.is_file()}  # fmt: skip
    there = aws_services["s3"].list_objects_v2(Bucket="my-bucket")["Contents"]
    prefix = "tokens/mine/"
    assert {each["Key"].removeprefix(prefix): each["Size"] for each in there} == files
    here, remote = (
        TokenDataset(place, sequence_length=32) for place in (str(token_folder), ADDRESS)
    )
    assert len(here) == len(remote) > 0 and (here[3] == remote[3]).all()

    lost = next(name for name in files if name.endswith(".bin"))
    aws_services["s3"].delete_object(Bucket="my-bucket", Key=prefix + lost)
    assert main(["push", str(token_folder), ADDRESS, "--json"]) == 0
    sent = json.loads(capsys.readouterr().out)["bytes"]
    assert sent == files[lost] + files["index.json"]


@pytest.mark.parametrize(
    ("folder", "address", "words"),
    [
        ("tokens", "my-bucket/tokens", "write s3://bucket/prefix"),
        ("tokens", "s3://", "write s3://bucket/prefix"),
        ("tokens", "s3://no-such-bucket/tokens", "the bucket does not exist"),
        ("empty", ADDRESS, "holds no index.json"),
    ],
)
def test_faulty_push_is_one_line(
    aws_services, token_folder, tmp_path, capsys, folder, address, words
):
    (tmp_path / "empty").mkdir()
    given = token_folder if folder == "tokens" else tmp_path / "empty"
    assert main(["push", str(given), address]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
