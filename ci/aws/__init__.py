"""An AWS account on loopback, with an FSx that is a folder here: for tests and notebooks.

The server is moto's, spoken to through boto3 and HTTP as AWS is. Added in `fsx` is what moto's FSx
lacks: states that change, mount names, network cards, links to S3; in `jobs` training that goes on
until it is stopped. In `lustre` is an ``lfs`` for the folder that stands for the mount. Simulated
are the services, not the requests to them.
"""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ci.aws import fsx, jobs, lustre
from nearlinear.launch.sagemaker import policies
from nearlinear.launch.sagemaker.follow import LOGS

REGION = "us-west-2"
BUCKET = "my-bucket"


@dataclass(frozen=True)
class Account:
    """What is in it."""

    endpoint: str
    region: str
    bucket: str
    role: str
    vpc: str
    subnet: str
    security_group: str
    """lets everything out, and Lustre's ports in from itself"""
    lustre: lustre.Emulated

    def say(self, job: str, host: str, lines: list[str]) -> None:
        """Put what a host of a job prints where the service would put it."""
        import boto3

        logs, stream = boto3.client("logs"), f"{job}/{host}-{int(time.time())}"
        with contextlib.suppress(logs.exceptions.ResourceAlreadyExistsException):
            logs.create_log_group(logGroupName=LOGS)
        logs.create_log_stream(logGroupName=LOGS, logStreamName=stream)
        now = int(time.time() * 1000)
        events = [{"timestamp": now + i, "message": line} for i, line in enumerate(lines)]
        logs.put_log_events(logGroupName=LOGS, logStreamName=stream, logEvents=events)


@contextlib.contextmanager
def account(folder: Path) -> Iterator[Account]:
    """Inside, boto3 speaks to an account of its own; ``folder`` holds what is mounted."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it names every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    emulated = lustre.install(folder, sys.executable)
    ours = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
        "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",  # machine images: half of what a reset takes
        "PATH": f"{emulated.tools}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        with fsx.completed(emulated), jobs.unfinished():
            yield furnish(endpoint, emulated)
    finally:
        server.stop()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def furnish(endpoint: str, emulated: lustre.Emulated) -> Account:
    """Nothing of what was there before, but a bucket, a role and a network."""
    import urllib.request

    import boto3

    reset = urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()
    place = {"LocationConstraint": REGION}
    boto3.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=place)
    role = boto3.client("iam").create_role(
        RoleName="nearlinear", AssumeRolePolicyDocument=json.dumps(policies.trust())
    )["Role"]["Arn"]
    ec2 = boto3.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.1.0/24")["Subnet"]["SubnetId"]
    group = ec2.create_security_group(GroupName="lustre", Description="Lustre", VpcId=vpc)
    group = group["GroupId"]
    ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=lustre_rules(group))
    return Account(endpoint, REGION, BUCKET, role, vpc, subnet, group, emulated)


def lustre_rules(group: str) -> list[dict]:
    """Rules that let Lustre's ports through, from or to the members of ``group``."""
    return [
        {
            "IpProtocol": "tcp",
            "FromPort": first,
            "ToPort": last,
            "UserIdGroupPairs": [{"GroupId": group}],
        }
        for first, last in ((988, 988), (1018, 1023))
    ]
