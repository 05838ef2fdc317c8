"""Training images of AWS: the Deep Learning Container for a region and a torch version.

``job.image = "auto"`` selects the image for the torch of this machine, ``"auto:2.9"`` for another
one. The launcher ships nearlinear itself as a wheel (`wheel`), so that no image needs building.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

from ...errors import ConfigError

AUTO = "auto"
"""Value of ``job.image`` that selects AWS's image."""
SOURCE = (
    "sagemaker-core 2.27.0 (2026-10-21), image_uri_config/pytorch.json and pytorch-amzn2023.json"
)
"""Origin of the accounts and of the versions; tests compare them where the package is installed."""


@dataclass(frozen=True)
class TrainingImage:
    """Repository and tag of a training image, for SageMaker and for Kubernetes."""

    repository: str
    tag: str
    public: str = ""
    """The same image for EC2 and EKS in AWS's public registry; empty if none was found there."""


_PUBLIC = "public.ecr.aws/deep-learning-containers/pytorch-training"
IMAGES = {
    "2.8": TrainingImage(
        "pytorch-training",
        "2.8.0-gpu-py312-cu129-ubuntu22.04-sagemaker",
        f"{_PUBLIC}:2.8.0-gpu-py312-cu129-ubuntu22.04-ec2",
    ),
    "2.9": TrainingImage(
        "pytorch-training",
        "2.9.0-gpu-py312-cu130-ubuntu22.04-sagemaker",
        f"{_PUBLIC}:2.9.0-gpu-py312-cu130-ubuntu22.04-ec2",
    ),
    "2.10": TrainingImage("pytorch-training", "2.10.0-gpu-py313-cu130-ubuntu22.04-sagemaker"),
    "2.11": TrainingImage("pytorch", "2.11-cu130-amzn2023-sagemaker"),
    "2.12": TrainingImage("pytorch", "2.12-cu130-amzn2023-sagemaker"),
    "2.13": TrainingImage("pytorch", "2.13-cu133-amzn2023-sagemaker"),
    "2.14": TrainingImage("pytorch", "2.14-cu133-amzn2023-sagemaker"),
}
"""GPU images by torch version, oldest first; the tags of 2.8 to 2.10 are in AWS's release notes."""

_VOLTA = "2.8"  # CUDA 13 does not support Volta GPUs (p3)

USUAL_ACCOUNT = "763104351884"
USUAL_REGIONS = (
    "ap-northeast-1 ap-northeast-2 ap-south-1 ap-southeast-1 ap-southeast-2 ca-central-1 "
    "eu-central-1 eu-north-1 eu-west-1 eu-west-2 eu-west-3 sa-east-1 us-east-1 us-east-2 us-west-1 "
    "us-west-2"
).split()
OTHER_ACCOUNTS = {
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-east-2": "975050140332",
    "ap-northeast-3": "364406365360",
    "ap-south-2": "772153158452",
    "ap-southeast-3": "907027046896",
    "ap-southeast-4": "457447274322",
    "ap-southeast-5": "550225433462",
    "ap-southeast-6": "633930458069",
    "ap-southeast-7": "590183813437",
    "ca-west-1": "204538143572",
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "eu-central-2": "380420809688",
    "eu-isoe-west-1": "371248457586",
    "eu-south-1": "692866216735",
    "eu-south-2": "503227376785",
    "eusc-de-east-1": "204133271717",
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
    "me-west-1": "124382933778",
    "mx-central-1": "637423239942",
    "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353",
    "us-iso-east-1": "886529160074",
    "us-isob-east-1": "094389454867",
    "us-isof-east-1": "303241398832",
    "us-isof-south-1": "454834333376",
}
"""Accounts of AWS's registry in the other regions."""
_DOMAINS = {
    "cn": "amazonaws.com.cn",
    "us-iso": "c2s.ic.gov",
    "us-isob": "sc2s.sgov.gov",
    "us-isof": "csp.hci.ic.gov",
    "eu-isoe": "cloud.adc-e.uk",
    "eusc-de": "amazonaws.eu",
}
"""Domain of the registry by the part of the region before its direction."""


def is_auto(image: str) -> bool:
    """Return True if ``image`` asks for AWS's image."""
    return image == AUTO or image.startswith(f"{AUTO}:")


def resolve_image(image: str, region: str, instance_type: str = "") -> str:
    """Return the image that ``image`` names: itself, or AWS's for ``auto``.

    Raises:
        ConfigError: The region or the torch version has no image.
    """
    if not is_auto(image):
        return image
    accounts = dict.fromkeys(USUAL_REGIONS, USUAL_ACCOUNT) | OTHER_ACCOUNTS
    if region not in accounts:
        cause = f"no AWS image is known for region {region!r}" if region else "no region is set"
        raise ConfigError(f"{image!r}: {cause}; set job.region")
    found = IMAGES[_version(image, instance_type, list(IMAGES))]
    domain = _DOMAINS.get(re.sub(r"-[a-z]+-\d+$", "", region), "amazonaws.com")
    return f"{accounts[region]}.dkr.ecr.{region}.{domain}/{found.repository}:{found.tag}"


def resolve_public_image(image: str, instance_type: str = "") -> str:
    """Return the image that ``image`` names on Kubernetes: itself, or AWS's public one."""
    if not is_auto(image):
        return image
    known = [version for version, found in IMAGES.items() if found.public]
    return IMAGES[_version(image, instance_type, known)].public


def _version(image: str, instance_type: str, known: list[str]) -> str:
    """Return the torch version to use: the requested one, or the nearest to this machine's."""
    if wanted := image.partition(":")[2]:
        if wanted not in known:
            raise ConfigError(
                f"{image!r}: AWS has no image for torch {wanted}; known are {', '.join(known)}"
            )
        return wanted
    if instance_type.removeprefix("ml.").startswith("p3"):
        return _VOLTA
    try:
        own = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return known[-1]
    minor = tuple(map(int, own.split(".")[:2]))
    older = [each for each in known if tuple(map(int, each.split("."))) <= minor]
    return older[-1] if older else known[0]
