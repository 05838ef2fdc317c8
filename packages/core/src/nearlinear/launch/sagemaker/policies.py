"""Minimal IAM policies of a job: for the user who launches it, its checks, and the job itself.

The caller creates, watches and stops jobs of one name and passes one role to SageMaker. The role
reads the inputs, writes the outputs, logs and metrics, and joins the VPC if there is one. The trust
policy lets SageMaker assume the role. Sources: the developer guide's page on SageMaker roles, and
the service authorization reference for the actions that support resources, 2026-11.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import ConfigError
from ..spec import JobSpec
from .aws import bucket_and_key
from .images import resolve_image
from .job_checks import ECR_IMAGE, job_region
from .jobs import LOG_GROUP

_ROLE_ARN = re.compile(r"arn:(aws[a-z-]*):iam::(\d{12}):role/.+")
# For the network interfaces of a job in a VPC. IAM supports no narrower resource for these actions.
NETWORK_INTERFACE_ACTIONS = (
    "CreateNetworkInterface CreateNetworkInterfacePermission DeleteNetworkInterface "
    "DeleteNetworkInterfacePermission DescribeDhcpOptions DescribeNetworkInterfaces "
    "DescribeSecurityGroups DescribeSubnets DescribeVpcs"
).split()


@dataclass(frozen=True)
class ArnScope:
    """Partition, account and region of a job's resources."""

    partition: str
    account: str
    region: str

    @classmethod
    def from_job(cls, job: JobSpec) -> ArnScope:
        """Parse the scope from the job's role. Raises ConfigError if the role is not an ARN."""
        found = _ROLE_ARN.fullmatch(job.role)
        if found is None:
            raise ConfigError(
                f"job.role = {job.role!r}: expected the ARN of the role that the job runs as, as "
                "in arn:aws:iam::123456789012:role/nearlinear; the role need not exist yet"
            )
        return cls(found[1], found[2], job.region or "*")

    def resource(self, service: str, name: str) -> str:
        """Return the ARN of a resource of ``service`` in this region and account."""
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{name}"

    def objects(self, uri: str) -> str:
        """Return the ARN of all S3 objects whose URI begins with ``uri`` (s3://...)."""
        bucket, key = bucket_and_key(uri)
        return f"{self.bucket(bucket)}/{key}*"

    def bucket(self, name: str) -> str:
        """Return the ARN of an S3 bucket."""
        return f"arn:{self.partition}:s3:::{name}"


def caller_policy(job: JobSpec) -> dict:
    """Return the policy for ``nearlinear launch``, ``status``, ``logs``, ``stop``, ``cost``.

    It includes ``nearlinear fsx check``, but not the creation of file systems, which is the task of
    an administrator.
    """
    scope = ArnScope.from_job(job)
    jobs = scope.resource("sagemaker", f"training-job/{job.name}-*")
    actions = ["CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob"]
    actions += ["AddTags"] * bool(job.tags)
    statements = [
        _allow("Jobs", "sagemaker", actions, [jobs]),
        _allow("Role", "iam", ["PassRole"], [job.role])
        | {"Condition": {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}},
        _allow("Logs", "logs", ["DescribeLogStreams", "GetLogEvents"], [_log_group(scope)]),
        _allow("Code", "s3", ["PutObject"], [scope.objects(f"{_job_prefix(job)}*/input/")]),
        _allow("Prices", "pricing", ["GetProducts"], ["*"]),
    ]
    if any(given.source == "fsx" for given in job.inputs.values()):
        describe_fsx = ["DescribeDataRepositoryAssociations", "DescribeFileSystems"]
        describe_vpc = ["DescribeNetworkInterfaces", "DescribeSecurityGroups", "DescribeSubnets"]
        statements.append(_allow("FileSystems", "fsx", describe_fsx, ["*"]))
        statements.append(_allow("Reach", "ec2", describe_vpc, ["*"]))
    return _policy(statements)


def checks_policy(job: JobSpec) -> dict:
    """Return the optional policy for the checks of the account before a launch.

    Without it, `account_checks` reports each check as not made. The dry run of a network interface
    is not included, because AWS grants it only together with the creation of one.
    """
    scope = ArnScope.from_job(job)
    addresses = [job.output, job.checkpoints, *(each.s3 for each in job.inputs.values())]
    buckets = {bucket_and_key(address)[0] for address in addresses if address}
    statements = [
        _allow("Quotas", "servicequotas", ["ListServiceQuotas"], ["*"]),
        _allow("Simulate", "iam", ["SimulatePrincipalPolicy"], [job.role]),
        _allow("Buckets", "s3", ["ListBucket"], map(scope.bucket, buckets)),
    ]
    image = _image_repository(job, scope.partition)
    if image and image[0] == scope.account:
        statements.append(_allow("Image", "ecr", ["DescribeImages"], [image[1]]))
    return _policy(statements)


def execution_policy(job: JobSpec) -> dict:
    """Return the policy for the role that the job runs as."""
    scope, own = ArnScope.from_job(job), f"{_job_prefix(job)}*/"
    inputs = [given.s3 for given in job.inputs.values() if given.source == "s3"]
    checkpoints = [f"{job.checkpoints.rstrip('/')}/"] if job.checkpoints else []
    read, written = [*inputs, *checkpoints, f"{own}input/"], [own, *checkpoints]
    buckets = {bucket_and_key(uri)[0] for uri in [*read, *written]}
    log_actions = ["CreateLogGroup", "CreateLogStream", "DescribeLogStreams", "PutLogEvents"]
    statements = [
        _allow("Read", "s3", ["GetObject"], map(scope.objects, read)),
        _allow("Write", "s3", ["PutObject"], map(scope.objects, written)),
        _allow("List", "s3", ["ListBucket"], map(scope.bucket, buckets)),
        _allow("Logs", "logs", log_actions, [_log_group(scope)]),
        _allow("Metrics", "cloudwatch", ["PutMetricData"], ["*"])
        | {"Condition": {"StringLike": {"cloudwatch:namespace": "/aws/sagemaker/*"}}},
        *_image_statements(job, scope.partition),
    ]
    if job.secrets:
        secrets = [_secret_arn(scope, text.partition("#")[0]) for text in job.secrets.values()]
        statements.append(_allow("Secrets", "secretsmanager", ["GetSecretValue"], secrets))
    if job.subnets:
        statements.append(_allow("Vpc", "ec2", NETWORK_INTERFACE_ACTIONS, ["*"]))
    return _policy(statements)


def _secret_arn(scope: ArnScope, identifier: str) -> str:
    """Return the ARN of a secret. AWS appends a hyphen and six characters to the name."""
    if identifier.startswith("arn:"):
        return identifier
    return scope.resource("secretsmanager", f"secret:{identifier}-??????")


def trust_policy() -> dict:
    """Return the trust policy of the role: SageMaker may assume it."""
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": "sagemaker.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    return _policy([statement])


def _job_prefix(job: JobSpec) -> str:
    """Return the S3 prefix of each job's own folder; the job's timestamp follows."""
    if not job.output:
        raise ConfigError("job.output is empty: set it to s3://bucket/prefix for outputs")
    return f"{job.output.rstrip('/')}/{job.name}-"


def _log_group(scope: ArnScope) -> str:
    """Return the ARN of the log group of all training jobs, with its streams."""
    return scope.resource("logs", f"log-group:{LOG_GROUP}:*")


def _image_statements(job: JobSpec, partition: str) -> list[dict]:
    """Return the statements to pull the image of ``job``; empty if it is not in ECR."""
    image = _image_repository(job, partition)
    if image is None:
        return []
    actions = ["BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer"]
    return [
        _allow("Image", "ecr", actions, [image[1]]),
        _allow("Registry", "ecr", ["GetAuthorizationToken"], ["*"]),
    ]


def _image_repository(job: JobSpec, partition: str) -> tuple[str, str] | None:
    """Return account and ARN of the repository of the job's image, or None outside of ECR."""
    found = ECR_IMAGE.match(resolve_image(job.image, job_region(job), job.instance_type))
    if found is None:
        return None
    account, region, repository = found.groups()
    return account, f"arn:{partition}:ecr:{region}:{account}:repository/{repository}"


def _allow(name: str, service: str, actions: Iterable[str], resources: Iterable[str]) -> dict:
    return {
        "Sid": name,
        "Effect": "Allow",
        "Action": sorted(f"{service}:{action}" for action in actions),
        "Resource": sorted(set(resources)),
    }


def _policy(statements: list[dict]) -> dict:
    return {"Version": "2012-10-17", "Statement": statements}
