"""Verbs of ``nearlinear fsx`` that call AWS."""

from __future__ import annotations

import argparse
import json
import sys

from ...errors import ConfigError
from .. import spec
from ..spec import raise_if_invalid
from . import service
from .access_checks import check_file_system_access
from .service import S3_EVENTS, FileSystemRequest, LinkRequest


def create(options: argparse.Namespace) -> int:
    """Create a file system."""
    request = FileSystemRequest(
        subnet=options.subnet,
        security_groups=tuple(options.groups),
        deployment=options.deployment,
        capacity_gib=options.capacity,
        mb_per_tib=options.mb_per_tib,
        lz4=not options.no_lz4,
        version=options.version,
        name=options.name,
    )
    if options.dry_run:
        return _print_request(request)
    created = service.create_file_system(request, options.region)
    print(f"creating {created}: {request.capacity_gib} GiB, {request.throughput:,.0f} MB/s")
    return _wait(created, options)


def link(options: argparse.Namespace) -> int:
    """Link a folder of a file system to S3."""
    exports = S3_EVENTS if options.export else ()
    request = LinkRequest(options.id, options.s3, options.directory, exports=exports)
    if options.dry_run:
        return _print_request(request)
    service.create_link(request, options.region)
    print(f"linking {options.directory} of {options.id} to {options.s3}")
    return _wait(options.id, options)


def describe(options: argparse.Namespace) -> int:
    """Print the state of a file system."""
    system = service.describe_file_system(options.id, options.region)
    print("\n".join(format_file_system(system)))
    return 0


def list_all(options: argparse.Namespace) -> int:
    """Print all file systems."""
    for each in service.list_file_systems(options.region):
        print(f"{each.id}  {each.lifecycle}  {each.deployment}  {each.capacity_gib} GiB")
    return 0


def delete(options: argparse.Namespace) -> int:
    """Delete a file system after confirmation."""
    system = service.describe_file_system(options.id, options.region)
    if options.dry_run:
        print(json.dumps({"FileSystemId": system.id}, indent=2))
        return 0
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"deleting {system.id} destroys its data and needs a confirmation; pass --yes"
            )
        print(f"{system.id}: {system.capacity_gib} GiB; data that is not in S3 will be lost.")
        if input(f"Type {system.id} to delete it: ").strip() != system.id:
            print("nothing was deleted")
            return 1
    service.delete_file_system(system.id, options.region)
    print(f"deleting {system.id}")
    return 0


def check(options: argparse.Namespace) -> int:
    """Check that a job can reach its file systems."""
    job, _ = spec.load(options.config, options.settings)
    raise_if_invalid(check_file_system_access(job))
    systems = [given.fsx for given in job.inputs.values() if given.source == "fsx"]
    print(f"{', '.join(systems)}: available and reachable" if systems else "no FSx input")
    return 0


def format_file_system(system: service.FileSystemInfo) -> list[str]:
    """Format a file system in a few lines, with the next commands."""
    lines = [
        f"{system.id}: {system.lifecycle}{f' ({system.reason})' if system.reason else ''}",
        f"{system.deployment}, Lustre {system.version or '2.10'}, {system.capacity_gib} GiB at "
        f"{system.throughput_per_tib} MB/s per TiB: {system.throughput:,.0f} MB/s",
        f"mount name: {system.mount_name or 'not known yet'}",
        f"DNS name: {system.dns_name}",
        f"network: {', '.join(system.subnets)} in {system.vpc}",
    ]
    for each in system.links:
        reason = f" ({each.reason})" if each.reason else ""
        lines.append(f"link: {each.directory} mirrors {each.s3}: {each.lifecycle}{reason}")
    if system.mount_name:
        lines += ["", "on a machine in its VPC:", f"  {system.mount_command()}", "",
                  "in a training config:", *system.input_toml().splitlines()]  # fmt: skip
    return lines


def _print_request(request: FileSystemRequest | LinkRequest) -> int:
    raise_if_invalid(request.find_problems(), "the request")
    print(json.dumps(request.to_request(), indent=2))
    return 0


def _wait(file_system: str, options: argparse.Namespace) -> int:
    if options.no_wait:
        print(f"check its state: nearlinear fsx describe {file_system}")
        return 0
    system = service.wait_until_available(
        file_system, options.region, report=lambda line: print(line, flush=True)
    )
    print("\n".join(format_file_system(system)))
    return 0
