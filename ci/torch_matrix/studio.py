"""Test the library with the package versions of SageMaker Studio.

    python -m ci.torch_matrix.studio --python python3.12

The versions are those of SageMaker Distribution 4.4.1 (August 2026), the newest image with a public
package list: github.com/aws/sagemaker-distribution, build_artifacts/v4/v4.4/v4.4.1. The image uses
conda packages; here the builds of the package index are installed, with torch for CUDA 12.8 instead
of 12.9.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ci.environment import ROOT, SetupError, side_environment

PACKAGES = {
    "torch": "2.8.0",
    "boto3": "1.43.46",
    "botocore": "1.43.46",
    "datasets": "5.0.1",
    "huggingface-hub": "0.36.0",
    "ipython": "8.37.0",
    "ipywidgets": "8.1.8",
    "jsonschema": "4.23.0",
    "jupyter-client": "8.9.1",
    "matplotlib": "3.10.9",
    "numpy": "1.26.4",
    "packaging": "25.0",
    "pandas": "2.3.3",
    "papermill": "2.7.0",
    "pip": "26.2.1",
    "psutil": "7.1.3",
    "pyarrow": "21.0.0",
    "PyYAML": "6.0.3",
    "pyzmq": "26.4.0",
    "requests": "2.34.2",
    "safetensors": "0.8.0",
    "setuptools": "84.0.0",
    "tensorboard": "2.19.0",
    "tornado": "6.5.8",
    "tqdm": "4.70.0",
    "transformers": "4.57.6",
    "urllib3": "1.26.20",
}
# Lines of docs/start/install.md, for a terminal of Studio in the repository's folder.
LINES = """\
python -c "from importlib.metadata import version as v; print('torch==' + v('torch'))" > torch.txt
pip install -c torch.txt -e packages/collectives -e "packages/core[notebooks,data]"
"""
TESTERS = ("pytest", "pytest-xdist", "hypothesis")
TESTS = ("tests/core", "tests/data_prep")
NOTEBOOK = "02"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.torch_matrix.studio",
        description="Build an environment with the versions of SageMaker Studio (8 GB, most of it "
        "CUDA), install the library with the documented lines, check that existing packages are "
        "unchanged, and run tests and a notebook.",
    )
    parser.add_argument(
        "--python",
        default="python3.12",
        help="interpreter of the environment (default: python3.12)",
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep the environment in this folder"
    )
    parser.add_argument("tests", nargs="*", default=TESTS, help="files or folders for pytest")
    args = parser.parse_args(argv)
    try:
        with environment(args.python, args.keep) as folder:
            before = installed(folder)
            run_shell(folder, LINES)
            after = installed(folder)
            changed = [name for name in before if after.get(name) != before[name]]
            if changed:
                raise SetupError(f"the install lines changed {', '.join(changed)}")
            print(f"{len(before)} packages unchanged, {len(after) - len(before)} new", flush=True)
            run_shell(folder, f"pip install --quiet {' '.join(TESTERS)}")
            tests = ["-m", "pytest", "--numprocesses=auto", "-q", *args.tests]
            notebook = ["-m", "ci.notebooks", "--scale", "ci", "--only", NOTEBOOK]
            return max(python(folder, command) for command in (tests, notebook))
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1


@contextlib.contextmanager
def environment(interpreter: str, kept: Path | None) -> Iterator[Path]:
    """Yield the folder of an environment like Studio's, removed unless ``kept``."""
    with contextlib.ExitStack() as stack:
        folder = kept or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="studio-")))
        packages = [f"{name}=={version}" for name, version in PACKAGES.items()]
        side_environment(folder, packages, interpreter, "--no-cache-dir")
        yield folder


def run_shell(folder: Path, lines: str) -> None:
    """Run shell commands in the repository's folder. Raises SetupError."""
    with tempfile.TemporaryDirectory() as elsewhere:  # receives torch.txt
        lines = lines.replace("torch.txt", str(Path(elsewhere, "torch.txt")))
        done = subprocess.run(
            ["bash", "-euc", lines],
            cwd=ROOT,
            env=environment_variables(folder),
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise SetupError((done.stderr or done.stdout).strip()[-4000:])


def installed(folder: Path) -> dict[str, str]:
    """Return installed versions by package."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "list", "--format=json"]
    listed = subprocess.run(
        command, env=environment_variables(folder), capture_output=True, text=True, check=True
    )
    return {each["name"]: each["version"] for each in json.loads(listed.stdout)}


def python(folder: Path, arguments: list[str]) -> int:
    return subprocess.call(
        [str(folder / "bin" / "python"), *arguments], cwd=ROOT, env=environment_variables(folder)
    )


def environment_variables(folder: Path) -> dict[str, str]:
    """Return the environment variables of a program in the environment."""
    drop = ("PYTHON", "VIRTUAL_ENV", "NEARLINEAR_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    path = f"{folder / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
    # Model hubs are offline, and each rank has one core, as in ./run test.
    return variables | {"PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
