"""What Kubernetes, or Kubeflow's operator, refuses of a job, or lets fail later.

Source: Kubernetes' pages on names, labels, volumes and environment variables; the operator's checks
(training-operator 1.9, pkg/webhooks), by which a job's name begins with a letter; and the names it
gives to pods and to the service that ranks meet at, which are host names: 63 characters at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from . import names
from .faults import Fault
from .kubernetes import CONFIG, DATA
from .spec import JobSpec

TAKEN = (CONFIG, DATA, "/dev/shm")
LONGEST = 63  # characters of a host name's part, and of a label
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(rf"{LABEL.pattern}(\.{LABEL.pattern})*")
TAG = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)")
SMALL = "small letters, digits, and - between them"
MIXED = "letters, digits, and - _ . between them"


def check(job: JobSpec) -> list[Fault]:
    """What of ``job`` a cluster of Kubernetes cannot do as it is described."""
    instead = "give it a checkpoint_claim for what it leaves, checkpoints too"
    rules = (_image(job), _names(job), _inputs(job), _checkpoints(job), _tags(job))
    found = [fault for rule in (*rules, names.environment(job)) for fault in rule]
    return [*found, *names.elsewhere(job, "Kubernetes", instead)]


def longest_name(job: JobSpec) -> int:
    """Characters that ``job.name`` may have, so that its last pod's name is a host name."""
    stamp = len("-20261122031500")
    return LONGEST - stamp - len(f"-worker-{job.nodes}")


def _image(job: JobSpec) -> Iterator[Fault]:
    if not job.image:
        yield Fault("job.image", "is missing", "name the container image")
    elif re.search(r"\s", job.image):
        yield Fault("job.image", f"{job.image!r} has a space in it", "leave that out")
    if job.source:
        yield Fault("job.source", "pods have the image's code", "build it into the image")


def _names(job: JobSpec) -> Iterator[Fault]:
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name):
        yield Fault("job.name", f"{job.name!r} is no name for pods", f"{SMALL}, a letter first")
    elif len(job.name) > longest_name(job):
        what = f"has {len(job.name)} characters, and pods are called after it"
        yield Fault("job.name", what, f"at most {longest_name(job)}")
    yield from _named("job.namespace", job.namespace, LABEL, LONGEST, SMALL)


def _inputs(job: JobSpec) -> Iterator[Fault]:
    for name, given in job.inputs.items():
        where = f"job.inputs.{name}"
        yield from _named(where, name, LABEL, LONGEST - len("input-"), SMALL)
        if given.source == "claim":
            yield from _named(f"{where}.claim", given.claim, SUBDOMAIN, 253, f"{SMALL}, or .")
        elif given.source == "path":
            yield from _folder(f"{where}.path", given.path)
        else:
            what = f"pods do not fetch {given.source} inputs"
            fix = "give it a PersistentVolumeClaim, and write its name as claim"
            yield Fault(where, what, fix)
        if ".." in PurePosixPath(given.directory).parts:
            yield Fault(
                f"{where}.directory", f"{given.directory!r} leaves the volume", "without .."
            )


def _checkpoints(job: JobSpec) -> Iterator[Fault]:
    if not job.checkpoint_claim:
        return
    where = "job.checkpoint_claim"
    yield from _named(where, job.checkpoint_claim, SUBDOMAIN, 253, f"{SMALL}, or .")
    where, path = "job.checkpoint_path", PurePosixPath(job.checkpoint_path)
    yield from _folder(where, job.checkpoint_path)
    if any(path.is_relative_to(it) or PurePosixPath(it).is_relative_to(path) for it in TAKEN):
        yield Fault(where, f"{path} is where pods have other things", "name another folder")


def _tags(job: JobSpec) -> Iterator[Fault]:
    """Tags become labels."""
    for key, value in job.tags.items():
        where, (prefix, slash, name) = f"job.tags.{key}", key.rpartition("/")
        if slash:
            yield from _named(where, prefix, SUBDOMAIN, 253, f"{SMALL}, or . before the /")
        yield from _named(where, name, TAG, LONGEST, MIXED)
        if value:
            yield from _named(where, value, TAG, LONGEST, MIXED)


def _named(where: str, value: str, form: re.Pattern, longest: int, fix: str) -> Iterator[Fault]:
    if len(value) > longest:
        yield Fault(where, f"{value!r} has {len(value)} characters", f"at most {longest}")
    elif not form.fullmatch(value):
        yield Fault(where, f"{value!r} is written wrongly for Kubernetes", fix)


def _folder(where: str, path: str) -> Iterator[Fault]:
    if not path.startswith("/") or ".." in PurePosixPath(path).parts:
        yield Fault(where, f"{path!r} is not a full path", "begin it with /, without ..")
    elif ":" in path:
        yield Fault(where, f"{path!r} has a : in it", "link to it by another name")
