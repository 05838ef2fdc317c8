"""FSx calls: create file systems and links, describe them, wait for them, delete them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ..sagemaker.aws import AWSError, create_client, translate_errors
from ..validation import raise_if_invalid
from .requests import SSD_MB_PER_TIB, FileSystemRequest, LinkRequest, total_throughput

POLL_INTERVAL = 15.0  # seconds
PENDING_STATES = ("CREATING", "UPDATING")
DEFAULT_MOUNT_POINT = "/fsx"


@dataclass(frozen=True)
class FileSystemLink:
    """Data repository association: a folder that mirrors a folder of S3."""

    id: str
    directory: str
    s3: str
    lifecycle: str
    """CREATING, AVAILABLE, MISCONFIGURED, UPDATING, DELETING or FAILED."""
    reason: str = ""
    """Reason of MISCONFIGURED or FAILED."""


@dataclass(frozen=True)
class FileSystemInfo:
    """Properties of a file system, from DescribeFileSystems."""

    id: str
    lifecycle: str
    """CREATING, AVAILABLE, FAILED, DELETING, MISCONFIGURED or UPDATING."""
    deployment: str
    version: str
    capacity_gib: int
    throughput_per_tib: int
    """MB/s per TiB."""
    mount_name: str
    dns_name: str
    vpc: str
    subnets: tuple[str, ...]
    interfaces: tuple[str, ...]
    """IDs of its network interfaces."""
    reason: str = ""
    """Reason of FAILED."""
    links: tuple[FileSystemLink, ...] = ()

    @property
    def throughput(self) -> float:
        """Throughput of the whole file system in MB/s."""
        return total_throughput(self.capacity_gib, self.throughput_per_tib)

    def job_directory(self, folder: str = "") -> str:
        """Return the directory of ``folder`` in a training job: it begins with the mount name."""
        return f"/{self.mount_name}/{folder.strip('/')}".rstrip("/")

    def mount_command(self, point: str = DEFAULT_MOUNT_POINT) -> str:
        """Return the shell command that mounts the file system on a machine in its VPC."""
        source = f"{self.dns_name}@tcp:/{self.mount_name}"
        return f"sudo mkdir -p {point} && sudo mount -t lustre -o relatime,flock {source} {point}"

    def input_toml(self, folder: str = "", channel: str = "train") -> str:
        """Return the lines of a training config that add the file system as a job input."""
        directory = self.job_directory(folder or self._first_linked_folder())
        return f'[job.inputs.{channel}]\nfsx = "{self.id}"\ndirectory = "{directory}"\n'

    def _first_linked_folder(self) -> str:
        return self.links[0].directory if self.links else "tokens"


def create_file_system(request: FileSystemRequest, region: str = "") -> str:
    """Create a file system and return its ID, without waiting.

    Raises:
        InvalidJob: The service would reject the request.
        AWSError: AWS rejected the call.
    """
    raise_if_invalid(request.find_problems(), "the request")
    fsx = create_client("fsx", region)
    with translate_errors("creating a file system"):
        return fsx.create_file_system(**request.to_request())["FileSystem"]["FileSystemId"]


def create_link(request: LinkRequest, region: str = "") -> str:
    """Link a folder to S3 and return the ID of the link, without waiting.

    Raises:
        InvalidJob: The service would reject the request.
        AWSError: AWS rejected the call.
    """
    system = describe_file_system(request.file_system, region)
    raise_if_invalid(request.find_problems(system.deployment, system.version), "the request")
    fsx = create_client("fsx", region)
    with translate_errors(f"linking {request.directory} of {request.file_system} to {request.s3}"):
        created = fsx.create_data_repository_association(**request.to_request())
    return created["Association"]["AssociationId"]


def describe_file_system(file_system: str, region: str = "") -> FileSystemInfo:
    """Return a file system with its links. Raises ConfigError if the ID does not exist."""
    fsx = create_client("fsx", region)
    try:
        with translate_errors(f"describing {file_system}"):
            found = fsx.describe_file_systems(FileSystemIds=[file_system])["FileSystems"]
    except AWSError as error:
        if error.code == "FileSystemNotFound":
            raise ConfigError(f"{error}; run nearlinear fsx list for a list of all") from None
        raise
    if not found:
        raise ConfigError(
            f"no file system {file_system}; run nearlinear fsx list for a list of all"
        )
    return parse_description(found[0], tuple(_read_links(fsx, file_system)))


def list_file_systems(region: str = "") -> list[FileSystemInfo]:
    """Return all Lustre file systems of the account in the region, without their links."""
    pages = create_client("fsx", region).get_paginator("describe_file_systems")
    with translate_errors("listing file systems"):
        found = [each for page in pages.paginate() for each in page["FileSystems"]]
    return [parse_description(each) for each in found if each["FileSystemType"] == "LUSTRE"]


def delete_file_system(file_system: str, region: str = "") -> None:
    """Delete a file system, its links, and all of its data that is not in S3."""
    fsx = create_client("fsx", region)
    with translate_errors(f"deleting {file_system}"):
        fsx.delete_file_system(FileSystemId=file_system)


def wait_until_available(
    file_system: str,
    region: str = "",
    *,
    report: Callable[[str], None] = print,
    sleep: Callable[[float], None] = time.sleep,
) -> FileSystemInfo:
    """Wait until the file system and all its links are AVAILABLE, usually 5 to 10 minutes.

    Args:
        file_system: ID of the file system.
        region: AWS region; empty: the environment's.
        report: Function that receives a line at each change.
        sleep: Function that waits between polls.

    Raises:
        AWSError: The file system or a link failed.
    """
    started, last = time.monotonic(), ""
    while True:
        system = describe_file_system(file_system, region)
        states = [(system.id, system.lifecycle, system.reason)]
        states += [(link.directory, link.lifecycle, link.reason) for link in system.links]
        line = ", ".join(f"{name} {state}" for name, state, _ in states)
        if line != last:
            report(f"{line} after {time.monotonic() - started:.0f} s")
            last = line
        for name, state, reason in states:
            if state not in (*PENDING_STATES, "AVAILABLE"):
                raise AWSError(f"{name} is {state}: {reason or 'no reason given'}")
        if not any(state in PENDING_STATES for _, state, _ in states):
            return system
        sleep(POLL_INTERVAL)


def parse_description(
    description: Mapping[str, Any], links: tuple[FileSystemLink, ...] = ()
) -> FileSystemInfo:
    """Parse one entry of DescribeFileSystems."""
    lustre = description.get("LustreConfiguration", {})
    deployment = lustre.get("DeploymentType", "SCRATCH_1")
    default_throughput = SSD_MB_PER_TIB.get(deployment, (0,))[0]
    return FileSystemInfo(
        id=description["FileSystemId"],
        lifecycle=description.get("Lifecycle", "CREATING"),
        deployment=deployment,
        version=description.get("FileSystemTypeVersion", ""),
        capacity_gib=description.get("StorageCapacity", 0),
        throughput_per_tib=lustre.get("PerUnitStorageThroughput") or default_throughput,
        mount_name=lustre.get("MountName", ""),
        dns_name=description.get("DNSName", ""),
        vpc=description.get("VpcId", ""),
        subnets=tuple(description.get("SubnetIds", ())),
        interfaces=tuple(description.get("NetworkInterfaceIds", ())),
        reason=description.get("FailureDetails", {}).get("Message", ""),
        links=links,
    )


def _read_links(fsx: Any, file_system: str) -> Iterator[FileSystemLink]:
    request: dict[str, Any] = {"Filters": [{"Name": "file-system-id", "Values": [file_system]}]}
    while True:
        with translate_errors(f"describing the links of {file_system}"):
            page = fsx.describe_data_repository_associations(**request)
        for each in page["Associations"]:
            yield FileSystemLink(
                id=each["AssociationId"],
                directory=each.get("FileSystemPath", ""),
                s3=each.get("DataRepositoryPath", ""),
                lifecycle=each.get("Lifecycle", ""),
                reason=each.get("FailureDetails", {}).get("Message", ""),
            )
        if not page.get("NextToken"):
            return
        request["NextToken"] = page["NextToken"]
