"""Whether the file systems that a job reads are there, ready, and within its reach.

Asks AWS, so it is no part of a dry run: a file system that is missing, of another network or behind
a closed port lets a job fail after minutes of waiting for machines.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import ConfigError
from ..faults import Fault
from ..sagemaker.aws import client, told
from ..spec import Input, JobSpec
from . import service, wish
from .service import Described

SHOWN = "988 and 1018-1023"


def check(job: JobSpec) -> list[Fault]:
    """Every fault between a job and the FSx file systems among its inputs. Raises ServiceRefused.

    Needs fsx:DescribeFileSystems, fsx:DescribeDataRepositoryAssociations and ec2:Describe of
    Subnets, SecurityGroups and NetworkInterfaces.
    """
    inputs = {name: given for name, given in job.inputs.items() if given.source == "fsx"}
    if not inputs:
        return []
    network = Network.of(job)
    found: list[Fault] = list(_subnets(job, network))
    for name, given in inputs.items():
        where = f"job.inputs.{name}"
        try:
            system = service.describe(given.fsx, job.region)
        except ConfigError as error:
            what = str(error).partition(";")[0]
            found.append(Fault(f"{where}.fsx", what, "nearlinear fsx list names all"))
            continue
        found += _state(system, where)
        found += _directory(system, given, where)
        found += _reach(system, network, where)
    return found


@dataclass(frozen=True)
class Network:
    """Where a job's machines stand, as EC2 describes it."""

    subnets: dict[str, dict]
    groups: dict[str, dict]
    ec2: object
    """client that told, to ask more"""

    @classmethod
    def of(cls, job: JobSpec) -> Network:
        """Of a job; what is not there is left out."""
        ec2 = client("ec2", job.region)
        with told("describing the job's network"):
            subnets = _described(ec2.describe_subnets, "subnet-id", job.subnets)["Subnets"]
            groups = _described(ec2.describe_security_groups, "group-id", job.security_groups)
        return cls(
            {each["SubnetId"]: each for each in subnets},
            {each["GroupId"]: each for each in groups["SecurityGroups"]},
            ec2,
        )

    def blocks(self) -> list[str]:
        """Addresses of its subnets."""
        return [each["CidrBlock"] for each in self.subnets.values()]


def _described(call, name: str, ids: list[str]) -> dict:
    """By filter: of ids that are not there, nothing, not an error about the first."""
    return call(Filters=[{"Name": name, "Values": ids or ["none"]}])


def _subnets(job: JobSpec, network: Network) -> Iterator[Fault]:
    for asked, there, where, fix in (
        (job.subnets, network.subnets, "job.subnets", "aws ec2 describe-subnets names all"),
        (job.security_groups, network.groups, "job.security_groups",
         "aws ec2 describe-security-groups names all"),
    ):  # fmt: skip
        if not asked:
            yield Fault(where, "is empty, and FSx is reached through a VPC", "name one")
        for name in asked:
            if name not in there:
                yield Fault(where, f"there is no {name!r} in this account and region", fix)


def _state(system: Described, where: str) -> Iterator[Fault]:
    if system.lifecycle != "AVAILABLE":
        fix = "wait for it" if system.lifecycle in service.PENDING else "make another"
        what = f"{system.id} is {system.lifecycle}{f' ({system.reason})' if system.reason else ''}"
        yield Fault(f"{where}.fsx", what, f"{fix}: nearlinear fsx describe {system.id}")


def _directory(system: Described, given: Input, where: str) -> Iterator[Fault]:
    parts = given.directory.strip("/").split("/")
    if parts[0] != system.mount_name:
        what = f"{given.directory!r} does not begin with {system.id}'s mount name"
        inside = "/".join(parts)
        yield Fault(f"{where}.directory", what, f"write {system.directory(inside)!r}")
        return
    folder = "/" + "/".join(parts[1:])
    for link in system.associations:
        within = f"{folder}/".startswith(f"{link.directory.rstrip('/')}/")
        if within and link.lifecycle != "AVAILABLE":
            what = f"its link to {link.s3} is {link.lifecycle}"
            why = f" ({link.reason})" if link.reason else ""
            fix = f"wait for it: nearlinear fsx describe {system.id}"
            yield Fault(f"{where}.directory", what + why, fix)


def _reach(system: Described, network: Network, where: str) -> Iterator[Fault]:
    for name, subnet in network.subnets.items():
        if subnet["VpcId"] != system.vpc:
            what = f"{name} is in {subnet['VpcId']}, {system.id} in {system.vpc}"
            yield Fault(where, what, f"take a subnet of {system.vpc}, such as {system.subnets[0]}")
            return
    if not network.groups or not network.subnets:
        return
    theirs, blocks = _of_system(system, network.ec2)
    ours = network.groups
    job, there = ", ".join(ours), ", ".join(theirs)
    for side, groups, peers, addresses, other in (
        (f"{system.id}'s security groups ({there})", theirs, ours, network.blocks(), job),
        (f"the job's security groups ({job})", ours, theirs, blocks, there),
    ):
        for direction, words in (("IpPermissions", "from"), ("IpPermissionsEgress", "to")):
            rules = [rule for group in groups.values() for rule in group.get(direction, [])]
            if not all(_open(rules, ports, set(peers), addresses) for ports in wish.PORTS):
                way = "inbound" if words == "from" else "outbound"
                what = f"{side} let no TCP {SHOWN} through {words} {other}"
                fix = f"add an {way} rule for TCP {SHOWN} {words} {other.split(',')[0]}"
                yield Fault(where, what, fix)


def _of_system(system: Described, ec2) -> tuple[dict[str, dict], list[str]]:
    """Security groups of a file system's network cards, and the addresses of its subnet."""
    with told(f"describing {system.id}'s network"):
        cards = _described(
            ec2.describe_network_interfaces, "network-interface-id", list(system.interfaces)
        )["NetworkInterfaces"]
        ids = sorted({group["GroupId"] for card in cards for group in card["Groups"]})
        groups = _described(ec2.describe_security_groups, "group-id", ids)["SecurityGroups"]
        subnets = _described(ec2.describe_subnets, "subnet-id", list(system.subnets))["Subnets"]
    return {each["GroupId"]: each for each in groups}, [each["CidrBlock"] for each in subnets]


def _open(rules: list[dict], ports: tuple[int, int], peers: set[str], blocks: list[str]) -> bool:
    """Whether rules together let TCP ``ports`` through from ``peers``, or from all of ``blocks``.

    A prefix list cannot be looked into here, and counts as letting through.
    """
    fitting = [rule for rule in rules if _covers(rule, ports)]
    named = {pair["GroupId"] for rule in fitting for pair in rule.get("UserIdGroupPairs", [])}
    if named & peers or any(rule.get("PrefixListIds") for rule in fitting):
        return True
    nets = [ipaddress.ip_network(each["CidrIp"]) for rule in fitting for each in rule["IpRanges"]]
    return bool(blocks) and all(
        any(ipaddress.ip_network(block).subnet_of(net) for net in nets) for block in blocks
    )


def _covers(rule: dict, ports: tuple[int, int]) -> bool:
    if rule["IpProtocol"] == "-1":
        return True
    least, most = rule.get("FromPort", 0), rule.get("ToPort", 65_535)
    return rule["IpProtocol"] in ("tcp", "6") and least <= ports[0] and ports[1] <= most
