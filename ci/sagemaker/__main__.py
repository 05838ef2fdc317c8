"""``python -m ci.sagemaker``: the SDK's request for every job in `jobs` beside ours, as a table."""

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

from ci.sagemaker import compare, drive, environment, jobs
from nearlinear.launch.sagemaker import policies

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests" / "core" / "data" / "sdk_request.json"
OPT_OUT = "SchemaVersion: '1.0'\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.sagemaker",
        description="Install the SageMaker SDK 3 into an environment of its own, let it submit the "
        "jobs of ci/sagemaker/jobs.py to a server on loopback, compare every field with what "
        "nearlinear launch sends, and run one of them here by the SDK's own driver script.",
    )
    parser.add_argument("--sdk", choices=environment.SDKS, default=environment.NEWEST)
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.relative_to(ROOT)}")
    parser.add_argument("--no-run", action="store_true", help="compare only")
    options = parser.parse_args(argv)
    try:
        python = environment.python(options.sdk)
    except environment.InstallError as error:
        print(f"{error}\nsagemaker-train {options.sdk} cannot be installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)):
        code = Path(folder, "code")
        code.mkdir()
        (code / "mine.py").write_text("x = 1\n")
        found = captured(python, code)
        failed = compared(found, code)
        failed += 0 if options.no_run else ran(found["requests"][jobs.SMALL], Path(folder))
    if options.keep and not failed:
        KEPT.parent.mkdir(exist_ok=True)
        KEPT.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed else 0


@contextlib.contextmanager
def server(folder: Path) -> Iterator[None]:
    """An account with a bucket and a role on loopback; the environment points to it."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every call
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
    place = {"LocationConstraint": jobs.REGION}
    boto3.client("s3").create_bucket(Bucket=jobs.BUCKET, CreateBucketConfiguration=place)
    boto3.client("iam").create_role(
        RoleName="nearlinear", AssumeRolePolicyDocument=json.dumps(policies.trust())
    )
    try:
        yield
    finally:
        running.stop()


def captured(python: Path, code: Path) -> dict:
    """What the SDK in that environment sends, and calls."""
    sources = [ROOT / "packages" / "core" / "src", ROOT]
    done = subprocess.run(
        [str(python), "-m", "ci.sagemaker.capture", str(code)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nthe SDK did not submit the jobs; what it says is above")
    return json.loads(done.stdout.splitlines()[-1])


def compared(found: dict, code: Path) -> int:
    """Print the tables; how many fields differ without a reason."""
    different = total = 0
    for name, theirs in found["requests"].items():
        rows = compare.fields(compare.ours(name, str(code)), theirs)
        print(f"{name}: ours | sagemaker-train {found['sdk']}\n{compare.table(rows)}")
        different += sum(not row.equal for row in rows)
        total += len(rows)
    print(f"{total} fields, {different} different without a reason")
    for stage, calls in found["calls"].items():
        print(f"the SDK called, {stage}: {', '.join(calls)}")
    return different


def ran(request: dict, folder: Path) -> int:
    """Run the small job; whether it failed."""
    from data_prep import prepare, sources

    (folder / "text.txt").write_text("The loader reads a batch of tokens.\n" * 400)
    prepare(sources.text([folder / "text.txt"]), folder / "tokens", progress=False)
    done = drive.run(request, folder / "ml", folder / "tokens")
    steps = [line for line in done.stdout.splitlines() if line.startswith("step=")]
    if done.returncode or len(steps) != 3:
        print(f"{done.stdout}\nthe SDK's driver ended with {done.returncode}", file=sys.stderr)
        return 1
    print(f"run here by the SDK's driver: {steps[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
