"""A separate environment for the SDK, whose pins conflict with the repository's."""

from pathlib import Path

from ci.environment import ROOT, side_environment

FOLDER = ROOT / "artifacts" / "sagemaker-sdk"
# sagemaker-train and the matching sagemaker-core: the newest, and the one of Studio's image.
SDKS = {"1.27.0": "2.27.0", "1.14.0": "2.14.0"}
NEWEST = next(iter(SDKS))
OURS = ["xxhash"]  # imported by nearlinear.launch, whose sources are on the path


def python(version: str = NEWEST) -> Path:
    """Return the Python of an environment with the SDK, built on first use (about 700 MB)."""
    packages = [f"sagemaker-train=={version}", f"sagemaker-core=={SDKS[version]}", *OURS]
    return side_environment(FOLDER / version, packages)
