"""What we send for a job is what the SageMaker SDK sends: every field of a request kept from it."""

import copy
import dataclasses
import json
import subprocess
import sys

import pytest

from ci.sagemaker import __main__ as program
from ci.sagemaker import compare, environment, jobs
from nearlinear.errors import ConfigError
from nearlinear.launch.sagemaker import model_trainer
from nearlinear.launch.spec import Input, JobSpec

pytest.importorskip("botocore")
KEPT = json.loads(program.KEPT.read_text())


def test_a_request_is_kept_for_every_job():
    assert KEPT["sdk"] == environment.NEWEST
    assert list(KEPT["requests"]) == list(jobs.JOBS)


@pytest.mark.parametrize("name", jobs.JOBS)
def test_our_request_is_the_sdks(name, tmp_path):
    rows = compare.fields(compare.ours(name, str(tmp_path)), KEPT["requests"][name])
    assert [row for row in rows if not row.equal] == [], compare.table(rows)
    named = {row.path for row in rows if row.reason}
    brought = 2 if name in jobs.WITH_CODE else 1
    assert len(named) == 1 + brought and "TrainingJobName" in named


def test_the_jobs_ask_for_every_field_there_is():
    """A field that no job sets would be compared with nothing."""
    # Not of SageMaker, or said by the type of its machines.
    elsewhere = {"place", "partition", "account", "namespace", "checkpoint_claim", "accelerators"}
    given = {key for data in jobs.JOBS.values() for key in data["job"]} | {"source"}
    assert {field.name for field in dataclasses.fields(JobSpec)} - elsewhere <= given
    inputs = [it for data in jobs.JOBS.values() for it in data["job"].get("inputs", {}).values()]
    of_input = {field.name for field in dataclasses.fields(Input)} - {"path", "claim"}
    assert of_input <= {key for each in inputs for key in each}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ResourceConfig.InstanceCount", 31),
        ("ResourceConfig.VolumeSizeInGB", True),
        ("TrainingJobName", "gpt2-31b-20261122000000"),
        ("InputDataConfig.4.DataSource.S3DataSource.S3Uri", "s3://my-bucket/elsewhere"),
        ("InputDataConfig.0.InputMode", "File"),
        ("HyperParameters.train-two_hop", "False"),
        ("EnableNetworkIsolation", False),
        ("Tags", []),
    ],
)
def test_a_difference_is_found(path, value, tmp_path):
    name = next(iter(jobs.JOBS))
    theirs = copy.deepcopy(KEPT["requests"][name])
    *above, last = path.split(".")
    holder = theirs
    for key in above:
        holder = holder[int(key)] if isinstance(holder, list) else holder[key]
    holder[last] = value
    rows = compare.fields(compare.ours(name, str(tmp_path)), theirs)
    different = [row for row in rows if not row.equal]
    assert different and all(last in row.path or path == "TrainingJobName" for row in different)
    assert "  !  " in compare.table(rows)


def test_the_sdk_writes_texts_as_they_are_so_we_write_them_before():
    _, config = jobs.read(next(iter(jobs.JOBS)), ".")
    values = model_trainer.hyperparameters(config)
    assert values["data-resume"] == '"7"' and values["optimizer-lr"] == 2e-4
    assert values["train-two_hop"] is False and values["model-overrides"]["pad_token_id"] is None


def test_without_the_sdk_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    with pytest.raises(ConfigError, match=r"nearlinear\[sagemaker-sdk\]"):
        model_trainer.model_trainer(*jobs.read("nothing but what must be", "."))


@pytest.mark.slow
@pytest.mark.parametrize("version", environment.SDKS)
def test_the_sdk_still_sends_it(version):
    if not (environment.FOLDER / version / "complete").exists():
        pytest.skip(f"no environment with the SDK: python -m ci.sagemaker --sdk {version}")
    done = subprocess.run(
        [sys.executable, "-m", "ci.sagemaker", "--sdk", version],
        cwd=program.ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 different without a reason" in done.stdout
    assert "run here by the SDK's driver: step=3" in done.stdout


def test_what_the_sdk_calls_is_told():
    """The module says it to whoever decides between the SDK and our own request."""
    calls = {call for stage in KEPT["calls"].values() for call in stage}
    assert KEPT["calls"]["making it"] == ["iam:GetRole", "iam:SimulatePrincipalPolicy"]
    told = model_trainer.__doc__ + " sagemaker:CreateTrainingJob"  # what it is all for
    assert not [call for call in calls if call not in told]
