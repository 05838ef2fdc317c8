"""Build a release in a separate environment: ``python -m ci.wheels``."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from ci.environment import ROOT, SetupError, side_environment

FOLDER = ROOT / "artifacts" / "wheels"
TOOLS = [
    "auditwheel==6.8.2",
    "cyclonedx-python-lib[json-validation]==11.12.0",
    "hatchling==1.33.0",
    "twine==7.0.0",
    "ziglang==0.17.1",  # a C++ compiler for both processors and any version of the C library
]


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.wheels",
        description="Build the wheels and source distributions of all packages and a CycloneDX "
        "bill of materials, and check them with auditwheel and twine. The collectives are compiled "
        "for manylinux_2_28 on x86_64 and aarch64, on any machine. The tools (400 MB) are "
        f"installed into {FOLDER.relative_to(ROOT)} on the first call.",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    parser.add_argument(
        "--repository",
        metavar="URL",
        default=os.environ.get("NEARLINEAR_REPOSITORY"),
        help="address of the published repository, for the metadata",
    )
    args = parser.parse_args(argv)
    try:
        python = side_environment(FOLDER / "tools", TOOLS)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    variables = {name: value for name, value in os.environ.items() if name != "CXX"}
    variables |= {"PYTHONPATH": str(ROOT), "ZIG_GLOBAL_CACHE_DIR": str(FOLDER / "zig-cache")}
    variables |= {"PATH": f"{python.parent}{os.pathsep}{variables.get('PATH', os.defpath)}"}
    if args.repository:
        variables["NEARLINEAR_REPOSITORY"] = args.repository.rstrip("/")
    command = [str(python), "-m", "ci.wheels.release", str(args.out)]
    return subprocess.call(command, cwd=ROOT, env=variables)


if __name__ == "__main__":
    sys.exit(main())
