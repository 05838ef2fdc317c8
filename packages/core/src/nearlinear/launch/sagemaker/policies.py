"""The least that AWS must allow for a job: to whoever launches it, and to the job itself.

Documents of IAM: the caller creates, watches and stops jobs of one name and hands over one role;
the role reads the inputs, writes the outputs, says what it does, and joins the VPC where there is
one; SageMaker may assume it. Source: the developer guide's page on SageMaker roles, and the service
authorization reference for which actions know resources, 2026-11.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import ConfigError
from ..spec import JobSpec
from .aws import bucket_and_key
from .follow import LOGS

ROLE = re.compile(r"arn:(aws[a-z-]*):iam::(\d{12}):role/.+")
IMAGE = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/([^:@]+)")
INTERFACES = (  # of the network cards a job gets in a VPC; IAM knows no narrower resource
    "CreateNetworkInterface CreateNetworkInterfacePermission DeleteNetworkInterface "
    "DeleteNetworkInterfacePermission DescribeDhcpOptions DescribeNetworkInterfaces "
    "DescribeSecurityGroups DescribeSubnets DescribeVpcs"
).split()


@dataclass(frozen=True)
class Place:
    """Where the job's resources are, as their names begin."""

    partition: str
    account: str
    region: str

    def arn(self, service: str, rest: str) -> str:
        """Of something that ``service`` has in the job's region and account."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{rest}"

    def objects(self, uri: str) -> str:
        """Of all objects whose names begin with ``uri`` (s3://...)."""
        bucket, key = bucket_and_key(uri)
        return f"{self.bucket(bucket)}/{key}*"

    def bucket(self, name: str) -> str:
        return f"arn:{self.partition}:s3:::{name}"


def place(job: JobSpec) -> Place:
    """Raises ConfigError where the role does not tell the account."""
    found = ROLE.fullmatch(job.role)
    if found is None:
        raise ConfigError(
            f"job.role = {job.role!r}: write the ARN of the role that the job is to run as (there "
            "or not yet), as in arn:aws:iam::123456789012:role/nearlinear"
        )
    return Place(*found.groups(), job.region or "*")


def caller(job: JobSpec) -> dict:
    """For ``nearlinear launch``, ``status``, ``logs``, ``stop``, ``cost`` and ``fsx check``.

    Making file systems is for their administrator, and not in it.
    """
    where = place(job)
    jobs = where.arn("sagemaker", f"training-job/{job.name}-*")
    actions = ["CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob"]
    actions += ["AddTags"] * bool(job.tags)
    statements = [
        _allow("Jobs", "sagemaker", actions, [jobs]),
        _allow("Role", "iam", ["PassRole"], [job.role])
        | {"Condition": {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}},
        _allow("Logs", "logs", ["DescribeLogStreams", "GetLogEvents"], [_logs(where)]),
        _allow("Code", "s3", ["PutObject"], [where.objects(f"{_folder(job)}*/input/")]),
        _allow("Prices", "pricing", ["GetProducts"], ["*"]),
    ]
    if any(given.source == "fsx" for given in job.inputs.values()):
        looks = ["DescribeDataRepositoryAssociations", "DescribeFileSystems"]
        reach = ["DescribeNetworkInterfaces", "DescribeSecurityGroups", "DescribeSubnets"]
        statements.append(_allow("FileSystems", "fsx", looks, ["*"]))
        statements.append(_allow("Reach", "ec2", reach, ["*"]))
    return _policy(statements)


def execution(job: JobSpec) -> dict:
    """For the role that the job runs as."""
    where, own = place(job), f"{_folder(job)}*/"
    inputs = [given.s3 for given in job.inputs.values() if given.source == "s3"]
    kept = [f"{job.checkpoints.rstrip('/')}/"] if job.checkpoints else []
    read, written = [*inputs, *kept, f"{own}input/"], [own, *kept]
    buckets = {bucket_and_key(uri)[0] for uri in [*read, *written]}
    says = ["CreateLogGroup", "CreateLogStream", "DescribeLogStreams", "PutLogEvents"]
    statements = [
        _allow("Read", "s3", ["GetObject"], map(where.objects, read)),
        _allow("Write", "s3", ["PutObject"], map(where.objects, written)),
        _allow("List", "s3", ["ListBucket"], map(where.bucket, buckets)),
        _allow("Logs", "logs", says, [_logs(where)]),
        _allow("Metrics", "cloudwatch", ["PutMetricData"], ["*"])
        | {"Condition": {"StringLike": {"cloudwatch:namespace": "/aws/sagemaker/*"}}},
        *_pull(job.image, where.partition),
    ]
    if job.subnets:
        statements.append(_allow("Vpc", "ec2", INTERFACES, ["*"]))
    return _policy(statements)


def trust() -> dict:
    """Who may assume that role: its trust policy."""
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": "sagemaker.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    return _policy([statement])


def _folder(job: JobSpec) -> str:
    """Where each job keeps what is its own; the time follows."""
    if not job.output:
        raise ConfigError("job.output is empty: write s3://bucket/prefix, where jobs leave things")
    return f"{job.output.rstrip('/')}/{job.name}-"


def _logs(where: Place) -> str:
    """The group of all training jobs, and its streams."""
    return where.arn("logs", f"log-group:{LOGS}:*")


def _pull(image: str, partition: str) -> list[dict]:
    """From ECR, where ``image`` is there."""
    found = IMAGE.match(image)
    if found is None:
        return []
    account, region, repository = found.groups()
    actions = ["BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer"]
    there = f"arn:{partition}:ecr:{region}:{account}:repository/{repository}"
    return [
        _allow("Image", "ecr", actions, [there]),
        _allow("Registry", "ecr", ["GetAuthorizationToken"], ["*"]),
    ]


def _allow(name: str, service: str, actions: Iterable[str], resources: Iterable[str]) -> dict:
    return {
        "Sid": name,
        "Effect": "Allow",
        "Action": sorted(f"{service}:{action}" for action in actions),
        "Resource": sorted(set(resources)),
    }


def _policy(statements: list[dict]) -> dict:
    return {"Version": "2012-10-17", "Statement": statements}
