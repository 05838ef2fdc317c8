"""Inside a SageMaker training container: from what the service has laid out to running ranks.

    python -m nearlinear.launch.sagemaker.container

The service leaves three files in ``/opt/ml/input/config`` and the data in ``/opt/ml/input/data``.
Scripts expect them as ``SM_...`` variables; the training takes every hyperparameter as a key of its
config. Of a failure the service shows what stands in ``/opt/ml/output/failure``.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from .. import instances, local
from .request import RANKS, plain, text

PORT = "7777"  # where ranks meet, on the first host
PARALLEL = "mp_parameters"
CONFIG = "input/config/nearlinear.json"  # what the hyperparameters come to
MOST_SHOWN = 1024  # characters of a failure


@dataclass(frozen=True)
class Container:
    """What one host of a job was given, below ``root`` (/opt/ml)."""

    root: Path
    hosts: list[str]
    host: str
    instance_type: str
    hyperparameters: dict[str, str]
    channels: list[str]

    @property
    def meeting_host(self) -> str:
        """Where ranks meet: the first host, or what the environment says."""
        return os.environ.get("SM_MASTER_ADDR") or self.hosts[0]

    @property
    def meeting_port(self) -> str:
        """Of the meeting host."""
        return os.environ.get("SM_MASTER_PORT") or PORT

    @property
    def ranks(self) -> int:
        """Processes of this host: one per accelerator, or what the environment asks for."""
        asked = os.environ.get(RANKS)
        machine = instances.known(self.instance_type)
        return int(asked) if asked else machine.accelerators if machine else 1


def read(root: Path) -> Container:
    """What lies below ``root``. Raises ConfigError where no job was laid out there."""
    if not (root / "input" / "config").is_dir():
        raise ConfigError(
            f"{root}/input/config is not there: this runs inside a SageMaker training container; "
            "nearlinear launch --place emulate lays one out on this machine"
        )

    def written(name: str) -> dict:
        path = root / "input" / "config" / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    resources = written("resourceconfig")
    return Container(
        root,
        resources.get("hosts", ["algo-1"]),
        resources.get("current_host", "algo-1"),
        resources.get("current_instance_type", ""),
        written("hyperparameters"),
        sorted(written("inputdataconfig")),
    )


def variables(found: Container) -> dict[str, str]:
    """What scripts read a job from: the service's own names."""
    values = {name: plain(value) for name, value in found.hyperparameters.items()}
    data = found.root / "input" / "data"
    return {
        "SM_HOSTS": json.dumps(found.hosts),
        "SM_CURRENT_HOST": found.host,
        "SM_HOST_COUNT": str(len(found.hosts)),
        "SM_CURRENT_INSTANCE_TYPE": found.instance_type,
        "SM_NUM_GPUS": str(found.ranks),
        "SM_MASTER_ADDR": found.meeting_host,
        "SM_MASTER_PORT": found.meeting_port,
        "SM_INPUT_DIR": str(found.root / "input"),
        "SM_MODEL_DIR": str(found.root / "model"),
        "SM_OUTPUT_DIR": str(found.root / "output"),
        "SM_OUTPUT_DATA_DIR": str(found.root / "output" / "data"),
        "SM_CHANNELS": json.dumps(found.channels),
        "SM_HPS": json.dumps(values),
        **{f"SM_CHANNEL_{name.upper()}": str(data / name) for name in found.channels},
        **{f"SM_HP_{variable(name)}": text(value) for name, value in values.items()},
    }


def variable(name: str) -> str:
    """A hyperparameter's name as part of a variable's."""
    return name.upper().replace(".", "_").replace("-", "_")


def config(found: Container) -> dict:
    """The training config that the hyperparameters spell, with data and outputs where they are.

    Names are as `request` writes them, or as the config does: ``optimizer-lr``, ``optimizer.lr``.
    """
    values = {name: plain(value) for name, value in found.hyperparameters.items()}
    values.pop(PARALLEL, None)  # the ranks read it from SM_HP_MP_PARAMETERS
    given = {name.replace("-", "."): value for name, value in values.items()}
    given.setdefault("run.folder", str(found.root / "output" / "data"))
    if "train" in found.channels and "data.sources" not in given:  # which name their channels
        given["data.path"] = str(found.root / "input" / "data" / "train")
    made: dict = {}
    for name, value in given.items():
        table, dot, key = name.partition(".")
        if dot:
            made.setdefault(table, {})[key] = value
        else:
            made[name] = value
    return made


def host(found: Container) -> local.Host:
    """Which ranks of the job start here, and where they meet the others."""
    meeting = f"{found.meeting_host}:{found.meeting_port}"
    return local.Host(found.ranks, len(found.hosts), found.hosts.index(found.host), meeting)


def main(root: str = "/opt/ml") -> int:
    """Be one host of the job; how its ranks ended, as an exit status."""
    try:
        found = read(Path(root))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (found.root / "output" / "data").mkdir(parents=True, exist_ok=True)
    (found.root / CONFIG).write_text(json.dumps(config(found), indent=1))
    os.environ.update(variables(found))
    ended = local.run(host(found), "nearlinear.cli", ["train", str(found.root / CONFIG)])
    if ended.why and ended.code < 128:  # a run that was told to end has not failed
        print(f"error: {ended.why}", file=sys.stderr)
        (found.root / "output" / "failure").write_text(ended.why[:MOST_SHOWN])
    return ended.code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
