"""Ask FSx: make a file system and links to S3, wait for them, describe them, delete them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...errors import ConfigError
from ..faults import FaultyJob
from ..sagemaker.aws import ServiceRefused, client, told
from . import wish

PAUSE = 15.0  # seconds between looks
PENDING = ("CREATING", "UPDATING")
MOUNT = "/fsx"  # where the mount command puts it


@dataclass(frozen=True)
class Association:
    """A folder of the file system that shows a folder of S3."""

    id: str
    directory: str
    s3: str
    lifecycle: str
    """CREATING, AVAILABLE, MISCONFIGURED, UPDATING, DELETING or FAILED"""
    reason: str = ""
    """why it is MISCONFIGURED or FAILED"""


@dataclass(frozen=True)
class Described:
    """A file system as the service describes it."""

    id: str
    lifecycle: str
    """CREATING, AVAILABLE, FAILED, DELETING, MISCONFIGURED or UPDATING"""
    deployment: str
    version: str
    capacity_gib: int
    per_unit: int
    """MB/s for each TiB"""
    mount_name: str
    dns_name: str
    vpc: str
    subnets: tuple[str, ...]
    interfaces: tuple[str, ...]
    """ids of its network cards"""
    reason: str = ""
    """why it is FAILED"""
    associations: tuple[Association, ...] = field(default=())

    @property
    def throughput(self) -> float:
        """MB/s of the whole file system."""
        return wish.throughput(self.capacity_gib, self.per_unit)

    def directory(self, folder: str = "") -> str:
        """What a training job calls ``folder`` of it: the mount name comes first."""
        return f"/{self.mount_name}/{folder.strip('/')}".rstrip("/")

    def mount_command(self, where: str = MOUNT) -> str:
        """For a notebook instance, a node of Slurm or any other machine in its VPC."""
        source = f"{self.dns_name}@tcp:/{self.mount_name}"
        return f"sudo mkdir -p {where} && sudo mount -t lustre -o relatime,flock {source} {where}"

    def input_toml(self, folder: str = "", channel: str = "train") -> str:
        """The lines of a training config that make it the input of a job."""
        return (
            f'[job.inputs.{channel}]\nfsx = "{self.id}"\n'
            f'directory = "{self.directory(folder or self._first_folder())}"\n'
        )

    def _first_folder(self) -> str:
        return self.associations[0].directory if self.associations else "tokens"


def create(asked: wish.FileSystem, region: str = "") -> str:
    """Ask for a file system; its id. Raises FaultyJob for what the service would refuse."""
    if faults := asked.faults():
        raise FaultyJob(faults, "the request")
    fsx = client("fsx", region)
    with told("creating a file system"):
        return fsx.create_file_system(**asked.request())["FileSystem"]["FileSystemId"]


def link(asked: wish.Link, region: str = "") -> str:
    """Ask for an association; its id. Raises FaultyJob for what the service would refuse."""
    found = describe(asked.file_system, region)
    if faults := asked.faults(found.deployment, found.version):
        raise FaultyJob(faults, "the request")
    fsx = client("fsx", region)
    with told(f"linking {asked.directory} of {asked.file_system} to {asked.s3}"):
        made = fsx.create_data_repository_association(**asked.request())
    return made["Association"]["AssociationId"]


def describe(file_system: str, region: str = "") -> Described:
    """A file system and its links. Raises ConfigError where there is none of that id."""
    fsx = client("fsx", region)
    try:
        with told(f"describing {file_system}"):
            found = fsx.describe_file_systems(FileSystemIds=[file_system])["FileSystems"]
    except ServiceRefused as error:
        if error.code == "FileSystemNotFound":
            raise ConfigError(f"{error}; nearlinear fsx list names all") from None
        raise
    if not found:
        raise ConfigError(f"no file system {file_system}; nearlinear fsx list names all")
    return described(found[0], tuple(_associations(fsx, file_system)))


def every(region: str = "") -> list[Described]:
    """All Lustre file systems of the account in the region, without their links."""
    pages = client("fsx", region).get_paginator("describe_file_systems")
    with told("listing file systems"):
        found = [each for page in pages.paginate() for each in page["FileSystems"]]
    return [described(each) for each in found if each["FileSystemType"] == "LUSTRE"]


def delete(file_system: str, region: str = "") -> None:
    """Delete a file system with all that is on it and not in S3. Links go with it."""
    fsx = client("fsx", region)
    with told(f"deleting {file_system}"):
        fsx.delete_file_system(FileSystemId=file_system)


def wait(
    file_system: str,
    region: str = "",
    *,
    say: Callable[[str], None] = print,
    pause: Callable[[float], None] = time.sleep,
) -> Described:
    """Until the file system and all its links are AVAILABLE. Raises ServiceRefused where one fails.

    ``say`` is told of every change; a file system takes five to ten minutes.
    """
    started, last = time.monotonic(), ""
    while True:
        found = describe(file_system, region)
        states = [(found.id, found.lifecycle, found.reason)]
        states += [(a.directory, a.lifecycle, a.reason) for a in found.associations]
        line = ", ".join(f"{name} {state}" for name, state, _ in states)
        if line != last:
            say(f"{line} after {time.monotonic() - started:.0f} s")
            last = line
        for name, state, reason in states:
            if state not in (*PENDING, "AVAILABLE"):
                raise ServiceRefused(f"{name} is {state}: {reason or 'no reason given'}")
        if not any(state in PENDING for _, state, _ in states):
            return found
        pause(PAUSE)


def described(found: dict, associations: tuple[Association, ...] = ()) -> Described:
    """What DescribeFileSystems says, in fewer words."""
    lustre = found.get("LustreConfiguration", {})
    deployment = lustre.get("DeploymentType", "SCRATCH_1")
    return Described(
        id=found["FileSystemId"],
        lifecycle=found.get("Lifecycle", "CREATING"),
        deployment=deployment,
        version=found.get("FileSystemTypeVersion", ""),
        capacity_gib=found.get("StorageCapacity", 0),
        per_unit=lustre.get("PerUnitStorageThroughput")
        or wish.SSD_MB_PER_TIB.get(deployment, (0,))[0],
        mount_name=lustre.get("MountName", ""),
        dns_name=found.get("DNSName", ""),
        vpc=found.get("VpcId", ""),
        subnets=tuple(found.get("SubnetIds", ())),
        interfaces=tuple(found.get("NetworkInterfaceIds", ())),
        reason=found.get("FailureDetails", {}).get("Message", ""),
        associations=associations,
    )


def _associations(fsx, file_system: str) -> Iterator[Association]:
    asked = {"Filters": [{"Name": "file-system-id", "Values": [file_system]}]}
    while True:
        with told(f"describing the links of {file_system}"):
            page = fsx.describe_data_repository_associations(**asked)
        for each in page["Associations"]:
            yield Association(
                id=each["AssociationId"],
                directory=each.get("FileSystemPath", ""),
                s3=each.get("DataRepositoryPath", ""),
                lifecycle=each.get("Lifecycle", ""),
                reason=each.get("FailureDetails", {}).get("Message", ""),
            )
        if not page.get("NextToken"):
            return
        asked["NextToken"] = page["NextToken"]
