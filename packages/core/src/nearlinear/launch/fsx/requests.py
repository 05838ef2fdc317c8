"""Requests for a file system and for a link to S3, and their validation.

The service's own model defines names, types and ranges (`request_checks.check_against_model`). This
module adds the rules between members: the sizes of each deployment type, and the types that can be
linked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..sagemaker.request_checks import check_against_model
from ..validation import Problem

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
