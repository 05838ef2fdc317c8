"""A job as a PyTorchJob of Kubeflow's training operator, with its config beside it.

The operator tells every pod who it is in torchrun's own variables (PET_NNODES, PET_NODE_RANK, ...),
so each pod runs torchrun on the config, which a ConfigMap brings.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from .. import schema
from ..errors import ConfigError
from ..storage import elsewhere
from ..train.config import TrainConfig
from . import instances
from .local import GRACE, NOTICE
from .spec import Input, JobSpec

CONFIG, DATA = "/etc/nearlinear", "/data"
FILE = "run.toml"
GPU, EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"
PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]+")  # what no reader of YAML takes for a number


def render(job: JobSpec, config: TrainConfig, name: str) -> str:
    """The ConfigMap and the PyTorchJob called ``name``, as YAML for ``kubectl apply -f``."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            'Kubernetes jobs need PyYAML: pip install "nearlinear[kubernetes]"'
        ) from None

    found = objects(job, config, name)
    return yaml.dump_all(found, Dumper=_dumper(yaml), sort_keys=False, width=100)


def _dumper(yaml):
    """A writer whose texts are texts to kubectl too, which reads y and 1e3 as PyYAML does not."""

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data) -> bool:
            return True

    def text(dumper: Dumper, value: str):
        style = "|" if "\n" in value else None if PLAIN.fullmatch(value) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return Dumper


def objects(job: JobSpec, config: TrainConfig, name: str) -> list[dict]:
    """The same as plain data."""
    labels = {"app": "nearlinear"} | job.tags
    place = {"name": name, "namespace": job.namespace, "labels": labels}
    brought = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": place,
        "data": {FILE: schema.to_toml(config)},
    }
    pod = {"metadata": {"labels": labels}, "spec": _pod(job, config, name)}
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    training = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": place,
        "spec": {
            "nprocPerNode": str(job.ranks_here),
            "runPolicy": _policy(job),
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
    return [brought, training]


def _policy(job: JobSpec) -> dict:
    """How the job ends. Pods that still run are deleted then, or their GPUs would stay taken."""
    policy = {"activeDeadlineSeconds": round(job.max_hours * 3600), "cleanPodPolicy": "Running"}
    # The limit is of restarts of all pods together, it is reached when they are as many, and one
    # failure restarts every pod: none of them can go on without the others.
    return policy | ({"backoffLimit": job.retries * job.nodes + 1} if job.retries else {})


def command(job: JobSpec, config: TrainConfig) -> list[str]:
    """What every pod runs."""
    settings = (f"{name}={value}" for name, value in _places(job, config).items())
    changes = [_literal(part) for setting in settings for part in ("--set", setting)]
    return ["torchrun", "-m", "nearlinear.cli", "train", f"{CONFIG}/{FILE}", *changes]


def _places(job: JobSpec, config: TrainConfig) -> dict[str, str]:
    """Settings of the training that say where things lie in a pod."""
    data = {"data.path": f"{DATA}/train"} if "train" in job.inputs else {}
    if not job.checkpoint_claim:
        return data
    # What a run leaves goes where it outlives its pods, unless it has a full path already.
    kept = PurePosixPath(job.checkpoint_path)
    left = {"run.folder": config.run.folder, "checkpoint.folder": config.checkpoint.folder}
    moved = {name: folder for name, folder in left.items() if not elsewhere(folder)}
    return data | {name: str(kept / folder) for name, folder in moved.items()}


def _pod(job: JobSpec, config: TrainConfig, name: str) -> dict:
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE)} | job.environment
    volumes, mounts = _volumes(job, name)
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": job.image,
        "command": command(job, config),
        "env": [{"name": key, "value": _literal(value)} for key, value in variables.items()],
        "resources": _resources(job),
        "volumeMounts": mounts,
    }
    gpus = {"tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]}
    return {
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": NOTICE,
        **(gpus if job.accelerators_here else {}),
        **_machine(job),
    }


def _literal(text: str) -> str:
    """``text``, kept from Kubernetes, which puts values of variables in place of ``$(NAME)``."""
    return text.replace("$", "$$")


def _machine(job: JobSpec) -> dict:
    """Where pods may run: EKS calls its machines by EC2's name, HyperPod by SageMaker's."""
    if instances.known(job.instance_type) is None:
        return {}
    name = job.instance_type.removeprefix("ml.")
    is_one = {
        "key": "node.kubernetes.io/instance-type",
        "operator": "In",
        "values": [name, f"ml.{name}"],
    }
    terms = {"nodeSelectorTerms": [{"matchExpressions": [is_one]}]}
    needed = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"affinity": {"nodeAffinity": {needed: terms}}}


def _resources(job: JobSpec) -> dict:
    """A machine's GPUs and EFA cards. EFA's buffers lie in huge pages, of which a pod that does
    not ask for them gets none; and who asks must ask for cores or memory, too: a core per rank."""
    machine = instances.known(job.instance_type)
    limits = {GPU: job.ranks_here} if job.accelerators_here else {}
    if machine and machine.efa:
        limits |= {EFA: machine.efa, "hugepages-2Mi": "5120Mi"}
    return {"limits": limits, "requests": {"cpu": job.ranks_here}} if limits else {}


def _volumes(job: JobSpec, name: str) -> tuple[list[dict], list[dict]]:
    """What a pod is given, and where it finds it."""
    volumes = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # what ranks of a node share
    ]
    mounts = [
        {"name": "config", "mountPath": CONFIG, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    for channel, given in job.inputs.items():
        volumes.append({"name": f"input-{channel}", **_source(given)})
        inside = {"subPath": given.directory.strip("/")} if given.directory.strip("/") else {}
        mount = {"mountPath": f"{DATA}/{channel}", "readOnly": not given.writable, **inside}
        mounts.append({"name": f"input-{channel}", **mount})
    if job.checkpoint_claim:
        claim = {"persistentVolumeClaim": {"claimName": job.checkpoint_claim}}
        volumes.append({"name": "checkpoints", **claim})
        mounts.append({"name": "checkpoints", "mountPath": job.checkpoint_path})
    return volumes, mounts


def _source(given: Input) -> dict:
    if given.source == "claim":
        return {"persistentVolumeClaim": {"claimName": given.claim}}
    return {"hostPath": {"path": given.path, "type": "Directory"}}
