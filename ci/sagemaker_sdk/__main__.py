"""Print the SDK's and nearlinear's request for every job: ``python -m ci.sagemaker_sdk``."""

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ci.environment import SetupError
from ci.sagemaker_sdk import compare, driver, environment, jobs
from nearlinear.launch.sagemaker import policies

ROOT = Path(__file__).resolve().parents[2]
SAVED_REQUESTS = ROOT / "tests" / "core" / "data" / "sdk_request.json"
OPT_OUT = "SchemaVersion: '1.0'\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.sagemaker_sdk",
        description="Install the SageMaker SDK 3 into a separate environment, submit the jobs of "
        "ci/sagemaker_sdk/jobs.py with it to a server on loopback, compare every field with the "
        "request of nearlinear launch, and run one job locally with the SDK's driver script.",
    )
    parser.add_argument("--sdk", choices=environment.SDKS, default=environment.NEWEST)
    parser.add_argument(
        "--keep", action="store_true", help=f"write {SAVED_REQUESTS.relative_to(ROOT)}"
    )
    parser.add_argument("--no-run", action="store_true", help="compare only")
    options = parser.parse_args(argv)
    try:
        python = environment.python(options.sdk)
    except SetupError as error:
        print(f"{error}\nerror: sagemaker-train {options.sdk} cannot be installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)):
        code = Path(folder, "code")
        code.mkdir()
        (code / "mine.py").write_text("x = 1\n")
        captured = capture_requests(python, code)
        failed = print_comparison(captured, code)
        if not options.no_run:
            failed += run_small_job(captured["requests"][jobs.SMALL], Path(folder))
    if options.keep and not failed:
        SAVED_REQUESTS.parent.mkdir(exist_ok=True)
        SAVED_REQUESTS.write_text(json.dumps(captured, indent=1) + "\n")
    return 1 if failed else 0


@contextlib.contextmanager
def server(folder: Path) -> Iterator[None]:
    """Run an AWS account with a bucket and a role on loopback, and direct boto3 to it."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise logs every call
    (folder / "config.yaml").write_text(OPT_OUT)
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": jobs.REGION,
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(folder / "config.yaml"),
    }
    location = {"LocationConstraint": jobs.REGION}
    boto3.client("s3").create_bucket(Bucket=jobs.BUCKET, CreateBucketConfiguration=location)
    boto3.client("iam").create_role(
        RoleName="nearlinear", AssumeRolePolicyDocument=json.dumps(policies.trust_policy())
    )
    try:
        yield
    finally:
        running.stop()


def capture_requests(python: Path, code: Path) -> dict:
    """Return the SDK's requests and AWS calls, captured in its environment."""
    sources = [ROOT / "packages" / "core" / "src", ROOT]
    done = subprocess.run(
        [str(python), "-m", "ci.sagemaker_sdk.capture", str(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nThe SDK did not submit the jobs; its output is above.")
    return json.loads(done.stdout.splitlines()[-1])


def print_comparison(captured: dict, code: Path) -> int:
    """Print the tables and return the number of unexplained differences."""
    different = total = 0
    for name, theirs in captured["requests"].items():
        rows = compare.compare_fields(compare.ours(name, str(code)), theirs)
        print(f"{name}: nearlinear | sagemaker-train {captured['sdk']}\n{compare.table(rows)}")
        different += sum(not row.equal for row in rows)
        total += len(rows)
    print(f"{total} fields, {different} unexplained differences")
    for stage, calls in captured["calls"].items():
        print(f"calls of the SDK, {stage}: {', '.join(calls)}")
    return different


def run_small_job(request: dict, folder: Path) -> int:
    """Run the small job and return 1 if it failed, otherwise 0."""
    from data_prep import prepare, sources

    (folder / "text.txt").write_text("The loader reads a batch of tokens.\n" * 400)
    prepare(sources.text([folder / "text.txt"]), folder / "tokens", progress=False)
    done = driver.run(request, folder / "ml", folder / "tokens")
    steps = [line for line in done.stdout.splitlines() if line.startswith("step=")]
    if done.returncode or len(steps) != 3:
        print(
            f"{done.stdout}\nerror: the SDK's driver ended with {done.returncode}", file=sys.stderr
        )
        return 1
    print(f"run locally by the SDK's driver: {steps[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
