"""Requests to FSx, and their validation without AWS calls."""

import pytest

from nearlinear.launch.fsx.service import FileSystemRequest, LinkRequest
from nearlinear.launch.sagemaker.request_checks import check_against_model

pytest.importorskip("boto3")

SUBNET, GROUP, ID = "subnet-0123456789abcdef0", "sg-0123456789abcdef0", "fs-0123456789abcdef0"


def system(**changes) -> FileSystemRequest:
    return FileSystemRequest(subnet=SUBNET, security_groups=(GROUP,), **changes)


def link(**changes) -> LinkRequest:
    return LinkRequest(
        **{"file_system": ID, "s3": "s3://bucket/tokens", "directory": "/tokens"} | changes
    )


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
def test_available_configurations_have_no_problems(asked, rate):
    """The service's reference computes 2.4 TiB x 50 MB/s per TiB = 120 MB/s."""
    assert asked.find_problems() == [] and asked.throughput == pytest.approx(rate)


def test_request_has_throughput_for_persistent_types_only():
    assert "PerUnitStorageThroughput" not in system().to_request()["LustreConfiguration"]
    asked = system(deployment="PERSISTENT_2").to_request()["LustreConfiguration"]
    assert asked["PerUnitStorageThroughput"] == 125 and asked["DataCompressionType"] == "LZ4"
    plain = system(lz4=False).to_request()["LustreConfiguration"]
    assert plain["DataCompressionType"] == "NONE"


@pytest.mark.parametrize(
    ("asked", "where", "fix"),
    [
        (system(capacity_gib=1000), "StorageCapacity", "such as 1200"),
        (system(capacity_gib=1201), "StorageCapacity", "such as 2400"),
        (system(capacity_gib=3600), "StorageCapacity", "such as 4800"),
        (system(capacity_gib=4800, deployment="SCRATCH_1"), "StorageCapacity", "such as 7200"),
        (system(mb_per_tib=250), "PerUnitStorageThroughput", "use PERSISTENT_2"),
        (
            system(mb_per_tib=100, deployment="PERSISTENT_2"),
            "PerUnitStorageThroughput",
            "one of 125, 250, 500, 1000",
        ),
        (system(version="2.10", deployment="PERSISTENT_2"), "FileSystemTypeVersion", "use 2.15"),
        (system(deployment="SCRATCH2"), "DeploymentType", "'SCRATCH_2'"),
        (FileSystemRequest(subnet="subnet-12"), "SubnetIds[0]", "at least 15 characters"),
        (FileSystemRequest(SUBNET, ("sg_0123456789",)), "SecurityGroupIds[0]", "must match"),
        (system(version="newest"), "FileSystemTypeVersion", "must match"),
        (link(directory="tokens"), "FileSystemPath", "write /tokens"),
        (link(s3="bucket/tokens"), "DataRepositoryPath", "s3://bucket/prefix"),
        (link(s3="s3://"), "DataRepositoryPath", "s3://bucket/prefix"),
        (link(file_system="fs-xyz"), "FileSystemId", "at least 11 characters"),
        (link(imports=("NEW", "ALTERED")), "Events[1]", "allowed are NEW, CHANGED, DELETED"),
    ],
)
def test_problem_names_field_and_remedy(asked, where, fix):
    found = asked.find_problems()
    assert found and all(where in problem.field for problem in found), found
    assert any(fix in problem.remedy for problem in found), found


@pytest.mark.parametrize(
    ("deployment", "version", "fix"),
    [
        ("SCRATCH_1", "2.10", "SCRATCH_2"),
        ("SCRATCH_1", "2.15", "SCRATCH_2"),
        ("SCRATCH_2", "2.10", "2.15"),
        ("PERSISTENT_1", "2.10", "2.15"),
    ],
)
def test_unsupported_links_are_rejected(deployment, version, fix):
    (problem,) = link().find_problems(deployment, version)
    assert problem.field == "FileSystemId" and fix in problem.remedy


@pytest.mark.parametrize("version", ["2.12", "2.15", ""])
@pytest.mark.parametrize("deployment", ["SCRATCH_2", "PERSISTENT_1", "PERSISTENT_2"])
def test_supported_links_have_no_problems(deployment, version):
    assert link().find_problems(deployment, version) == []


def test_link_request_has_import_and_export_policies():
    both = link(exports=("NEW",)).to_request()
    assert both["S3"] == {
        "AutoImportPolicy": {"Events": ["NEW", "CHANGED", "DELETED"]},
        "AutoExportPolicy": {"Events": ["NEW"]},
    }
    assert "S3" not in link(imports=()).to_request()
    assert both["BatchImportMetaDataOnCreate"] is True


def test_check_against_model_of_another_service():
    (problem,) = check_against_model({"FileSystemId": ID, "Force": True}, "DeleteFileSystem", "fsx")
    assert problem.field == "Force" and "not a field of the service" in problem.cause
