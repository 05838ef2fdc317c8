"""PyTorchJobs: Kubernetes accepts them, their pods train, and invalid jobs are rejected."""

import copy
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from nearlinear.config import schema
from nearlinear.config import train as train_config
from nearlinear.errors import ConfigError
from nearlinear.launch import kubernetes, spec
from nearlinear.launch.spec import TERMINATION_NOTICE

NAME = "gpt2-30b-20261122031500"
USUAL = {
    "name": "gpt2-30b",
    "image": "registry/nearlinear:1",
    "nodes": 4,
    "inputs": {"train": {"claim": "tokens", "directory": "/gpt2"}, "val": {"path": "/mnt/val"}},
    "retries": 2,
    "checkpoint_claim": "runs",
    "environment": {"NCCL_DEBUG": "WARN"},
    "tags": {"team": "models"},
}
TRAINING = {"model": {"preset": "gpt2-30b"}, "parallel": {"hybrid_shard_degree": 16}}


def job_and_config(**changes):
    return spec.load(TRAINING | {"job": USUAL | changes})


def rendered(**changes) -> tuple[dict, dict]:
    """Return the ConfigMap and the PyTorchJob parsed from the rendered YAML."""
    return tuple(yaml.safe_load_all(kubernetes.render_manifest(*job_and_config(**changes), NAME)))


def container_of(training: dict, role: str = "Master") -> dict:
    pod = training["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"]
    (container,) = pod["containers"]
    return container


# --- validity for the API server ------------------------------------------------------------------


@pytest.fixture(scope="module")
def kubernetes_schema():
    pytest.importorskip("kubeflow.training", reason="needs the operator's types: extra dev")
    from tests.core.launch import kubernetes_schema

    return kubernetes_schema


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nodes": 1, "retries": 0, "tags": {}, "environment": {}},
        {"nodes": 1000, "instance_type": "ml.p5.48xlarge"},
        {"instance_type": "cpu", "ranks_per_node": 3, "inputs": {}, "checkpoint_claim": ""},
        {"instance_type": "dgx", "accelerators": 8, "namespace": "team-a"},
        {"environment": {"A": "1e3", "B": "on", "C": "", "D": "$(HOME)\n\t'\"", "E": "~"}},
        {"tags": {"example.com/team": "a.b_c-d", "empty": ""}, "max_hours": 0.5},
    ],
)
def test_rendered_objects_are_valid(changes, kubernetes_schema):
    assert kubernetes.check_kubernetes_job(job_and_config(**changes)[0]) == []
    brought, training = rendered(**changes)
    assert (brought["kind"], training["kind"]) == ("ConfigMap", "PyTorchJob")
    assert kubernetes_schema.errors(brought) == []
    assert kubernetes_schema.errors(training) == []
    for each in training["spec"]["pytorchReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME}} | each["template"]
        assert kubernetes_schema.errors(pod) == []


GONE = object()
SPEC = "spec"
MASTER = f"{SPEC}/pytorchReplicaSpecs/Master"
POD = f"{MASTER}/template/spec"
CONTAINER = f"{POD}/containers/0"
BROKEN = [
    # names, types and required fields: from the models of the packages
    (f"{SPEC}/nProcPerNode", "8"),
    (f"{SPEC}/nprocPerNode", 8),
    (f"{SPEC}/nprocPerNode", "all of them"),
    (f"{SPEC}/runPolicy", GONE),
    (f"{SPEC}/runPolicy/activeDeadlineSeconds", "86400"),
    (f"{SPEC}/runPolicy/backofLimit", 3),
    (f"{SPEC}/pytorchReplicaSpecs", GONE),
    (f"{MASTER}/replicas", "1"),
    (f"{MASTER}/restartPolicies", "Never"),
    (f"{MASTER}/template/metadata/label", {}),
    (f"{POD}/containers", GONE),
    (f"{POD}/tolerations/0/operators", "Exists"),
    (f"{POD}/terminationGracePeriodSeconds", "120"),
    (f"{CONTAINER}/name", GONE),
    (f"{CONTAINER}/command", "torchrun"),
    (f"{CONTAINER}/comand", ["torchrun"]),
    (f"{CONTAINER}/env/0/value", 1),
    (f"{CONTAINER}/env/0/name", GONE),
    (f"{CONTAINER}/volumeMounts/0/mountPath", GONE),
    (f"{CONTAINER}/resources/limit", {}),
    (f"{POD}/volumes/0/configMap/names", "config"),
    (f"{POD}/volumes/2/persistentVolumeClaim/claimName", GONE),
    # formats and values: from Kubernetes' documentation and the operator's checks
    ("apiVersion", "kubeflow.org/v2"),
    ("metadata/name", GONE),
    ("metadata/name", "gpt2_30b"),
    ("metadata/name", "30b-gpt2"),
    ("metadata/name", "g" * 64),
    ("metadata/labels/team", "two words"),
    ("metadata/labels/team", True),
    ("metadata/labels/a b", "models"),
    (f"{MASTER}/restartPolicy", "Sometimes"),
    (f"{MASTER}/replicas", 2),
    (f"{SPEC}/pytorchReplicaSpecs/Boss", {}),
    (f"{SPEC}/runPolicy/cleanPodPolicy", "Some"),
    (f"{POD}/containers", []),
    (f"{CONTAINER}/name", "torch"),
    (f"{CONTAINER}/image", GONE),
    (f"{CONTAINER}/image", ""),
    (f"{CONTAINER}/env/0/name", "A B"),
    (f"{CONTAINER}/resources/limits/nvidia.com~gpu", -1),
    (f"{CONTAINER}/resources/limits/hugepages-2Mi", "5120 MiB"),
    (f"{CONTAINER}/resources/requests/cpu", GONE),
    (f"{CONTAINER}/volumeMounts/0/name", "configs"),
    (f"{CONTAINER}/volumeMounts/1/mountPath", "/etc/nearlinear"),
    (f"{POD}/volumes/0/name", "shm"),
    (f"{POD}/volumes/0/name", "Config"),
]


@pytest.mark.parametrize(("path", "value"), BROKEN)
def test_schema_detects_invalid_objects(path, value, kubernetes_schema):
    """The schema must detect each of these, or the test above would prove nothing."""
    training = holder = copy.deepcopy(
        rendered()[1]
    )  # a deep copy separates the pod that both roles share
    *above, last = (part.replace("~", "/") for part in path.split("/"))
    for part in above:
        holder = holder[int(part)] if isinstance(holder, list) else holder[part]
    if value is GONE:
        del holder[last]
    else:
        holder[last] = value
    assert kubernetes_schema.errors(training)


# --- YAML -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["1e3", "y", "N", "on", "off", "~", "null", "0o14", "1:30", "0x10", "1_000", ".5", "=",
              "2026-11-22", "", " a", "#a", "a: b", "'", '"', "a\nb\n", "\t"]
)  # fmt: skip
def test_ambiguous_strings_are_quoted(value):
    job, config = job_and_config(environment={"VALUE": value})
    text = kubernetes.render_manifest(job, config, NAME)
    (line,) = set(re.findall(r"name: \"?VALUE\"?\n +value: (.*)", text))
    assert line[0] in "\"'|"
    variables = container_of(list(yaml.safe_load_all(text))[1])["env"]
    assert {"name": "VALUE", "value": value} in variables


def test_missing_yaml_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError, match="nearlinear.kubernetes"):
        kubernetes.render_manifest(*job_and_config(), NAME)


# --- content of the objects -----------------------------------------------------------------------


def test_pods_find_config_and_data():
    brought, training = rendered()
    text = brought["data"][kubernetes.CONFIG_FILE]
    read = schema.build(train_config.TrainConfig, tomllib.loads(text))
    assert read.model.preset == "gpt2-30b" and read.parallel.hybrid_shard_degree == 16
    pod = training["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    (volume,) = [volume for volume in pod["volumes"] if "configMap" in volume]
    assert volume["configMap"]["name"] == brought["metadata"]["name"]
    assert brought["metadata"]["namespace"] == training["metadata"]["namespace"]
    container = container_of(training)
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert f"{mounts['config']['mountPath']}/{kubernetes.CONFIG_FILE}" in container["command"]
    train = mounts["input-train"]
    assert f"data.path={train['mountPath']}" in container["command"]
    assert train["subPath"] == "gpt2" and train["readOnly"]


def test_data_sources_replace_the_input_train():
    blended = TRAINING | {"data": {"sources": {"/data/train": 0.7, "/data/val": 0.3}}}
    made = kubernetes.render_manifest(*spec.load(blended | {"job": USUAL}), NAME)
    _, training = yaml.safe_load_all(made)
    container = container_of(training)
    assert "data.path" not in " ".join(container["command"])
    assert "input-train" in {mount["name"] for mount in container["volumeMounts"]}


def test_outputs_are_written_to_the_checkpoint_claim():
    container = container_of(rendered(checkpoint_path="/checkpoints")[1])
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["checkpoints"] == {"name": "checkpoints", "mountPath": "/checkpoints"}
    assert "run.folder=/checkpoints/runs/latest" in container["command"]
    assert "checkpoint.folder=/checkpoints" in container["command"]
    job, config = spec.load(TRAINING | {"job": USUAL, "run": {"folder": "/mine/run"}})
    assert "run.folder=/mine/run" in kubernetes.pod_command(job, config)
    bucket = {"checkpoint": {"folder": "s3://my-bucket/run"}}
    said = " ".join(kubernetes.pod_command(*spec.load(TRAINING | {"job": USUAL} | bucket)))
    assert "run.folder=" in said and "checkpoint.folder" not in said
    without = " ".join(kubernetes.pod_command(*job_and_config(checkpoint_claim="")))
    assert "run.folder" not in without and "checkpoint.folder" not in without


@pytest.mark.parametrize("nodes", [1, 2, 32])
def test_one_pod_per_node_with_its_gpus_and_efa(nodes):
    _, training = rendered(nodes=nodes)
    replicas = training["spec"]["pytorchReplicaSpecs"]
    assert sum(each["replicas"] for each in replicas.values()) == nodes
    assert replicas["Master"]["replicas"] == 1
    assert training["spec"]["nprocPerNode"] == "8"
    assert training["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"  # frees the GPUs
    for role, each in replicas.items():
        limits = container_of(training, role)["resources"]["limits"]
        assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"]) == (8, 4)
        assert "hugepages-2Mi" in limits  # EFA's buffers
        assert each["template"]["metadata"]["labels"] == {"app": "nearlinear", "team": "models"}


def test_node_affinity_selects_the_instance_type():
    (term,) = rendered()[1]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"][
        "affinity"
    ]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["p4d.24xlarge", "ml.p4d.24xlarge"]


def test_own_machine_requests_gpus_without_affinity():
    _, training = rendered(instance_type="dgx", accelerators=8)
    assert container_of(training)["resources"]["limits"] == {"nvidia.com/gpu": 8}
    pod = training["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert "affinity" not in pod and pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    _, training = rendered(instance_type="cpu", ranks_per_node=2)
    assert container_of(training)["resources"] == {}
    assert training["spec"]["nprocPerNode"] == "2"


def test_backoff_limit_counts_restarts_of_all_pods():
    """The operator fails the job when the restarts of all pods together reach the limit."""
    _, training = rendered(nodes=4, retries=2)
    assert training["spec"]["runPolicy"]["backoffLimit"] > 2 * 4
    replicas = training["spec"]["pytorchReplicaSpecs"]
    assert {each["restartPolicy"] for each in replicas.values()} == {"OnFailure"}
    _, training = rendered(retries=0)
    assert "backoffLimit" not in training["spec"]["runPolicy"]
    replicas = training["spec"]["pytorchReplicaSpecs"]
    assert {each["restartPolicy"] for each in replicas.values()} == {"Never"}


def test_termination_grace_period_exceeds_shutdown_timeout():
    """The kubelet kills a pod after the notice, and torchrun its ranks slightly earlier."""
    _, training = rendered()
    pod = training["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    variables = {it["name"]: it["value"] for it in pod["containers"][0]["env"]}
    ranks = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert ranks < pod["terminationGracePeriodSeconds"] == TERMINATION_NOTICE < ranks + 30


# --- validation -----------------------------------------------------------------------------------

TRAIN = {"train": {"claim": "tokens"}}
LONG = "a" * 64


@pytest.mark.parametrize(
    ("changes", "where", "fix"),
    [
        ({"image": ""}, "job.image", 'image = "auto"'),
        ({"image": "a b:1"}, "job.image", "remove it"),
        ({"source": "."}, "job.source", "build the code into the image"),
        ({"name": "gpt2_30b"}, "job.name", "lower-case letters and digits, with -"),
        ({"name": "GPT2"}, "job.name", "lower-case letters"),
        ({"name": "30b"}, "job.name", "beginning with a letter"),
        ({"name": "gpt2-"}, "job.name", "lower-case letters"),
        ({"name": "g" * 40}, "job.name", "at most 39"),
        ({"name": "g" * 38, "nodes": 100}, "job.name", "at most 37"),
        ({"name": ""}, "job.name", "beginning with a letter"),
        ({"namespace": "Team A"}, "job.namespace", "lower-case letters"),
        ({"namespace": LONG}, "job.namespace", "at most 63"),
        ({"checkpoint_claim": "my_runs"}, "job.checkpoint_claim", "or ."),
        ({"checkpoint_path": "checkpoints"}, "job.checkpoint_path", "begin it with /"),
        ({"checkpoint_path": "/runs/../etc"}, "job.checkpoint_path", "without .."),
        ({"checkpoint_path": "/etc/nearlinear"}, "job.checkpoint_path", "another folder"),
        ({"checkpoint_path": "/data"}, "job.checkpoint_path", "another folder"),
        ({"checkpoint_path": "/dev/shm/here"}, "job.checkpoint_path", "another folder"),
        ({"inputs": {"my_data": {"claim": "a"}}}, "job.inputs.my_data", "lower-case letters"),
        ({"inputs": {"a" * 58: {"claim": "a"}}}, "job.inputs.aaa", "at most 57"),
        ({"inputs": {"a": {"claim": "My"}}}, "job.inputs.a.claim", "lower-case letters"),
        ({"inputs": {"a": {"claim": "a" * 254}}}, "job.inputs.a.claim", "at most 253"),
        ({"inputs": {"a": {"path": "data"}}}, "job.inputs.a.path", "begin it with /"),
        ({"inputs": {"a": {"path": "/a:b"}}}, "job.inputs.a.path", "another name"),
        ({"inputs": {"a": {"s3": "s3://b/c"}}}, "job.inputs.a", "PersistentVolumeClaim"),
        (
            {"inputs": {"a": {"fsx": "fs-0123456789abcdef0", "directory": "/abc/d"}}},
            "job.inputs.a",
            "PersistentVolumeClaim",
        ),
        (
            {"inputs": {"a": {"claim": "b", "directory": "../c"}}},
            "job.inputs.a.directory",
            "without ..",
        ),
        ({"tags": {"team": "two words"}}, "job.tags.team", "letters and digits"),
        ({"tags": {"team": LONG}}, "job.tags.team", "at most 63"),
        ({"tags": {"a b": "c"}}, "job.tags.a b", "letters and digits"),
        ({"tags": {"Example.com/team": "c"}}, "job.tags.Example.com/team", "before the /"),
        ({"tags": {"team": "-c"}}, "job.tags.team", "between them"),
        (
            {"environment": {"MY-VARIABLE": "1"}},
            "job.environment.MY-VARIABLE",
            "begin with a letter or _",
        ),
        ({"environment": {"PET_NNODES": "1"}}, "job.environment.PET_NNODES", "remove"),
        ({"environment": {"RANK": "0"}}, "job.environment.RANK", "remove"),
        ({"output": "s3://a/b"}, "job.output", "checkpoint_claim"),
        ({"checkpoints": "s3://a/b"}, "job.checkpoints", "checkpoint_claim"),
        ({"spot": True}, "job.spot", "remove"),
        ({"keep_warm_minutes": 5}, "job.keep_warm_minutes", "remove"),
    ],
)
def test_problem_names_field_and_remedy(changes, where, fix):
    (problem,) = kubernetes.check_kubernetes_job(job_and_config(**changes)[0])
    assert problem.field.startswith(where) and fix in problem.remedy


@pytest.mark.parametrize("nodes", [1, 2, 12, 1000])
def test_longest_name_gives_valid_host_names(nodes, kubernetes_schema):
    job, _ = job_and_config(nodes=nodes)
    name = "g" * kubernetes.max_name_length(job)
    assert kubernetes.check_kubernetes_job(job_and_config(nodes=nodes, name=name)[0]) == []
    last = f"-worker-{nodes - 2}" if nodes > 1 else "-master-0"
    assert len(f"{name}-20261122031500{last}") <= 63


# --- pods -----------------------------------------------------------------------------------------


class Cluster:
    """Run pods as local processes, with the variables of the operator and the kubelet.

    Nothing is mounted: paths in commands are replaced by the folders that would be mounted.
    """

    def __init__(self, folder: Path, brought: dict, training: dict):
        self.folder, self.training = folder, training
        (folder / "config").mkdir(parents=True)
        for name, text in brought["data"].items():
            (folder / "config" / name).write_text(text)

    def pods(self) -> list[dict]:
        replicas = self.training["spec"]["pytorchReplicaSpecs"]
        return [
            each["template"]["spec"]
            for role in ("Master", "Worker")
            for each in [replicas.get(role, {"replicas": 0})]
            for _ in range(each["replicas"])
        ]

    def run(self) -> list[subprocess.CompletedProcess]:
        pods, port = self.pods(), free_port()
        running = [self.start(pod, rank, len(pods), port) for rank, pod in enumerate(pods)]
        try:
            said = [process.communicate(timeout=120) for process in running]
        finally:
            for process in running:
                process.kill()
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *texts)
            for process, texts in zip(running, said, strict=True)
        ]

    def start(self, pod: dict, rank: int, nodes: int, port: int) -> subprocess.Popen:
        (container,) = pod["containers"]
        per_node = self.training["spec"]["nprocPerNode"]
        variables = {it["name"]: it["value"] for it in container["env"]}
        for name, value in variables.items():
            variables[name] = expanded(value, variables)
        operators = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
            "PET_NNODES": str(nodes),
            "PET_NODE_RANK": str(rank),
            "PET_NPROC_PER_NODE": per_node,
            "RANK": str(rank),  # index of the pod: torchrun sets RANK for each rank
            "WORLD_SIZE": str(nodes * int(per_node)),
        }
        here = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": "1",
        }
        command = [expanded(word, variables | operators) for word in container["command"]]
        for mount in container["volumeMounts"]:
            shown = str(self.shown(pod, mount))
            command = [re.sub(rf"{mount['mountPath']}(?=/|$)", shown, word) for word in command]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=here | variables | operators,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def shown(self, pod: dict, mount: dict) -> Path:
        (volume,) = [it for it in pod["volumes"] if it["name"] == mount["name"]]
        if "hostPath" in volume:
            source = Path(volume["hostPath"]["path"])
        elif "persistentVolumeClaim" in volume:
            source = self.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
        else:
            source = self.folder / volume["name"]
        return source / mount.get("subPath", "")


def expanded(text: str, variables: dict) -> str:
    """Expand like Kubernetes: $(NAME) to the value of an existing variable, $$ to $."""
    known = r"\$\$|\$\((\w+)\)"
    return re.sub(
        known, lambda it: "$" if it[0] == "$$" else variables.get(it[1], it[0]), text
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.slow
def test_pods_train_together(small_run, tmp_path):
    tokens = Path(small_run["data"].pop("path"))
    small_run["run"]["folder"] = "runs/mine"
    small_run["train"]["steps"] = 3
    job, config = spec.load(
        small_run
        | {
            "job": {
                "image": "registry/nearlinear:1",
                "instance_type": "cpu",
                "nodes": 2,
                "ranks_per_node": 1,
                "inputs": {"train": {"path": str(tokens.parent), "directory": tokens.name}},
                "checkpoint_claim": "runs",
                "environment": {"MARK": 'it\'s "here" $(HOME) $$'},
            }
        }
    )
    assert kubernetes.check_kubernetes_job(job) == []
    brought, training = yaml.safe_load_all(kubernetes.render_manifest(job, config, "small-1"))
    done = Cluster(tmp_path / "cluster", brought, training).run()
    assert [pod.returncode for pod in done] == [0, 0], done
    assert "done: 3 steps" in done[0].stdout and "done:" not in done[1].stdout
    left = tmp_path / "cluster" / "claims" / "runs" / "runs" / "mine"
    lines = (left / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 3


def test_dollar_signs_are_escaped():
    job, config = job_and_config(environment={"MARK": "$(NCCL_DEBUG) $HOME $$", "A": "a$(MARK)"})
    variables = {it["name"]: it["value"] for it in container_of(
        kubernetes.build_objects(job, config, NAME)[1])["env"]}  # fmt: skip
    assert expanded(variables["MARK"], {"NCCL_DEBUG": "WARN"}) == "$(NCCL_DEBUG) $HOME $$"
    assert expanded(variables["A"], {"MARK": "b"}) == "a$(MARK)"
