"""Checks of a SageMaker job that need no request and no network.

The problems name keys of ``[job]``: missing keys, inputs that SageMaker cannot mount, S3 addresses,
the region, the instance type's regions and the image. `request_checks` then checks the request.
Sources: botocore's list of regions, the hardware table, the S3 user guide on bucket names, and the
SageMaker developer guide on training images, 2026-11.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ...config.schema import did_you_mean
from ...config.train import TrainConfig
from ...data.open import CHANNEL
from ...errors import ConfigError
from ...hardware import is_recorded_region, offering_regions
from ..spec import JobSpec, Problem
from .aws import bucket_and_key
from .images import AUTO, is_auto, resolve_image

REQUIRED_KEYS = {
    "image": AUTO,
    "role": "arn:aws:iam::123456789012:role/nearlinear",
    "output": "s3://my-bucket/output",
}
"""Required keys of ``[job]``, with an example of each."""

ECR_IMAGE = re.compile(r"(\d{12})\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.[a-z0-9.-]+/([^:@]+)")
"""Image in Elastic Container Registry: account, region and repository."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+")


def job_region(job: JobSpec) -> str:
    """Return the region of ``job``, or of the environment; empty if neither is set."""
    return job.region or os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION", "")


def check_job(job: JobSpec, config: TrainConfig) -> list[Problem]:
    """Return all problems of the keys of ``[job]``."""
    return [
        *_check_required_keys(job),
        *_check_inputs(job, config),
        *_check_s3_addresses(job),
        *(list(_check_region(job)) or _check_image(job)),  # an unknown region has no images
    ]


def check_offering(job: JobSpec) -> Iterator[Problem]:
    """Yield a problem if the hardware table knows that the region lacks the instance type."""
    region, offering = job_region(job), offering_regions(job.instance_type)
    if is_recorded_region(region) and offering and region not in offering:
        cause = f"AWS does not offer {job.instance_type} in {region}"
        yield Problem("job.instance_type", cause, f"set job.region to one of {', '.join(offering)}")


def _check_required_keys(job: JobSpec) -> Iterator[Problem]:
    for name, example in REQUIRED_KEYS.items():
        if not getattr(job, name):
            yield Problem(f"job.{name}", "is missing", f'set it, as in {name} = "{example}"')


def _check_inputs(job: JobSpec, config: TrainConfig) -> Iterator[Problem]:
    """Check the sources of the inputs, and that the trainer can read its own as files."""
    sources = [name.removeprefix(CHANNEL) for name in config.data.sources]
    read = {*(sources or ["train"]), config.data.path.removeprefix(CHANNEL)}
    for name, given in job.inputs.items():
        field = f"job.inputs.{name}"
        if given.source == "path":
            cause = f"{given.folder!r} is a folder of this machine, which SageMaker cannot see"
            remedy = f"upload it: nearlinear data push {given.folder} s3://BUCKET/{name}, then set "
            yield Problem(field, cause, f'{remedy}s3 = "s3://BUCKET/{name}" instead of path')
        elif given.source == "claim":
            cause = f"{given.claim!r} is a claim of Kubernetes"
            yield Problem(field, cause, "use s3, fsx or efs")
        elif given.source == "s3" and given.mode == "Pipe" and name in read:
            cause = "'Pipe' streams the data, but token shards are files"
            yield Problem(f"{field}.mode", cause, "use FastFile or File")


def _check_s3_addresses(job: JobSpec) -> Iterator[Problem]:
    """Check the buckets and prefixes of the job, and that nothing overwrites its own input."""
    addresses = {"job.output": job.output, "job.checkpoints": job.checkpoints}
    addresses |= {f"job.inputs.{name}.s3": given.s3 for name, given in job.inputs.items()}
    seen: dict[str, str] = {}
    for field, address in addresses.items():
        if not address:
            continue
        if problem := s3_problem(field, address):
            yield problem
            continue
        same = seen.setdefault(address.rstrip("/"), field)
        if same != field and not (same.startswith("job.inputs") and field.startswith("job.inputs")):
            cause = f"{address!r} is {same} too, so that their files would mix"
            yield Problem(field, cause, f"name another prefix, such as {address.rstrip('/')}/own")


def s3_problem(field: str, address: str) -> Problem | None:
    """Return the problem of an S3 address, or None."""
    if not address.startswith("s3://"):
        example = f"s3://{address.rpartition('://')[2].strip('/') or 'my-bucket/prefix'}"
        return Problem(field, f"{address!r} is not an S3 address", f'write it as in "{example}"')
    bucket, _ = bucket_and_key(address)
    if bucket.startswith("arn:"):
        return None
    legal = _BUCKET.fullmatch(bucket) and ".." not in bucket and not _ADDRESS.fullmatch(bucket)
    if not legal or bucket.startswith(("xn--", "sthree-")):
        cause = f"{bucket!r} cannot be the name of a bucket"
        return Problem(field, cause, "use 3 to 63 lower-case letters, digits, - and single dots")
    return None


def _check_region(job: JobSpec) -> Iterator[Problem]:
    known = sagemaker_regions()
    if job.region and known and job.region not in known:
        hint = did_you_mean(job.region, known, cutoff=0.7) or f"known are {', '.join(known)}"
        yield Problem("job.region", f"{job.region!r} is not a region of SageMaker", hint)


def sagemaker_regions() -> list[str]:
    """Return the regions in which SageMaker exists; empty without botocore."""
    try:
        from botocore.session import Session
    except ImportError:
        return []
    session = Session()
    partitions = session.get_available_partitions()
    return [r for each in partitions for r in session.get_available_regions("sagemaker", each)]


def _check_image(job: JobSpec) -> Iterator[Problem]:
    if not job.image:
        return
    if is_auto(job.image):
        try:
            resolve_image(job.image, job_region(job), job.instance_type)
        except ConfigError as error:
            yield Problem("job.image", str(error), "or name an image of your own")
        return
    found, region = ECR_IMAGE.match(job.image), job_region(job)
    if found is None:
        cause = f"{job.image!r} is not in Elastic Container Registry, SageMaker's only source"
        remedy = f'use ACCOUNT.dkr.ecr.{region or "REGION"}.amazonaws.com/NAME:TAG, or "{AUTO}"'
        yield Problem("job.image", cause, remedy)
    elif region and found[2] != region:
        cause = f"the image is in {found[2]}, but the job runs in {region}"
        yield Problem("job.image", cause, f"push it to {region}, or set job.region to {found[2]}")
