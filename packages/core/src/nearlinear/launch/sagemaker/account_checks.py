"""Ask AWS, before a job is sent, whether the account can run it.

Quotas, the role and its permissions, buckets, the image, and the network, by AWS's own dry runs and
simulations where it has them. Nothing is created. A check that the caller may not make is reported
as a note, because the job may run nevertheless. Sources: the API references of Service Quotas, IAM
(SimulatePrincipalPolicy), EC2 (DryRun), ECR and S3, 2026-11.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...errors import ConfigError
from ..spec import JobSpec, Problem
from . import policies
from .aws import AWSError, bucket_and_key, create_client, translate_errors
from .job_checks import ECR_IMAGE

QUOTA_NAMES = {
    False: "{} for training job usage",
    True: "{} for spot training job usage",
}
"""Name of the quota for the instances of a job, by ``job.spot``."""
_WARM_POOL_QUOTA = "{} for training warm pool usage"
_ALLOWED = "allowed"
_MISSING_CODES = ("404", "NoSuchBucket", "NotFound")


def check_account(job: JobSpec, request: dict[str, Any]) -> tuple[list[Problem], list[str]]:
    """Return the problems of the account for ``request``, and notes on checks not made.

    Raises:
        ConfigError: boto3, the region or the credentials are missing.
    """
    create_client("sts", job.region)  # raises without credentials
    checks: tuple[tuple[str, Callable[[], Iterable[Problem]]], ...] = (
        ("the caller's account", functools.partial(_check_caller, job)),
        ("quotas", functools.partial(_check_quotas, job)),
        ("permissions of job.role", functools.partial(_check_role, job)),
        ("buckets", functools.partial(_check_buckets, job)),
        ("the image", functools.partial(_check_image, job, request)),
        ("the network", functools.partial(_check_network, job)),
        ("file systems", functools.partial(_check_file_systems, job)),
    )
    problems, notes = [], []
    for name, check in checks:
        try:
            problems += check()
        except AWSError as error:
            notes.append(f"{name} ({error})")
    return problems, notes


def _check_caller(job: JobSpec) -> Iterator[Problem]:
    with translate_errors("asking for the caller's identity"):
        account = create_client("sts", job.region).get_caller_identity()["Account"]
    owner = policies.ArnScope.from_job(job).account
    if account != owner:
        cause = f"the role is in account {owner}, but these credentials are of account {account}"
        yield Problem("job.role", cause, "name a role of this account, or change AWS_PROFILE")


def _check_quotas(job: JobSpec) -> Iterator[Problem]:
    """Compare the job's machines with the quota of their type; quotas count running jobs, too."""
    wanted = {QUOTA_NAMES[job.spot].format(job.instance_type): job.nodes}
    if job.keep_warm_minutes:
        wanted[_WARM_POOL_QUOTA.format(job.instance_type)] = job.nodes
    client = create_client("service-quotas", job.region)
    with translate_errors("reading the quotas of SageMaker"):
        pages = client.get_paginator("list_service_quotas").paginate(ServiceCode="sagemaker")
        quotas = [quota for page in pages for quota in page["Quotas"]]
    for quota in quotas:
        if (needed := wanted.get(quota["QuotaName"], 0)) > quota["Value"]:
            cause = f"{needed}, but the quota {quota['QuotaName']!r} is {quota['Value']:g}"
            code = quota.get("QuotaCode", "")
            remedy = f"request more: aws service-quotas request-service-quota-increase {code}"
            yield Problem("job.nodes", cause, remedy.rstrip())


def _check_role(job: JobSpec) -> Iterator[Problem]:
    """Simulate the execution policy for the role. Statements with conditions are left out."""
    client, denied = create_client("iam", job.region), []
    for statement in policies.execution_policy(job)["Statement"]:
        if "Condition" in statement:
            continue
        try:
            with translate_errors("simulating the permissions of job.role"):
                found = client.simulate_principal_policy(
                    PolicySourceArn=job.role,
                    ActionNames=statement["Action"],
                    ResourceArns=[_example(arn) for arn in statement["Resource"]],
                )
        except AWSError as error:
            if error.code in ("NoSuchEntity", "NoSuchEntityException"):
                remedy = "create it: nearlinear policies prints its policies"
                yield Problem("job.role", f"{job.role} does not exist", remedy)
                return
            raise
        results = found["EvaluationResults"]
        denied += [
            f"{each['EvalActionName']} on {each.get('EvalResourceName', '*')}"
            for each in results
            if each["EvalDecision"] != _ALLOWED
        ]
    if denied:
        more = f" and {len(denied) - 3} more" if len(denied) > 3 else ""
        cause = f"the role may not do {', '.join(denied[:3])}{more}"
        remedy = "attach the policy of nearlinear policies --execution"
        yield Problem("job.role", cause, remedy)


def _example(arn: str) -> str:
    """Return one resource of a pattern: simulations take no wildcards but a single one."""
    return arn if arn == "*" else arn.replace("*", "x").replace("?", "x")


def _check_buckets(job: JobSpec) -> Iterator[Problem]:
    addresses = {"job.output": job.output, "job.checkpoints": job.checkpoints}
    addresses |= {f"job.inputs.{name}.s3": given.s3 for name, given in job.inputs.items()}
    client, seen = create_client("s3", job.region), set()
    for field, address in addresses.items():
        bucket, _ = bucket_and_key(address)
        if not bucket or bucket in seen:
            continue
        seen.add(bucket)
        try:
            with translate_errors(f"looking at s3://{bucket}"):
                found = client.head_bucket(Bucket=bucket)
        except AWSError as error:
            if error.code not in _MISSING_CODES:
                raise
            cause = f"there is no bucket {bucket!r}"
            yield Problem(field, cause, f"create it: aws s3 mb s3://{bucket}, or name another")
            continue
        headers = found["ResponseMetadata"]["HTTPHeaders"]
        region, own = headers.get("x-amz-bucket-region"), client.meta.region_name
        if region and region != own:
            cause = f"bucket {bucket!r} is in {region}, but the job runs in {own}"
            yield Problem(field, cause, "use a bucket of the job's region")


def _check_image(job: JobSpec, request: dict[str, Any]) -> Iterator[Problem]:
    """Look up an image of the job's own account; AWS's images are in a table."""
    image = request["AlgorithmSpecification"]["TrainingImage"]
    found = ECR_IMAGE.match(image)
    if found is None or found[1] != policies.ArnScope.from_job(job).account:
        return
    _, digest, named = image.partition("@")
    identifier = {"imageDigest": named} if digest else {"imageTag": image.rpartition(":")[2]}
    client = create_client("ecr", found[2])
    try:
        with translate_errors(f"looking up {image}"):
            client.describe_images(repositoryName=found[3], imageIds=[identifier])
    except AWSError as error:
        if error.code not in ("ImageNotFoundException", "RepositoryNotFoundException"):
            raise
        cause = f"there is no image {image}"
        yield Problem("job.image", cause, 'push it, or set image = "auto" for AWS\'s own')


def _check_network(job: JobSpec) -> Iterator[Problem]:
    """Ask EC2 for a dry run of the network interfaces that SageMaker creates in the subnets."""
    if not job.subnets:
        return
    client = create_client("ec2", job.region)
    for subnet in job.subnets:
        try:
            with translate_errors(f"dry run of a network interface in {subnet}"):
                client.create_network_interface(
                    DryRun=True, SubnetId=subnet, Groups=job.security_groups
                )
        except AWSError as error:
            if error.code == "DryRunOperation":  # it would have succeeded
                continue
            if not error.code.startswith("Invalid"):
                raise
            yield Problem("job.subnets", str(error), "correct job.subnets and job.security_groups")


def _check_file_systems(job: JobSpec) -> list[Problem]:
    from ..fsx.access_checks import check_file_system_access

    try:
        return check_file_system_access(job)
    except ConfigError as error:
        return [Problem("job.inputs", str(error), "see nearlinear fsx check")]
