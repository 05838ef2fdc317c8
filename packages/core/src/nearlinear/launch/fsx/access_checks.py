"""Check that the file systems of a job exist, are ready, and can be reached from its machines.

These checks call AWS, so a dry run does not include them. Without them, a missing file system, a
different network or a closed port fails the job after minutes of waiting for machines.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from ..sagemaker.aws import create_client, translate_errors
from ..spec import JobInput, JobSpec, Problem
from . import service
from .service import LUSTRE_PORTS, FileSystemInfo

_PORTS_TEXT = "988 and 1018-1023"


def check_file_system_access(job: JobSpec) -> list[Problem]:
    """Return every problem between a job and the FSx file systems among its inputs.

    Needs the IAM actions fsx:DescribeFileSystems, fsx:DescribeDataRepositoryAssociations,
    ec2:DescribeSubnets, ec2:DescribeSecurityGroups and ec2:DescribeNetworkInterfaces.

    Raises:
        AWSError: AWS rejected a call.
    """
    inputs = {name: given for name, given in job.inputs.items() if given.source == "fsx"}
    if not inputs:
        return []
    network = JobNetwork.from_job(job)
    found: list[Problem] = list(_check_network(job, network))
    for name, given in inputs.items():
        field = f"job.inputs.{name}"
        try:
            system = service.describe_file_system(given.fsx, job.region)
        except ConfigError as error:
            cause = str(error).partition(";")[0]
            found.append(Problem(f"{field}.fsx", cause, "nearlinear fsx list names all"))
            continue
        found += _check_state(system, field)
        found += _check_directory(system, given, field)
        found += _check_reachability(system, network, field)
    return found


@dataclass(frozen=True)
class JobNetwork:
    """Subnets and security groups of a job by ID, as EC2 describes them."""

    subnets: dict[str, dict]
    security_groups: dict[str, dict]
    ec2: Any
    """Client for further calls."""

    @classmethod
    def from_job(cls, job: JobSpec) -> JobNetwork:
        """Describe the network of a job; missing subnets and groups are omitted."""
        ec2 = create_client("ec2", job.region)
        with translate_errors("describing the job's network"):
            subnets = _describe(ec2.describe_subnets, "subnet-id", job.subnets)
            groups = _describe(ec2.describe_security_groups, "group-id", job.security_groups)
        return cls(
            {each["SubnetId"]: each for each in subnets["Subnets"]},
            {each["GroupId"]: each for each in groups["SecurityGroups"]},
            ec2,
        )

    def cidr_blocks(self) -> list[str]:
        """Return the address blocks of the subnets."""
        return [each["CidrBlock"] for each in self.subnets.values()]


def _describe(call: Callable[..., dict], name: str, ids: list[str]) -> dict:
    """Describe by filter, which omits missing IDs instead of raising for the first."""
    return call(Filters=[{"Name": name, "Values": ids or ["none"]}])


def _check_network(job: JobSpec, network: JobNetwork) -> Iterator[Problem]:
    for given, existing, field, command in (
        (job.subnets, network.subnets, "job.subnets", "describe-subnets"),
        (job.security_groups, network.security_groups, "job.security_groups",
         "describe-security-groups"),
    ):  # fmt: skip
        if not given:
            yield Problem(field, "is empty, but FSx is reached through a VPC", "name one")
        for name in given:
            if name not in existing:
                cause = f"{name!r} does not exist in this account and region"
                yield Problem(field, cause, f"aws ec2 {command} names all")


def _check_state(system: FileSystemInfo, field: str) -> Iterator[Problem]:
    if system.lifecycle != "AVAILABLE":
        pending = system.lifecycle in service.PENDING_STATES
        action = "wait for it" if pending else "create another"
        cause = f"{system.id} is {system.lifecycle}{f' ({system.reason})' if system.reason else ''}"
        yield Problem(f"{field}.fsx", cause, f"{action}: nearlinear fsx describe {system.id}")


def _check_directory(system: FileSystemInfo, given: JobInput, field: str) -> Iterator[Problem]:
    parts = given.directory.strip("/").split("/")
    if parts[0] != system.mount_name:
        cause = f"{given.directory!r} does not begin with the mount name of {system.id}"
        remedy = f"write {system.job_directory('/'.join(parts))!r}"
        yield Problem(f"{field}.directory", cause, remedy)
        return
    folder = "/" + "/".join(parts[1:])
    for link in system.links:
        within = f"{folder}/".startswith(f"{link.directory.rstrip('/')}/")
        if within and link.lifecycle != "AVAILABLE":
            reason = f" ({link.reason})" if link.reason else ""
            cause = f"its link to {link.s3} is {link.lifecycle}{reason}"
            remedy = f"wait for it: nearlinear fsx describe {system.id}"
            yield Problem(f"{field}.directory", cause, remedy)


def _check_reachability(
    system: FileSystemInfo, network: JobNetwork, field: str
) -> Iterator[Problem]:
    for name, subnet in network.subnets.items():
        if subnet["VpcId"] != system.vpc:
            cause = f"{name} is in {subnet['VpcId']}, but {system.id} is in {system.vpc}"
            remedy = f"use a subnet of {system.vpc}, such as {system.subnets[0]}"
            yield Problem(field, cause, remedy)
            return
    if not network.security_groups or not network.subnets:
        return
    system_groups, system_blocks = _describe_system_network(system, network.ec2)
    job_groups = network.security_groups
    job_names, system_names = ", ".join(job_groups), ", ".join(system_groups)
    for side, groups, peers, blocks, other in (
        (f"the security groups of {system.id} ({system_names})", system_groups, job_groups,
         network.cidr_blocks(), job_names),
        (f"the security groups of the job ({job_names})", job_groups, system_groups,
         system_blocks, system_names),
    ):  # fmt: skip
        for direction, kind, word in (
            ("IpPermissions", "inbound", "from"),
            ("IpPermissionsEgress", "outbound", "to"),
        ):
            rules = [rule for group in groups.values() for rule in group.get(direction, [])]
            if not all(_allows(rules, ports, peers, blocks) for ports in LUSTRE_PORTS):
                cause = f"{side} do not allow TCP {_PORTS_TEXT} {word} {other}"
                peer = other.split(",")[0]
                remedy = f"add an {kind} rule for TCP {_PORTS_TEXT} {word} {peer}"
                yield Problem(field, cause, remedy)


def _describe_system_network(system: FileSystemInfo, ec2: Any) -> tuple[dict[str, dict], list[str]]:
    """Return the security groups of a file system's interfaces, and its subnets' addresses."""
    with translate_errors(f"describing the network of {system.id}"):
        interfaces = _describe(
            ec2.describe_network_interfaces, "network-interface-id", list(system.interfaces)
        )["NetworkInterfaces"]
        ids = sorted({group["GroupId"] for each in interfaces for group in each["Groups"]})
        groups = _describe(ec2.describe_security_groups, "group-id", ids)["SecurityGroups"]
        subnets = _describe(ec2.describe_subnets, "subnet-id", list(system.subnets))["Subnets"]
    return {each["GroupId"]: each for each in groups}, [each["CidrBlock"] for each in subnets]


def _allows(
    rules: list[dict], ports: tuple[int, int], peers: Iterable[str], blocks: list[str]
) -> bool:
    """Return True if the rules allow TCP ``ports`` for a group of ``peers`` or all ``blocks``.

    Prefix lists are not resolved, and count as allowing all addresses.
    """
    matching = [rule for rule in rules if _covers_ports(rule, ports)]
    allowed = {pair["GroupId"] for rule in matching for pair in rule.get("UserIdGroupPairs", [])}
    if allowed & set(peers) or any(rule.get("PrefixListIds") for rule in matching):
        return True
    networks = [
        ipaddress.IPv4Network(each["CidrIp"]) for rule in matching for each in rule["IpRanges"]
    ]
    return bool(blocks) and all(
        any(ipaddress.IPv4Network(block).subnet_of(network) for network in networks)
        for block in blocks
    )


def _covers_ports(rule: dict, ports: tuple[int, int]) -> bool:
    if rule["IpProtocol"] == "-1":
        return True
    first, last = rule.get("FromPort", 0), rule.get("ToPort", 65_535)
    return rule["IpProtocol"] in ("tcp", "6") and first <= ports[0] and ports[1] <= last
