"""Secrets of a job: references instead of values, and redaction of everything that is printed.

``job.secrets`` maps an environment variable of the ranks to the place that holds its value. The
value never appears in a request, a manifest, a script or a log:

=============  ==============================  ================================================
place          reference                       mechanism
=============  ==============================  ================================================
kubernetes     ``name/key``                    a Kubernetes Secret, read by the kubelet
sagemaker      ``name`` or ARN, and ``#key``   AWS Secrets Manager, read by the container
slurm          ``env:NAME``, ``file:PATH``     sbatch --export-file, through a pipe
local          ``env:NAME``, ``file:PATH``     the environment of the ranks
=============  ==============================  ================================================

Values of ``job.environment`` are redacted in dry runs if the variable's name, or a URL with a
password, looks like a secret.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .spec import JobSpec, Problem

REDACTED = "<redacted>"
SECRETS_VARIABLE = "NEARLINEAR_SECRETS"
"""Environment variable with the references that a SageMaker container resolves, as JSON."""

_SECRET_NAME = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|API_?KEY|(^|_)(KEY|AUTH)(_|$)",
    re.IGNORECASE,
)
_PASSWORD_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_REFERENCES = {
    "kubernetes": (r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._a-zA-Z0-9]+", "wandb/api-key",
                   "the name of a Kubernetes Secret and a key in it"),
    "sagemaker": (r"[-/_+=.@:a-zA-Z0-9]{1,2048}(#[^#]+)?", "wandb#api-key",
                  "the name or ARN of a secret in AWS Secrets Manager, and optionally a key of its "
                  "JSON"),
    "here": (r"env:[A-Za-z_][A-Za-z0-9_]*|file:.+", "env:WANDB_API_KEY",
             "env:NAME, a variable of this shell, or file:PATH, a file of this machine"),
}  # fmt: skip


def is_secret_name(name: str) -> bool:
    """Return True if the name of a variable says that its value is a secret."""
    return _SECRET_NAME.search(name) is not None


def redact_value(name: str, value: str) -> str:
    """Return ``value``, or a placeholder for the secrets in it."""
    return REDACTED if is_secret_name(name) else _PASSWORD_IN_URL.sub(REDACTED, value)


def redact_job(job: JobSpec) -> JobSpec:
    """Return ``job`` with the secrets in its environment redacted, for output."""
    environment = {name: redact_value(name, value) for name, value in job.environment.items()}
    return dataclasses.replace(job, environment=environment)


def redact_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a SageMaker request with the secrets in its environment redacted, for output."""
    shown = dict(request)
    if "Environment" in shown:
        values = shown["Environment"].items()
        shown["Environment"] = {
            name: value if name == SECRETS_VARIABLE else redact_value(name, value)
            for name, value in values
        }
    return shown


def secrets_in_clear_text(job: JobSpec) -> list[str]:
    """Return the variables of ``job.environment`` that belong into ``job.secrets``."""
    clean = redact_job(job).environment
    return [name for name, value in job.environment.items() if clean[name] != value]


def check_secrets(job: JobSpec, place: str) -> Iterator[Problem]:
    """Yield problems of ``job.secrets`` on a backend: kubernetes, sagemaker, or any other."""
    pattern, example, meaning = _REFERENCES.get(place, _REFERENCES["here"])
    for name, reference in job.secrets.items():
        field = f"job.secrets.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            cause = f"{name!r} is not a valid variable name"
            yield Problem(field, cause, "use letters, digits and _; begin with a letter or _")
        elif name in job.environment:
            yield Problem(field, "is also in job.environment", "remove it there")
        elif not re.fullmatch(pattern, reference):
            # the reference is not shown: it may be the secret itself
            yield Problem(field, "is not a reference", f'give {meaning}, as in "{example}"')


def read_secrets(job: JobSpec) -> dict[str, str]:
    """Read the values of ``env:`` and ``file:`` references.

    Raises:
        ConfigError: A variable is not set, or a file cannot be read.
    """
    return {name: _read(name, reference) for name, reference in job.secrets.items()}


def _read(name: str, reference: str) -> str:
    kind, _, place = reference.partition(":")
    if kind == "env":
        if place not in os.environ:
            raise ConfigError(f"job.secrets.{name}: the variable {place} is not set in this shell")
        return os.environ[place]
    try:
        return Path(place).expanduser().read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"job.secrets.{name}: cannot read the file {place}: {error}") from None


def export_file(values: Mapping[str, str]) -> bytes:
    """Return the content of sbatch's ``--export-file``: entries that end with NUL."""
    return b"".join(f"{name}={value}\0".encode() for name, value in values.items())


def resolve_in_container(environment: Mapping[str, str]) -> dict[str, str]:
    """Read the secrets of `SECRETS_VARIABLE` from AWS Secrets Manager.

    Variables that are set already are left alone, so that an emulated job needs no AWS.

    Raises:
        ConfigError: A secret does not exist, or the job's role may not read it.
    """
    references = json.loads(environment.get(SECRETS_VARIABLE) or "{}")
    missing = {name: text for name, text in references.items() if name not in environment}
    if not missing:
        return {}
    from .sagemaker.aws import create_client, translate_errors

    client, values = create_client("secretsmanager"), {}
    for name, reference in missing.items():
        identifier, _, key = reference.partition("#")
        with translate_errors(f"reading the secret {identifier} for job.secrets.{name}"):
            text = client.get_secret_value(SecretId=identifier)["SecretString"]
        if key:
            try:
                text = json.loads(text)[key]
            except (ValueError, KeyError, TypeError):
                raise ConfigError(
                    f"job.secrets.{name}: the secret {identifier} is no JSON object with the key "
                    f"{key!r}"
                ) from None
        values[name] = str(text)
    return values
