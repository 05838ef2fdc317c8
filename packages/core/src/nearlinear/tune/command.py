"""``nearlinear tune`` on the ranks of a job: check, measure, choose, say.

Every rank measures and chooses, from the same numbers; the first one prints and writes.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from .. import outputs
from ..config import Config
from ..errors import ConfigError
from ..mesh import Mesh
from ..schema import coerce, to_toml
from ..train import preflight
from ..train.config import TrainConfig


@dataclass(frozen=True)
class Options:
    """What the command line adds to the config."""

    rounds: int = 5
    """timed rounds of every measurement"""
    memory: float = 0.0
    """GiB a rank may use; 0 = what is free"""
    write: str = ""
    """where to write the config with the picked settings"""
    json: str = ""
    """where to write all numbers"""
    machine: str = ""
    """where to write what the machine can do, for ``nearlinear plan``: then nothing is picked"""
    source: str = ""
    """the config file"""


def check(config: TrainConfig, options: Options, world: int, ranks_per_node: int = 0) -> Mesh:
    """Raise ConfigError or DataError for what would fail later; the mesh. No torch is imported."""
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: must be at least 1")
    if not options.memory >= 0:  # NaN too
        raise ConfigError(f"--memory {options.memory}: must be 0 (what is free) or more GiB")
    for flag, path, suffix in (
        ("--write", options.write, ".toml"),
        ("--json", options.json, ".json"),
        ("--machine", options.machine, ".toml"),
    ):
        outputs.check(flag, path, suffix, options.source)
    if options.machine:
        return _check_machine(config, options, world, ranks_per_node)
    config.model.architecture  # noqa: B018 - raises ConfigError
    config.parallel.check_supported()
    _check_degrees(config.parallel)
    vocabulary(config)
    return Mesh.from_config(config.parallel, world, ranks_per_node)


def _check_machine(config: TrainConfig, options: Options, world: int, ranks_per_node: int) -> Mesh:
    for flag in ("memory", "write", "json"):
        if getattr(options, flag):
            raise ConfigError(
                f"--{flag} picks settings for a model, --machine measures for any: give one of them"
            )
    if ranks_per_node and world % ranks_per_node:
        raise ConfigError(
            f"{world} ranks on nodes of {ranks_per_node}: --machine measures nodes that are equal"
        )
    backend = {"communication_backend": config.parallel.communication_backend}
    return Mesh.from_config(Config(**backend), world, ranks_per_node)


def _check_degrees(parallel: Config) -> None:
    for kind in ("tensor", "context", "expert", "pipeline"):
        key = f"{kind}_parallel_degree"
        degree = getattr(parallel, key)
        if degree > 1:
            raise ConfigError(
                f"parallel.{key} = {degree}: tune measures sharded data parallelism alone; add "
                f"--set parallel.{key}=1, and start as many ranks as share a batch then"
            )


def vocabulary(config: TrainConfig) -> int:
    """Ids of the model: those of the data, as in training, or what the overrides say.

    Raises ConfigError and DataError.
    """
    key = "vocab_size"
    if not config.data.folder and key in config.model.overrides:
        return coerce(config.model.overrides[key], int, f"model.overrides.{key}")
    held = preflight.open_dataset(config, "train", verified=True).manifest.vocab_size
    return coerce(config.model.overrides.get(key, held), int, f"model.overrides.{key}")


def run(config: TrainConfig, options: Options) -> int:
    """Be one rank of the job. Raises ConfigError, DataError and NearlinearError."""
    from .. import runtime
    from . import report

    if options.machine:
        return _measure_machine(config, options)
    found = find(config, options)
    rank = runtime.current().rank
    runtime.shutdown()
    if rank == 0:
        print(report.text(found), flush=True)
        outputs.write(options.write, to_toml(_with_settings(config, found.settings)))
        outputs.write(options.json, json.dumps(report.plain(found), indent=1) + "\n")
    return 0


def _measure_machine(config: TrainConfig, options: Options) -> int:
    from .. import runtime
    from . import machine

    found = machine.measure(config, Path(options.machine).stem, options.rounds)
    rank = runtime.current().rank
    runtime.shutdown()
    if rank == 0:
        print(machine.text(found), flush=True)
        outputs.write(options.machine, machine.to_toml(found))
    return 0


def find(config: TrainConfig, options: Options):
    """Measure and choose: the `Findings`, the same on every rank. A collective call."""
    from .. import backends, runtime
    from ..train.model import build_model
    from . import choose, measure, memory, reasons, report, units, work

    mesh = runtime.init(config.parallel)
    now = runtime.current()
    ranks_here = min(mesh.ranks_per_node or mesh.world, mesh.world)
    free = memory.free_memory(now.device, ranks_here)
    model = build_model(config.model, vocabulary(config))
    parts = units.units_of(model)
    worked = work.measure_work(config, parts, vocabulary(config), now, options.rounds)
    asked = config.parallel.communication_backend
    meant = "nccl" if now.device.type == "cuda" else backends.for_device(asked, now.device.type)
    allowed = int(options.memory * 2**30) or free
    job = choose.Job(mesh.world, allowed, config.parallel, meant, now.device.type)
    names = measure.candidates(meant, now.device)
    degrees = choose.degrees_that_fit(worked, job)
    rows = measure.measure_links(degrees, names, parts, now, options.rounds)
    measured = {
        (degree, name): {
            (row.collective, row.unit): row.seconds
            for row in rows
            if (row.degree, row.backend) == (degree, name)
        }
        for degree in degrees
        for name in names
    }
    layouts = choose.layouts(worked, job, measured)
    nodes = "node" if mesh.nodes == 1 else "nodes"
    batch = f"micro-batches of {config.batch.micro_batch_size} x {config.sequence_length} tokens"
    title = (
        f"{config.model.name}: {worked.parameters:,} parameters in {len(worked.blocks)} blocks "
        f"and a root; {batch}; {mesh.world} ranks ({now.device.type}) on {mesh.nodes} {nodes}"
    )
    return report.Findings(
        title,
        worked,
        job,
        rows,
        layouts,
        choose.layout_asked_for(worked, job, measured),
        reasons.settings(worked, job, measured, layouts),
    )


def _with_settings(config: TrainConfig, settings) -> TrainConfig:
    picked = {setting.key: setting.value for setting in settings}
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **picked))
