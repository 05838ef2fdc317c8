"""An AWS account on loopback, with an FSx file system that is a local folder.

The server is moto's, addressed through boto3 and HTTP like AWS. moto's FSx lacks lifecycle states,
mount names, network interfaces and data repository associations, and its SageMaker completes
training jobs at once; this module adds both. Services are simulated, requests are real.
"""

import contextlib
import json
import logging
import os
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from ci.emulation import lustre
from ci.emulation.lustre import EmulatedLustre
from nearlinear.launch.sagemaker import policies
from nearlinear.launch.sagemaker.jobs import LOG_GROUP

REGION = "us-west-2"
BUCKET = "my-bucket"


@dataclass(frozen=True)
class Account:
    """Resources of the emulated account."""

    endpoint: str
    region: str
    bucket: str
    role: str
    vpc: str
    subnet: str
    security_group: str
    """Security group with all egress and Lustre's ports open to its own members."""
    lustre: EmulatedLustre

    def write_logs(self, job: str, host: str, lines: list[str]) -> None:
        """Write the output of a training job's host to CloudWatch, as the service would."""
        import boto3

        logs, stream = boto3.client("logs"), f"{job}/{host}-{int(time.time())}"
        with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
            logs.create_log_group(logGroupName=LOG_GROUP)
        logs.create_log_stream(logGroupName=LOG_GROUP, logStreamName=stream)
        now = int(time.time() * 1000)
        events = [{"timestamp": now + i, "message": line} for i, line in enumerate(lines)]
        logs.put_log_events(logGroupName=LOG_GROUP, logStreamName=stream, logEvents=events)


@contextlib.contextmanager
def account(folder: Path) -> Iterator[Account]:
    """Direct boto3 to a fresh emulated account; its Lustre mount lies below ``folder``."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise logs every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    emulated = lustre.install(folder, sys.executable)
    variables = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",  # calls that moto lacks fail at once
        "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",  # machine images take half the time of a reset
        "PATH": f"{emulated.tools}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        with extended_fsx(emulated), unfinished_jobs():
            yield reset_account(endpoint, emulated)
    finally:
        server.stop()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def reset_account(endpoint: str, emulated: EmulatedLustre) -> Account:
    """Remove all resources, then create a bucket, a role and a network."""
    import urllib.request

    import boto3

    reset = urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()
    location = {"LocationConstraint": REGION}
    boto3.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=location)
    role = boto3.client("iam").create_role(
        RoleName="nearlinear", AssumeRolePolicyDocument=json.dumps(policies.trust_policy())
    )["Role"]["Arn"]
    ec2 = boto3.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="lustre", Description="Lustre", VpcId=vpc)
    group = group["GroupId"]
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=lustre_rules(group))
    return Account(endpoint, REGION, BUCKET, role, vpc, subnet, group, emulated)


def lustre_rules(group: str) -> list[dict]:
    """Security group rules that open Lustre's ports to members of ``group``."""
    return [
        {
            "IpProtocol": "tcp",
            "FromPort": first,
            "ToPort": last,
            "UserIdGroupPairs": [{"GroupId": group}],
        }
        for first, last in ((988, 988), (1018, 1023))
    ]


# FSx


@contextlib.contextmanager
def extended_fsx(emulated: EmulatedLustre) -> Iterator[None]:
    """Add states, network interfaces and S3 links to moto's FSx within the block.

    A file system is CREATING in the first description and AVAILABLE from the second on. A data
    repository association imports the names of S3 objects into ``emulated``, which stands for the
    mount of every file system.
    """
    from moto.fsx.models import FileSystem
    from moto.fsx.responses import FSxResponse

    original_to_dict = FileSystem.to_dict

    def to_dict(system) -> dict:
        return original_to_dict(system) | _additional_fields(system)

    def create(response) -> str:
        request = json.loads(response.body)
        association = {
            "AssociationId": f"dra-{uuid.uuid4().hex[:17]}",
            "Lifecycle": "CREATING",
            **{name: request[name] for name in request if name != "ClientRequestToken"},
        }
        _find_system(response, request["FileSystemId"])
        _associations(response).append(association)
        if request.get("BatchImportMetaDataOnCreate"):
            _import_names(response, request, emulated)
        return json.dumps({"Association": association})

    def describe(response) -> str:
        filters = json.loads(response.body).get("Filters", [])
        wanted = {v for each in filters if each["Name"] == "file-system-id" for v in each["Values"]}
        found = [dict(link) for link in _associations(response) if link["FileSystemId"] in wanted]
        for link in _associations(response):
            link["Lifecycle"] = "AVAILABLE"  # from the next description on
        return json.dumps({"Associations": found})

    def describe_systems(response) -> str:
        for name in json.loads(response.body).get("FileSystemIds", []):
            _find_system(response, name)
        return original_describe(response)

    original_describe = FSxResponse.describe_file_systems
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(FileSystem, "to_dict", to_dict))
        for name, method in (
            ("create_data_repository_association", create),
            ("describe_data_repository_associations", describe),
            ("describe_file_systems", describe_systems),
        ):
            stack.enter_context(mock.patch.object(FSxResponse, name, method, create=True))
        yield


def _additional_fields(system) -> dict:
    """Return the fields that FSx reports for a file system and moto omits."""
    from moto.ec2.models import ec2_backends

    if not hasattr(system, "descriptions"):
        system.descriptions, system.mount_name = 0, uuid.uuid4().hex[:8]
        ec2 = ec2_backends[system.backend.account_id][system.backend.region_name]
        subnet = ec2.get_subnet(system.subnet_ids[0])
        interface = ec2.create_network_interface(
            subnet, private_ip_address="", group_ids=system.security_group_ids or []
        )
        system.vpc, system.network_interface = subnet.vpc_id, interface.id
    system.descriptions += 1
    configuration = dict(system.lustre_configuration or {}) | {"MountName": system.mount_name}
    # The response to `create` counts as one description.
    return {
        "Lifecycle": "AVAILABLE" if system.descriptions > 2 else "CREATING",
        "VpcId": system.vpc,
        "NetworkInterfaceIds": [system.network_interface],
        "FileSystemTypeVersion": "2.15",
        "LustreConfiguration": configuration,
    }


def _associations(response) -> list[dict]:
    backend = response.fsx_backend
    if not hasattr(backend, "links"):
        backend.links = []
    return backend.links


def _find_system(response, name: str):
    from moto.fsx.exceptions import FileSystemNotFound

    if name not in response.fsx_backend.file_systems:
        raise FileSystemNotFound(name)
    return response.fsx_backend.file_systems[name]


def _import_names(response, request: dict, emulated: EmulatedLustre) -> None:
    """Add a file without contents for every S3 object below the linked prefix."""
    import boto3
    from moto.s3.models import s3_backends

    s3 = boto3.client("s3")
    bucket, _, prefix = request["DataRepositoryPath"].removeprefix("s3://").partition("/")
    objects = s3_backends[response.current_account]["aws"].buckets[bucket].keys.items()
    for key, found in objects:
        if key.startswith(prefix):
            below = key[len(prefix) :].strip("/")
            path = f"{request['FileSystemPath'].strip('/')}/{below}"
            source = {"Bucket": bucket, "Key": key}
            url = s3.generate_presigned_url("get_object", source)
            emulated.add_released_file(path, found.size, url)


# SageMaker


@contextlib.contextmanager
def unfinished_jobs() -> Iterator[None]:
    """Keep training jobs of moto's SageMaker in progress until they are stopped. Nothing runs."""
    from moto.core.responses import EmptyResult
    from moto.sagemaker.exceptions import ValidationError
    from moto.sagemaker.models import SageMakerModelBackend
    from moto.sagemaker.responses import SageMakerResponse

    original_create = SageMakerModelBackend.create_training_job

    def create(backend, *arguments, **named):
        job = original_create(backend, *arguments, **named)
        job.training_job_status, job.secondary_status = "InProgress", "Training"
        return job

    def stop(response) -> EmptyResult:
        name = response._get_param("TrainingJobName")
        job = response.sagemaker_backend.training_jobs.get(name)
        if job is None:
            raise ValidationError(message="Requested resource not found.")
        if job.training_job_status != "InProgress":
            state = job.training_job_status
            raise ValidationError(message=f"The job is {state}, and cannot be stopped.")
        job.training_job_status = job.secondary_status = "Stopped"
        return EmptyResult()

    with (
        mock.patch.object(SageMakerModelBackend, "create_training_job", create),
        mock.patch.object(SageMakerResponse, "stop_training_job", stop, create=True),
    ):
        yield
