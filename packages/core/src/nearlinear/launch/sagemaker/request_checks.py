"""Validation of AWS requests, before they are sent.

`check_against_model` applies the service's own model, which boto3 ships: members, types,
enumerations, patterns and ranges. boto3 itself checks only names, types and minima, and the service
would report the other problems one at a time.

`check_rules` applies the rules between members of a CreateTrainingJob request that SageMaker
enforces, or whose violation fails later. The rules read the request alone, whoever built it.
Sources: the API reference of CreateTrainingJob and the developer guide's pages on FSx, managed spot
training, warm pools and EFA, 2026-11.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ...config.schema import did_you_mean
from ...data.open import CHANNEL
from ...errors import ConfigError
from ...hardware import find_instance_type
from ..spec import Problem
from .container import OWN_CHANNELS, decode_hyperparameter

_MAX_LISTED_NAMES = 20
_NUMBERS = ("integer", "long", "float", "double")
_PYTHON_TYPES = {"structure": dict, "map": dict, "list": list, "string": str, "boolean": bool}
_TYPE_NAMES = {dict: "a table", list: "a list", str: "a string", bool: "true or false"}
# Java's character classes, which the service's patterns use, in Python's syntax.
_JAVA_CLASSES = {r"\p{Alnum}": "A-Za-z0-9", r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s"}

_RESERVED_PATHS = ("/opt/ml/input", "/opt/ml/output", "/opt/ml/model", "/opt/ml/code")
_MAX_RUN_SECONDS = 28 * 24 * 3600
_MAX_VOLUME_GB = 16_384  # of a gp2 volume
_MOUNT_NAME = re.compile(r"fsx|[a-z0-9]{8}")
_IMAGE_FIELD = "AlgorithmSpecification.TrainingImage"
_ECR_REGION = re.compile(r"\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com")


@functools.cache
def input_shape(operation: str, service: str = "sagemaker") -> Any:
    """Return botocore's shape of an operation's input. Raises ConfigError without boto3."""
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError:
        raise ConfigError(
            'SageMaker jobs need boto3: pip install "nearlinear[sagemaker]"'
        ) from None
    model = ServiceModel(Loader().load_service_model(service, "service-2"), service)
    return model.operation_model(operation).input_shape


def check_against_model(
    request: dict, operation: str = "CreateTrainingJob", service: str = "sagemaker"
) -> list[Problem]:
    """Return every violation of the service's model in ``request``."""
    return list(_check_value(request, input_shape(operation, service), ""))


def _check_value(value: Any, shape: Any, field: str) -> Iterator[Problem]:
    kind = shape.type_name
    if not _has_type(value, kind):
        expected = "a number" if kind in _NUMBERS else _TYPE_NAMES[_PYTHON_TYPES[kind]]
        yield Problem(field, f"{value!r} has the wrong type", f"expected {expected}")
        return
    if kind == "structure":
        yield from _check_structure(value, shape, field)
    elif kind == "map":
        for key, inner in value.items():
            yield from _check_value(key, shape.key, f"{field}[{key!r}] (key)")
            yield from _check_value(inner, shape.value, f"{field}[{key!r}]")
    elif kind == "list":
        for index, inner in enumerate(value):
            yield from _check_value(inner, shape.member, f"{field}[{index}]")
    out_of_range = list(_check_range(value, shape, field))
    yield from out_of_range
    if kind == "string" and not out_of_range:
        yield from _check_text(value, shape, field)


def _has_type(value: Any, kind: str) -> bool:
    if kind in _NUMBERS:
        allowed = (int, float) if kind in ("float", "double") else int
        return isinstance(value, allowed) and not isinstance(value, bool)
    return isinstance(value, _PYTHON_TYPES[kind])


def _check_structure(value: dict, shape: Any, field: str) -> Iterator[Problem]:
    for name in shape.required_members:
        if name not in value:
            yield Problem(_join(field, name), "is missing", "this field is required")
    for name, inner in value.items():
        if name in shape.members:
            yield from _check_value(inner, shape.members[name], _join(field, name))
        else:
            remedy = _suggest(name, shape.members)
            yield Problem(_join(field, name), "is not a field of the service", remedy)


def _check_range(value: Any, shape: Any, field: str) -> Iterator[Problem]:
    """Check the size of a number, and the length of any other value."""
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    number = shape.type_name in _NUMBERS
    size = value if number else len(value) if hasattr(value, "__len__") else None
    if size is None:
        return
    unit = {"string": " characters", "list": " entries", "map": " entries"}.get(shape.type_name, "")
    if least is not None and size < least:
        yield Problem(field, f"{size}{unit} is too small", f"at least {least}{unit}")
    if most is not None and size > most:
        yield Problem(field, f"{size}{unit} is too large", f"at most {most}{unit}")


def _check_text(value: str, shape: Any, field: str) -> Iterator[Problem]:
    if shape.enum and value not in shape.enum:
        yield Problem(field, f"{value!r} is not allowed", _suggest(value, shape.enum))
    pattern = shape.metadata.get("pattern")
    if pattern and not _compile_java_pattern(pattern).fullmatch(value):
        yield Problem(field, f"{value!r} has the wrong format", f"it must match {pattern}")


def _suggest(value: str, known: Iterable[str]) -> str:
    """Return the nearest of the ``known`` names, or a list of them."""
    known = list(known)
    if nearest := did_you_mean(value, known):
        return nearest
    if len(known) < _MAX_LISTED_NAMES:
        return f"allowed are {', '.join(known)}"
    return f"allowed are {len(known)} names, such as {', '.join(known[:3])}"


def _join(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


@functools.cache
def _compile_java_pattern(pattern: str) -> re.Pattern[str]:
    for java, python in _JAVA_CLASSES.items():
        pattern = pattern.replace(java, python)
    return re.compile(pattern, re.DOTALL)


def check_rules(request: dict) -> list[Problem]:
    """Return every violation of the rules between members of a CreateTrainingJob request."""
    rules = (
        _check_channels,
        _check_data_channels,
        _check_network,
        _check_time_limits,
        _check_image,
        _check_metrics,
        _check_tags,
        _check_instances,
        _check_volume,
        _check_checkpoints,
    )
    return [problem for rule in rules for problem in rule(request)]


def _check_channels(request: dict) -> Iterator[Problem]:
    channels = request.get("InputDataConfig", [])
    counts = Counter(channel.get("ChannelName") for channel in channels)
    for name, count in counts.items():
        if count > 1:
            own = name in OWN_CHANNELS
            remedy = "rename yours: the launcher adds that channel" if own else "rename one"
            yield Problem("InputDataConfig", f"{count} channels are named {name!r}", remedy)
    for index, channel in enumerate(channels):
        field, source = f"InputDataConfig[{index}]", channel.get("DataSource", {})
        if len(source) != 1:
            yield Problem(f"{field}.DataSource", f"has {len(source)} sources", "give exactly one")
        system = source.get("FileSystemDataSource")
        if system is not None:
            yield from _check_file_system(channel, system, field, request)
        elif channel.get("CompressionType") == "Gzip" and channel.get("InputMode") == "FastFile":
            yield Problem(
                f"{field}.CompressionType",
                "'Gzip' is not supported with InputMode 'FastFile'",
                "use InputMode 'File', or store the data uncompressed",
            )


def _check_data_channels(request: dict) -> Iterator[Problem]:
    """Check that the channels named in nearlinear's hyperparameters exist."""
    values = request.get("HyperParameters", {})
    given = {name.replace("-", "."): value for name, value in values.items()}
    sources = decode_hyperparameter(given.get("data.sources", "{}"))
    existing = {channel.get("ChannelName") for channel in request.get("InputDataConfig", [])}
    for name in [given.get("data.path", ""), *sources]:
        channel = name.removeprefix(CHANNEL)
        if channel != name and channel not in existing:
            cause = f"{name!r} refers to channel {channel!r}, which does not exist"
            yield Problem("InputDataConfig", cause, f"add it as job.inputs.{channel}")
    if sources and "train" in existing and f"{CHANNEL}train" not in sources:
        remedy = f'add it, as "{CHANNEL}train" = 0.5, or remove the input'
        yield Problem("InputDataConfig", "data.sources does not use the channel 'train'", remedy)


def _check_file_system(channel: dict, system: dict, field: str, request: dict) -> Iterator[Problem]:
    directory = system.get("DirectoryPath", "")
    directory_field = f"{field}.DataSource.FileSystemDataSource.DirectoryPath"
    if channel.get("InputMode", "File") != "File":
        yield Problem(
            f"{field}.InputMode",
            f"{channel['InputMode']!r} is for S3 only",
            "remove the field: file systems are mounted",
        )
    if not directory.startswith("/"):
        yield Problem(directory_field, f"{directory!r} is not absolute", "begin it with /")
    elif system.get("FileSystemType") == "FSxLustre" and not _has_mount_name(directory):
        yield Problem(
            directory_field,
            f"{directory!r} lacks the mount name",
            "use /MOUNT_NAME/folder: aws fsx describe-file-systems prints the mount name",
        )
    if "VpcConfig" not in request:
        cause = f"is missing, but channel {channel.get('ChannelName')!r} is on a file system"
        yield Problem("VpcConfig", cause, "give a subnet and a security group with access to it")


def _has_mount_name(directory: str) -> bool:
    """Return True for /MOUNT_NAME/folder, and for /MOUNT_NAME unless that is the usual /fsx."""
    first, *inside = directory.strip("/").split("/")
    return _MOUNT_NAME.fullmatch(first) is not None and (bool(inside) or first != "fsx")


def _check_network(request: dict) -> Iterator[Problem]:
    vpc = request.get("VpcConfig", {})
    for member, prefix in (("Subnets", "subnet-"), ("SecurityGroupIds", "sg-")):
        names = vpc.get(member, [])
        for name in names:
            if isinstance(name, str) and not re.fullmatch(rf"{prefix}[0-9a-f]{{8,17}}", name):
                remedy = f"use an ID such as {prefix}0123456789abcdef0"
                yield Problem(f"VpcConfig.{member}", f"{name!r} is not a valid ID", remedy)
        if len(set(names)) < len(names):
            yield Problem(f"VpcConfig.{member}", f"{names} has duplicates", "remove them")
    resources, subnets = request.get("ResourceConfig", {}), set(vpc.get("Subnets", []))
    name, count = resources.get("InstanceType", ""), resources.get("InstanceCount", 1)
    known = find_instance_type(name)
    if len(subnets) > 1 and known and known.efa_interfaces and isinstance(count, int) and count > 1:
        cause = f"{len(subnets)} subnets, but the EFA traffic of {count} x {name} cannot cross them"
        yield Problem("VpcConfig.Subnets", cause, "give one subnet")


def _check_time_limits(request: dict) -> Iterator[Problem]:
    stopping, spot = request.get("StoppingCondition", {}), request.get("EnableManagedSpotTraining")
    run, wait = stopping.get("MaxRuntimeInSeconds"), stopping.get("MaxWaitTimeInSeconds")
    field = "StoppingCondition.MaxWaitTimeInSeconds"
    if run is not None and run > _MAX_RUN_SECONDS:
        yield Problem(
            "StoppingCondition.MaxRuntimeInSeconds",
            f"{run} s is more than 28 days",
            f"at most {_MAX_RUN_SECONDS}; resume a longer run from a checkpoint",
        )
    if spot and wait is None:
        remedy = "set it to the limit for running and waiting for capacity together"
        yield Problem(field, "is missing for a spot job", remedy)
    if spot and wait is not None and run is not None and wait < run:
        yield Problem(field, f"{wait} s is less than the run time, {run} s", f"at least {run}")
    if wait is not None and not spot:
        yield Problem(field, f"{wait}: only spot jobs have this field", "remove it, or enable spot")
    if spot and request.get("ResourceConfig", {}).get("KeepAlivePeriodInSeconds"):
        yield Problem(
            "ResourceConfig.KeepAlivePeriodInSeconds",
            "spot jobs do not support warm pools",
            "remove this field or disable spot",
        )


def _check_image(request: dict) -> Iterator[Problem]:
    algorithm, field = request.get("AlgorithmSpecification", {}), _IMAGE_FIELD
    image = algorithm.get("TrainingImage", "")
    if bool(image) == bool(algorithm.get("AlgorithmName")):
        cause = "is given together with AlgorithmName" if image else "is missing"
        yield Problem(field, cause, "give the container image only")
    if image and not _ECR_REGION.search(image) and "/" not in image:
        remedy = "use ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG"
        yield Problem(field, f"{image!r} does not name a registry", remedy)
    if image and ":" not in image.rpartition("/")[2] and "@" not in image:
        yield Problem(field, f"{image!r} has no tag", "add one, as in :2.13-cuda13")


def _check_metrics(request: dict) -> Iterator[Problem]:
    metrics = request.get("AlgorithmSpecification", {}).get("MetricDefinitions", [])
    counts = Counter(metric.get("Name") for metric in metrics)
    for index, metric in enumerate(metrics):
        field = f"AlgorithmSpecification.MetricDefinitions[{index}]"
        if counts[metric.get("Name")] > 1:
            yield Problem(f"{field}.Name", f"{metric['Name']!r} is a duplicate", "rename one")
        pattern = metric.get("Regex", "")
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            cause = f"{pattern!r} is not a valid regular expression ({error})"
            yield Problem(f"{field}.Regex", cause, "correct it")
            continue
        if not groups:
            remedy = "put (...) around the number"
            yield Problem(f"{field}.Regex", f"{pattern!r} has no group", remedy)


def _check_tags(request: dict) -> Iterator[Problem]:
    tags = request.get("Tags", [])
    for key, count in Counter(tag.get("Key", "") for tag in tags).items():
        if count > 1:
            yield Problem("Tags", f"{key!r} is given {count} times", "keep one")
        if key.lower().startswith("aws:"):
            yield Problem("Tags", f"{key!r}: the prefix aws: is reserved", "rename it")


def _check_instances(request: dict) -> Iterator[Problem]:
    resources = request.get("ResourceConfig", {})
    count, name = resources.get("InstanceCount", 1), resources.get("InstanceType", "")
    known = find_instance_type(name)
    if isinstance(count, int) and count < 1:
        yield Problem("ResourceConfig.InstanceCount", f"{count} is too small", "at least 1")
    if known and known.efa_interfaces == 0 and isinstance(count, int) and count > 1:
        yield Problem(
            "ResourceConfig.InstanceType",
            f"{count} x {name}: this instance type has no EFA",
            "use one with EFA (p4d.24xlarge and larger), or a single machine",
        )


def _check_volume(request: dict) -> Iterator[Problem]:
    resources = request.get("ResourceConfig", {})
    size, name = resources.get("VolumeSizeInGB", 0), resources.get("InstanceType", "")
    known = find_instance_type(name)
    local = known.local_gb if known else 0
    most = local or _MAX_VOLUME_GB
    if isinstance(size, int) and size > most:
        what = f"the local disks of {name}" if local else "an EBS volume"
        cause = f"{size} GB is more than {what} can hold"
        yield Problem("ResourceConfig.VolumeSizeInGB", cause, f"at most {most}")


def _check_checkpoints(request: dict) -> Iterator[Problem]:
    path = request.get("CheckpointConfig", {}).get("LocalPath", "")
    for reserved in _RESERVED_PATHS:
        if path == reserved or path.startswith(f"{reserved}/"):
            yield Problem(
                "CheckpointConfig.LocalPath",
                f"{path!r} is inside {reserved}, which SageMaker reserves",
                "use /opt/ml/checkpoints",
            )
    if request.get("EnableManagedSpotTraining") and "CheckpointConfig" not in request:
        yield Problem(
            "CheckpointConfig",
            "is missing, but spot capacity can be reclaimed at any time",
            "name a folder in S3 for checkpoints",
        )
