"""JSON schemas of Kubernetes objects, as strict as an API server.

The schemas are built from the models in the packages ``kubernetes`` and ``kubeflow-training``,
which are generated from the same types as the API server and the custom resource definition. The
models define fields, types and required members. Formats and enumerations of the fields that
nearlinear writes are added here, from Kubernetes' documentation on names and volumes and the
operator's checks (training-operator 1.9, pkg/webhooks).
"""

from __future__ import annotations

import functools
import re

import jsonschema
import kubernetes.client
from kubeflow.training import models

KINDS = {
    "ConfigMap": ("v1", "V1ConfigMap"),
    "Pod": ("v1", "V1Pod"),
    "PyTorchJob": ("kubeflow.org/v1", "KubeflowOrgV1PyTorchJob"),
}
PLAIN = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "datetime": {"type": "string"},
    "object": {},
    "Quantity": {},
}
LONGER = re.compile("^K8sIo(Api(Core|Autoscaling)|ApimachineryPkgApisMeta)")
LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
DOMAIN = rf"{LABEL}(\.{LABEL})*"
TAG = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


def _text(pattern: str, longest: int = 2**20) -> dict:
    return {"pattern": rf"^(?:{pattern})\Z", "maxLength": longest}


SUBDOMAIN = _text(DOMAIN, 253)
ABSOLUTE = _text(r"/(?!.*(^|/)\.\.(/|$))[^:]*")


def _one_of(*values: str) -> dict:
    return {"enum": list(values)}


def _with(field: str, schema: dict) -> dict:
    """Require ``field`` of an object, with ``schema``."""
    return {"required": [field], "properties": {field: schema}}


QUANTITIES = {
    "additionalProperties": {
        "anyOf": [
            {"type": "integer", "minimum": 0},
            {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?$"},
        ]
    }
}
CONTAINERS = {"contains": _with("name", {"const": "pytorch"}), "items": {"required": ["image"]}}
# More about fields than the models say: model, field, schema.
MORE = {
    ("V1ObjectMeta", "name"): SUBDOMAIN,
    ("V1ObjectMeta", "namespace"): _text(LABEL),
    ("V1ObjectMeta", "labels"): {
        "propertyNames": _text(f"({DOMAIN}/)?{TAG}"),
        "additionalProperties": _text(f"({TAG})?"),
    },
    ("V1Container", "name"): _text(LABEL),
    ("V1Container", "image"): _text(r"\S+"),
    ("V1EnvVar", "name"): _text("[-._a-zA-Z][-._a-zA-Z0-9]*"),
    ("V1Volume", "name"): _text(LABEL),
    ("V1VolumeMount", "mountPath"): ABSOLUTE,
    ("V1VolumeMount", "subPath"): _text(r"(?!/)(?!.*(^|/)\.\.(/|$)).*"),
    ("V1HostPathVolumeSource", "path"): ABSOLUTE,
    ("V1HostPathVolumeSource", "type"): _one_of("", "Directory", "DirectoryOrCreate", "File"),
    ("V1EmptyDirVolumeSource", "medium"): _one_of("", "Memory"),
    ("V1PersistentVolumeClaimVolumeSource", "claimName"): SUBDOMAIN,
    ("V1ConfigMapVolumeSource", "name"): SUBDOMAIN,
    ("V1NodeSelectorRequirement", "operator"): _one_of(
        "In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"
    ),
    ("V1Toleration", "operator"): _one_of("Exists", "Equal"),
    ("V1Toleration", "effect"): _one_of("", "NoSchedule", "PreferNoSchedule", "NoExecute"),
    ("V1ResourceRequirements", "limits"): QUANTITIES,
    ("V1ResourceRequirements", "requests"): QUANTITIES,
    ("V1PodSpec", "containers"): {"minItems": 1},
    ("V1PodSpec", "restartPolicy"): _one_of("Always", "OnFailure", "Never"),
    ("KubeflowOrgV1ReplicaSpec", "restartPolicy"): _one_of(
        "Always", "OnFailure", "Never", "ExitCode"
    ),
    ("KubeflowOrgV1ReplicaSpec", "replicas"): {"minimum": 1},
    ("KubeflowOrgV1RunPolicy", "cleanPodPolicy"): _one_of("", "All", "Running", "None"),
    ("KubeflowOrgV1RunPolicy", "activeDeadlineSeconds"): {"minimum": 1},
    ("KubeflowOrgV1RunPolicy", "backoffLimit"): {"minimum": 0},
    ("KubeflowOrgV1PyTorchJobSpec", "nprocPerNode"): _text("auto|cpu|gpu|[1-9][0-9]*"),
    ("KubeflowOrgV1PyTorchJobSpec", "pytorchReplicaSpecs"): {
        "minProperties": 1,
        "propertyNames": _one_of("Master", "Worker"),
        "allOf": [{"properties": {"Master": {"properties": {"replicas": {"const": 1}}}}}],
        "additionalProperties": _with("template", _with("spec", _with("containers", CONTAINERS))),
    },
    # The job's name is that of its pods and services, with -worker-31 behind it.
    ("KubeflowOrgV1PyTorchJob", "metadata"): _with(
        "name", _text("[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
    ),
}


def errors(document: dict) -> list[str]:
    """Return all errors of ``document``, each with its path."""
    version, model = KINDS[document["kind"]]
    found = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in jsonschema.Draft202012Validator(_schema(model)).iter_errors(document)
    ]
    if document.get("apiVersion") != version:
        found.append(f"apiVersion: {document.get('apiVersion')!r} is not {version!r}")
    return found + [fault for pod in _pods(document) for fault in _between(pod)]


def _pods(document: dict) -> list[dict]:
    if document["kind"] == "Pod":
        return [document["spec"]]
    replicas = document.get("spec", {}).get("pytorchReplicaSpecs", {})
    return [each["template"]["spec"] for each in replicas.values() if "template" in each]


def _between(pod: dict) -> list[str]:
    """Return errors between fields of a pod."""
    found, volumes = [], [volume.get("name") for volume in pod.get("volumes", [])]
    if len(set(volumes)) < len(volumes):
        found.append("volumes: a name twice")
    for container in pod.get("containers", []):
        mounts = container.get("volumeMounts", [])
        paths = [mount.get("mountPath") for mount in mounts]
        found += [
            f"volumeMounts: no volume {mount.get('name')!r}"
            for mount in mounts
            if mount.get("name") not in volumes
        ]
        if len(set(paths)) < len(paths):
            found.append("volumeMounts: a mountPath twice")
        resources = container.get("resources", {})
        asked = {**resources.get("limits", {}), **resources.get("requests", {})}
        if any(name.startswith("hugepages-") for name in asked) and not {"cpu", "memory"} & {
            *asked
        }:
            found.append("resources: huge pages without cpu or memory")
    return found


@functools.cache
def _schema(model: str) -> dict:
    definitions: dict[str, dict] = {}
    _define(model, definitions)
    return {"$ref": f"#/$defs/{model}", "$defs": definitions}


def _define(name: str, definitions: dict[str, dict]) -> None:
    if name in definitions:
        return
    # The operator's own, or Kubernetes', which the operator's package gives longer names to.
    model = getattr(models, name, None) or getattr(kubernetes.client, LONGER.sub("", name))
    properties = definitions[name] = {}  # there before its fields are: some contain themselves
    fields = {model.attribute_map[it]: kind for it, kind in model.openapi_types.items()}
    definitions[name] = {
        "type": "object",
        "additionalProperties": False,
        "required": _required(model),
        "properties": properties,
    }
    for field, kind in fields.items():
        schema = _kind(kind, definitions)
        if (name, field) in MORE:
            more = MORE[name, field]
            # A quantity is a number or a text; the models say text.
            schema = more if more is QUANTITIES else {"allOf": [schema, more]}
        properties[field] = schema


def _kind(kind: str, definitions: dict[str, dict]) -> dict:
    if kind in PLAIN:
        return PLAIN[kind]
    if several := re.fullmatch(r"list\[(.*)\]", kind):
        return {"type": "array", "items": _kind(several[1], definitions)}
    if table := re.fullmatch(r"dict\(str, (.*)\)", kind):
        return {"type": "object", "additionalProperties": _kind(table[1], definitions)}
    _define(kind, definitions)
    return {"$ref": f"#/$defs/{kind}"}


def _required(model) -> list[str]:
    """Return the fields that the model's setters require."""
    blank, found = model.__new__(model), []
    blank.local_vars_configuration = kubernetes.client.Configuration()
    for attribute, field in model.attribute_map.items():
        try:
            setattr(blank, attribute, None)
        except ValueError:
            found.append(field)
    return found
