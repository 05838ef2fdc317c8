"""What moto's FSx lacks, added to it for as long as it is asked for.

File systems get a state (CREATING at the first look, AVAILABLE from the second on), a VPC, network
cards and a mount name. Data repository associations are made and described, and import the names
of S3's objects into the folder that stands for the mount, as FSx does into the file system.
"""

import contextlib
import json
import uuid
from collections.abc import Iterator
from unittest import mock

from ci.aws.lustre import Emulated


@contextlib.contextmanager
def completed(emulated: Emulated) -> Iterator[None]:
    """Inside, moto's FSx has all this; ``emulated`` stands for the mount of every file system."""
    from moto.fsx.models import FileSystem
    from moto.fsx.responses import FSxResponse

    plain = FileSystem.to_dict

    def to_dict(system) -> dict:
        return plain(system) | _more(system)

    def create(response) -> str:
        asked = json.loads(response.body)
        made = {
            "AssociationId": f"dra-{uuid.uuid4().hex[:17]}",
            "Lifecycle": "CREATING",
            **{name: asked[name] for name in asked if name != "ClientRequestToken"},
        }
        _system(response, asked["FileSystemId"])
        _links(response).append(made)
        if asked.get("BatchImportMetaDataOnCreate"):
            _import(response, asked, emulated)
        return json.dumps({"Association": made})

    def describe(response) -> str:
        filters = json.loads(response.body).get("Filters", [])
        wanted = {v for each in filters if each["Name"] == "file-system-id" for v in each["Values"]}
        found = [dict(link) for link in _links(response) if link["FileSystemId"] in wanted]
        for link in _links(response):
            link["Lifecycle"] = "AVAILABLE"  # from the next look on
        return json.dumps({"Associations": found})

    def describe_systems(response) -> str:
        for name in json.loads(response.body).get("FileSystemIds", []):
            _system(response, name)
        return listed(response)

    listed = FSxResponse.describe_file_systems
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(FileSystem, "to_dict", to_dict))
        for name, method in (
            ("create_data_repository_association", create),
            ("describe_data_repository_associations", describe),
            ("describe_file_systems", describe_systems),
        ):
            stack.enter_context(mock.patch.object(FSxResponse, name, method, create=True))
        yield


def _more(system) -> dict:
    """What the service says of a file system, and moto does not."""
    from moto.ec2.models import ec2_backends

    if not hasattr(system, "looks"):
        system.looks, system.mount_name = 0, uuid.uuid4().hex[:8]
        ec2 = ec2_backends[system.backend.account_id][system.backend.region_name]
        subnet = ec2.get_subnet(system.subnet_ids[0])
        card = ec2.create_network_interface(
            subnet, private_ip_address="", group_ids=system.security_group_ids or []
        )
        system.vpc, system.card = subnet.vpc_id, card.id
    system.looks += 1
    lustre = dict(system.lustre_configuration or {}) | {"MountName": system.mount_name}
    return {
        "Lifecycle": "AVAILABLE" if system.looks > 2 else "CREATING",  # the first is create's
        "VpcId": system.vpc,
        "NetworkInterfaceIds": [system.card],
        "FileSystemTypeVersion": "2.15",
        "LustreConfiguration": lustre,
    }


def _links(response) -> list[dict]:
    backend = response.fsx_backend
    if not hasattr(backend, "links"):
        backend.links = []
    return backend.links


def _system(response, name: str):
    from moto.fsx.exceptions import FileSystemNotFound

    if name not in response.fsx_backend.file_systems:
        raise FileSystemNotFound(name)
    return response.fsx_backend.file_systems[name]


def _import(response, asked: dict, emulated: Emulated) -> None:
    """Every object below the linked prefix appears as a file without its bytes."""
    import boto3
    from moto.s3.models import s3_backends

    s3 = boto3.client("s3")
    bucket, _, prefix = asked["DataRepositoryPath"].removeprefix("s3://").partition("/")
    objects = s3_backends[response.current_account]["aws"].buckets[bucket].keys.items()
    for key, found in objects:
        if key.startswith(prefix):
            below = key[len(prefix) :].strip("/")
            path = f"{asked['FileSystemPath'].strip('/')}/{below}"
            place = {"Bucket": bucket, "Key": key}
            emulated.appear(path, found.size, s3.generate_presigned_url("get_object", place))
