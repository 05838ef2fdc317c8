"""File systems made, linked, checked and deleted on a real server that speaks AWS's protocols.

The server is moto's. Its FSx has no states, no mount names, no network cards and no links to S3:
those are added by `ci.aws.fsx`, in the server, so that requests and answers still pass through
boto3 and HTTP.
"""

import copy
import json

import pytest

from nearlinear import cli
from nearlinear.errors import ConfigError, NearlinearError
from nearlinear.launch import spec
from nearlinear.launch.fsx import check, service, wish
from nearlinear.launch.sagemaker import aws as sessions
from nearlinear.launch.sagemaker import policies
from tests.core.test_job_faults import RUN

boto3 = pytest.importorskip("boto3")
pytest.importorskip("moto.server")
aws = pytest.importorskip("ci.aws")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with aws.account(tmp_path_factory.mktemp("account")) as found:
        yield found


@pytest.fixture
def account(server, monkeypatch):
    monkeypatch.setattr(service, "PAUSE", 0.0)
    return aws.furnish(server.endpoint, server.lustre)


@pytest.fixture
def system(account):
    """An available file system with a link."""
    asked = wish.FileSystem(account.subnet, (account.security_group,))
    made = service.create(asked)
    service.wait(made, say=lambda line: None)
    service.link(wish.Link(made, f"s3://{account.bucket}/tokens/", "/tokens"))
    return service.wait(made, say=lambda line: None)


def create(account, *more: str) -> list[str]:
    return ["fsx", "create", "--subnet", account.subnet,
            "--security-group", account.security_group, *more]  # fmt: skip


def test_from_nothing_to_a_jobs_input(account, capsys):
    assert cli.main(create(account, "--capacity", "2400")) == 0
    (made,) = service.every()
    said = capsys.readouterr().out
    assert f"creating {made.id}: 2400 GiB, 480 MB/s" in said
    assert said.index("CREATING after") < said.index("AVAILABLE after")
    s3 = f"s3://{account.bucket}/tokens"
    assert cli.main(["fsx", "link", made.id, s3, "/tokens"]) == 0
    assert f"link: /tokens shows {s3}: AVAILABLE" in capsys.readouterr().out
    assert cli.main(["fsx", "describe", made.id]) == 0
    said = capsys.readouterr().out
    found = service.describe(made.id)
    assert f"mount name: {found.mount_name}" in said
    mount = f"mount -t lustre -o relatime,flock {found.dns_name}@tcp:/{found.mount_name} /fsx"
    assert mount in said
    # The lines that are shown are those that a job takes.
    import tomllib

    lines = said[said.index("[job.inputs.train]") :]
    job, _ = spec.load({"job": tomllib.loads(lines)["job"]})
    assert job.inputs["train"].directory == f"/{found.mount_name}/tokens"
    assert cli.main(["fsx", "list"]) == 0
    assert made.id in capsys.readouterr().out


def test_dry_runs_touch_nothing(account, system, capsys):
    assert cli.main(create(account, "--dry-run")) == 0
    assert json.loads(capsys.readouterr().out)["StorageCapacity"] == 1200
    line = ["fsx", "link", system.id, "s3://bucket/more", "/more", "--export", "--dry-run"]
    assert cli.main(line) == 0
    assert json.loads(capsys.readouterr().out)["FileSystemPath"] == "/more"
    assert cli.main(["fsx", "delete", system.id, "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out) == {"FileSystemId": system.id}
    assert len(service.every()) == 1 and len(service.describe(system.id).associations) == 1


def test_a_faulty_wish_is_not_sent(account, capsys):
    assert cli.main(create(account, "--capacity", "3000")) == 2
    said = capsys.readouterr().err
    assert "the request has a fault; nothing was sent" in said and "such as 4800" in said
    assert service.every() == []


def test_deleting_needs_a_yes(system, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert cli.main(["fsx", "delete", system.id]) == 2
    assert "--yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "yes")
    assert cli.main(["fsx", "delete", system.id]) == 1
    assert "nothing was deleted" in capsys.readouterr().out and len(service.every()) == 1
    assert cli.main(["fsx", "delete", system.id, "--yes"]) == 0
    assert service.every() == []


def test_one_that_is_not_there_is_named(account, capsys):
    assert cli.main(["fsx", "describe", "fs-0123456789abcdef0"]) == 2
    said = capsys.readouterr().err
    assert "fs-0123456789abcdef0" in said and "nearlinear fsx list" in said


def test_a_scratch_1_is_not_linked(account):
    made = service.create(wish.FileSystem(account.subnet, deployment="SCRATCH_1"))
    with pytest.raises(ConfigError, match="make a SCRATCH_2"):
        service.link(wish.Link(made, "s3://bucket/tokens", "/tokens"))


def test_waiting_ends_where_it_fails(account, monkeypatch):
    made = service.create(wish.FileSystem(account.subnet))
    plain = service.described

    def failing(found, associations=()):
        answer = found | {"Lifecycle": "FAILED", "FailureDetails": {"Message": "no capacity"}}
        return plain(answer, associations)

    monkeypatch.setattr(service, "described", failing)
    with pytest.raises(NearlinearError, match="FAILED: no capacity"):
        service.wait(made, say=lambda line: None)


# Before a job.


@pytest.fixture
def run(account, system):
    """A config whose job reads that file system, from its subnet."""
    data = copy.deepcopy(RUN)
    data["job"] |= {
        "subnets": [account.subnet],
        "security_groups": [account.security_group],
        "inputs": {"train": {"fsx": system.id, "directory": system.directory("tokens/a")}},
    }
    return data


def faults(run) -> list:
    return check.check(spec.load(run)[0])


def test_a_job_within_reach_has_no_fault(run, tmp_path, capsys):
    assert faults(run) == []
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    assert cli.main(["fsx", "check", str(path)]) == 0
    assert "within the job's reach" in capsys.readouterr().out


def test_the_callers_policy_allows_what_is_asked_and_no_more(run, monkeypatch):
    job, asked, session = spec.load(run)[0], set(), sessions.session

    def listening(region: str = ""):
        found = session(region)
        found.events.register(
            "provide-client-params",
            lambda model, **_: asked.add(f"{model.service_model.signing_name}:{model.name}"),
        )
        return found

    monkeypatch.setattr(sessions, "session", listening)
    assert check.check(job) == []
    looks = {it["Sid"]: it["Action"] for it in policies.caller(job)["Statement"]}
    assert asked == {*looks["FileSystems"], *looks["Reach"]}


def test_a_job_without_such_an_input_asks_nobody(run, monkeypatch):
    run["job"]["inputs"] = {"train": {"s3": "s3://bucket/tokens"}}
    monkeypatch.setattr(check, "client", None)
    assert faults(run) == []


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
def test_what_is_out_of_reach_is_named_with_its_fix(account, run, system, case, tmp_path, capsys):
    fix = case(account, run, system)
    (fault,) = faults(run)
    assert fix in fault.fix
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    assert cli.main(["fsx", "check", str(path)]) == 2
    assert fix in capsys.readouterr().err


def test_one_that_is_not_ready_is_waited_for(account, run):
    made = service.create(wish.FileSystem(account.subnet, (account.security_group,)))
    name = service.describe(made).mount_name  # its first look: still CREATING at the second
    again = service.create(wish.FileSystem(account.subnet, (account.security_group,)))
    run["job"]["inputs"]["train"] = {"fsx": again, "directory": f"/{name}/a"}
    found = faults(run)
    assert "CREATING" in found[0].what and "wait for it" in found[0].fix


def test_a_link_that_is_not_ready_is_named(account, run, system):
    service.link(wish.Link(system.id, f"s3://{account.bucket}/more", "/more"))
    run["job"]["inputs"]["train"]["directory"] = system.directory("more")
    (fault,) = faults(run)
    assert "is CREATING" in fault.what and f"s3://{account.bucket}/more" in fault.what
    assert faults(run) == []  # at the next look it is there


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


def test_closed_ports_are_named_on_the_side_that_closes_them(account, run, system):
    run["job"]["security_groups"] = [group(account, "closed")]
    first, second = faults(run)
    assert f"{system.id}'s security groups ({account.security_group})" in first.what
    assert "inbound" in first.fix and f"from {run['job']['security_groups'][0]}" in first.fix
    assert "the job's security groups" in second.what and "inbound" in second.fix


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
def test_ports_and_addresses_are_compared(account, run, ingress, closed):
    """The job is in the file system's group, which opens itself, and in one with these rules."""
    mine = group(account, "mine", ingress)
    run["job"]["security_groups"] = [mine]
    ec2 = boto3.client("ec2")
    ec2.authorize_security_group_ingress(
        GroupId=account.security_group, IpPermissions=aws.lustre_rules(mine)
    )
    assert bool(faults(run)) == closed


def test_outbound_rules_count_too(account, run):
    run["job"]["security_groups"] = [account.security_group, group(account, "more")]
    assert faults(run) == []  # one of the two is enough
    only = group(account, "silent", [aws.lustre_rules(account.security_group)], egress=[])
    ec2 = boto3.client("ec2")
    ec2.authorize_security_group_ingress(
        GroupId=account.security_group, IpPermissions=aws.lustre_rules(only)
    )
    run["job"]["security_groups"] = [only]
    (fault,) = faults(run)
    assert "outbound" in fault.fix and "to " in fault.fix
