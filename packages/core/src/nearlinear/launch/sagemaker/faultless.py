"""A job's request, once nothing is wrong with it: all checks that need no network."""

from __future__ import annotations

from ...train.config import TrainConfig
from .. import layout
from ..faults import FaultyJob
from ..spec import JobSpec
from . import request, rules, shapes


def faultless(job: JobSpec, config: TrainConfig) -> dict:
    """The request, under a name that is used once. Raises FaultyJob with all that is wrong."""
    if missing := request.missing(job):
        raise FaultyJob(missing)
    name = request.job_name(job.name)
    found = request.request(job, config, name, f"{job.output.rstrip('/')}/{name}")
    faults = [*shapes.check(found), *rules.check(found), *layout.check(job, config.parallel)]
    if faults:
        raise FaultyJob(faults)
    return found
