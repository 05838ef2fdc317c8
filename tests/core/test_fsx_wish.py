"""What would be asked of FSx, and every fault in it that can be found without asking."""

import pytest

from nearlinear.launch.fsx.wish import FileSystem, Link
from nearlinear.launch.sagemaker import shapes

pytest.importorskip("boto3")

SUBNET, GROUP, ID = "subnet-0123456789abcdef0", "sg-0123456789abcdef0", "fs-0123456789abcdef0"


def system(**changes) -> FileSystem:
    return FileSystem(subnet=SUBNET, security_groups=(GROUP,), **changes)


def link(**changes) -> Link:
    return Link(**{"file_system": ID, "s3": "s3://bucket/tokens", "directory": "/tokens"} | changes)


@pytest.mark.parametrize(
    ("asked", "rate"),
    [
        (system(), 240),
        (system(capacity_gib=2400), 480),
        (system(deployment="PERSISTENT_2", capacity_gib=12_000), 1500),
        (system(deployment="PERSISTENT_2", capacity_gib=4800, mb_per_tib=1000), 4800),
        (system(deployment="PERSISTENT_1", capacity_gib=2400, mb_per_tib=50), 120),
        (system(deployment="SCRATCH_1", capacity_gib=7200, lz4=False), 1440),
    ],
)
def test_what_is_sold_has_no_fault(asked, rate):
    """Rates as the service's own reference computes them: 2.4 TiB x 50 MB/s per TiB = 120 MB/s."""
    assert asked.faults() == [] and asked.throughput == pytest.approx(rate)


def test_scratch_types_do_not_name_their_throughput():
    assert "PerUnitStorageThroughput" not in system().request()["LustreConfiguration"]
    asked = system(deployment="PERSISTENT_2").request()["LustreConfiguration"]
    assert asked["PerUnitStorageThroughput"] == 125 and asked["DataCompressionType"] == "LZ4"
    plain = system(lz4=False).request()["LustreConfiguration"]
    assert plain["DataCompressionType"] == "NONE"


@pytest.mark.parametrize(
    ("asked", "where", "fix"),
    [
        (system(capacity_gib=1000), "StorageCapacity", "such as 1200"),
        (system(capacity_gib=1201), "StorageCapacity", "such as 2400"),
        (system(capacity_gib=3600), "StorageCapacity", "such as 4800"),
        (system(capacity_gib=4800, deployment="SCRATCH_1"), "StorageCapacity", "such as 7200"),
        (system(mb_per_tib=250), "PerUnitStorageThroughput", "take PERSISTENT_2"),
        (
            system(mb_per_tib=100, deployment="PERSISTENT_2"),
            "PerUnitStorageThroughput",
            "one of 125, 250, 500, 1000",
        ),
        (system(version="2.10", deployment="PERSISTENT_2"), "FileSystemTypeVersion", "take 2.15"),
        (system(deployment="SCRATCH2"), "DeploymentType", "'SCRATCH_2'"),
        (FileSystem(subnet="subnet-12"), "SubnetIds[0]", "at least 15 characters"),
        (FileSystem(SUBNET, ("sg_0123456789",)), "SecurityGroupIds[0]", "must match"),
        (system(version="newest"), "FileSystemTypeVersion", "must match"),
        (link(directory="tokens"), "FileSystemPath", "write /tokens"),
        (link(s3="bucket/tokens"), "DataRepositoryPath", "s3://bucket/prefix"),
        (link(s3="s3://"), "DataRepositoryPath", "s3://bucket/prefix"),
        (link(file_system="fs-xyz"), "FileSystemId", "must match"),
        (link(imports=("NEW", "ALTERED")), "Events[1]", "allowed are NEW, CHANGED, DELETED"),
    ],
)
def test_a_fault_is_named_with_its_fix(asked, where, fix):
    found = asked.faults()
    assert found and all(where in fault.where for fault in found), found
    assert any(fix in fault.fix for fault in found), found


@pytest.mark.parametrize(
    ("deployment", "version", "fix"),
    [
        ("SCRATCH_1", "2.10", "SCRATCH_2"),
        ("SCRATCH_1", "2.15", "SCRATCH_2"),
        ("SCRATCH_2", "2.10", "2.15"),
        ("PERSISTENT_1", "2.10", "2.15"),
    ],
)
def test_what_cannot_be_linked(deployment, version, fix):
    (fault,) = link().faults(deployment, version)
    assert fault.where == "FileSystemId" and fix in fault.fix


@pytest.mark.parametrize("version", ["2.12", "2.15", ""])
@pytest.mark.parametrize("deployment", ["SCRATCH_2", "PERSISTENT_1", "PERSISTENT_2"])
def test_what_can_be_linked(deployment, version):
    assert link().faults(deployment, version) == []


def test_a_link_follows_what_it_is_told_to():
    both = link(exports=("NEW",)).request()
    assert both["S3"] == {
        "AutoImportPolicy": {"Events": ["NEW", "CHANGED", "DELETED"]},
        "AutoExportPolicy": {"Events": ["NEW"]},
    }
    assert "S3" not in link(imports=()).request()
    assert both["BatchImportMetaDataOnCreate"] is True


def test_a_request_of_another_service_is_held_against_its_own_model():
    (fault,) = shapes.check({"FileSystemId": ID, "Force": True}, "DeleteFileSystem", "fsx")
    assert fault.where == "Force" and "not known to the service" in fault.what
