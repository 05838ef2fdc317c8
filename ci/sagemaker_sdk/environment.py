"""A separate environment for the SDK, whose pins conflict with the repository's."""

import os
import shutil
import subprocess
import venv
from pathlib import Path

from ci.environment import pip_config, uv_environment

FOLDER = Path(__file__).resolve().parents[2] / "artifacts" / "sagemaker-sdk"
# sagemaker-train and the matching sagemaker-core: the newest, and the one of Studio's image.
SDKS = {"1.27.0": "2.27.0", "1.14.0": "2.14.0"}
NEWEST = next(iter(SDKS))


class InstallError(RuntimeError):
    """The SDK cannot be installed; the message contains pip's output."""


def python(version: str = NEWEST) -> Path:
    """Return the Python of an environment with the SDK, built on first use (about 700 MB)."""
    folder = FOLDER / version
    found, stamp = folder / "bin" / "python", folder / "complete"
    if not stamp.exists():
        uv = shutil.which("uv")
        venv.create(folder, with_pip=not uv, clear=True)
        pip = [uv, "pip"] if uv else [str(found), "-m", "pip", "--disable-pip-version-check"]
        where = ["--python", str(found)] if uv else []
        packages = [f"sagemaker-train=={version}", f"sagemaker-core=={SDKS[version]}"]
        done = subprocess.run(
            [*pip, "install", "--quiet", *where, *packages],
            env=uv_environment(os.environ, pip_config()) if uv else None,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise InstallError((done.stderr or done.stdout).strip()[-2000:])
        stamp.touch()
    return found
