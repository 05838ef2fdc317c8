"""Training images: AWS's accounts, versions, the Dockerfile, and images of Kubernetes jobs."""

import base64
import io
import json
import re
import tomllib
import zipfile
from pathlib import Path

import pytest

import nearlinear
from nearlinear import cli
from nearlinear.errors import ConfigError
from nearlinear.launch.kubernetes import build_objects
from nearlinear.launch.sagemaker import images
from nearlinear.launch.sagemaker.job_checks import ECR_IMAGE, sagemaker_regions
from nearlinear.launch.wheel import PACKAGES, WHEEL_NAME, write_wheel
from tests.core.launch.test_validation import job_and_config

CORE = Path(__file__).resolve().parents[3] / "packages" / "core"


@pytest.mark.parametrize(
    ("region", "registry"),
    [
        ("us-west-2", "763104351884.dkr.ecr.us-west-2.amazonaws.com"),
        ("eu-central-2", "380420809688.dkr.ecr.eu-central-2.amazonaws.com"),
        ("us-gov-west-1", "442386744353.dkr.ecr.us-gov-west-1.amazonaws.com"),
        ("cn-north-1", "727897471807.dkr.ecr.cn-north-1.amazonaws.com.cn"),
        ("us-iso-east-1", "886529160074.dkr.ecr.us-iso-east-1.c2s.ic.gov"),
        ("eusc-de-east-1", "204133271717.dkr.ecr.eusc-de-east-1.amazonaws.eu"),
    ],
)
def test_registry_of_a_region(region, registry):
    image = images.resolve_image("auto:2.13", region)
    assert image == f"{registry}/pytorch:2.13-cu133-amzn2023-sagemaker"
    assert ECR_IMAGE.match(image)


def test_every_sagemaker_region_has_an_account():
    pytest.importorskip("botocore")
    for region in sagemaker_regions():
        assert f".dkr.ecr.{region}." in images.resolve_image("auto", region)


def test_domains_are_those_of_the_partitions():
    loader = pytest.importorskip("botocore.loaders").Loader()
    suffixes = {p["dnsSuffix"] for p in loader.load_data("endpoints")["partitions"]}
    assert set(images._DOMAINS.values()) | {"amazonaws.com"} == suffixes


def test_table_equals_the_sdk_where_it_is_installed():
    """The published table of the SDK, `images.SOURCE`."""
    core = pytest.importorskip("sagemaker.core", reason="the SageMaker SDK is not installed")
    folder = Path(core.__file__).parent / "image_uri_config"
    new = json.loads((folder / "pytorch-amzn2023.json").read_text())["training"]["versions"]
    old = json.loads((folder / "pytorch.json").read_text())["training"]["versions"]
    accounts = dict.fromkeys(images.USUAL_REGIONS, images.USUAL_ACCOUNT) | images.OTHER_ACCOUNTS
    assert accounts == new["2.13"]["registries"] == old["2.10.0"]["registries"]
    for version, image in images.IMAGES.items():
        if version in new:
            tag = f"{version}-{new[version]['container_version']['gpu']}"
            assert (image.repository, image.tag) == (new[version]["repository"], tag)
        else:
            python = old[f"{version}.0"]["py_versions"][0]
            assert image.tag.startswith(f"{version}.0-gpu-{python}-")
            assert image.repository == old[f"{version}.0"]["repository"]


@pytest.mark.parametrize(
    ("torch", "instance", "version"),
    [
        ("2.13.0+cpu", "ml.p4d.24xlarge", "2.13"),
        ("2.6.0", "ml.p4d.24xlarge", "2.8"),
        ("2.99.1", "ml.p4d.24xlarge", "2.14"),
        ("2.13.0", "ml.p3.16xlarge", "2.8"),  # CUDA 13 does not support Volta
    ],
)
def test_version_follows_the_torch_of_this_machine(monkeypatch, torch, instance, version):
    monkeypatch.setattr("importlib.metadata.version", lambda name: torch)
    image = images.resolve_image("auto", "us-east-1", instance)
    assert images.IMAGES[version].tag == image.rpartition(":")[2]


def test_own_images_are_left_alone_and_unknown_versions_rejected():
    assert images.resolve_image("me/image:1", "") == "me/image:1"
    with pytest.raises(ConfigError, match="no region is set"):
        images.resolve_image("auto", "")
    with pytest.raises(ConfigError, match="known are 2.8, 2.9"):
        images.resolve_public_image("auto:2.13")


def test_dockerfile_agrees_with_the_table_and_the_wheel():
    lines = (CORE / "docker" / "Dockerfile").read_text().splitlines()
    steps = dict(line.split(" ", 1) for line in lines if re.match("[A-Z]+ ", line))
    public = [image.public for image in images.IMAGES.values() if image.public]
    assert steps["ARG"] == f"BASE={public[-1]}" and steps["FROM"] == "${BASE}"
    source, target = steps["COPY"].split()
    assert Path("dist", WHEEL_NAME).match(source) and target == "/tmp/wheels/"
    extras = re.search(r"\[([a-z0-9,]+)\]", steps["RUN"])[1].split(",")
    known = tomllib.loads((CORE / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(known["optional-dependencies"])
    assert "nearlinear" in known["scripts"] and lines[-1].strip() == "&& nearlinear --version"


def test_kubernetes_job_installs_the_shipped_wheel():
    job, config = job_and_config(
        job__place="kubernetes", job__image="auto:2.9", job__inputs={}, job__source=""
    )
    _, shipped, training = build_objects(job, config, "gpt2-1")
    ((name, data),) = shipped["binaryData"].items()
    assert name == WHEEL_NAME and len(base64.b64decode(data)) < 2**20
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(data))) as wheel:
        assert "nearlinear/launch/wheel.py" in wheel.namelist()
    pod = training["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == images.IMAGES["2.9"].public
    assert container["command"][:2] == ["/bin/sh", "-c"]
    assert container["command"][4:7] == ["torchrun", "-m", "nearlinear.cli"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"{mounts['wheel']}/*.whl" in container["command"][2]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "wheel"]
    assert volume["configMap"]["name"] == shipped["metadata"]["name"]


def test_wheel_is_reproducible_and_complete(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = (write_wheel(tmp_path / name) for name in "ab")
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as wheel:
        names = wheel.namelist()
        record = wheel.read(f"nearlinear-{nearlinear.__version__}.dist-info/RECORD").decode()
    assert {name.split("/")[0] for name in names} >= set(PACKAGES)
    assert "nearlinear/hardware/hardware.toml" in names
    assert [line.split(",")[0] for line in record.splitlines()] == names
    assert not any("__pycache__" in name for name in names)


def test_slurm_refuses_the_image_of_aws(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text('[job]\nplace = "slurm"\nimage = "auto"\n')
    assert cli.main(["launch", str(path), "--dry-run"]) == 2
    assert "job.image: 'auto' is an image of AWS" in capsys.readouterr().err
