"""The hardware table agrees with EC2's descriptions and covers SageMaker's instance types."""

import gzip
import json
from pathlib import Path

import pytest

from nearlinear import hardware
from nearlinear.launch.sagemaker.request_checks import input_shape

# SageMaker instance types with accelerators that the table omits, for reasons stated there.
OMITTED = ("p2.", "p6e-gb200.", "trn1.", "trn1n.", "trn2.")
RETIRED = {"p3.2xlarge": 1, "p3.8xlarge": 4, "p3.16xlarge": 8}  # no longer listed by EC2


@pytest.fixture(scope="module")
def described() -> dict[str, dict]:
    """Descriptions of EC2's DescribeInstanceTypes by instance type."""
    moto = pytest.importorskip("moto", reason="moto carries EC2's descriptions: extra dev")
    recorded = Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz"
    return json.loads(gzip.decompress(recorded.read_bytes()))


def sagemaker_types() -> set[str]:
    members = input_shape("CreateTrainingJob").members["ResourceConfig"].members
    return {name.removeprefix("ml.") for name in members["InstanceType"].enum}


@pytest.mark.parametrize("name", sorted(hardware.instance_types()))
def test_instance_type_matches_ec2_description(name, described):
    found = hardware.instance_types()[name]
    if name in RETIRED:
        assert name not in described and found == hardware.InstanceType(RETIRED[name], 0)
        return
    network = described[name]["NetworkInfo"]
    gpus = sum(gpu["Count"] for gpu in described[name]["GpuInfo"]["Gpus"])
    cards = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    disks = described[name].get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0)
    assert found == hardware.InstanceType(gpus, cards, disks)
    assert network["EfaSupported"] == bool(cards)


def test_offering_regions_match_ec2_records():
    moto = pytest.importorskip("moto", reason="moto carries EC2's offerings: extra dev")
    folder = Path(moto.__file__).parent / "ec2/resources/instance_type_offerings/region"
    offered: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.json.gz")):
        region = path.name.removesuffix(".json.gz")
        assert hardware.is_recorded_region(region)
        for offer in json.loads(gzip.decompress(path.read_bytes())):
            offered.setdefault(offer["InstanceType"], []).append(region)
    assert offered and not hardware.is_recorded_region("cn-north-1")
    for name in hardware.instance_types():
        assert hardware.offering_regions(f"ml.{name}") == offered.get(name, []), name


def test_every_sagemaker_gpu_type_is_known_or_deliberately_omitted(described):
    for name in sagemaker_types():
        description = described.get(name, {})
        if name in hardware.instance_types():
            assert not name.startswith(OMITTED)
        elif name.startswith(OMITTED):
            assert "GpuInfo" not in description  # the only one that EC2 describes: Trainium
        else:  # no accelerators, or no longer listed by EC2
            assert not {"GpuInfo", "NeuronInfo"} & set(description)
            assert name[0] in "cmrt"
    assert all(any(name.startswith(left) for name in sagemaker_types()) for left in OMITTED)


def test_known_types_are_offered_by_sagemaker():
    assert set(hardware.instance_types()) - sagemaker_types() == {"g4dn.metal"}  # on EC2 only


@pytest.mark.parametrize("name", ["p4d.24xlarge", "ml.p4d.24xlarge"])
def test_instance_type_is_found_with_and_without_ml_prefix(name):
    assert hardware.find_instance_type(name) == hardware.InstanceType(8, 4, 8000)
    assert hardware.find_instance_type(name + "s") is None
