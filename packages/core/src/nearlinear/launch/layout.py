"""Whether the machines of a job and the parallel layout that is to run on them fit each other."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Config
from ..errors import ConfigError
from . import instances
from .faults import Fault
from .spec import JobSpec


def check(job: JobSpec, layout: Config) -> list[Fault]:
    """Every fault between them."""
    unknown = not job.accelerators_here and not job.ranks_per_node
    return [*_ranks(job), *([] if unknown else _degrees(job, layout))]


def _ranks(job: JobSpec) -> Iterator[Fault]:
    where, machine = "job.ranks_per_node", instances.known(job.instance_type)
    if machine and job.accelerators not in (0, machine.accelerators):
        what = f"{job.accelerators}, and {job.instance_type} has {machine.accelerators}"
        yield Fault("job.accelerators", what, "leave it out, or name the machine that it is of")
        return
    here, there = job.ranks_here, job.accelerators_here
    if not there:
        if not job.ranks_per_node:
            what = f"how many accelerators {job.instance_type!r} has is not known here"
            yield Fault(where, what, "set it, or job.accelerators where it has GPUs")
        return
    if here < there:
        what = f"{here} of {job.instance_type}'s {there} accelerators work, and the network cards "
        yield Fault(where, what + "beside the others idle", f"leave it out, or set it to {there}")
    if here > there:
        what = f"{here} ranks for {there} accelerators of {job.instance_type}"
        yield Fault(where, what, f"at most {there}")


def _degrees(job: JobSpec, layout: Config) -> Iterator[Fault]:
    here = job.ranks_here
    try:
        layout.degrees(job.world)
    except ConfigError as error:
        yield Fault("parallel", f"{error}", f"the job has {job.nodes} x {here} ranks")
        return
    degree = layout.hybrid_shard_degree or job.world
    if degree > here and degree % here:
        what = f"{degree} ranks are no whole number of nodes of {here}: groups would share network "
        fix = f"take a multiple or a divisor of {here}"
        yield Fault("parallel.hybrid_shard_degree", what + "cards unevenly", fix)
