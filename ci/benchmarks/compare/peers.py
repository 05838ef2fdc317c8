"""Separate environments for library releases that conflict with the installed ones.

Such an environment contains one library and falls back to the packages of this environment, so that
torch and all other packages are identical. It is built under artifacts/peers on first use.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from ci.environment import PEERS_SETTINGS, ROOT, pip_config, remedy, uv_environment

FOLDER = ROOT / "artifacts" / "peers"
FALLBACK = "import site; site.addsitedir({!r})\n"


class PeerMissing(RuntimeError):
    """A library cannot be installed; the message contains the reason and a remedy."""


def is_installed(requirement: str) -> bool:
    """Return True if this environment has the pinned release; also for an empty requirement."""
    if not requirement:
        return True
    name, version = requirement.split("==")
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def python_with(requirement: str) -> str:
    """Return an interpreter that can import ``requirement``; build its environment if necessary.

    Raises:
        PeerMissing: If the requirement cannot be installed.
    """
    if is_installed(requirement):
        return sys.executable
    home = FOLDER / requirement.replace("==", "-")
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        print(f"installing {requirement} in {home.relative_to(ROOT)} ...", file=sys.stderr)
        shutil.rmtree(home, ignore_errors=True)
        _build(home, python, requirement)
        (home / "complete").touch()
    return str(python)


def _build(home: Path, python: Path, requirement: str) -> None:
    uv = shutil.which("uv")
    venv.create(home, with_pip=not uv, symlinks=True)
    own = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    here = sysconfig.get_path("purelib")
    (Path(own) / "fallback.pth").write_text(FALLBACK.format(here))
    if uv:
        install = [uv, "pip", "install", "--python", str(python)]
        env = uv_environment(os.environ, pip_config())
    else:
        install = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
        env = dict(os.environ)
    command = [*install, "--no-deps", "--no-build-isolation", requirement]
    done = subprocess.run(
        command, env={**env, **PEERS_SETTINGS}, capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        output = done.stdout + done.stderr
        tail = "\n".join("    " + line for line in output.splitlines()[-10:])
        raise PeerMissing(f"{requirement} cannot be installed. {remedy(output)}\n{tail}")
