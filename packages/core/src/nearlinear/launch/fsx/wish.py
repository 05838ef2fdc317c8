"""What is asked of FSx, and what it would refuse: requests for a file system and for a link to S3.

The service's own model knows names, types and ranges (`sagemaker.shapes`); the rules here are
between members: which size goes with which deployment type, and which types can be linked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..faults import Fault
from ..sagemaker import shapes

PORTS = ((988, 988), (1018, 1023))  # TCP, that Lustre's servers and clients use, both ways
LINKED_FROM = "2.12"  # the first version of Lustre with data repository associations
EVENTS = ("NEW", "CHANGED", "DELETED")
SSD_MB_PER_TIB = {  # MB/s that can be bought for each TiB; of scratch types it is fixed
    "SCRATCH_1": (200,),
    "SCRATCH_2": (200,),
    "PERSISTENT_1": (50, 100, 200),
    "PERSISTENT_2": (125, 250, 500, 1000),
}


@dataclass(frozen=True)
class FileSystem:
    """A file system on SSDs to be made."""

    subnet: str
    """id of the one subnet it is in; jobs in the same one read without crossing zones"""
    security_groups: tuple[str, ...] = ()
    """ids; they must let Lustre's ports through, see `PORTS`"""
    deployment: str = "SCRATCH_2"
    """SCRATCH_2: for one project, not replicated; PERSISTENT_2: to keep, replicated"""
    capacity_gib: int = 1200
    """1200, 2400, or a multiple of 2400"""
    mb_per_tib: int = 0
    """MB/s for each TiB, of persistent types; 0 = the least"""
    lz4: bool = True
    """files are compressed; token ids shrink"""
    version: str = "2.15"
    """of Lustre"""
    name: str = "nearlinear"
    """tag Name"""

    @property
    def per_unit(self) -> int:
        """MB/s for each TiB."""
        return self.mb_per_tib or SSD_MB_PER_TIB.get(self.deployment, (0,))[0]

    @property
    def throughput(self) -> float:
        """MB/s of the whole file system."""
        return throughput(self.capacity_gib, self.per_unit)

    def request(self) -> dict:
        """CreateFileSystem."""
        lustre: dict = {
            "DeploymentType": self.deployment,
            "DataCompressionType": "LZ4" if self.lz4 else "NONE",
        }
        if not self.deployment.startswith("SCRATCH"):
            lustre["PerUnitStorageThroughput"] = self.per_unit
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

    def faults(self) -> list[Fault]:
        """Everything the service would refuse."""
        found = shapes.check(self.request(), "CreateFileSystem", "fsx")
        return [*found, *self._size(), *self._throughput(), *self._version()]

    def _size(self) -> Iterator[Fault]:
        step = 3600 if self.deployment == "SCRATCH_1" else 2400
        size = self.capacity_gib
        if size in (1200, 2400) or (size > 2400 and size % step == 0):
            return
        above = 1200 if size <= 1200 else 2400 if size <= 2400 else -(-size // step) * step
        what = f"{size} GiB are not sold as {self.deployment}"
        yield Fault("StorageCapacity", what, f"1200, 2400 or a multiple of {step}, such as {above}")

    def _throughput(self) -> Iterator[Fault]:
        sold = SSD_MB_PER_TIB.get(self.deployment)
        where = "LustreConfiguration.PerUnitStorageThroughput"
        if sold is None or self.mb_per_tib == 0 or self.mb_per_tib in sold:
            return
        listed = ", ".join(map(str, sold))
        if self.deployment.startswith("SCRATCH"):
            fix = "leave it out, or take PERSISTENT_2"
            yield Fault(where, f"a {self.deployment} has {listed} MB/s per TiB", fix)
        else:
            what = f"{self.mb_per_tib} MB/s per TiB are not sold as {self.deployment}"
            yield Fault(where, what, f"one of {listed}")

    def _version(self) -> Iterator[Fault]:
        if self.deployment == "PERSISTENT_2" and self.version == "2.10":
            what = "PERSISTENT_2 has no Lustre 2.10"
            yield Fault("FileSystemTypeVersion", what, "take 2.15")


@dataclass(frozen=True)
class Link:
    """A folder of a file system that shows a folder of S3: a data repository association."""

    file_system: str
    """id"""
    s3: str
    """s3://bucket/prefix"""
    directory: str
    """on the file system, as in /tokens, without the mount name"""
    imports: tuple[str, ...] = EVENTS
    """events in S3 that are followed: NEW, CHANGED, DELETED"""
    exports: tuple[str, ...] = ()
    """events on the file system that are followed in S3"""

    def request(self) -> dict:
        """CreateDataRepositoryAssociation; the names of all objects are imported at once."""
        policies = {"AutoImportPolicy": self.imports, "AutoExportPolicy": self.exports}
        followed = {name: {"Events": list(events)} for name, events in policies.items() if events}
        return {
            "FileSystemId": self.file_system,
            "FileSystemPath": self.directory,
            "DataRepositoryPath": self.s3,
            "BatchImportMetaDataOnCreate": True,
            **({"S3": followed} if followed else {}),
        }

    def faults(self, deployment: str = "", version: str = "") -> list[Fault]:
        """Everything the service would refuse, of a file system of that type and version."""
        found = shapes.check(self.request(), "CreateDataRepositoryAssociation", "fsx")
        return [*found, *self._paths(), *_linkable(deployment, version)]

    def _paths(self) -> Iterator[Fault]:
        if not self.directory.startswith("/"):
            fix = f"write /{self.directory}"
            yield Fault("FileSystemPath", f"{self.directory!r} is not absolute", fix)
        if not self.s3.startswith("s3://") or not self.s3.removeprefix("s3://").strip("/"):
            fix = "write s3://bucket/prefix"
            yield Fault("DataRepositoryPath", f"{self.s3!r} is no folder of S3", fix)


def _linkable(deployment: str, version: str) -> Iterator[Fault]:
    """Whether a file system can have associations at all."""
    if deployment == "SCRATCH_1":
        what = "a SCRATCH_1 file system is linked when it is made, or never"
        yield Fault("FileSystemId", what, "make a SCRATCH_2 or a PERSISTENT_2")
    elif version and _number(version) < _number(LINKED_FROM):
        what = f"with Lustre {version} it cannot be linked"
        yield Fault("FileSystemId", what, f"make one with --version {LINKED_FROM} or 2.15")


def throughput(capacity_gib: int, per_unit: int) -> float:
    """MB/s of a file system. 1200 GiB count as 1.2 TiB, as the service itself counts."""
    return capacity_gib / 1000 * per_unit


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
