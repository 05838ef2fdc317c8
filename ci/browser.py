"""Find or install Chromium for tests of web pages: `python3 -m ci.browser`.

Installs Debian's package as root; elsewhere prints the remedy, and the tests skip with a reason.
Uses the Python standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = (
    "chromium-headless-shell",  # a quarter smaller
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)
PACKAGES = ("chromium-headless-shell", "chromium")
TIMEOUT = 600  # seconds of one apt-get call
MISSING = "No Chromium was found. Install the package chromium, or Google Chrome."


def find() -> str | None:
    """Return the path of a working Chromium, or None.

    Ubuntu's package is a stub that does not run.
    """
    for path in filter(None, map(shutil.which, NAMES)):
        try:
            found = subprocess.run([path, "--version"], capture_output=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if found.returncode == 0:
            return path
    return None


def install() -> str | None:
    """Install Chromium with apt-get and return its path, or print the reason and return None."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        print(f"{MISSING} Automatic installation needs root and apt-get.")
        return None
    print("installing Chromium for the tests of the dashboard ...", flush=True)
    error = _run(apt, "update")
    for package in PACKAGES:
        error = _run(apt, "install", "--yes", "--no-install-recommends", package) or error
        if path := find():
            return path
    print(f"{MISSING} apt-get failed:\n{error}")
    return None


def _run(*command: str) -> str:
    """Return the last lines of output of a failed command, or an empty string."""
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run(command, env=quiet, text=True, timeout=TIMEOUT, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "\n".join(done.stdout.splitlines()[-5:]) if done.returncode else ""


if __name__ == "__main__":
    path = find() or install()
    if path is None:
        sys.exit("Tests that need a browser will be skipped.")
    print(f"browser: {path}")
