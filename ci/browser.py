"""A Chromium for the tests that look at a page: `python3 -m ci.browser` installs one where it can.

From Debian's packages, as root; elsewhere it says what to do, and those tests say why they did not
run. Python standard library only, for it runs before anything is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = (
    "chromium-headless-shell",  # a quarter smaller, and enough
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
PACKAGES = ("chromium-headless-shell", "chromium")
PATIENCE = 600  # seconds for one call of apt-get
MISSING = "no Chromium here: install the package chromium, or Google Chrome"


def find() -> str | None:
    """The path of a Chromium that runs, or None. Ubuntu's package only points to another store."""
    for path in filter(None, map(shutil.which, NAMES)):
        try:
            found = subprocess.run([path, "--version"], capture_output=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if found.returncode == 0:
            return path
    return None


def install() -> str | None:
    """Have apt-get install one; its path, or None, with the reason printed."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        print(f"{MISSING}; it is not installed for you without root and apt-get")
        return None
    print("installing Chromium for the tests of the dashboard ...", flush=True)
    why = _run(apt, "update")
    for package in PACKAGES:
        why = _run(apt, "install", "--yes", "--no-install-recommends", package) or why
        if path := find():
            return path
    print(f"{MISSING}; apt-get could not:\n{why}")
    return None


def _run(*command: str) -> str:
    """The last lines of what a command said, if it failed."""
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, env=quiet, text=True, timeout=PATIENCE, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "\n".join(done.stdout.splitlines()[-5:]) if done.returncode else ""


if __name__ == "__main__":
    path = find() or install()
    if path is None:
        sys.exit("the tests that need a browser will be skipped")
    print(f"browser: {path}")
