"""The table of machines says what EC2 says, and knows what SageMaker trains on."""

import gzip
import json
from pathlib import Path

import pytest

from nearlinear.launch import instances
from nearlinear.launch.sagemaker import shapes

# SageMaker's, with accelerators, and not in the table: its docstring says why.
LEFT_OUT = ("p2.", "p6e-gb200.", "trn1.", "trn1n.", "trn2.")
OLD = {"p3.2xlarge": 1, "p3.8xlarge": 4, "p3.16xlarge": 8}  # EC2 lists them no longer


@pytest.fixture(scope="module")
def described() -> dict[str, dict]:
    """What EC2's DescribeInstanceTypes answers, by type."""
    moto = pytest.importorskip("moto", reason="moto carries EC2's descriptions: extra dev")
    recorded = Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz"
    return json.loads(gzip.decompress(recorded.read_bytes()))


def sagemakers() -> set[str]:
    members = shapes.operation("CreateTrainingJob").members["ResourceConfig"].members
    return {name.removeprefix("ml.") for name in members["InstanceType"].enum}


@pytest.mark.parametrize("name", sorted(instances.KNOWN))
def test_a_machine_is_as_ec2_describes_it(name, described):
    found = instances.KNOWN[name]
    if name in OLD:
        assert name not in described and found == instances.Instance(OLD[name], 0)
        return
    network = described[name]["NetworkInfo"]
    gpus = sum(gpu["Count"] for gpu in described[name]["GpuInfo"]["Gpus"])
    cards = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    assert found == instances.Instance(gpus, cards)
    assert network["EfaSupported"] == bool(cards)


def test_every_machine_that_sagemaker_trains_on_is_known_or_left_out_on_purpose(described):
    for name in sagemakers():
        more = described.get(name, {})
        if name in instances.KNOWN:
            assert not name.startswith(LEFT_OUT)
        elif name.startswith(LEFT_OUT):
            assert "GpuInfo" not in more  # of those that EC2 describes: Trainium
        else:  # a machine without accelerators, or so old that EC2 lists it no longer
            assert not {"GpuInfo", "NeuronInfo"} & set(more)
            assert name[0] in "cmrt"
    assert all(any(name.startswith(left) for name in sagemakers()) for left in LEFT_OUT)


def test_machines_are_sagemakers():
    assert set(instances.KNOWN) - sagemakers() == {"g4dn.metal"}  # EC2's alone


@pytest.mark.parametrize("name", ["p4d.24xlarge", "ml.p4d.24xlarge"])
def test_both_names_of_a_machine_are_known(name):
    assert instances.known(name) == instances.Instance(8, 4)
    assert instances.known(name + "s") is None
