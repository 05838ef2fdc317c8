"""Container entry point: start the ranks of one host of a SageMaker training job.

    python -m nearlinear.launch.sagemaker.container

SageMaker writes three files to ``/opt/ml/input/config`` and the data to ``/opt/ml/input/data``.
Scripts expect them in ``SM_...`` variables. Each hyperparameter is a key of the training config.
SageMaker displays the content of ``/opt/ml/output/failure`` as the reason of a failure. The channel
``sm_drivers`` brings the launcher script into the container, and the request's entry point starts
it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, NearlinearError
from ...hardware import find_instance_type
from .. import local
from ..secrets import resolve_in_container

CODE_CHANNEL, DRIVER_CHANNEL = "code", "sm_drivers"
OWN_CHANNELS = (CODE_CHANNEL, DRIVER_CHANNEL)
RANKS_VARIABLE = "NEARLINEAR_RANKS_PER_NODE"
"""Environment variable with the number of ranks per host; `container` reads it."""
CONTAINER_ROOT = "/opt/ml"
SCRIPT_NAME = "sm_train.sh"
SCRIPT_PATH = f"{CONTAINER_ROOT}/input/data/{DRIVER_CHANNEL}/{SCRIPT_NAME}"
START_COMMAND = f"chmod +x {SCRIPT_PATH} && {SCRIPT_PATH}"
SCRIPT = """\
#!/bin/bash
# Started by the training job. The script finds the other inputs relative to its own path.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
code=$root/input/data/code
# With AWS's own image, the launcher ships nearlinear as a wheel. pip keeps the image's torch.
for wheel in "$(dirname "$0")"/*.whl; do
  if [ -f "$wheel" ]; then
    python -m pip install --quiet "$wheel"
  fi
done
if [ -f "$code/requirements.txt" ]; then
  python -m pip install --quiet -r "$code/requirements.txt"
fi
if [ -d "$code" ]; then
  cd "$code"
  export PYTHONPATH="$code${PYTHONPATH:+:$PYTHONPATH}"
fi
exec python -m nearlinear.launch.sagemaker.container "$root"
"""


def write_script(folder: Path) -> None:
    """Write the launcher script to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCRIPT_NAME).write_text(SCRIPT)
    (folder / SCRIPT_NAME).chmod(0o755)


def encode_hyperparameter(value: Any) -> str:
    """Encode ``value`` like the SageMaker SDK: JSON, but plain strings that are not valid JSON."""
    is_plain = isinstance(value, str) and decode_hyperparameter(value) == value
    return value if is_plain else json.dumps(value)


def decode_hyperparameter(value: str) -> Any:
    """Decode the result of `encode_hyperparameter`."""
    try:
        return json.loads(value)
    except ValueError:
        return value


DEFAULT_PORT = "7777"  # rendezvous port on the first host
_PARALLEL = "mp_parameters"
_CONFIG_FILE = "input/config/nearlinear.json"
_MAX_FAILURE_LENGTH = 1024  # characters that SageMaker displays


@dataclass(frozen=True)
class ContainerInputs:
    """Inputs of one host of a job, below ``root`` (/opt/ml)."""

    root: Path
    hosts: list[str]
    host: str
    instance_type: str
    hyperparameters: dict[str, str]
    channels: list[str]

    @property
    def master_address(self) -> str:
        """Host of the rendezvous: the first one, unless the environment names another."""
        return os.environ.get("SM_MASTER_ADDR") or self.hosts[0]

    @property
    def master_port(self) -> str:
        """Port of the rendezvous."""
        return os.environ.get("SM_MASTER_PORT") or DEFAULT_PORT

    @property
    def num_ranks(self) -> int:
        """Processes on this host: one per GPU, unless the environment sets the number."""
        if number := os.environ.get(RANKS_VARIABLE):
            return int(number)
        known = find_instance_type(self.instance_type)
        return known.gpus if known else 1


def read_inputs(root: Path) -> ContainerInputs:
    """Read the files below ``root``. Raises ConfigError outside of a training container."""
    if not (root / "input" / "config").is_dir():
        raise ConfigError(
            f"{root}/input/config does not exist: this command runs inside a SageMaker training "
            "container; to emulate one on this machine, run nearlinear launch --place emulate"
        )

    def read_json(name: str) -> dict:
        path = root / "input" / "config" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    resources = read_json("resourceconfig")
    return ContainerInputs(
        root,
        resources.get("hosts", ["algo-1"]),
        resources.get("current_host", "algo-1"),
        resources.get("current_instance_type", ""),
        read_json("hyperparameters"),
        sorted(read_json("inputdataconfig")),
    )


def script_variables(inputs: ContainerInputs) -> dict[str, str]:
    """Return the ``SM_...`` variables that SageMaker's own containers set for scripts."""
    values = _decoded_hyperparameters(inputs)
    data = inputs.root / "input" / "data"
    return {
        "SM_HOSTS": json.dumps(inputs.hosts),
        "SM_CURRENT_HOST": inputs.host,
        "SM_HOST_COUNT": str(len(inputs.hosts)),
        "SM_CURRENT_INSTANCE_TYPE": inputs.instance_type,
        "SM_NUM_GPUS": str(inputs.num_ranks),
        "SM_MASTER_ADDR": inputs.master_address,
        "SM_MASTER_PORT": inputs.master_port,
        "SM_INPUT_DIR": str(inputs.root / "input"),
        "SM_MODEL_DIR": str(inputs.root / "model"),
        "SM_OUTPUT_DIR": str(inputs.root / "output"),
        "SM_OUTPUT_DATA_DIR": str(inputs.root / "output" / "data"),
        "SM_CHANNELS": json.dumps(inputs.channels),
        "SM_HPS": json.dumps(values),
        **{f"SM_CHANNEL_{name.upper()}": str(data / name) for name in inputs.channels},
        **{
            f"SM_HP_{variable_name(name)}": encode_hyperparameter(value)
            for name, value in values.items()
        },
    }


def variable_name(hyperparameter: str) -> str:
    """Return the part of a variable name that stands for a hyperparameter."""
    return hyperparameter.upper().replace(".", "_").replace("-", "_")


def _decoded_hyperparameters(inputs: ContainerInputs) -> dict[str, Any]:
    return {name: decode_hyperparameter(text) for name, text in inputs.hyperparameters.items()}


def training_config(inputs: ContainerInputs) -> dict[str, Any]:
    """Return the training config of the hyperparameters, with the container's paths.

    Names are written as in `build_request` (``optimizer-lr``) or as in the config
    (``optimizer.lr``).
    """
    values = _decoded_hyperparameters(inputs)
    values.pop(_PARALLEL, None)  # the ranks read it from SM_HP_MP_PARAMETERS
    flat = {name.replace("-", "."): value for name, value in values.items()}
    flat.setdefault("run.folder", str(inputs.root / "output" / "data"))
    if "train" in inputs.channels and "data.sources" not in flat:  # sources name their channels
        flat["data.path"] = str(inputs.root / "input" / "data" / "train")
    config: dict = {}
    for name, value in flat.items():
        table, dot, key = name.partition(".")
        if dot:
            config.setdefault(table, {})[key] = value
        else:
            config[name] = value
    return config


def local_ranks(inputs: ContainerInputs) -> local.LocalRanks:
    """Return the ranks to start on this host, and their rendezvous."""
    rendezvous = f"{inputs.master_address}:{inputs.master_port}"
    index = inputs.hosts.index(inputs.host)
    return local.LocalRanks(inputs.num_ranks, len(inputs.hosts), index, rendezvous)


def main(root: str = CONTAINER_ROOT) -> int:
    """Run the ranks of this host and return their exit code."""
    try:
        inputs = read_inputs(Path(root))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (inputs.root / "output" / "data").mkdir(parents=True, exist_ok=True)
    config_file = inputs.root / _CONFIG_FILE
    config_file.write_text(json.dumps(training_config(inputs), indent=1))
    os.environ.update(script_variables(inputs))
    try:
        os.environ.update(resolve_in_container(os.environ))
    except NearlinearError as error:
        return _fail(inputs, local.ExitStatus(error.exit_code, str(error)))
    status = local.run_ranks(local_ranks(inputs), "nearlinear.cli", ["train", str(config_file)])
    if status.reason and status.code < 128:  # a run stopped by a signal has not failed
        return _fail(inputs, status)
    return status.code


def _fail(inputs: ContainerInputs, status: local.ExitStatus) -> int:
    """Print the reason of a failure, write it where SageMaker reads it, and return the code."""
    print(f"error: {status.reason}", file=sys.stderr)
    failure = inputs.root / "output" / "failure"
    failure.write_text(status.reason[:_MAX_FAILURE_LENGTH])
    return status.code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
