"""Kubernetes jobs: a PyTorchJob of Kubeflow's training operator, and its validation.

The operator sets torchrun's variables in every pod (PET_NNODES, PET_NODE_RANK, ...), so each pod
runs torchrun on the training config, which a ConfigMap provides.

Sources of the rules: the Kubernetes documentation on names, labels, volumes and environment
variables, and the checks of training-operator 1.9 (pkg/webhooks): a job name begins with a letter.
The operator derives pod names and the rendezvous service name from the job name. They are host
names with at most 63 characters.
"""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ..config import schema
from ..config.train import TrainConfig
from ..errors import ConfigError
from ..hardware import find_instance_type
from ..storage import is_remote
from .local import SHUTDOWN_TIMEOUT
from .sagemaker.images import AUTO, is_auto, resolve_public_image
from .secrets import check_secrets
from .spec import (
    TERMINATION_NOTICE,
    JobInput,
    JobSpec,
    Problem,
    check_environment,
    check_sagemaker_only_keys,
    token_input,
)
from .wheel import write_wheel

CONFIG_FOLDER, DATA_FOLDER = "/etc/nearlinear", "/data"
CONFIG_FILE = "run.toml"
WHEEL_FOLDER = "/etc/nearlinear-wheel"
_MAX_CONFIG_MAP = 2**20  # bytes
GPU_RESOURCE, EFA_RESOURCE = "nvidia.com/gpu", "vpc.amazonaws.com/efa"
_UNAMBIGUOUS = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]+")  # never parsed as a number by YAML readers

_RESERVED_PATHS = (CONFIG_FOLDER, WHEEL_FOLDER, DATA_FOLDER, "/dev/shm")
_MAX_LABEL = 63  # characters of a label, and of one component of a host name
_MAX_SUBDOMAIN = 253
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_TAG = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)")
_LABEL_REMEDY = "use lower-case letters and digits, with - between them"
_TAG_REMEDY = "use letters and digits, with - _ . between them"


def render_manifest(job: JobSpec, config: TrainConfig, name: str) -> str:
    """Return the objects of the job ``name`` as YAML for ``kubectl apply --server-side -f``.

    A client-side apply would copy a shipped wheel to an annotation, which is too small for it.
    """
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            'Kubernetes jobs need PyYAML: pip install "nearlinear[kubernetes]"'
        ) from None

    objects = build_objects(job, config, name)
    return yaml.dump_all(objects, Dumper=_quoting_dumper(yaml), sort_keys=False, width=100)


def _quoting_dumper(yaml: Any) -> type:
    """Return a dumper that quotes strings such as y and 1e3, which kubectl reads differently."""

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def represent_text(dumper: Dumper, value: str):
        style = "|" if "\n" in value else None if _UNAMBIGUOUS.fullmatch(value) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, represent_text)
    return Dumper


def build_objects(job: JobSpec, config: TrainConfig, name: str) -> list[dict]:
    """Return the ConfigMap and the PyTorchJob ``name`` as plain data.

    With ``image = "auto"``, a second ConfigMap ships nearlinear as a wheel.
    """
    labels = {"app": "nearlinear"} | job.tags
    metadata = {"name": name, "namespace": job.namespace, "labels": labels}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {CONFIG_FILE: schema.to_toml(config)},
    }
    pod = {"metadata": {"labels": labels}, "spec": _pod_spec(job, config, name)}
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    training_job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(job.local_world_size),
            "runPolicy": _run_policy(job),
            "pytorchReplicaSpecs": {
                role: {
                    "replicas": count,
                    "restartPolicy": "OnFailure" if job.retries else "Never",
                    "template": pod,
                }
                for role, count in replicas.items()
                if count
            },
        },
    }
    shipped = [_wheel_object(job, name)] if is_auto(job.image) else []
    return [config_map, *shipped, training_job]


def _wheel_object(job: JobSpec, name: str) -> dict:
    """Return the ConfigMap with the wheel of the running nearlinear."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_wheel(Path(folder))
        data = path.read_bytes()
    if len(data) > _MAX_CONFIG_MAP:
        raise ConfigError(
            f"the wheel of nearlinear has {len(data):,} bytes, more than a ConfigMap may hold; "
            "name an image that contains nearlinear in job.image"
        )
    metadata = {"name": f"{name}-wheel", "namespace": job.namespace}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "binaryData": {path.name: base64.b64encode(data).decode()},
    }


def _run_policy(job: JobSpec) -> dict:
    # Running pods are deleted at the end of the job; otherwise they would keep their GPUs.
    policy = {"activeDeadlineSeconds": round(job.max_hours * 3600), "cleanPodPolicy": "Running"}
    # The limit counts restarts of all pods together, and the job fails when it is reached. One
    # failure restarts every pod, because no rank can continue without the others.
    return policy | ({"backoffLimit": job.retries * job.nodes + 1} if job.retries else {})


def pod_command(job: JobSpec, config: TrainConfig) -> list[str]:
    """Return the command that every pod runs."""
    settings = (f"{name}={value}" for name, value in _path_settings(job, config).items())
    changes = [_escape_dollars(part) for setting in settings for part in ("--set", setting)]
    file = f"{CONFIG_FOLDER}/{CONFIG_FILE}"
    train = ["torchrun", "-m", "nearlinear.cli", "train", file, *changes]
    if not is_auto(job.image):
        return train
    install = f'python -m pip install --quiet {WHEEL_FOLDER}/*.whl && exec "$@"'
    return ["/bin/sh", "-c", install, "nearlinear", *train]


def _path_settings(job: JobSpec, config: TrainConfig) -> dict[str, str]:
    """Return the settings that replace paths of the config by paths inside a pod."""
    data = {"data.path": f"{DATA_FOLDER}/train"} if token_input(job, config) else {}
    if not job.checkpoint_claim:
        return data
    # Relative output folders move to the claim, which outlives the pods.
    claim = PurePosixPath(job.checkpoint_path)
    checkpoints = "" if config.checkpoint.folder == "auto" else config.checkpoint.folder
    folders = {"run.folder": config.run.folder, "checkpoint.folder": checkpoints}
    moved = {name: folder for name, folder in folders.items() if not is_remote(folder)}
    return data | {name: str(claim / folder) for name, folder in moved.items()}


def _pod_spec(job: JobSpec, config: TrainConfig, name: str) -> dict:
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT)} | job.environment
    volumes, mounts = _volumes_and_mounts(job, name)
    container = {
        "name": "pytorch",  # the operator requires this name
        "image": resolve_public_image(job.image, job.instance_type),
        "command": pod_command(job, config),
        "env": [
            *({"name": key, "value": _escape_dollars(value)} for key, value in variables.items()),
            *_secret_variables(job),
        ],
        "resources": _resources(job),
        "volumeMounts": mounts,
    }
    gpus = {"tolerations": [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]}
    return {
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": TERMINATION_NOTICE,
        **(gpus if job.num_accelerators else {}),
        **_affinity(job),
    }


def _secret_variables(job: JobSpec) -> Iterator[dict]:
    """Yield variables whose values the kubelet reads from Secrets."""
    for variable, reference in job.secrets.items():
        name, _, key = reference.partition("/")
        source = {"secretKeyRef": {"name": name, "key": key}}
        yield {"name": variable, "valueFrom": source}


def _escape_dollars(text: str) -> str:
    """Escape ``text`` against Kubernetes, which expands ``$(NAME)`` to a variable's value."""
    return text.replace("$", "$$")


def _affinity(job: JobSpec) -> dict:
    """Restrict pods to the instance type. EKS labels nodes with EC2's name, HyperPod with ``ml.``.

    Unknown instance types are not restricted.
    """
    if find_instance_type(job.instance_type) is None:
        return {}
    name = job.instance_type.removeprefix("ml.")
    expression = {
        "key": "node.kubernetes.io/instance-type",
        "operator": "In",
        "values": [name, f"ml.{name}"],
    }
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}


def _resources(job: JobSpec) -> dict:
    """Request the GPUs and EFA interfaces of a machine.

    EFA allocates its buffers in huge pages, which a pod must request. A request for huge pages
    requires one for cores or memory too: one core per rank.
    """
    known = find_instance_type(job.instance_type)
    limits: dict[str, int | str] = {}
    if job.num_accelerators:
        limits[GPU_RESOURCE] = job.local_world_size
    if known and known.efa_interfaces:
        limits |= {EFA_RESOURCE: known.efa_interfaces, "hugepages-2Mi": "5120Mi"}
    return {"limits": limits, "requests": {"cpu": job.local_world_size}} if limits else {}


def _volumes_and_mounts(job: JobSpec, name: str) -> tuple[list[dict], list[dict]]:
    volumes: list[dict] = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # shared memory of the ranks of a node
    ]
    mounts: list[dict] = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if is_auto(job.image):
        volumes.append({"name": "wheel", "configMap": {"name": f"{name}-wheel"}})
        mounts.append({"name": "wheel", "mountPath": WHEEL_FOLDER, "readOnly": True})
    for channel, given in job.inputs.items():
        volumes.append({"name": f"input-{channel}", **_volume_source(given)})
        inside = {"subPath": given.directory.strip("/")} if given.directory.strip("/") else {}
        mount = {"mountPath": f"{DATA_FOLDER}/{channel}", "readOnly": not given.writable, **inside}
        mounts.append({"name": f"input-{channel}", **mount})
    if job.checkpoint_claim:
        claim = {"persistentVolumeClaim": {"claimName": job.checkpoint_claim}}
        volumes.append({"name": "checkpoints", **claim})
        mounts.append({"name": "checkpoints", "mountPath": job.checkpoint_path})
    return volumes, mounts


def _volume_source(given: JobInput) -> dict:
    if given.source == "claim":
        return {"persistentVolumeClaim": {"claimName": given.claim}}
    return {"hostPath": {"path": given.path, "type": "Directory"}}


def check_kubernetes_job(job: JobSpec) -> list[Problem]:
    """Return all problems that Kubernetes or the operator would reject, or that fail later."""
    storage = "set job.checkpoint_claim, which keeps outputs and checkpoints"
    return [
        *_check_image(job),
        *_check_names(job),
        *_check_inputs(job),
        *_check_checkpoints(job),
        *_check_tags(job),
        *check_environment(job),
        *check_secrets(job, "kubernetes"),
        *check_sagemaker_only_keys(job, "Kubernetes", storage),
    ]


def max_name_length(job: JobSpec) -> int:
    """Return the longest ``job.name`` for which the last pod's name is a valid host name."""
    timestamp = len("-20261122031500")
    return _MAX_LABEL - timestamp - len(f"-worker-{job.nodes}")


def _check_image(job: JobSpec) -> Iterator[Problem]:
    if not job.image:
        yield Problem("job.image", "is missing", f'name the image, or set image = "{AUTO}"')
    elif is_auto(job.image):
        try:
            resolve_public_image(job.image, job.instance_type)
        except ConfigError as error:
            yield Problem("job.image", str(error), "or name an image that contains nearlinear")
    elif re.search(r"\s", job.image):
        yield Problem("job.image", f"{job.image!r} contains white space", "remove it")
    if job.source:
        cause = f"{job.source!r}: pods run the code in the image"
        yield Problem("job.source", cause, "remove the key, and build the code into the image")


def _check_names(job: JobSpec) -> Iterator[Problem]:
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name):
        cause = f"{job.name!r} is not a valid pod name"
        yield Problem("job.name", cause, f"{_LABEL_REMEDY}, beginning with a letter")
    elif len(job.name) > max_name_length(job):
        cause = f"{job.name!r} has {len(job.name)} characters, too many for the names of its pods"
        yield Problem("job.name", cause, f"at most {max_name_length(job)}")
    yield from _check_name("job.namespace", job.namespace, _LABEL, _MAX_LABEL, _LABEL_REMEDY)


def _check_inputs(job: JobSpec) -> Iterator[Problem]:
    for name, given in job.inputs.items():
        field = f"job.inputs.{name}"
        yield from _check_name(field, name, _LABEL, _MAX_LABEL - len("input-"), _LABEL_REMEDY)
        if given.source == "claim":
            yield from _check_subdomain(f"{field}.claim", given.claim)
        elif given.source == "path":
            yield from _check_folder(f"{field}.path", given.path)
        else:
            cause = f"pods do not fetch {given.source} inputs"
            yield Problem(field, cause, "create a PersistentVolumeClaim, and set claim to its name")
        if ".." in PurePosixPath(given.directory).parts:
            cause = f"{given.directory!r} leaves the volume"
            yield Problem(f"{field}.directory", cause, "give a path without ..")


def _check_checkpoints(job: JobSpec) -> Iterator[Problem]:
    if not job.checkpoint_claim:
        return
    yield from _check_subdomain("job.checkpoint_claim", job.checkpoint_claim)
    field, path = "job.checkpoint_path", PurePosixPath(job.checkpoint_path)
    yield from _check_folder(field, job.checkpoint_path)
    for reserved in map(PurePosixPath, _RESERVED_PATHS):
        if path.is_relative_to(reserved) or reserved.is_relative_to(path):
            cause = f"{str(path)!r} overlaps {reserved}, which the pod uses"
            yield Problem(field, cause, "name another folder")
            return


def _check_tags(job: JobSpec) -> Iterator[Problem]:
    """Check the tags, which become labels."""
    for key, value in job.tags.items():
        field, (prefix, slash, name) = f"job.tags.{key}", key.rpartition("/")
        if slash:
            remedy = f"{_LABEL_REMEDY}, or . before the /"
            yield from _check_name(field, prefix, _SUBDOMAIN, _MAX_SUBDOMAIN, remedy)
        yield from _check_name(field, name, _TAG, _MAX_LABEL, _TAG_REMEDY)
        if value:
            yield from _check_name(field, value, _TAG, _MAX_LABEL, _TAG_REMEDY)


def _check_subdomain(field: str, value: str) -> Iterator[Problem]:
    return _check_name(field, value, _SUBDOMAIN, _MAX_SUBDOMAIN, f"{_LABEL_REMEDY}, or .")


def _check_name(
    field: str, value: str, pattern: re.Pattern, max_length: int, remedy: str
) -> Iterator[Problem]:
    if len(value) > max_length:
        yield Problem(field, f"{value!r} has {len(value)} characters", f"at most {max_length}")
    elif not pattern.fullmatch(value):
        yield Problem(field, f"{value!r} is not a valid Kubernetes name", remedy)


def _check_folder(field: str, path: str) -> Iterator[Problem]:
    if not path.startswith("/") or ".." in PurePosixPath(path).parts:
        yield Problem(field, f"{path!r} is not an absolute path", "begin it with /, without ..")
    elif ":" in path:
        yield Problem(field, f"{path!r} contains :", "link to the folder under another name")
