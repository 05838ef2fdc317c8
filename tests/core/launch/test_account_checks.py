"""Checks of the account before a launch.

moto answers for STS, S3, ECR and EC2. It has neither the quotas of SageMaker nor IAM's simulation,
so a server with prepared responses answers for these two.
"""

import copy
import json

import pytest

from nearlinear import cli
from nearlinear.launch import spec
from nearlinear.launch.sagemaker import account_checks
from nearlinear.launch.sagemaker.build_request import build_request
from tests.core import answers
from tests.core.launch.test_validation import ACCOUNT, RUN

pytest.importorskip("boto3")
ROLE = RUN["job"]["role"]
QUOTA = "ml.p4d.24xlarge for training job usage"


def simulated(**decisions: str) -> str:
    """Return IAM's answer to a simulation, with a decision by action."""
    results = "".join(
        f"<member><EvalActionName>{action.replace('_', ':')}</EvalActionName>"
        f"<EvalDecision>{decision}</EvalDecision><EvalResourceName>r</EvalResourceName></member>"
        for action, decision in decisions.items()
    )
    inner = f"<EvaluationResults>{results}</EvaluationResults><IsTruncated>false</IsTruncated>"
    name = "SimulatePrincipalPolicy"
    return f"<{name}Response><{name}Result>{inner}</{name}Result></{name}Response>"


def quota(name: str, value: float) -> dict:
    return {"Quotas": [{"QuotaName": name, "Value": value, "QuotaCode": "L-1"}]}


@pytest.fixture
def prepared(aws_services, monkeypatch):
    """Answers for quotas and IAM; an account that can run the job."""
    with answers.serving() as found:
        for service in ("SERVICE_QUOTAS", "IAM"):
            monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", found.address)
        yield found


@pytest.fixture
def able(prepared):
    prepared.give("ListServiceQuotas", 200, quota(QUOTA, 64))
    prepared.give("SimulatePrincipalPolicy", 200, simulated(s3_GetObject="allowed"))
    return prepared


def the_job(**changes):
    data = copy.deepcopy(RUN)
    data["job"] |= {"inputs": {"train": {"s3": "s3://my-bucket/tokens"}}, "region": answers.REGION}
    del data["job"]["subnets"], data["job"]["security_groups"]
    data["job"] |= changes
    return data


def check(**changes):
    job, config = spec.load(the_job(**changes))
    return account_checks.check_account(job, build_request(job, config))


def test_able_account_has_neither_problems_nor_notes(able):
    assert check() == ([], [])
    simulations = [asked for call, asked in able.asked if call == "SimulatePrincipalPolicy"]
    assert {asked["PolicySourceArn"] for asked in simulations} == {ROLE}
    assert "s3:PutObject" in {asked["ActionNames.member.1"] for asked in simulations}
    assert not any("*" in asked["ResourceArns.member.1"][1:] for asked in simulations)


@pytest.mark.parametrize(
    ("changes", "name", "value", "named"),
    [
        ({}, QUOTA, 31, True),
        ({}, QUOTA, 32, False),
        ({"spot": True, "max_wait_hours": 50}, QUOTA, 0, False),
        (
            {"spot": True, "max_wait_hours": 50},
            "ml.p4d.24xlarge for spot training job usage",
            0,
            True,
        ),
        ({"keep_warm_minutes": 9}, "ml.p4d.24xlarge for training warm pool usage", 1, True),
        ({}, "ml.p4de.24xlarge for training job usage", 0, False),
    ],
)
def test_quota_is_compared_with_the_machines(able, changes, name, value, named):
    able.ready["ListServiceQuotas"] = []
    able.give("ListServiceQuotas", 200, quota(name, value))
    problems, _ = check(**changes)
    assert [problem.field for problem in problems] == ["job.nodes"] * named
    assert all(f"{value}" in p.cause and "L-1" in p.remedy for p in problems)


def test_denied_actions_of_the_role_are_named(able):
    able.ready["SimulatePrincipalPolicy"] = []
    able.give("SimulatePrincipalPolicy", 200, simulated(s3_PutObject="implicitDeny"))
    ((problem,), _) = check()
    assert problem.field == "job.role" and "s3:PutObject on r" in problem.cause
    assert "nearlinear policies --execution" in problem.remedy


def test_missing_role_is_named(able):
    error = "<Error><Code>NoSuchEntity</Code><Message>no role</Message></Error>"
    able.ready["SimulatePrincipalPolicy"] = []
    able.give("SimulatePrincipalPolicy", 404, f"<ErrorResponse>{error}</ErrorResponse>")
    ((problem,), _) = check()
    assert problem.cause == f"{ROLE} does not exist"


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"role": "arn:aws:iam::210987654321:role/x"}, "job.role", f"of account {ACCOUNT}"),
        ({"output": "s3://no-such-bucket/o"}, "job.output", "no bucket 'no-such-bucket'"),
        ({"checkpoints": "s3://elsewhere/c"}, "job.checkpoints", "is in eu-west-1"),
        (
            {"image": f"{ACCOUNT}.dkr.ecr.us-west-2.amazonaws.com/nearlinear:2.14"},
            "job.image",
            "there is no image",
        ),
        (
            {"image": f"{ACCOUNT}.dkr.ecr.us-west-2.amazonaws.com/other:2.13"},
            "job.image",
            "there is no image",
        ),
    ],
)
def test_missing_resource_is_named(able, changes, field, words):
    import boto3

    place = {"LocationConstraint": "eu-west-1"}
    boto3.client("s3", "eu-west-1").create_bucket(
        Bucket="elsewhere", CreateBucketConfiguration=place
    )
    problems, notes = check(**changes)
    assert [problem.field for problem in problems] == [field], (problems, notes)
    assert words in problems[0].cause and notes == []


def test_network_interface_is_a_dry_run(able):
    import boto3

    ec2 = boto3.client("ec2")
    subnet = ec2.describe_subnets()["Subnets"][0]
    (group,) = ec2.describe_security_groups(
        Filters=[{"Name": "vpc-id", "Values": [subnet["VpcId"]]}]
    )["SecurityGroups"]
    network = {"subnets": [subnet["SubnetId"]], "security_groups": [group["GroupId"]]}
    before = len(ec2.describe_network_interfaces()["NetworkInterfaces"])
    assert check(**network) == ([], [])
    assert len(ec2.describe_network_interfaces()["NetworkInterfaces"]) == before
    ((problem,), _) = check(**network | {"subnets": ["subnet-0123456789abcdef0"]})
    assert problem.field == "job.subnets" and "InvalidSubnetID.NotFound" in problem.cause


def test_missing_file_system_is_named(able):
    problems, _ = check(
        inputs={"train": {"fsx": "fs-0123456789abcdef0", "directory": "/abcdefgh/tokens"}},
        subnets=["subnet-0123456789abcdef0"],
        security_groups=["sg-0123456789abcdef0"],
    )
    assert "job.inputs.train.fsx" in {problem.field for problem in problems}


def test_denied_checks_are_notes(prepared):
    prepared.refuse("ListServiceQuotas", "AccessDeniedException", "not authorized")
    denied = "<Error><Code>AccessDenied</Code><Message>not authorized</Message></Error>"
    prepared.give("SimulatePrincipalPolicy", 403, f"<ErrorResponse>{denied}</ErrorResponse>")
    problems, notes = check()
    assert problems == [] and len(notes) == 2
    assert notes[0].startswith("quotas (") and notes[1].startswith("permissions of job.role (")
    assert all("nearlinear policies" in note for note in notes)


def test_dry_run_asks_the_account_on_request_only(able, tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(the_job(source="", output="s3://no-such-bucket/o")))
    assert cli.main(["launch", str(path), "--dry-run"]) == 0
    assert able.asked == []
    assert cli.main(["launch", str(path), "--dry-run", "--check-account"]) == 2
    assert "there is no bucket 'no-such-bucket'" in capsys.readouterr().err
    assert able.asked
