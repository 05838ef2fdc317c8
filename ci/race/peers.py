"""Releases of peers that the race's own environment has not, each installed in one of its own.

Torch and everything else is the same there: such an environment sees the race's packages behind
its own few. It is built on first use under artifacts/peers and kept.
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
SEES_THE_RACE = "import site; site.addsitedir({!r})\n"


class PeerMissing(RuntimeError):
    """A peer cannot be installed; the message says why and what to do."""


def is_here(requirement: str) -> bool:
    """Whether this environment has that very release, such as ``deepspeed==0.19.8``, if any."""
    if not requirement:
        return True
    name, version = requirement.split("==")
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def python_with(requirement: str) -> str:
    """A Python that imports ``requirement``: this one, or that of an environment made for it.

    Raises PeerMissing.
    """
    if is_here(requirement):
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
    (Path(own) / "race.pth").write_text(SEES_THE_RACE.format(here))
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
        raise PeerMissing(f"{requirement} could not be installed. {remedy(output)}\n{tail}")
