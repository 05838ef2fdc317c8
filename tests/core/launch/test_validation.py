"""Validation of SageMaker jobs: each problem is reported with its remedy before submission."""

import copy
import json
import sys

import pytest

from nearlinear import cli
from nearlinear.errors import ConfigError
from nearlinear.launch import spec
from nearlinear.launch.sagemaker.build_request import render_request
from nearlinear.launch.sagemaker.container import RANKS_VARIABLE
from nearlinear.launch.sagemaker.request_checks import (
    check_against_model,
    check_rules,
    input_shape,
)
from nearlinear.launch.spec import InvalidJob, Problem, check_parallel_layout

ACCOUNT = "123456789012"
NAME, FOLDER = "gpt2-30b-20261122031500", "s3://my-bucket/jobs/gpt2-30b"
RUN = {
    "model": {"preset": "gpt2-30b"},
    "parallel": {"sharded_data_parallel_degree": 128, "bf16": True},
    "batch": {"micro_batch_size": 6},
    "activations": {"checkpoint": "each", "offload": True},
    "job": {
        "place": "sagemaker",
        "image": f"{ACCOUNT}.dkr.ecr.us-west-2.amazonaws.com/nearlinear:2.13-cuda13",
        "instance_type": "ml.p4d.24xlarge",
        "nodes": 32,
        "role": f"arn:aws:iam::{ACCOUNT}:role/nearlinear",
        "source": ".",
        "inputs": {
            "train": {"fsx": "fs-0123456789abcdef0", "directory": "/abcdefgh/train"},
            "val": {"s3": "s3://my-bucket/val"},
        },
        "output": "s3://my-bucket/output",
        "checkpoints": "s3://my-bucket/checkpoints",
        "subnets": ["subnet-0123456789abcdef0"],
        "security_groups": ["sg-0123456789abcdef0"],
        "tags": {"team": "models"},
        "retries": 2,
    },
}


def job_and_config(**changes):
    data = copy.deepcopy(RUN)
    for path, value in changes.items():
        table = data
        *tables, last = path.split("__")
        for name in tables:
            table = table[name]
        table[last] = value
    return spec.load(data)


def find_problems(found: dict, job, config) -> list[Problem]:
    return [
        *check_against_model(found),
        *check_rules(found),
        *check_parallel_layout(job, config.parallel),
    ]


def good() -> dict:
    return copy.deepcopy(render_request(*job_and_config(), NAME, FOLDER))


def at(found, path):
    """Return the container of the last part of ``path`` in a request, and that part."""
    *above, last = path.split("/")
    for name in above:
        found = found[int(name)] if isinstance(found, list) else found[name]
    return found, int(last) if isinstance(found, list) else last


def test_published_job_has_no_problems():
    assert find_problems(good(), *job_and_config()) == []


GONE = object()
MACHINES, SPOT = "ResourceConfig", {"EnableManagedSpotTraining": True}
STOP = "StoppingCondition"
SOURCE = "InputDataConfig/0/DataSource/FileSystemDataSource"
ALGORITHM = "AlgorithmSpecification"
METRIC = f"{ALGORITHM}/MetricDefinitions/0"
SEEDED = [
    # rules of the service's model
    ({"TrainingJobName": "gpt2_30b"}, "TrainingJobName", "must match"),
    ({"TrainingJobName": "g" * 80}, "TrainingJobName", "at most 63 characters"),
    ({"RoleArn": GONE}, "RoleArn", "required"),
    ({"RoleArn": "arn:aws:iam::42:role/me"}, "RoleArn", "must match"),
    ({f"{MACHINES}/InstanceType": "ml.p4d.48xlarge"}, "InstanceType", "'ml.p4d.24xlarge'"),
    ({f"{MACHINES}/InstanceCount": "32"}, "InstanceCount", "expected a number"),
    ({f"{MACHINES}/KeepAlivePeriodInSeconds": 999_999}, "KeepAlivePeriod", "at most 21600"),
    ({f"{MACHINES}/VolumeSizeInGb": 500}, "VolumeSizeInGb", "'VolumeSizeInGB'"),
    ({f"{SOURCE}/FileSystemType": "FSxLustr"}, "FileSystemType", "'FSxLustre'"),
    ({f"{SOURCE}/FileSystemId": "fs-12"}, "FileSystemId", "at least 11"),
    ({f"{SOURCE}/FileSystemAccessMode": "read"}, "FileSystemAccessMode", "allowed are rw, ro"),
    ({"InputDataConfig/1/DataSource/S3DataSource/S3Uri": "my-bucket/val"}, "S3Uri", "must match"),
    ({"InputDataConfig/1/ChannelName": "my val"}, "ChannelName", "must match"),
    ({f"{METRIC}/Regex": "(" + "x" * 500 + ")"}, "Regex", "at most 500"),
    ({"RetryStrategy/MaximumRetryAttempts": 31}, "MaximumRetryAttempts", "at most 30"),
    ({"OutputDataConfig": GONE}, "OutputDataConfig", "required"),
    # rules between members
    ({"VpcConfig": GONE}, "VpcConfig", "security group"),
    ({"VpcConfig/Subnets": ["sg-0123456789abcdef0"]}, "Subnets", "subnet-0123456789abcdef0"),
    ({f"{SOURCE}/DirectoryPath": "abcdefgh/train"}, "DirectoryPath", "begin it with /"),
    ({f"{SOURCE}/DirectoryPath": "/fsx"}, "DirectoryPath", "MOUNT_NAME"),
    ({"InputDataConfig/1/ChannelName": "code"}, "InputDataConfig", "rename yours"),
    ({"InputDataConfig/0/InputMode": "FastFile"}, "InputMode", "remove the field"),
    (SPOT, "MaxWaitTimeInSeconds", "capacity together"),
    (SPOT | {f"{STOP}/MaxWaitTimeInSeconds": 60}, "MaxWaitTimeInSeconds", "at least 86400"),
    (
        SPOT
        | {f"{STOP}/MaxWaitTimeInSeconds": 90_000, f"{MACHINES}/KeepAlivePeriodInSeconds": 600},
        "KeepAlivePeriodInSeconds",
        "remove this field or disable spot",
    ),
    (
        SPOT | {f"{STOP}/MaxWaitTimeInSeconds": 90_000, "CheckpointConfig": GONE},
        "CheckpointConfig",
        "folder in S3",
    ),
    ({f"{STOP}/MaxWaitTimeInSeconds": 90_000}, "MaxWaitTimeInSeconds", "enable spot"),
    ({f"{STOP}/MaxRuntimeInSeconds": 90 * 86_400}, "MaxRuntimeInSeconds", "at most 2419200"),
    ({f"{ALGORITHM}/AlgorithmName": "mine"}, "TrainingImage", "only"),
    ({f"{METRIC}/Regex": "loss=(\\S+"}, "Regex", "correct it"),
    ({f"{METRIC}/Regex": "loss=\\S+"}, "Regex", "around the number"),
    ({f"{METRIC}/Name": "loss"}, "MetricDefinitions", "rename one"),
    ({f"{MACHINES}/InstanceType": "ml.p3.16xlarge"}, "InstanceType", "one with EFA"),
    ({"Tags/0/Key": "aws:team"}, "Tags", "rename it"),
    ({"CheckpointConfig/LocalPath": "/opt/ml/model/c"}, "LocalPath", "/opt/ml/checkpoints"),
]


@pytest.mark.parametrize(("changes", "where", "fix"), SEEDED)
def test_problem_names_field_and_remedy(changes, where, fix):
    named = find_problems(changed(changes), *job_and_config())
    assert named and all(where in problem.field for problem in named), named
    assert any(fix in problem.remedy for problem in named), named


def changed(changes) -> dict:
    found = good()
    for path, value in changes.items():
        holder, last = at(found, path)
        if value is GONE:
            del holder[last]
        else:
            holder[last] = value
    return found


DAYS = 86_400
WARM, IMAGE = f"{MACHINES}/KeepAlivePeriodInSeconds", f"{ALGORITHM}/TrainingImage"
SPOT_TIMES = {f"{STOP}/MaxRuntimeInSeconds": 600, f"{STOP}/MaxWaitTimeInSeconds": 600}
SECOND = "InputDataConfig/1"


@pytest.mark.parametrize(
    "changes",
    [
        {f"{STOP}/MaxRuntimeInSeconds": 28 * DAYS},
        SPOT | SPOT_TIMES,
        SPOT | SPOT_TIMES | {WARM: 0},
        {WARM: 21_600},
        {"TrainingJobName": "g" * 63},
        {"RetryStrategy/MaximumRetryAttempts": 30},
        {"RetryStrategy/MaximumRetryAttempts": 1},
        {"RetryStrategy": GONE},
        {f"{MACHINES}/InstanceType": "ml.p3.16xlarge", f"{MACHINES}/InstanceCount": 1},
        {f"{MACHINES}/InstanceCount": 1},
        {f"{SECOND}/CompressionType": "Gzip", f"{SECOND}/InputMode": "File"},
        {f"{SECOND}/CompressionType": "None", f"{SECOND}/InputMode": "FastFile"},
        {"InputDataConfig/0/InputMode": "File"},
        {f"{SOURCE}/DirectoryPath": "/fsx/train"},
        {f"{SOURCE}/FileSystemType": "EFS", f"{SOURCE}/DirectoryPath": "/fsx"},
        {IMAGE: "registry.example.com/me/image@sha256:" + "0" * 64},
        {IMAGE: "registry.example.com:5000/image:1"},
        {f"{METRIC}/Regex": "loss=(\\S+) (x)"},
        {f"{METRIC}/Regex": "(" + "x" * 498 + ")"},
        {"CheckpointConfig/LocalPath": "/opt/ml/models"},
        {"CheckpointConfig/LocalPath": "/opt/ml/checkpoints"},
        {"CheckpointConfig": GONE},
        {"Tags": [{"Key": "awsteam", "Value": ""}, {"Key": "team", "Value": "aws:"}]},
        {
            "VpcConfig/Subnets": ["subnet-01234567", "subnet-0123456789abcdef0"],
            f"{MACHINES}/InstanceCount": 1,
        },
    ],
)
def test_values_at_the_limits_have_no_problems(changes):
    found = changed(changes)
    assert [*check_against_model(found), *check_rules(found)] == []


@pytest.mark.parametrize(
    ("changes", "field", "cause"),
    [
        ({f"{STOP}/MaxRuntimeInSeconds": 28 * DAYS + 1}, f"{STOP}.MaxRuntimeInSeconds", "2419201"),
        (
            SPOT | SPOT_TIMES | {f"{STOP}/MaxWaitTimeInSeconds": 599},
            f"{STOP}.MaxWaitTimeInSeconds",
            "599 s is less than the run time, 600 s",
        ),
        (SPOT | SPOT_TIMES | {WARM: 1}, f"{MACHINES}.KeepAlivePeriodInSeconds", "warm pools"),
        ({f"{STOP}/MaxWaitTimeInSeconds": 600}, f"{STOP}.MaxWaitTimeInSeconds", "only spot jobs"),
        ({f"{MACHINES}/InstanceCount": 0}, f"{MACHINES}.InstanceCount", "0 is too small"),
        (
            {f"{MACHINES}/InstanceType": "ml.p3.16xlarge", f"{MACHINES}/InstanceCount": 2},
            f"{MACHINES}.InstanceType",
            "2 x ml.p3.16xlarge",
        ),
        (
            {f"{SECOND}/CompressionType": "Gzip", f"{SECOND}/InputMode": "FastFile"},
            "InputDataConfig[1].CompressionType",
            "'Gzip' is not supported",
        ),
        ({f"{SECOND}/DataSource": {}}, "InputDataConfig[1].DataSource", "has 0 sources"),
        ({f"{SECOND}/ChannelName": "train"}, "InputDataConfig", "2 channels are named 'train'"),
        ({IMAGE: "image:1"}, "AlgorithmSpecification.TrainingImage", "does not name a registry"),
        ({IMAGE: "a.example.com:5000/me"}, "AlgorithmSpecification.TrainingImage", "has no tag"),
        ({IMAGE: GONE}, "AlgorithmSpecification.TrainingImage", "is missing"),
        ({"CheckpointConfig/LocalPath": "/opt/ml/code"}, "CheckpointConfig.LocalPath", "inside"),
        ({"CheckpointConfig/LocalPath": "/opt/ml/input/x"}, "CheckpointConfig.LocalPath", "input"),
        ({"Tags/0/Key": "AWS:x"}, "Tags", "the prefix aws: is reserved"),
        (
            {"Tags": [{"Key": "a", "Value": ""}, {"Key": "a", "Value": "b"}]},
            "Tags",
            "'a' is given 2 times",
        ),
        (
            {"VpcConfig/SecurityGroupIds": ["sg-0123456789abcdef0"] * 2},
            "VpcConfig.SecurityGroupIds",
            "has duplicates",
        ),
        ({"VpcConfig/Subnets": ["subnet-0123456"]}, "VpcConfig.Subnets", "is not a valid ID"),
        (
            {
                "VpcConfig/Subnets": ["subnet-01234567", "subnet-0123456789abcdef0"],
                f"{MACHINES}/InstanceCount": 2,
            },
            "VpcConfig.Subnets",
            "2 subnets, but the EFA traffic of 2 x ml.p4d.24xlarge cannot cross them",
        ),
        ({"RetryStrategy/MaximumRetryAttempts": 0}, "RetryStrategy.MaximumRetryAttempts", "0 is"),
        ({"RetryStrategy/MaximumRetryAttempts": True}, "RetryStrategy.MaximumRetryAttempts", "has"),
        ({"RetryStrategy/MaximumRetryAttempts": 1.5}, "RetryStrategy.MaximumRetryAttempts", "has"),
        ({"Tags": {}}, "Tags", "{} has the wrong type"),
        ({"HyperParameters/x": 3}, "HyperParameters['x']", "3 has the wrong type"),
        ({"HyperParameters/" + "k" * 257: "v"}, f"HyperParameters['{'k' * 257}'] (key)", "257 c"),
        ({"EnableManagedSpotTraining": ""}, "EnableManagedSpotTraining", "'' has the wrong type"),
        ({f"{METRIC}/Regexp": "x"}, "AlgorithmSpecification.MetricDefinitions[0].Regexp", "is not"),
    ],
)
def test_only_the_wrong_field_is_named_with_its_cause(changes, field, cause):
    found = changed(changes)
    named = [*check_against_model(found), *check_rules(found)]
    assert [problem.field for problem in named] == [field], named
    assert cause in named[0].cause


def test_unlike_names_are_listed_and_many_names_are_counted():
    found = changed({f"{MACHINES}/InstanceType": "zzz", f"{SOURCE}/FileSystemAccessMode": "zzz"})
    remedies = {problem.field: problem.remedy for problem in check_against_model(found)}
    mode, kind = (remedies[name] for name in sorted(remedies))
    assert mode == "allowed are rw, ro"
    assert kind.startswith("allowed are ") and kind.count("ml.") == 3 and "names, such as" in kind


def test_misspelled_names_get_the_nearest_one_as_remedy():
    found = changed({f"{MACHINES}/InstanceType": "ml.p4d.24xlarg", "Tagz": []})
    remedies = {problem.field: problem.remedy for problem in check_against_model(found)}
    assert remedies == {
        f"{MACHINES}.InstanceType": "did you mean 'ml.p4d.24xlarge'?",
        "Tagz": "did you mean 'Tags'?",
    }


def test_missing_boto3_is_reported_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "botocore.loaders", None)
    with pytest.raises(ConfigError, match=r'pip install "nearlinear\[sagemaker\]"'):
        input_shape("CreateTrainingJob", "another-service")  # shapes of known ones are cached


ONE_RANK = {"job__nodes": 1, "parallel__sharded_data_parallel_degree": 1}


@pytest.mark.parametrize(
    ("changes", "where", "fix"),
    [
        ({"parallel__sharded_data_parallel_degree": 96}, "parallel", "32 x 8 ranks"),
        ({"job__ranks_per_node": 4}, "ranks_per_node", "remove the key"),
        ({"job__ranks_per_node": 16}, "ranks_per_node", "at most 8"),
        ({"job__accelerators": 4}, "job.accelerators", "remove the key"),
        ({"job__instance_type": "ml.p2.16xlarge", **ONE_RANK}, "ranks_per_node", "set it"),
        (
            {"parallel__sharded_data_parallel_degree": 12, "job__nodes": 3},
            "hybrid_shard_degree",
            "a multiple or a divisor of 8",
        ),
    ],
)
def test_parallel_layout_must_fit_the_machines(changes, where, fix):
    job, config = job_and_config(**changes)
    (problem,) = find_problems(render_request(job, config, NAME, FOLDER), job, config)
    assert where in problem.field and fix in problem.remedy


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"job__inputs__train": {}}, "one of path, s3, fsx, efs, claim; this one has none"),
        ({"job__inputs__train__s3": "s3://a/b"}, "this one has s3 and fsx"),
        ({"job__inputs__train__directory": "abc"}, "mount name first"),
        ({"job__inputs__train__mode": "Fast"}, "did you mean 'FastFile'"),
        ({"job__nodes": 0}, "job.nodes = 0: must be at least 1"),
        ({"job__max_hours": 0}, "job.max_hours = 0.0: must be more than 0"),
        ({"job__instance_types": "ml.p4d.24xlarge"}, "did you mean 'instance_type'"),
        ({"job__tags__team": 3}, "job.tags.team = 3: expected a text"),
    ],
)
def test_job_spec_rejects_inconsistent_values(changes, words):
    with pytest.raises(ConfigError, match=words):
        job_and_config(**changes)


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        ({"path": "channel:books"}, "add it as job.inputs.books"),
        ({"sources": {"channel:train": 1, "channel:books": 1}}, "job.inputs.books"),
        ({"sources": {"channel:val": 1}}, 'as "channel:train" = 0.5, or remove the input'),
        ({"sources": {"channel:train": 3, "channel:val": 1, "s3://bucket/tokens": 1}}, None),
    ],
)
def test_data_sources_must_be_existing_channels(data, fix):
    job, config = job_and_config(data=data)
    found = find_problems(render_request(job, config, NAME, FOLDER), job, config)
    assert [fix in problem.remedy for problem in found] == ([True] if fix else []), found


def test_missing_required_keys_are_reported_as_job_keys(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text('[job]\nplace = "sagemaker"\nrole = "arn:aws:iam::123456789012:role/me"\n')
    assert cli.main(["launch", str(path), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "job.image: is missing" in said and 'output = "s3://' in said
    assert "job.role" not in said


# Faults of a whole job: settings, the field of the single line that names it, and words of its
# remedy. `UNFIT` ends with the planner's own refusal.
VPC_GONE = ["job.subnets=[]", "job.security_groups=[]"]
ONE = ["job.nodes=1", "parallel.sharded_data_parallel_degree=8"]


def train_input(**keys: str) -> list[str]:
    """Return settings that replace the input ``train``."""
    return [f"job.inputs.train.{key}={keys.get(key, '')}" for key in {"fsx", "directory", *keys}]


FAULTY_JOBS = [
    # keys and types
    (["job.instance_types=ml.p4d.24xlarge"], "instance_types", "did you mean 'instance_type'"),
    (["job.nodes=0"], "job.nodes", "at least 1"),
    (["job.nodes=many"], "job.nodes", "expected"),
    (["job.max_hours=0"], "job.max_hours", "more than 0"),
    (["job.volume_gb=0"], "job.volume_gb", "at least 1"),
    (["job.retries=-1"], "job.retries", "0 or more"),
    (["job.place=sagemakr"], "job.place", "did you mean 'sagemaker'"),
    (["job.tags.team=3"], "job.tags.team", "expected a text"),
    (["modl.preset=gpt2-30b"], "modl", "did you mean 'model'"),
    (["model.preset=gpt2-30c"], "gpt2-30c", "did you mean"),
    # name, role, image
    (["job.name=gpt2_30b"], "TrainingJobName", "must match"),
    ([f"job.name={'g' * 60}"], "TrainingJobName", "at most 63"),
    (["job.role="], "job.role", "set it"),
    (["job.role=nearlinear"], "RoleArn", "at least 20"),
    (["job.role=arn:aws:iam::42:role/me"], "RoleArn", "must match"),
    (["job.image="], "job.image", 'image = "auto"'),
    (["job.image=nearlinear:1"], "job.image", "ACCOUNT.dkr.ecr"),
    (["job.image=docker.io/me/nearlinear:1"], "job.image", "ACCOUNT.dkr.ecr"),
    (["job.image=public.ecr.aws/me/nearlinear:1"], "job.image", "ACCOUNT.dkr.ecr"),
    (["job.image=auto:1.13"], "job.image", "known are 2.8"),
    ([f"job.image={ACCOUNT}.dkr.ecr.us-west-2.amazonaws.com/nearlinear"], "TrainingImage", "tag"),
    (["job.region=us-east-1"], "job.image", "set job.region to us-west-2"),
    # region and machines
    (["job.region=us-wets-2", "job.image=auto"], "job.region", "did you mean 'us-west-2'"),
    (["job.region=oregon"], "job.region", "known are"),
    (["job.region=eu-west-3", "job.image=auto"], "job.instance_type", "us-west-2"),
    (["job.region=us-gov-west-2", "job.image=auto"], "job.region", "did you mean"),
    (["job.instance_type=ml.p4d.48xlarge", "job.ranks_per_node=8"], "InstanceType", "p4d.24xlarge"),
    (["job.instance_type=p4d.24xlarge"], "InstanceType", "did you mean 'ml.p4d.24xlarge'"),
    (["job.instance_type=ml.p3.16xlarge", "parallel.bf16=false"], "InstanceType", "one with EFA"),
    (["job.accelerators=4"], "job.accelerators", "remove the key"),
    (["job.ranks_per_node=4"], "job.ranks_per_node", "remove the key"),
    (["job.ranks_per_node=16"], "job.ranks_per_node", "at most 8"),
    (["job.volume_gb=8001"], "VolumeSizeInGB", "at most 8000"),
    (["job.keep_warm_minutes=400"], "KeepAlivePeriodInSeconds", "at most 21600"),
    (["job.retries=31"], "MaximumRetryAttempts", "at most 30"),
    (["job.max_hours=800"], "MaxRuntimeInSeconds", "resume"),
    (["job.max_wait_hours=1", "job.spot=true"], "MaxWaitTimeInSeconds", "at least 86400"),
    (["job.spot=true", "job.checkpoints="], "CheckpointConfig", "folder in S3"),
    (["job.spot=true", "job.keep_warm_minutes=30"], "KeepAlivePeriodInSeconds", "disable spot"),
    # layout
    (["job.nodes=3"], "parallel", "3 x 8 ranks"),
    (["parallel.sharded_data_parallel_degree=96"], "parallel", "32 x 8 ranks"),
    (["parallel.sharded_data_parallel_degree=12", "job.nodes=3"], "hybrid_shard_degree", "of 8"),
    (["parallel.tensor_parallel_degree=3"], "tensor_parallel_degree", "allowed are"),
    (["parallel.pipeline_parallel_degree=5"], "pipeline_parallel_degree", "allowed are"),
    # addresses
    (["job.output="], "job.output", "set it"),
    (["job.output=my-bucket/output"], "job.output", 's3://my-bucket/output"'),
    (["job.output=https://my-bucket/output"], "job.output", 's3://my-bucket/output"'),
    (["job.output=s3://My_Bucket/output"], "job.output", "lower-case"),
    (["job.output=s3://ab/output"], "job.output", "3 to 63"),
    (["job.output=s3://192.168.0.1/output"], "job.output", "lower-case"),
    (["job.checkpoints=s3://my..bucket/c"], "job.checkpoints", "single dots"),
    (["job.checkpoints=s3://my-bucket/output"], "job.checkpoints", "another prefix"),
    (["job.checkpoints=s3://my-bucket/output/"], "job.checkpoints", "another prefix"),
    (["job.checkpoints=https://my-bucket/c"], "job.checkpoints", 's3://my-bucket/c"'),
    (["job.checkpoint_path=/opt/ml/model"], "LocalPath", "/opt/ml/checkpoints"),
    # inputs
    (train_input(path="data/mine"), "job.inputs.train", "data push data/mine s3://"),
    (train_input(claim="tokens"), "job.inputs.train", "s3, fsx or efs"),
    (train_input(s3="my-bucket/tokens"), "job.inputs.train.s3", 's3://my-bucket/tokens"'),
    (train_input(s3="s3://UPPER/tokens"), "job.inputs.train.s3", "lower-case"),
    (train_input(s3="s3://my-bucket/tokens", mode="Pipe"), "train.mode", "FastFile"),
    (train_input(s3="s3://my-bucket/tokens", mode="Fast"), "mode", "'FastFile'"),
    (train_input(s3="s3://my-bucket/checkpoints"), "train.s3", "another prefix"),
    (["job.inputs.train.directory=/tokens"], "DirectoryPath", "MOUNT_NAME"),
    (["job.inputs.train.directory=/tokens/train"], "DirectoryPath", "MOUNT_NAME"),
    (["job.inputs.train.directory=/fsx"], "DirectoryPath", "MOUNT_NAME"),
    (["job.inputs.train.directory=abc"], "directory", "mount name first"),
    (["job.inputs.train.fsx=fs-12"], "FileSystemId", "at least 11"),
    (["job.inputs.sm_drivers={s3 = 's3://my-bucket/code'}"], "InputDataConfig", "rename yours"),
    (["data.path=channel:books"], "InputDataConfig", "job.inputs.books"),
    # network, tags, environment, secrets
    (VPC_GONE, "VpcConfig", "security group"),
    (["job.subnets=['sg-0123456789abcdef0']"], "VpcConfig.Subnets", "subnet-0123456789abcdef0"),
    (
        ["job.subnets=['subnet-0123456789abcdef0', 'subnet-0123456789abcdef1']"],
        "VpcConfig.Subnets",
        "give one subnet",
    ),
    (["job.tags={'aws:team' = 'x'}"], "Tags", "rename it"),
    (["job.secrets={TOKEN = ' '}"], "job.secrets.TOKEN", "AWS Secrets Manager"),
    # the planner
    (
        ["activations.checkpoint=", "activations.offload=false"],
        "memory",
        'activations.checkpoint = "each"',
    ),
    (["batch.micro_batch_size=64"], "memory", "batch.micro_batch_size = 16"),
    (["job.nodes=1", "parallel.sharded_data_parallel_degree=8"], "memory", "GiB"),
    (["parallel.fp8=true"], "the config", "does not support fp8"),
]


def test_sixty_faulty_jobs_are_in_the_table():
    assert len({tuple(settings) for settings, _, _ in FAULTY_JOBS}) == len(FAULTY_JOBS) >= 60


@pytest.mark.parametrize(("settings", "where", "fix"), FAULTY_JOBS)
def test_faulty_job_is_named_offline_in_one_line(
    tmp_path, capsys, monkeypatch, settings, where, fix
):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing is asked
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    data = copy.deepcopy(RUN)
    data["job"]["region"] = "us-west-2"
    data["job"]["source"] = ""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    changes = [word for setting in settings for word in ("--set", setting)]
    assert cli.main(["launch", str(path), "--dry-run", *changes]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.strip().splitlines()
    if lines[0] == "error: the job has a problem; nothing was sent:":
        del lines[0]
    assert len(lines) == 1, said.err
    assert where in lines[0] and fix in lines[0], lines[0]


def test_force_sends_what_the_planner_refuses(tmp_path, capsys, caplog):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RUN))
    unfit = [str(path), "--dry-run", "--set", "activations.checkpoint="]
    unfit += ["--set", "activations.offload=false"]
    assert cli.main(["launch", *unfit, "--force"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["ResourceConfig"]["InstanceCount"] == 32
    assert "--force: memory: " in caplog.text and "GiB per GPU" in said.err
    for place in ("slurm", "kubernetes"):
        data = copy.deepcopy(RUN)
        data["job"]["inputs"] = {"train": {"path": "/fsx/tokens"}}
        for key in ("output", "checkpoints", "source"):
            del data["job"][key]
        path.write_text(json.dumps(data))
        assert cli.main(["launch", *unfit, "--place", place]) == 2
        assert "cheapest change that makes it fit" in capsys.readouterr().err
        assert cli.main(["launch", *unfit, "--place", place, "--force"]) == 0
        assert "planned: " in capsys.readouterr().err


def test_machines_unknown_to_the_planner_are_not_refused(tmp_path, capsys):
    data = copy.deepcopy(RUN)
    data["job"] |= {"instance_type": "ml.g5.48xlarge", "nodes": 32}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    assert cli.main(["launch", str(path), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "not planned: the planner does not know 'ml.g5.48xlarge'" in said
    assert "price: unknown" in said and "--price-per-hour" in said


def test_unknown_instance_type_gets_the_ranks_variable():
    asked = {"instance_type": "ml.p9.48xlarge", "accelerators": 16}
    job, config = job_and_config(**{f"job__{key}": value for key, value in asked.items()})
    found = render_request(job, config, NAME, FOLDER)
    assert found["Environment"][RANKS_VARIABLE] == "16" == str(job.local_world_size)


def test_own_machine_uses_its_number_of_accelerators():
    job, config = job_and_config(job__instance_type="dgx", job__accelerators=8)
    assert job.world_size == 256 and check_parallel_layout(job, config.parallel) == []


def test_invalid_job_reports_all_problems_at_once():
    found = good() | {"TrainingJobName": "gpt2_30b", "RoleArn": "me"}
    error = InvalidJob(find_problems(found, *job_and_config()))
    assert "TrainingJobName: 'gpt2_30b'" in str(error) and "RoleArn: " in str(error)
    assert "nothing was sent" in str(error)
