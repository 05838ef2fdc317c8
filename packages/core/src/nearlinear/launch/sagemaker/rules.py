"""What SageMaker refuses although every member of a request is fine by itself, or lets fail later.

Each rule reads the request alone, so that it holds whoever wrote it. Source: the API reference of
CreateTrainingJob and the developer guide's pages on FSx, managed spot training, warm pools and EFA,
2026-11.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from ...data.opening import CHANNEL
from .. import instances
from ..faults import Fault
from .request import CODE, DRIVERS, plain

OURS = (CODE, DRIVERS)  # channels
RESERVED_PATHS = ("/opt/ml/input", "/opt/ml/output", "/opt/ml/model", "/opt/ml/code")
LONGEST_RUN = 28 * 24 * 3600
REGION = re.compile(r"\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com")


def check(request: dict) -> list[Fault]:
    """Every fault between members of a CreateTrainingJob request."""
    rules = (_inputs, _data, _network, _time, _image, _metrics, _tags, _machines, _checkpoints)
    return [fault for rule in rules for fault in rule(request)]


def _inputs(request: dict) -> Iterator[Fault]:
    channels = request.get("InputDataConfig", [])
    counts = Counter(channel.get("ChannelName") for channel in channels)
    for name, times in counts.items():
        if times > 1:
            fix = "rename yours: the launcher brings that one" if name in OURS else "rename one"
            yield Fault("InputDataConfig", f"{times} channels are called {name!r}", fix)
    for index, channel in enumerate(channels):
        where, source = f"InputDataConfig[{index}]", channel.get("DataSource", {})
        if len(source) != 1:
            yield Fault(f"{where}.DataSource", f"{len(source)} sources", "give exactly one")
        system = source.get("FileSystemDataSource")
        if system is not None:
            yield from _file_system(channel, system, where, request)
        elif channel.get("CompressionType") == "Gzip" and channel.get("InputMode") == "FastFile":
            yield Fault(
                f"{where}.CompressionType",
                "FastFile does not unpack",
                "use InputMode File, or store it unpacked",
            )


def _data(request: dict) -> Iterator[Fault]:
    """Channels that the training reads, by what nearlinear's hyperparameters say."""
    given = {name.replace("-", "."): it for name, it in request.get("HyperParameters", {}).items()}
    sources = plain(given.get("data.sources", "{}"))
    there = {channel.get("ChannelName") for channel in request.get("InputDataConfig", [])}
    for name in [given.get("data.path", ""), *sources]:
        channel = name.removeprefix(CHANNEL)
        if channel != name and channel not in there:
            fix = f"name its place under job.inputs.{channel}"
            yield Fault("InputDataConfig", f"no channel is called {channel!r}, as in {name}", fix)
    if sources and "train" in there and f"{CHANNEL}train" not in sources:
        fix = f'name it there, as "{CHANNEL}train" = 0.5, or leave the input out'
        yield Fault("InputDataConfig", "data.sources does not name the channel train", fix)


def _file_system(channel: dict, system: dict, where: str, request: dict) -> Iterator[Fault]:
    directory = system.get("DirectoryPath", "")
    if channel.get("InputMode", "File") != "File":
        yield Fault(
            f"{where}.InputMode",
            f"{channel['InputMode']} is for S3",
            "leave it out: file systems are mounted",
        )
    if not directory.startswith("/"):
        yield Fault(
            f"{where}.DataSource.FileSystemDataSource.DirectoryPath",
            f"{directory!r} is not absolute",
            "begin it with /",
        )
    elif system.get("FileSystemType") == "FSxLustre" and directory.strip("/") == "fsx":
        yield Fault(
            f"{where}.DataSource.FileSystemDataSource.DirectoryPath",
            f"{directory!r} lacks the mount name",
            "write /MOUNT_NAME/folder: aws fsx describe-file-systems shows it",
        )
    if "VpcConfig" not in request:
        what = f"is missing, and channel {channel.get('ChannelName')!r} is on a file system"
        yield Fault("VpcConfig", what, "name the subnet and a security group that reach it")


def _network(request: dict) -> Iterator[Fault]:
    vpc = request.get("VpcConfig", {})
    for member, prefix in (("Subnets", "subnet-"), ("SecurityGroupIds", "sg-")):
        names = vpc.get(member, [])
        for name in names:
            if isinstance(name, str) and not re.fullmatch(rf"{prefix}[0-9a-f]{{8,17}}", name):
                yield Fault(
                    f"VpcConfig.{member}",
                    f"{name!r} is no id",
                    f"it looks like {prefix}0123456789abcdef0",
                )
        if len(set(names)) < len(names):
            yield Fault(f"VpcConfig.{member}", "names one twice", "name it once")


def _time(request: dict) -> Iterator[Fault]:
    stopping, spot = request.get("StoppingCondition", {}), request.get("EnableManagedSpotTraining")
    run, wait = stopping.get("MaxRuntimeInSeconds"), stopping.get("MaxWaitTimeInSeconds")
    place = "StoppingCondition.MaxWaitTimeInSeconds"
    if run is not None and run > LONGEST_RUN:
        yield Fault(
            "StoppingCondition.MaxRuntimeInSeconds",
            f"{run} s is more than 28 days",
            f"at most {LONGEST_RUN}; resume from a checkpoint after that",
        )
    if spot and wait is None:
        yield Fault(
            place, "is missing for a spot job", "give it: run and wait for capacity together"
        )
    if spot and wait is not None and run is not None and wait < run:
        yield Fault(place, f"{wait} s is less than the run's {run} s", f"at least {run}")
    if wait is not None and not spot:
        yield Fault(place, "is for spot jobs only", "leave it out, or ask for spot")
    if spot and request.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds"):
        yield Fault(
            "ResourceConfig.KeepAlivePeriodInSeconds",
            "a spot job has no warm pool",
            "leave one of the two out",
        )


def _image(request: dict) -> Iterator[Fault]:
    algorithm = request.get("AlgorithmSpecification", {})
    image = algorithm.get("TrainingImage", "")
    if bool(image) == bool(algorithm.get("AlgorithmName")):
        what = "an algorithm beside it" if image else "is missing"
        yield Fault("AlgorithmSpecification.TrainingImage", what, "name the container image, alone")
    if image and not REGION.search(image) and "/" not in image:
        yield Fault(
            "AlgorithmSpecification.TrainingImage",
            f"{image!r} is in no registry",
            "write ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG",
        )
    if image and ":" not in image.rpartition("/")[2] and "@" not in image:
        yield Fault(
            "AlgorithmSpecification.TrainingImage",
            f"{image!r} has no tag",
            "name one, as in :2.13-cuda13",
        )


def _metrics(request: dict) -> Iterator[Fault]:
    found = request.get("AlgorithmSpecification", {}).get("MetricDefinitions", [])
    counts = Counter(metric.get("Name") for metric in found)
    for index, metric in enumerate(found):
        where = f"AlgorithmSpecification.MetricDefinitions[{index}]"
        if counts[metric.get("Name")] > 1:
            yield Fault(f"{where}.Name", f"{metric['Name']!r} is there twice", "rename one")
        try:
            groups = re.compile(metric.get("Regex", "")).groups
        except re.error as error:
            yield Fault(f"{where}.Regex", f"is no regular expression ({error})", "mend it")
            continue
        if not groups:
            yield Fault(f"{where}.Regex", "has no group", "put (...) around the number")


def _tags(request: dict) -> Iterator[Fault]:
    tags = request.get("Tags", [])
    for key, times in Counter(tag.get("Key", "") for tag in tags).items():
        if times > 1:
            yield Fault("Tags", f"{key!r} is there {times} times", "keep one")
        if key.lower().startswith("aws:"):
            yield Fault("Tags", f"{key!r}: names that begin with aws: are taken", "rename it")


def _machines(request: dict) -> Iterator[Fault]:
    machines = request.get("ResourceConfig", {})
    count, kind = machines.get("InstanceCount", 1), machines.get("InstanceType", "")
    record = instances.known(kind)
    if isinstance(count, int) and count < 1:
        yield Fault("ResourceConfig.InstanceCount", f"{count} machines", "at least 1")
    if record and record.efa == 0 and isinstance(count, int) and count > 1:
        yield Fault(
            "ResourceConfig.InstanceType",
            f"{count} x {kind} have no EFA between them",
            "take one with EFA (p4d.24xlarge and up), or one machine",
        )


def _checkpoints(request: dict) -> Iterator[Fault]:
    path = request.get("CheckpointConfig", {}).get("LocalPath", "")
    for taken in RESERVED_PATHS:
        if path == taken or path.startswith(f"{taken}/"):
            yield Fault(
                "CheckpointConfig.LocalPath",
                f"{path!r} lies in {taken}, which is taken",
                "use /opt/ml/checkpoints",
            )
    if request.get("EnableManagedSpotTraining") and "CheckpointConfig" not in request:
        yield Fault(
            "CheckpointConfig",
            "is missing, and spot capacity may be taken away at any time",
            "name a folder in S3 for checkpoints",
        )
