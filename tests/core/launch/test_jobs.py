"""Jobs submitted to moto, a local server with AWS's protocols.

moto neither stops jobs nor throttles nor rejects roles. These cases use a server with prepared
responses.
"""

import io
import json
import os
import re
import subprocess
import sys
import time
import zipfile

import pytest

from nearlinear import cli
from nearlinear.errors import ConfigError
from nearlinear.launch.sagemaker import aws, jobs
from tests.core import answers

pytest.importorskip("boto3")
ResponseParserError = pytest.importorskip("botocore.parsers").ResponseParserError


@pytest.fixture
def services(aws_services):
    return aws_services


@pytest.fixture
def config(sagemaker_run):
    return sagemaker_run


def keys(s3) -> list[str]:
    return [found["Key"] for found in s3.list_objects_v2(Bucket="my-bucket").get("Contents", [])]


def test_submit_uploads_code_and_launcher_script(services, config, capsys):
    assert cli.main(["launch", str(config), "--yes"]) == 0
    said = capsys.readouterr().out
    (job,) = services["sagemaker"].list_training_jobs()["TrainingJobSummaries"]
    name = job["TrainingJobName"]
    assert f"submitted: {name}" in said
    found = jobs.describe_job(name)
    assert found["ResourceConfig"]["InstanceCount"] == 32
    assert found["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"].endswith("tokens")
    places = {each["ChannelName"]: each["DataSource"] for each in found["InputDataConfig"]}
    code = places["code"]["S3DataSource"]["S3Uri"].removeprefix("s3://my-bucket/")
    drivers = places["sm_drivers"]["S3DataSource"]["S3Uri"].removeprefix("s3://my-bucket/")
    assert keys(services["s3"]) == [f"{code}/mine.py", f"{drivers}/sm_train.sh"]


def test_dry_run_changes_nothing(services, config, capsys):
    assert cli.main(["launch", str(config), "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["ResourceConfig"]["InstanceCount"] == 32
    assert keys(services["s3"]) == []
    assert services["sagemaker"].list_training_jobs()["TrainingJobSummaries"] == []


def test_submission_needs_a_terminal_or_yes(services, config, capsys, monkeypatch):
    assert cli.main(["launch", str(config)]) == 2  # pytest's input is no terminal
    said = capsys.readouterr().err
    assert "Pass --yes" in said and "price: 315.76 USD, at most 16,863.47 USD in 24 h" in said
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    questions = []
    for answer, code, jobs_made in (("", 1, 0), ("n", 1, 0), ("y", 0, 1)):
        monkeypatch.setattr("builtins.input", lambda text, a=answer: questions.append(text) or a)
        assert cli.main(["launch", str(config), "--price-per-hour", "20"]) == code
        made = services["sagemaker"].list_training_jobs()["TrainingJobSummaries"]
        assert len(made) == jobs_made
    assert "32 x ml.p4d.24xlarge? [y/N]" in questions[0]
    assert "at most 15,360.00 in 24 h (as given)" in capsys.readouterr().err


def test_auto_image_ships_nearlinear_as_a_wheel(services, config, capsys, tmp_path):
    settings = ["--set", "job.image=auto:2.9", "--set", f"job.region={answers.REGION}"]
    assert cli.main(["launch", str(config), "--yes", *settings]) == 0
    (summary,) = services["sagemaker"].list_training_jobs()["TrainingJobSummaries"]
    found = jobs.describe_job(summary["TrainingJobName"])
    assert found["AlgorithmSpecification"]["TrainingImage"] == (
        "763104351884.dkr.ecr.us-west-2.amazonaws.com/"
        "pytorch-training:2.9.0-gpu-py312-cu130-ubuntu22.04-sagemaker"
    )
    (key,) = [key for key in keys(services["s3"]) if key.endswith(".whl")]
    assert "/input/sm_drivers/nearlinear-" in key
    body = services["s3"].get_object(Bucket="my-bucket", Key=key)["Body"].read()
    with zipfile.ZipFile(io.BytesIO(body)) as wheel:
        assert wheel.testzip() is None
        wheel.extractall(tmp_path)
    said = subprocess.run(
        [sys.executable, "-c", "import nearlinear, data_prep; print(nearlinear.__file__)"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert said.stdout.strip() == str(tmp_path / "nearlinear" / "__init__.py"), said.stderr


def test_invalid_job_changes_nothing(services, config, capsys):
    assert cli.main(["launch", str(config), "--set", "job.nodes=3"]) == 2
    assert "nothing was sent" in capsys.readouterr().err
    assert keys(services["s3"]) == []


def test_missing_bucket_is_reported(services, config, capsys):
    assert (
        cli.main(["launch", str(config), "--yes", "--set", "job.output=s3://no-such-bucket/o"]) == 2
    )
    said = capsys.readouterr().err
    assert "job.output: there is no bucket 'no-such-bucket'" in said and "Traceback" not in said
    assert services["sagemaker"].list_training_jobs()["TrainingJobSummaries"] == []


def test_large_code_folder_is_rejected(services, config, capsys, monkeypatch):
    monkeypatch.setattr("nearlinear.launch.sagemaker.jobs.MAX_CODE_SIZE", 3)
    assert cli.main(["launch", str(config), "--yes"]) == 2
    assert "move data out of it" in capsys.readouterr().err and keys(services["s3"]) == []


def test_missing_code_folder_is_rejected(services, config, capsys):
    assert cli.main(["launch", str(config), "--set", "job.source=nowhere"]) == 2
    assert "job.source = 'nowhere': no such folder" in capsys.readouterr().err
    assert keys(services["s3"]) == []


@pytest.fixture
def no_credentials(monkeypatch):
    """Remove all AWS credentials from the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "job.region = us-west-2"),
        ({"AWS_DEFAULT_REGION": answers.REGION}, "aws configure"),
        (
            {"AWS_DEFAULT_REGION": answers.REGION, "AWS_ACCESS_KEY_ID": "x"},
            "cannot read the AWS credentials",
        ),
        ({"AWS_PROFILE": "none"}, "none"),
    ],
)
def test_missing_aws_settings_are_reported(no_credentials, variables, words):
    for name, value in variables.items():
        no_credentials.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        aws.create_client("sagemaker")


def test_missing_boto3_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match=r"nearlinear\[sagemaker\]"):
        aws.create_client("sagemaker")


@pytest.mark.parametrize("command", ["status", "logs", "cost"])
def test_unknown_job_is_reported(services, capsys, command):
    assert cli.main([command, "no-such-job"]) == 2
    said = capsys.readouterr().err
    assert "no-such-job: no such training job" in said and "list-training-jobs" in said


def test_status_of_a_submitted_job(services, config, capsys):
    cli.main(["launch", str(config), "--yes"])
    name = re.findall(r"submitted: (\S+)", capsys.readouterr().out)[0]
    assert cli.main(["status", name]) == 0
    said = capsys.readouterr().out
    assert f"{name}: Completed" in said and "machines: 32 x ml.p4d.24xlarge" in said


def test_logs_without_output_print_the_status(services, config, capsys):
    cli.main(["launch", str(config), "--yes"])
    name = re.findall(r"submitted: (\S+)", capsys.readouterr().out)[0]
    assert cli.main(["logs", name]) == 0
    said = capsys.readouterr()
    assert said.out == "" and f"no output yet; {name}: Completed" in said.err


@pytest.fixture
def prepared(monkeypatch):
    """A server that answers AWS calls with prepared responses."""
    with answers.serving() as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.address)
        monkeypatch.setenv("AWS_DEFAULT_REGION", answers.REGION)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
        for name, value in answers.KEYS.items():
            monkeypatch.setenv(name, value)
        yield found


def test_stop_requests_a_stop(prepared, capsys):
    prepared.give("StopTrainingJob", 200, {})
    assert cli.main(["stop", "job-1"]) == 0
    assert prepared.asked == [("StopTrainingJob", {"TrainingJobName": "job-1"})]
    assert "nearlinear status job-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "message", "status", "words"),
    [
        ("ValidationException", "The training job is in status Completed.", 400, "Completed"),
        ("ValidationException", "Requested resource not found.", 400, "no such training job"),
        ("AccessDeniedException", "not authorized to perform", 400, "nearlinear policies"),
        ("ExpiredTokenException", "expired", 400, "aws sso login"),
        ("ThrottlingException", "Rate exceeded", 400, "try again in a minute"),
        ("InternalFailure", "", 500, "the service failed (HTTP 500), not your request"),
    ],
)
def test_failed_stop_reports_cause_and_remedy(prepared, capsys, code, message, status, words):
    prepared.refuse("StopTrainingJob", code, message, status)
    assert cli.main(["stop", "job-1"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_unparsable_response_is_a_service_failure(prepared, capsys):
    """A proxy may answer with an HTML page."""
    prepared.give("DescribeTrainingJob", 502, "<!doctype html>\n<title>Bad gateway</title>")
    assert cli.main(["status", "job-1"]) == 2
    said = capsys.readouterr().err
    assert "describing job-1: the service failed (HTTP 502)" in said and "doctype" not in said
    with (
        pytest.raises(aws.AWSError, match="asking: the service failed"),
        aws.translate_errors("asking"),
    ):
        raise ResponseParserError("a page that is no XML, where some services answer in XML")


def test_throttled_call_is_retried(prepared):
    prepared.refuse("DescribeTrainingJob", "ThrottlingException", "Rate exceeded")
    prepared.give("DescribeTrainingJob", 200, {"TrainingJobName": "job-1"})
    assert jobs.describe_job("job-1")["TrainingJobName"] == "job-1"
    assert len(prepared.asked) == 2


def test_unreachable_server_is_reported(monkeypatch, prepared, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert cli.main(["status", "job-1"]) == 2
    assert "Could not connect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "message", "words"),
    [
        ("ValidationException", "Could not assume role arn:aws:iam::1:role/x", "assume role"),
        ("ResourceLimitExceeded", "The limit 'ml.p4d.24xlarge' is 0 Instances", "Service Quotas"),
    ],
)
def test_rejected_job_reports_cause_and_remedy(
    services, config, prepared, monkeypatch, capsys, code, message, words
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", services["s3"].meta.endpoint_url)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", prepared.address)
    prepared.refuse("CreateTrainingJob", code, message)
    assert cli.main(["launch", str(config), "--yes"]) == 2
    said = capsys.readouterr()
    assert words in said.err and message in said.err and "submitted" not in said.out


def test_logs_continue_after_an_empty_page(prepared):
    """CloudWatch may return a page without events and a token for the next page."""
    prepared.give("DescribeLogStreams", 200, {"logStreams": [{"logStreamName": "job-1/algo-1-17"}]})
    for events, token in (([], "f/1"), (["step=1"], "f/2"), ([], "f/2")):
        found = [{"timestamp": 1, "message": message} for message in events]
        prepared.give("GetLogEvents", 200, {"events": found, "nextForwardToken": token})
    assert list(jobs.read_logs("job-1")) == ["step=1"]
    tokens = [asked.get("nextToken") for call, asked in prepared.asked if call == "GetLogEvents"]
    assert tokens == [None, "f/1", "f/2"]


def say(logs, stream: str, *messages: str, after: int = 0) -> None:
    """Write log messages, the first one ``after`` milliseconds from now."""
    events = [
        {"timestamp": int(time.time() * 1e3) + after + i, "message": message}
        for i, message in enumerate(messages)
    ]
    logs.put_log_events(logGroupName=jobs.LOG_GROUP, logStreamName=stream, logEvents=events)


def test_logs_of_the_first_host_or_of_all_hosts(services):
    logs = services["logs"]
    assert list(jobs.read_logs("job-1")) == []
    logs.create_log_group(logGroupName=jobs.LOG_GROUP)
    for host in (1, 2, 10):
        stream = f"job-1/algo-{host}-1700000000"
        logs.create_log_stream(logGroupName=jobs.LOG_GROUP, logStreamName=stream)
        say(logs, stream, f"step=1 from {host}", f"step=2 from {host}")
    assert list(jobs.read_logs("job-1")) == ["step=1 from 1", "step=2 from 1"]
    all_lines = list(jobs.read_logs("job-1", all_hosts=True))
    assert all_lines[:2] == ["[algo-1] step=1 from 1", "[algo-1] step=2 from 1"]
    assert [line.split()[0] for line in all_lines[2:]] == ["[algo-2]"] * 2 + ["[algo-10]"] * 2


def test_follow_ends_with_the_job_without_repeated_lines(services, monkeypatch):
    logs, stream = services["logs"], "job-1/algo-1-1700000000"
    logs.create_log_group(logGroupName=jobs.LOG_GROUP)
    logs.create_log_stream(logGroupName=jobs.LOG_GROUP, logStreamName=stream)
    states = iter(["InProgress", "InProgress", "Completed"])
    monkeypatch.setattr(
        jobs, "describe_job", lambda name, region: {"TrainingJobStatus": next(states)}
    )
    say(logs, stream, "step=1")
    prepared = iter(["step=2", "step=3"])
    found = jobs.read_logs("job-1", follow=True, sleep=lambda _: say(logs, stream, next(prepared)))
    assert list(found) == ["step=1", "step=2", "step=3"]


def test_logs_span_several_pages(services):
    logs = services["logs"]
    logs.create_log_group(logGroupName=jobs.LOG_GROUP)
    for host in range(1, 61):
        stream = f"job-1/algo-{host}-1700000000"
        logs.create_log_stream(logGroupName=jobs.LOG_GROUP, logStreamName=stream)
        say(logs, stream, f"of {host}")
    all_lines = list(jobs.read_logs("job-1", all_hosts=True))
    assert all_lines == [f"[algo-{host}] of {host}" for host in range(1, 61)]
    many = [f"step={number}" for number in range(10_500)]
    for begin in range(0, len(many), 5000):
        say(logs, "job-1/algo-1-1700000000", *many[begin : begin + 5000], after=1000 + begin)
    assert list(jobs.read_logs("job-1")) == ["of 1", *many]
