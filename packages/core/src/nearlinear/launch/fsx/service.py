"""FSx calls: create file systems and links, describe them, wait for them, delete them.

The service's own model defines names, types and ranges of requests
(`request_checks.check_against_model`). `FileSystemRequest` and `LinkRequest` add the rules between
members: the sizes of each deployment type, and the types that can be linked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ..sagemaker.aws import AWSError, create_client, translate_errors
from ..sagemaker.request_checks import check_against_model
from ..spec import Problem, raise_if_invalid

LUSTRE_PORTS = ((988, 988), (1018, 1023))
"""TCP port ranges of Lustre's servers and clients, in both directions."""
MIN_LINKABLE_VERSION = "2.12"
"""First Lustre version with data repository associations."""
S3_EVENTS = ("NEW", "CHANGED", "DELETED")
SSD_MB_PER_TIB = {
    "SCRATCH_1": (200,),
    "SCRATCH_2": (200,),
    "PERSISTENT_1": (50, 100, 200),
    "PERSISTENT_2": (125, 250, 500, 1000),
}
"""Available throughput in MB/s per TiB by deployment type; fixed for scratch types."""


@dataclass(frozen=True)
class FileSystemRequest:
    """Request for a file system on SSDs."""

    subnet: str
    """ID of its subnet. Jobs in the same subnet read without crossing availability zones."""
    security_groups: tuple[str, ...] = ()
    """IDs of security groups that allow `LUSTRE_PORTS`."""
    deployment: str = "SCRATCH_2"
    """SCRATCH_2: temporary, not replicated; PERSISTENT_2: long-term, replicated."""
    capacity_gib: int = 1200
    """1200, 2400, or a multiple of 2400."""
    mb_per_tib: int = 0
    """Throughput in MB/s per TiB, for persistent types; 0 = the minimum."""
    lz4: bool = True
    """Compress files; token IDs compress well."""
    version: str = "2.15"
    """Lustre version."""
    name: str = "nearlinear"
    """Tag Name."""

    @property
    def throughput_per_tib(self) -> int:
        """Throughput in MB/s per TiB."""
        return self.mb_per_tib or SSD_MB_PER_TIB.get(self.deployment, (0,))[0]

    @property
    def throughput(self) -> float:
        """Throughput of the whole file system in MB/s."""
        return total_throughput(self.capacity_gib, self.throughput_per_tib)

    def to_request(self) -> dict[str, Any]:
        """Return the CreateFileSystem request."""
        lustre: dict[str, Any] = {
            "DeploymentType": self.deployment,
            "DataCompressionType": "LZ4" if self.lz4 else "NONE",
        }
        if not self.deployment.startswith("SCRATCH"):
            lustre["PerUnitStorageThroughput"] = self.throughput_per_tib
        groups = {"SecurityGroupIds": list(self.security_groups)} if self.security_groups else {}
        return {
            "FileSystemType": "LUSTRE",
            "FileSystemTypeVersion": self.version,
            "StorageCapacity": self.capacity_gib,
            "StorageType": "SSD",
            "SubnetIds": [self.subnet],
            **groups,
            "LustreConfiguration": lustre,
            "Tags": [{"Key": "Name", "Value": self.name}],
        }

    def find_problems(self) -> list[Problem]:
        """Return everything that the service would reject."""
        found = check_against_model(self.to_request(), "CreateFileSystem", "fsx")
        return [*found, *self._check_size(), *self._check_throughput(), *self._check_version()]

    def _check_size(self) -> Iterator[Problem]:
        step = 3600 if self.deployment == "SCRATCH_1" else 2400
        size = self.capacity_gib
        if size in (1200, 2400) or (size > 2400 and size % step == 0):
            return
        above = 1200 if size <= 1200 else 2400 if size <= 2400 else -(-size // step) * step
        cause = f"{size} GiB is not available for {self.deployment}"
        remedy = f"use 1200, 2400 or a multiple of {step}, such as {above}"
        yield Problem("StorageCapacity", cause, remedy)

    def _check_throughput(self) -> Iterator[Problem]:
        available = SSD_MB_PER_TIB.get(self.deployment)
        field = "LustreConfiguration.PerUnitStorageThroughput"
        if available is None or self.mb_per_tib == 0 or self.mb_per_tib in available:
            return
        listed = ", ".join(map(str, available))
        cause = f"{self.mb_per_tib} MB/s per TiB is not available for {self.deployment}"
        if self.deployment.startswith("SCRATCH"):
            remedy = f"remove it, because {self.deployment} has {listed}, or use PERSISTENT_2"
            yield Problem(field, cause, remedy)
        else:
            yield Problem(field, cause, f"use one of {listed}")

    def _check_version(self) -> Iterator[Problem]:
        if self.deployment == "PERSISTENT_2" and self.version == "2.10":
            cause = "'2.10' is not available for PERSISTENT_2"
            yield Problem("FileSystemTypeVersion", cause, "use 2.15")


@dataclass(frozen=True)
class LinkRequest:
    """Request for a data repository association: a folder that mirrors a folder of S3."""

    file_system: str
    """ID of the file system."""
    s3: str
    """s3://bucket/prefix"""
    directory: str
    """Folder on the file system, as in /tokens, without the mount name."""
    imports: tuple[str, ...] = S3_EVENTS
    """Events in S3 that are applied to the file system: NEW, CHANGED, DELETED."""
    exports: tuple[str, ...] = ()
    """Events on the file system that are applied to S3."""

    def to_request(self) -> dict[str, Any]:
        """Return the CreateDataRepositoryAssociation request.

        The names of all objects are imported at once.
        """
        policies = {"AutoImportPolicy": self.imports, "AutoExportPolicy": self.exports}
        given = {name: {"Events": list(events)} for name, events in policies.items() if events}
        return {
            "FileSystemId": self.file_system,
            "FileSystemPath": self.directory,
            "DataRepositoryPath": self.s3,
            "BatchImportMetaDataOnCreate": True,
            **({"S3": given} if given else {}),
        }

    def find_problems(self, deployment: str = "", version: str = "") -> list[Problem]:
        """Return everything that the service would reject.

        ``deployment`` and ``version`` describe the file system; empty: not checked.
        """
        operation = "CreateDataRepositoryAssociation"
        found = check_against_model(self.to_request(), operation, "fsx")
        return [*found, *self._check_paths(), *_check_linkable(deployment, version)]

    def _check_paths(self) -> Iterator[Problem]:
        if not self.directory.startswith("/"):
            cause = f"{self.directory!r} is not absolute"
            yield Problem("FileSystemPath", cause, f"write /{self.directory}")
        if not self.s3.startswith("s3://") or not self.s3.removeprefix("s3://").strip("/"):
            cause = f"{self.s3!r} is not a folder in S3"
            yield Problem("DataRepositoryPath", cause, "write s3://bucket/prefix")


def _check_linkable(deployment: str, version: str) -> Iterator[Problem]:
    """Check that a file system supports data repository associations."""
    if deployment == "SCRATCH_1":
        cause = "SCRATCH_1 file systems can be linked only at creation"
        yield Problem("FileSystemId", cause, "create a SCRATCH_2 or PERSISTENT_2 file system")
    elif version and _parse_version(version) < _parse_version(MIN_LINKABLE_VERSION):
        cause = f"Lustre {version} does not support links"
        remedy = f"create a file system with --version {MIN_LINKABLE_VERSION} or 2.15"
        yield Problem("FileSystemId", cause, remedy)


def total_throughput(capacity_gib: int, per_tib: int) -> float:
    """Return the throughput of a file system in MB/s.

    Like the service, it counts 1200 GiB as 1.2 TiB.
    """
    return capacity_gib / 1000 * per_tib


def _parse_version(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


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
