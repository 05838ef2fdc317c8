"""File systems created, linked, checked and deleted on moto, a local server with AWS's protocols.

moto's FSx has no states, mount names, network interfaces or links to S3. `ci.emulation.aws` adds
them in the server, so that requests and responses still pass through boto3 and HTTP.
"""

import copy
import json

import pytest

from nearlinear import cli
from nearlinear.errors import ConfigError, NearlinearError
from nearlinear.launch import spec
from nearlinear.launch.fsx import access_checks, service
from nearlinear.launch.fsx.access_checks import check_file_system_access
from nearlinear.launch.fsx.service import FileSystemRequest, LinkRequest
from nearlinear.launch.sagemaker import aws as sessions
from nearlinear.launch.sagemaker import policies
from tests.core.launch.test_validation import RUN

boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto.server")
aws = pytest.importorskip("ci.emulation.aws")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with aws.account(tmp_path_factory.mktemp("account")) as found:
        yield found


@pytest.fixture
def account(server, monkeypatch):
    monkeypatch.setattr(service, "POLL_INTERVAL", 0.0)
    return aws.reset_account(server.endpoint, server.lustre)


@pytest.fixture
def system(account):
    """Create an available file system with a link."""
    asked = FileSystemRequest(account.subnet, (account.security_group,))
    made = service.create_file_system(asked)
    service.wait_until_available(made, report=lambda line: None)
    service.create_link(LinkRequest(made, f"s3://{account.bucket}/tokens/", "/tokens"))
    return service.wait_until_available(made, report=lambda line: None)


def create(account, *more: str) -> list[str]:
    return ["fsx", "create", "--subnet", account.subnet,
            "--security-group", account.security_group, *more]  # fmt: skip


def test_create_link_and_describe_give_a_job_input(account, capsys):
    assert cli.main(create(account, "--capacity", "2400")) == 0
    (made,) = service.list_file_systems()
    said = capsys.readouterr().out
    assert f"creating {made.id}: 2400 GiB, 480 MB/s" in said
    assert said.index("CREATING after") < said.index("AVAILABLE after")
    s3 = f"s3://{account.bucket}/tokens"
    assert cli.main(["fsx", "link", made.id, s3, "/tokens"]) == 0
    assert f"link: /tokens mirrors {s3}: AVAILABLE" in capsys.readouterr().out
    assert cli.main(["fsx", "describe", made.id]) == 0
    said = capsys.readouterr().out
    found = service.describe_file_system(made.id)
    assert f"mount name: {found.mount_name}" in said
    mount = f"mount -t lustre -o relatime,flock {found.dns_name}@tcp:/{found.mount_name} /fsx"
    assert mount in said
    # The printed lines are valid in a config.
    import tomllib

    lines = said[said.index("[job.inputs.train]") :]
    job, _ = spec.load({"job": tomllib.loads(lines)["job"]})
    assert job.inputs["train"].directory == f"/{found.mount_name}/tokens"
    assert cli.main(["fsx", "list"]) == 0
    assert made.id in capsys.readouterr().out


def test_dry_runs_change_nothing(account, system, capsys):
    assert cli.main(create(account, "--dry-run")) == 0
    assert json.loads(capsys.readouterr().out)["StorageCapacity"] == 1200
    line = ["fsx", "link", system.id, "s3://bucket/more", "/more", "--export", "--dry-run"]
    assert cli.main(line) == 0
    assert json.loads(capsys.readouterr().out)["FileSystemPath"] == "/more"
    assert cli.main(["fsx", "delete", system.id, "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out) == {"FileSystemId": system.id}
    assert (
        len(service.list_file_systems()) == 1
        and len(service.describe_file_system(system.id).links) == 1
    )


def test_invalid_request_is_not_sent(account, capsys):
    assert cli.main(create(account, "--capacity", "3000")) == 2
    said = capsys.readouterr().err
    assert "the request has a problem; nothing was sent" in said and "such as 4800" in said
    assert service.list_file_systems() == []


def test_delete_requires_confirmation(system, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert cli.main(["fsx", "delete", system.id]) == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "yes")
    assert cli.main(["fsx", "delete", system.id]) == 1
    assert (
        "nothing was deleted" in capsys.readouterr().out and len(service.list_file_systems()) == 1
    )
    assert cli.main(["fsx", "delete", system.id, "--yes"]) == 0
    assert service.list_file_systems() == []


def test_unknown_file_system_is_reported(account, capsys):
    assert cli.main(["fsx", "describe", "fs-0123456789abcdef0"]) == 2
    said = capsys.readouterr().err
    assert "fs-0123456789abcdef0" in said and "nearlinear fsx list" in said


def test_scratch_1_cannot_be_linked(account):
    made = service.create_file_system(FileSystemRequest(account.subnet, deployment="SCRATCH_1"))
    with pytest.raises(ConfigError, match="create a SCRATCH_2"):
        service.create_link(LinkRequest(made, "s3://bucket/tokens", "/tokens"))


def test_wait_raises_for_a_failed_file_system(account, monkeypatch):
    made = service.create_file_system(FileSystemRequest(account.subnet))
    plain = service.parse_description

    def failing(description, links=()):
        answer = description | {"Lifecycle": "FAILED", "FailureDetails": {"Message": "no capacity"}}
        return plain(answer, links)

    monkeypatch.setattr(service, "parse_description", failing)
    with pytest.raises(NearlinearError, match="FAILED: no capacity"):
        service.wait_until_available(made, report=lambda line: None)


# Access checks of a job.


@pytest.fixture
def run(account, system):
    """Return a config whose job reads the file system, from the same subnet."""
    data = copy.deepcopy(RUN)
    data["job"] |= {
        "subnets": [account.subnet],
        "security_groups": [account.security_group],
        "inputs": {"train": {"fsx": system.id, "directory": system.job_directory("tokens/a")}},
    }
    return data


def find_problems(run) -> list:
    return check_file_system_access(spec.load(run)[0])


def test_reachable_file_system_has_no_problems(run, tmp_path, capsys):
    assert find_problems(run) == []
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    assert cli.main(["fsx", "check", str(path)]) == 0
    assert "available and reachable" in capsys.readouterr().out


def test_caller_policy_allows_exactly_the_access_checks(run, monkeypatch):
    job, asked, session = spec.load(run)[0], set(), sessions.create_session

    def listening(region: str = ""):
        found = session(region)
        found.events.register(
            "provide-client-params",
            lambda model, **_: asked.add(f"{model.service_model.signing_name}:{model.name}"),
        )
        return found

    monkeypatch.setattr(sessions, "create_session", listening)
    assert check_file_system_access(job) == []
    looks = {it["Sid"]: it["Action"] for it in policies.caller_policy(job)["Statement"]}
    assert asked == {*looks["FileSystems"], *looks["Reach"]}


def test_job_without_fsx_input_makes_no_aws_call(run, monkeypatch):
    run["job"]["inputs"] = {"train": {"s3": "s3://bucket/tokens"}}
    monkeypatch.setattr(access_checks, "create_client", None)
    assert find_problems(run) == []


def other_vpc(account, run, system):
    ec2 = boto3.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.1.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.1.1.0/24")["Subnet"]["SubnetId"]
    run["job"]["subnets"] = [subnet]
    return f"such as {account.subnet}"


def no_mount_name(account, run, system):
    run["job"]["inputs"]["train"]["directory"] = "/tokens/a"
    return f"write '/{system.mount_name}/tokens/a'"


def gone(account, run, system):
    run["job"]["inputs"]["train"]["fsx"] = "fs-0123456789abcdef0"
    return "nearlinear fsx list"


def no_such_subnet(account, run, system):
    run["job"]["subnets"] = ["subnet-0123456789abcdef0"]
    return "describe-subnets"


def no_such_group(account, run, system):
    run["job"]["security_groups"] = ["sg-0123456789abcdef0"]
    return "describe-security-groups"


def no_network(account, run, system):
    run["job"]["security_groups"] = []
    return "name one"


CASES = [other_vpc, no_mount_name, gone, no_such_subnet, no_such_group, no_network]


@pytest.mark.parametrize("case", CASES)
def test_unreachable_file_system_names_the_remedy(account, run, system, case, tmp_path, capsys):
    fix = case(account, run, system)
    (problem,) = find_problems(run)
    assert fix in problem.remedy
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    assert cli.main(["fsx", "check", str(path)]) == 2
    assert fix in capsys.readouterr().err


def test_pending_file_system_is_reported(account, run):
    made = service.create_file_system(FileSystemRequest(account.subnet, (account.security_group,)))
    name = service.describe_file_system(
        made
    ).mount_name  # the first call: the state is still CREATING at the second
    again = service.create_file_system(FileSystemRequest(account.subnet, (account.security_group,)))
    run["job"]["inputs"]["train"] = {"fsx": again, "directory": f"/{name}/a"}
    found = find_problems(run)
    assert "CREATING" in found[0].cause and "wait for it" in found[0].remedy


def test_pending_link_is_reported(account, run, system):
    service.create_link(LinkRequest(system.id, f"s3://{account.bucket}/more", "/more"))
    run["job"]["inputs"]["train"]["directory"] = system.job_directory("more")
    (problem,) = find_problems(run)
    assert "is CREATING" in problem.cause and f"s3://{account.bucket}/more" in problem.cause
    assert find_problems(run) == []  # available at the next call


def group(account, name: str, ingress=(), egress=None) -> str:
    ec2 = boto3.client("ec2")
    made = ec2.create_security_group(GroupName=name, Description=name, VpcId=account.vpc)["GroupId"]
    for rules in ingress:
        ec2.authorize_security_group_ingress(GroupId=made, IpPermissions=rules)
    if egress is not None:
        everything = ec2.describe_security_groups(GroupIds=[made])["SecurityGroups"][0]
        ec2.revoke_security_group_egress(
            GroupId=made, IpPermissions=everything["IpPermissionsEgress"]
        )
        for rules in egress:
            ec2.authorize_security_group_egress(GroupId=made, IpPermissions=rules)
    return made


def range_rule(first: int, last: int, block: str) -> list[dict]:
    ports = {"IpProtocol": "tcp", "FromPort": first, "ToPort": last}
    return [ports | {"IpRanges": [{"CidrIp": block}]}]


def test_closed_ports_name_the_side_that_blocks_them(account, run, system):
    run["job"]["security_groups"] = [group(account, "closed")]
    first, second = find_problems(run)
    assert f"the security groups of {system.id} ({account.security_group})" in first.cause
    assert "inbound" in first.remedy and f"from {run['job']['security_groups'][0]}" in first.remedy
    assert "the security groups of the job" in second.cause and "inbound" in second.remedy


@pytest.mark.parametrize(
    ("ingress", "closed"),
    [
        ([range_rule(988, 988, "10.0.0.0/16"), range_rule(1018, 1023, "10.0.0.0/16")], False),
        ([range_rule(0, 65_535, "0.0.0.0/0")], False),
        ([range_rule(988, 988, "10.0.0.0/16")], True),
        ([range_rule(988, 988, "10.0.0.0/16"), range_rule(1019, 1023, "10.0.0.0/16")], True),
        ([range_rule(988, 1023, "10.0.1.0/25")], True),  # half of the subnet
        ([[{"IpProtocol": "udp", "FromPort": 988, "ToPort": 1023,
            "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]], True),
    ],
)  # fmt: skip
def test_inbound_rules_must_cover_ports_and_subnets(account, run, ingress, closed):
    """The job is in a group with these inbound rules, which the file system's group allows."""
    mine = group(account, "mine", ingress)
    run["job"]["security_groups"] = [mine]
    ec2 = boto3.client("ec2")
    ec2.authorize_security_group_ingress(
        GroupId=account.security_group, IpPermissions=aws.lustre_rules(mine)
    )
    assert bool(find_problems(run)) == closed


def test_outbound_rules_are_checked(account, run):
    run["job"]["security_groups"] = [account.security_group, group(account, "more")]
    assert find_problems(run) == []  # one of two groups is sufficient
    only = group(account, "silent", [aws.lustre_rules(account.security_group)], egress=[])
    ec2 = boto3.client("ec2")
    ec2.authorize_security_group_ingress(
        GroupId=account.security_group, IpPermissions=aws.lustre_rules(only)
    )
    run["job"]["security_groups"] = [only]
    (problem,) = find_problems(run)
    assert "outbound" in problem.remedy and "to " in problem.remedy
