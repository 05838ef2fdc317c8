"""What nodes of Slurm and pods of Kubernetes have in common that a job can get wrong.

Both run what is on them already: nothing is fetched from S3 or copied there, and ranks are told who
they are in variables of the environment, which a job must not set for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .faults import Fault
from .spec import JobSpec

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Each rank has its own; one for all of them would be believed by all.
OURS = re.compile(
    r"RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_(RANK|WORLD_SIZE)|(PET|TORCHELASTIC|SLURM)_.*"
)


def environment(job: JobSpec) -> Iterator[Fault]:
    """Faults of the variables that a job sets."""
    for name, value in job.environment.items():
        where = f"job.environment.{name}"
        if not VARIABLE.fullmatch(name):
            fix = "letters, digits and _, no digit first"
            yield Fault(where, "is no name that a shell could set", fix)
        elif OURS.fullmatch(name):
            yield Fault(where, "every rank is given its own", "leave it out")
        elif "\0" in value:
            yield Fault(where, "has a character of code 0, where values end", "leave that out")


def elsewhere(job: JobSpec, where: str, instead: str) -> Iterator[Fault]:
    """Faults of what a job asks of SageMaker, which ``where`` has not; ``instead``: of storage."""
    for name in ("output", "checkpoints"):
        if getattr(job, name):
            yield Fault(f"job.{name}", f"{where} copies nothing to S3", f"leave it out; {instead}")
    for name in ("spot", "keep_warm_minutes"):
        if getattr(job, name):
            yield Fault(f"job.{name}", f"{where} does not have that", "leave it out")
