"""IAM policies allow exactly the calls of a job.

boto3's calls are recorded. The action and resource that each call needs are written here from AWS's
service authorization reference, independently of the policies. moto enforces the actions, but not
the resources of SageMaker and CloudWatch, so this module evaluates resources itself.
"""

import fnmatch
import json
import re
import urllib.request

import pytest

from nearlinear import cli
from nearlinear.launch.sagemaker import aws, jobs, policies
from tests.core.launch.test_validation import ACCOUNT, job_and_config

pytest.importorskip("boto3")
REGION = "us-west-2"
UNUSED = {
    # used by nearlinear fsx check: tested in test_fsx_service.py
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "fsx:DescribeDataRepositoryAssociations",
    "fsx:DescribeFileSystems",
}


def the_job(**changes):
    job, _ = job_and_config(**{"job__region": REGION} | changes)
    return job


# --- needs of a call ------------------------------------------------------------------------------


def needs(service: str, call: str, given: dict) -> list[tuple[str, str, dict]]:
    """Return the actions, resources and contexts that one recorded call needs."""
    here = f"{REGION}:{ACCOUNT}"
    if call == "HeadBucket":
        return [("s3:ListBucket", f"arn:aws:s3:::{given['Bucket']}", {})]
    if service == "sts":
        return []  # GetCallerIdentity needs no permission
    if service == "servicequotas":
        return [(f"servicequotas:{call}", "*", {})]
    if service == "iam":
        return [(f"iam:{call}", given["PolicySourceArn"], {})]
    if service == "ecr":
        repository = f"arn:aws:ecr:{here}:repository/{given['repositoryName']}"
        return [(f"ecr:{call}", repository, {})]
    if service == "s3":
        return [(f"s3:{call}", f"arn:aws:s3:::{given['Bucket']}/{given['Key']}", {})]
    if service == "logs":
        stream = given.get("logStreamName", "")
        name = f"{given['logGroupName']}:" + (f"log-stream:{stream}" if stream else "")
        return [(f"logs:{call}", f"arn:aws:logs:{here}:log-group:{name}", {})]
    if service == "pricing":
        return [(f"pricing:{call}", "*", {})]
    assert service == "sagemaker", f"say what {service}:{call} needs"
    job = f"arn:aws:sagemaker:{here}:training-job/{given['TrainingJobName']}"
    found = [(f"sagemaker:{call}", job, {})]
    if call == "CreateTrainingJob":
        passed = {"iam:PassedToService": "sagemaker.amazonaws.com"}
        found.append(("iam:PassRole", given["RoleArn"], passed))
        found += [("sagemaker:AddTags", job, {})] * bool(given.get("Tags"))
    return found


def allows(policy: dict, action: str, resource: str, context: dict) -> bool:
    """Evaluate a policy like IAM, for the features that our policies use."""

    def matches(pattern: str, text: str) -> bool:
        return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))

    for statement in policy["Statement"]:
        conditions = statement.get("Condition", {})
        kept = all(
            matches(wanted, context.get(key, ""))
            for keys in conditions.values()
            for key, wanted in keys.items()
        )
        if (
            kept
            and any(matches(pattern, action) for pattern in statement["Action"])
            and any(matches(pattern, resource) for pattern in statement["Resource"])
        ):
            return True
    return False


@pytest.fixture
def recorded(monkeypatch):
    """Record every call of every client created from now on."""
    heard = []
    session = aws.create_session

    def listening(region: str = ""):
        found = session(region)
        found.events.register(
            "provide-client-params",
            lambda params, model, **_: heard.append(
                (model.service_model.signing_name, model.name, params)
            ),
        )
        return found

    monkeypatch.setattr(aws, "create_session", listening)
    return heard


def use_everything(config, capsys) -> None:
    """Run all commands of the caller's policy. moto supports neither stops nor prices."""
    assert cli.main(["launch", str(config), "--yes", "--set", f"job.region={REGION}"]) == 0
    name = re.findall(r"submitted: (\S+)", capsys.readouterr().out)[0]
    for command in (["status"], ["logs"], ["logs", "--all"], ["stop"], ["cost"]):
        cli.main([*command, name])
    capsys.readouterr()


def say_something(logs, name: str) -> None:
    logs.create_log_group(logGroupName=jobs.LOG_GROUP)
    stream = f"{name}/algo-1-1700000000"
    logs.create_log_stream(logGroupName=jobs.LOG_GROUP, logStreamName=stream)
    events = [{"timestamp": 1, "message": "step=1"}]
    logs.put_log_events(logGroupName=jobs.LOG_GROUP, logStreamName=stream, logEvents=events)


@pytest.fixture
def used(recorded, aws_services, sagemaker_run, monkeypatch, capsys):
    """Return the needs of all commands together."""
    name = "nearlinear-20261122000000"
    monkeypatch.setattr(
        "nearlinear.launch.sagemaker.build_request.timestamped_name", lambda *_: name
    )
    say_something(aws_services["logs"], name)
    use_everything(sagemaker_run, capsys)
    found = [need for call in recorded for need in needs(*call)]
    assert len({action for action, _, _ in found}) == 13, sorted({a for a, _, _ in found})
    return found


CHECKS = {
    "ecr:DescribeImages",
    "iam:SimulatePrincipalPolicy",
    "s3:ListBucket",
    "servicequotas:ListServiceQuotas",
}


def test_checks_policy_allows_exactly_the_recorded_checks(used):
    policy = policies.checks_policy(the_job())
    checks = [need for need in used if need[0] in CHECKS]
    assert checks and all(allows(policy, *need) for need in checks)
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert allowed == CHECKS
    assert not allows(policy, "s3:ListBucket", "arn:aws:s3:::other", {})


def test_caller_policy_allows_exactly_the_recorded_calls(used):
    policy = policies.caller_policy(the_job())
    refused = [need for need in used if need[0] not in CHECKS and not allows(policy, *need)]
    assert refused == []
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert allowed - {action for action, _, _ in used} == UNUSED


def test_every_statement_of_the_caller_policy_is_needed(used):
    whole = policies.caller_policy(the_job())
    for statement in whole["Statement"]:
        if set(statement["Action"]) <= UNUSED:
            continue
        rest = {"Statement": [each for each in whole["Statement"] if each != statement]}
        mine = [need for need in used if need[0] not in CHECKS]
        assert not all(allows(rest, *need) for need in mine), statement["Sid"]


@pytest.mark.parametrize(
    ("action", "resource", "context"),
    [
        ("sagemaker:StopTrainingJob", f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/x-1", {}),
        ("sagemaker:CreateTrainingJob",
         f"arn:aws:sagemaker:{REGION}:210987654321:training-job/nearlinear-1", {}),
        ("iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/admin",
         {"iam:PassedToService": "sagemaker.amazonaws.com"}),
        ("iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/nearlinear",
         {"iam:PassedToService": "ec2.amazonaws.com"}),
        ("s3:PutObject", "arn:aws:s3:::my-bucket/output/other-1/input/code/a.py", {}),
        ("s3:PutObject", "arn:aws:s3:::my-bucket/output/nearlinear-1/output/model.tar.gz", {}),
        ("s3:GetObject", "arn:aws:s3:::my-bucket/output/nearlinear-1/input/code/a.py", {}),
        ("logs:GetLogEvents",
         f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/aws/lambda/x:log-stream:y", {}),
        ("sagemaker:CreateEndpoint", "*", {}),
    ],
)  # fmt: skip
def test_caller_policy_denies_other_resources(action, resource, context):
    assert not allows(policies.caller_policy(the_job()), action, resource, context)


# Actions of SageMaker in the job's role, from the developer guide: it lists and reads inputs and
# code, stores checkpoints, writes outputs, logs, sends metrics, pulls the image, joins the VPC.
OWN = "arn:aws:s3:::my-bucket/output/nearlinear-20261122000000"
GROUP = f"arn:aws:logs:{REGION}:{ACCOUNT}:log-group:/aws/sagemaker/TrainingJobs"
DONE = [
    ("s3:ListBucket", "arn:aws:s3:::my-bucket", {}),
    ("s3:GetObject", "arn:aws:s3:::my-bucket/val/shard-00000.bin", {}),
    ("s3:GetObject", f"{OWN}/input/code/mine.py", {}),
    ("s3:GetObject", f"{OWN}/input/sm_drivers/sm_train.sh", {}),
    ("s3:GetObject", "arn:aws:s3:::my-bucket/checkpoints/step-100/index.json", {}),
    ("s3:PutObject", "arn:aws:s3:::my-bucket/checkpoints/step-200/index.json", {}),
    ("s3:PutObject", f"{OWN}/output/output.tar.gz", {}),
    ("logs:CreateLogGroup", f"{GROUP}:", {}),
    ("logs:CreateLogStream", f"{GROUP}:log-stream:x/algo-1-17", {}),
    ("logs:DescribeLogStreams", f"{GROUP}:", {}),
    ("logs:PutLogEvents", f"{GROUP}:log-stream:x/algo-1-17", {}),
    ("cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": "/aws/sagemaker/TrainingJobs"}),
    ("ecr:GetAuthorizationToken", "*", {}),
    *((f"ecr:{action}", f"arn:aws:ecr:{REGION}:{ACCOUNT}:repository/nearlinear", {})
      for action in ("BatchCheckLayerAvailability", "BatchGetImage", "GetDownloadUrlForLayer")),
    *((f"ec2:{action}", "*", {}) for action in policies.NETWORK_INTERFACE_ACTIONS),
]  # fmt: skip


def test_execution_policy_allows_exactly_the_actions_of_a_job():
    policy = policies.execution_policy(the_job())
    assert [need for need in DONE if not allows(policy, *need)] == []
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert allowed == {action for action, _, _ in DONE}
    for action, resource in (
        ("s3:PutObject", "arn:aws:s3:::my-bucket/val/shard-00000.bin"),
        ("s3:PutObject", "arn:aws:s3:::my-bucket/output/other-1/x"),
        ("s3:GetObject", "arn:aws:s3:::my-bucket/secrets"),
        ("s3:ListBucket", "arn:aws:s3:::other"),
        ("s3:DeleteObject", f"{OWN}/output/output.tar.gz"),
        ("cloudwatch:PutMetricData", "*"),
    ):
        assert not allows(policy, action, resource, {"cloudwatch:namespace": "AWS/EC2"})


def test_unused_features_are_not_allowed():
    job = the_job(job__subnets=[], job__tags={}, job__checkpoints="", job__image="public/x:1",
                  job__inputs={})  # fmt: skip
    both = [policies.caller_policy(job), policies.execution_policy(job)]
    actions = {
        action for policy in both for each in policy["Statement"] for action in each["Action"]
    }
    assert not any(action.startswith(("ec2:", "ecr:", "fsx:")) for action in actions)
    assert "sagemaker:AddTags" not in actions
    assert "checkpoints" not in json.dumps(both)


# IAM limits the size of inline policies of users and roles.
@pytest.mark.parametrize(
    ("made", "most"),
    [
        (policies.caller_policy, 2048),
        (policies.checks_policy, 2048),
        (policies.execution_policy, 10_240),
    ],
    ids=["caller", "checks", "execution"],
)
def test_policy_is_a_valid_iam_document(made, most):
    policy = made(the_job())
    assert set(policy) == {"Version", "Statement"} and policy["Version"] == "2012-10-17"
    assert len(json.dumps(policy, separators=(",", ":"))) <= most
    names = [statement["Sid"] for statement in policy["Statement"]]
    assert len(set(names)) == len(names) and all(re.fullmatch("[A-Za-z0-9]+", it) for it in names)
    for statement in policy["Statement"]:
        assert set(statement) - {"Condition"} == {"Sid", "Effect", "Action", "Resource"}
        assert statement["Effect"] == "Allow" and statement["Action"] and statement["Resource"]
        for action in statement["Action"]:
            assert re.fullmatch(r"[a-z0-9-]+:[A-Za-z]+", action), "no wildcard among actions"
        for resource in statement["Resource"]:
            service, region, account = (resource.split(":", 5) + [""] * 5)[2:5]
            assert resource == "*" or re.fullmatch(r"arn:aws:[a-z0-9]+:[^:]*:[^:]*:.+", resource)
            if service not in ("", "s3"):
                assert account == ACCOUNT and region in (REGION, "")


@pytest.mark.parametrize(
    "made",
    [
        policies.caller_policy,
        policies.checks_policy,
        policies.execution_policy,
        policies.trust_policy,
    ],
)
def test_moto_accepts_the_policy(aws_services, made):
    """moto checks IAM's grammar."""
    document = json.dumps(made() if made is policies.trust_policy else made(the_job()))
    iam = aws_services["iam"]
    if made is policies.trust_policy:
        iam.create_role(RoleName="x", AssumeRolePolicyDocument=document)
    else:
        iam.create_policy(PolicyName="x", PolicyDocument=document)


def test_arns_use_the_partition_of_the_role():
    job = the_job(job__role=f"arn:aws-cn:iam::{ACCOUNT}:role/x", job__region="cn-north-1")
    text = json.dumps([policies.caller_policy(job), policies.execution_policy(job)])
    assert "arn:aws:" not in text and f"arn:aws-cn:logs:cn-north-1:{ACCOUNT}:" in text


@pytest.fixture
def enforcing(moto_address, aws_services, monkeypatch):
    """Enforce policies of a single user in moto; yields a function that sets the policy."""
    iam = aws_services["iam"]
    iam.create_user(UserName="me")
    key = iam.create_access_key(UserName="me")["AccessKey"]

    def after(calls: str) -> None:
        address, kind = f"{moto_address}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(address, calls.encode(), kind))

    def may(policy: dict, but: str = "") -> None:
        """Set the actions only: moto ignores resources and conditions of these services."""
        statements = [
            {"Effect": "Allow", "Resource": "*",
             "Action": [action for action in statement["Action"] if action != but] or ["none:None"]}
            for statement in policy["Statement"]
        ]  # fmt: skip
        document = json.dumps({"Version": policy["Version"], "Statement": statements})
        after("inf")
        iam.put_user_policy(UserName="me", PolicyName="caller", PolicyDocument=document)
        after("0")

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    yield may
    after("inf")


COMMANDS = {
    "s3:PutObject": "launch",
    "sagemaker:CreateTrainingJob": "launch",
    "sagemaker:DescribeTrainingJob": "status",
    "logs:DescribeLogStreams": "logs",
    "logs:GetLogEvents": "logs",
    "sagemaker:StopTrainingJob": "stop",
}


@pytest.mark.parametrize("without", ["", *COMMANDS])
def test_enforced_caller_policy(
    enforcing, aws_services, sagemaker_run, monkeypatch, capsys, without
):
    """The policy suffices for every command; without one action, its command is denied."""
    name = "nearlinear-20261122000000"
    monkeypatch.setattr(
        "nearlinear.launch.sagemaker.build_request.timestamped_name", lambda *_: name
    )
    say_something(aws_services["logs"], name)
    policy = policies.caller_policy(the_job())
    enforcing(policy)
    if without not in ("s3:PutObject", "sagemaker:CreateTrainingJob"):
        assert cli.main(["launch", str(sagemaker_run), "--yes"]) == 0
    enforcing(policy, but=without)
    for command in dict.fromkeys(COMMANDS.values()):
        if command == "launch" and not (without and COMMANDS[without] == "launch"):
            continue  # launched above; the name is in use
        capsys.readouterr()
        given = [str(sagemaker_run), "--yes"] if command == "launch" else [name]
        code = cli.main([command, *given])
        said = capsys.readouterr().err
        if without and COMMANDS[without] == command:
            assert code == 2 and "AccessDenied" in said and "nearlinear policies" in said, said
            return
        assert "AccessDenied" not in said
        assert code == (2 if command == "stop" else 0), said  # moto does not support stops
    assert not without


@pytest.mark.parametrize(
    ("role", "output", "words"),
    [
        ("", "s3://b/o", "job.role = ''"),
        ("nearlinear", "s3://b/o", "arn:aws:iam::123456789012:role/nearlinear"),
        (f"arn:aws:iam::{ACCOUNT}:role/x", "", "job.output is empty"),
    ],
)
def test_policies_require_role_and_output(sagemaker_run, capsys, role, output, words):
    settings = [f"--set=job.role={role!r}", f"--set=job.output={output!r}"]
    assert cli.main(["policies", str(sagemaker_run), *settings]) == 2
    assert words in capsys.readouterr().err


def test_policies_command_prints_iam_documents(sagemaker_run, capsys):
    region = f"--set=job.region={REGION}"
    assert cli.main(["policies", str(sagemaker_run), region]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert list(whole) == ["caller", "checks", "execution", "trust"]
    for name, document in whole.items():
        assert cli.main(["policies", str(sagemaker_run), region, f"--{name}"]) == 0
        assert json.loads(capsys.readouterr().out) == document
