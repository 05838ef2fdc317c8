"""Secrets of a job reach the ranks by reference, and their values appear nowhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nearlinear import cli
from nearlinear.launch import run_job, secrets, spec
from nearlinear.launch.sagemaker import container, policies
from tests.core.launch.test_validation import RUN

VALUE = "s3cr3t-value-0123456789"
CLEAR = {
    "WANDB_API_KEY": VALUE,
    "HF_TOKEN": VALUE,
    "AWS_SECRET_ACCESS_KEY": VALUE,
    "DB_PASSWORD": VALUE,
    "PROXY": f"https://me:{VALUE}@proxy:80",
}
KEPT = {"TOKENIZERS_PARALLELISM": "false", "MONKEY_BARS": "kept-value", "KEYBOARD": "kept-value"}
REFERENCES = {
    "kubernetes": "wandb/api-key",
    "sagemaker": "wandb#api-key",
    "slurm": "env:MY_KEY",
    "local": "env:MY_KEY",
}


@pytest.fixture
def run_file(tmp_path):
    """Return a function that writes a config file with changes of its table [job]."""

    def write(**changes) -> str:
        inputs = {"train": {"path": "/data"}}
        plain = {"place": "slurm", "nodes": 1, "accelerators": 0, "ranks_per_node": 1}
        plain |= {"instance_type": "here", "image": "image", "name": "job", "inputs": inputs}
        job = dict(RUN["job"]) if changes.get("place") in ("sagemaker", "emulate") else plain
        file = tmp_path / "run.json"
        file.write_text(json.dumps({"job": job | changes}))
        return str(file)

    return write


@pytest.mark.parametrize("place", ["kubernetes", "slurm", "sagemaker", "emulate", "local"])
def test_dry_run_redacts_secrets_by_name_and_in_urls(run_file, capfd, caplog, place):
    file = run_file(place=place, environment=CLEAR | KEPT)
    assert cli.main(["launch", file, "--dry-run"]) == 0
    said = capfd.readouterr()
    assert VALUE not in said.out + said.err
    assert all(name in caplog.text for name in CLEAR) and "job.secrets" in caplog.text
    assert VALUE not in caplog.text
    if place != "local":  # which prints no environment
        assert said.out.count("<redacted>") >= len(CLEAR) and "kept-value" in said.out


@pytest.mark.parametrize("place", ["kubernetes", "slurm", "sagemaker", "local"])
def test_reference_is_passed_on_instead_of_the_value(run_file, capfd, monkeypatch, place):
    monkeypatch.setenv("MY_KEY", VALUE)
    file = run_file(place=place, secrets={"WANDB_API_KEY": REFERENCES[place]})
    assert cli.main(["launch", file, "--dry-run"]) == 0
    said = capfd.readouterr()
    assert VALUE not in said.out + said.err
    if place == "kubernetes":
        import yaml

        _, job = yaml.safe_load_all(said.out)
        master = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
        [container_spec] = master["containers"]
        assert {
            "name": "WANDB_API_KEY",
            "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "api-key"}},
        } in container_spec["env"]
    if place == "sagemaker":
        known = json.loads(json.loads(said.out)["Environment"][secrets.SECRETS_VARIABLE])
        assert known == {"WANDB_API_KEY": "wandb#api-key"}


def test_sbatch_receives_secrets_through_a_descriptor(run_file, tmp_path, monkeypatch):
    """A program in sbatch's place stores its arguments and the descriptor's content."""
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, pathlib\n"
        "folder = pathlib.Path(__file__).parent\n"
        "[option] = sys.argv[1:]\n"
        "number = int(option.removeprefix('--export-file='))\n"
        "(folder / 'values').write_bytes(open(number, 'rb').read())\n"
        "(folder / 'script').write_text(sys.stdin.read())\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "token").write_text(f"{VALUE}\n")
    secret = {"HF_TOKEN": f"file:{tmp_path / 'token'}"}
    assert cli.main(["launch", run_file(place="slurm", secrets=secret)]) == 0
    assert (program.parent / "values").read_bytes() == f"HF_TOKEN={VALUE}\0".encode()
    script = (program.parent / "script").read_text()
    check = next(line for line in script.splitlines() if "HF_TOKEN" in line)
    assert VALUE not in script
    for environment, code in (({}, 1), ({"HF_TOKEN": "x"}, 0)):
        done = subprocess.run(["bash", "-euc", check], env=environment, capture_output=True)
        assert bool(done.returncode) == bool(code)


@pytest.mark.parametrize("place", ["kubernetes", "sagemaker", "slurm", "local"])
def test_value_in_place_of_a_reference_is_refused_without_printing_it(run_file, capfd, place):
    bad = {"kubernetes": VALUE, "sagemaker": f"{VALUE} x", "slurm": VALUE, "local": VALUE}[place]
    file = run_file(place=place, secrets={"HF_TOKEN": bad})
    assert cli.main(["launch", file, "--dry-run"]) == 2
    said = capfd.readouterr()
    assert "job.secrets.HF_TOKEN: is not a reference" in said.err
    assert VALUE not in said.out + said.err


def test_local_ranks_get_the_values(run_file, monkeypatch):
    monkeypatch.setenv("MY_KEY", VALUE)
    seen = {}
    monkeypatch.setattr(run_job.subprocess, "call", lambda command, env: seen.update(env) or 0)
    assert cli.main(["launch", run_file(place="local", secrets={"HF_TOKEN": "env:MY_KEY"})]) == 0
    assert seen["HF_TOKEN"] == VALUE


class Manager:
    """AWS Secrets Manager with one secret."""

    def get_secret_value(self, SecretId):
        return {"SecretString": {"wandb": json.dumps({"api-key": VALUE}), "plain": VALUE}[SecretId]}


def test_container_reads_secrets_that_are_not_set(monkeypatch):
    monkeypatch.setattr("nearlinear.launch.sagemaker.aws.create_client", lambda name: Manager())
    references = {"A": "wandb#api-key", "B": "plain", "C": "elsewhere"}
    environment = {secrets.SECRETS_VARIABLE: json.dumps(references), "C": "set"}
    assert secrets.resolve_in_container(environment) == {"A": VALUE, "B": VALUE}
    environment[secrets.SECRETS_VARIABLE] = json.dumps({"A": "plain#x"})
    with pytest.raises(secrets.ConfigError, match="plain is no JSON object with the key 'x'"):
        secrets.resolve_in_container(environment)


def test_unreadable_secret_ends_the_container_with_its_reason(tmp_path, monkeypatch, capsys):
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)

    def fail(environment):
        raise secrets.ConfigError("job.secrets.A: reason")

    monkeypatch.setattr(container, "resolve_in_container", fail)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert container.main(str(tmp_path)) == 2
    assert Path(tmp_path, "output", "failure").read_text() == "job.secrets.A: reason"


def test_execution_policy_allows_reading_the_secrets_only():
    arn = "arn:aws:secretsmanager:us-west-2:123456789012:secret:hf-AbCdEf"
    job, _ = spec.load(RUN | {"job": RUN["job"] | {"secrets": {"A": "wandb#x", "B": arn}}})
    [statement] = (s for s in policies.execution_policy(job)["Statement"] if s["Sid"] == "Secrets")
    assert statement["Action"] == ["secretsmanager:GetSecretValue"]
    name = "arn:aws:secretsmanager:*:123456789012:secret:wandb-??????"
    assert statement["Resource"] == sorted([name, arn])
