"""The verbs of ``nearlinear fsx`` that ask AWS."""

from __future__ import annotations

import json
import sys

from ...errors import ConfigError
from .. import spec
from ..faults import FaultyJob
from . import check as checks
from . import service, wish


def create(options) -> int:
    """Make a file system."""
    asked = wish.FileSystem(
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
        return _show(asked)
    made = service.create(asked, options.region)
    print(f"creating {made}: {asked.capacity_gib} GiB, {asked.throughput:,.0f} MB/s")
    return _until_there(made, options)


def link(options) -> int:
    """Link a folder of a file system to S3."""
    exports = wish.EVENTS if options.export else ()
    asked = wish.Link(options.id, options.s3, options.directory, exports=exports)
    if options.dry_run:
        return _show(asked)
    service.link(asked, options.region)
    print(f"linking {options.directory} of {options.id} to {options.s3}")
    return _until_there(options.id, options)


def describe(options) -> int:
    """Say how a file system stands."""
    print("\n".join(lines(service.describe(options.id, options.region))))
    return 0


def list(options) -> int:  # the verb's name
    """Name all file systems."""
    for found in service.every(options.region):
        print(f"{found.id}  {found.lifecycle}  {found.deployment}  {found.capacity_gib} GiB")
    return 0


def delete(options) -> int:
    """Delete a file system, after a yes."""
    found = service.describe(options.id, options.region)
    if options.dry_run:
        print(json.dumps({"FileSystemId": found.id}, indent=2))
        return 0
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"{found.id} and what is on it would be gone: say so with --yes")
        print(f"{found.id}: {found.capacity_gib} GiB; what is not in S3 will be gone.")
        if input(f"Type {found.id} to delete it: ").strip() != found.id:
            print("nothing was deleted")
            return 1
    service.delete(found.id, options.region)
    print(f"deleting {found.id}")
    return 0


def check(options) -> int:
    """Say whether a job reaches its file systems."""
    job, _ = spec.load(options.config, options.settings)
    if faults := checks.check(job):
        raise FaultyJob(faults)
    systems = [given.fsx for given in job.inputs.values() if given.source == "fsx"]
    print(f"{', '.join(systems)}: there, and within the job's reach" if systems else "no FSx input")
    return 0


def lines(found: service.Described) -> list[str]:
    """A file system in a few lines, with what to type next."""
    said = [
        f"{found.id}: {found.lifecycle}{f' ({found.reason})' if found.reason else ''}",
        f"{found.deployment}, Lustre {found.version or '2.10'}, {found.capacity_gib} GiB at "
        f"{found.per_unit} MB/s per TiB: {found.throughput:,.0f} MB/s",
        f"mount name: {found.mount_name or 'not yet known'}",
        f"DNS name: {found.dns_name}",
        f"network: {', '.join(found.subnets)} in {found.vpc}",
    ]
    for each in found.associations:
        why = f" ({each.reason})" if each.reason else ""
        said.append(f"link: {each.directory} shows {each.s3}: {each.lifecycle}{why}")
    if found.mount_name:
        said += ["", "on a machine of its VPC:", f"  {found.mount_command()}", "",
                 "in a training config:", *found.input_toml().splitlines()]  # fmt: skip
    return said


def _show(asked: wish.FileSystem | wish.Link) -> int:
    if faults := asked.faults():
        raise FaultyJob(faults, "the request")
    print(json.dumps(asked.request(), indent=2))
    return 0


def _until_there(file_system: str, options) -> int:
    if options.no_wait:
        print(f"see: nearlinear fsx describe {file_system}")
        return 0
    found = service.wait(file_system, options.region, say=lambda line: print(line, flush=True))
    print("\n".join(lines(found)))
    return 0
