"""Our request equals the SDK's request, recorded in tests/core/data/sdk_request.json."""

import copy
import dataclasses
import json
import subprocess
import sys

import pytest

from ci.sagemaker_sdk import __main__ as program
from ci.sagemaker_sdk import compare, environment, jobs
from nearlinear.errors import ConfigError
from nearlinear.launch.sagemaker import model_trainer
from nearlinear.launch.spec import JobInput, JobSpec

pytest.importorskip("botocore")
SAVED = json.loads(program.SAVED_REQUESTS.read_text())


def test_every_job_has_a_recorded_request():
    assert SAVED["sdk"] == environment.NEWEST
    assert list(SAVED["requests"]) == list(jobs.JOBS)


@pytest.mark.parametrize("name", jobs.JOBS)
def test_our_request_equals_the_recorded_sdk_request(name, tmp_path):
    rows = compare.compare_fields(compare.ours(name, str(tmp_path)), SAVED["requests"][name])
    assert [row for row in rows if not row.equal] == [], compare.table(rows)
    named = {row.path for row in rows if row.reason}
    brought = 2 if name in jobs.WITH_CODE else 1
    assert len(named) == 1 + brought and "TrainingJobName" in named


def test_compared_jobs_set_every_field():
    """A field that no job sets would not be compared."""
    # Keys of other backends, implied by the instance type, or unknown to the SDK.
    elsewhere = {
        "secrets",
        "place",
        "partition",
        "account",
        "namespace",
        "checkpoint_claim",
        "accelerators",
    }
    given = {key for data in jobs.JOBS.values() for key in data["job"]} | {"source"}
    assert {field.name for field in dataclasses.fields(JobSpec)} - elsewhere <= given
    inputs = [it for data in jobs.JOBS.values() for it in data["job"].get("inputs", {}).values()]
    of_input = {field.name for field in dataclasses.fields(JobInput)} - {"path", "claim"}
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
def test_comparison_detects_a_difference(path, value, tmp_path):
    name = next(iter(jobs.JOBS))
    theirs = copy.deepcopy(SAVED["requests"][name])
    *above, last = path.split(".")
    holder = theirs
    for key in above:
        holder = holder[int(key)] if isinstance(holder, list) else holder[key]
    holder[last] = value
    rows = compare.compare_fields(compare.ours(name, str(tmp_path)), theirs)
    different = [row for row in rows if not row.equal]
    assert different and all(last in row.path or path == "TrainingJobName" for row in different)
    assert "  !  " in compare.table(rows)


def test_string_hyperparameters_are_encoded_for_the_sdk():
    _, config = jobs.read(next(iter(jobs.JOBS)), ".")
    values = model_trainer.hyperparameters(config)
    assert values["data-resume"] == '"7"' and values["optimizer-lr"] == 2e-4
    assert values["train-two_hop"] is False and values["model-overrides"]["pad_token_id"] is None


def test_missing_sdk_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sagemaker", None)
    with pytest.raises(ConfigError, match=r"nearlinear\[sagemaker-sdk\]"):
        model_trainer.model_trainer(*jobs.read("required fields only", "."))


@pytest.mark.slow
@pytest.mark.parametrize("version", environment.SDKS)
def test_installed_sdk_sends_the_recorded_request(version):
    if not (environment.FOLDER / version / "complete").exists():
        pytest.skip(f"no environment with the SDK: python -m ci.sagemaker_sdk --sdk {version}")
    done = subprocess.run(
        [sys.executable, "-m", "ci.sagemaker_sdk", "--sdk", version],
        cwd=program.ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 unexplained differences" in done.stdout
    assert "run locally by the SDK's driver: step=3" in done.stdout


def test_docstring_lists_all_sdk_calls():
    """The docstring lists the calls, so that users can choose between the SDK and our request."""
    calls = {call for stage in SAVED["calls"].values() for call in stage}
    assert SAVED["calls"]["making it"] == ["iam:GetRole", "iam:SimulatePrincipalPolicy"]
    documented = model_trainer.__doc__ + " sagemaker:CreateTrainingJob"  # the purpose of all calls
    assert not [call for call in calls if call not in documented]
