"""Run ``nearlinear tune`` on the ranks of a job: check, measure, choose settings, print.

Every rank measures; the first one chooses, prints and writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ...config.parallel import ParallelConfig
from ...config.schema import coerce, to_toml
from ...config.train import TrainConfig
from ...distributed.mesh import Mesh
from ...errors import ConfigError
from ...output_file import check_output_file, write_output_file
from ...train import preflight
from ..workload import workload_from_config


@dataclass(frozen=True)
class TuneOptions:
    """Options of ``nearlinear tune``."""

    rounds: int = 5
    """Timed rounds of every measurement."""
    memory: float = 0.0
    """GiB per rank; 0 means the free memory."""
    write: str = ""
    """File for the tuned config (.toml)."""
    json: str = ""
    """File for all numbers (.json)."""
    machine: str = ""
    """File for the measured machine (.toml); no settings are chosen."""
    source: str = ""
    """The config file."""


def check_tune(
    config: TrainConfig, options: TuneOptions, world: int, ranks_per_node: int = 0
) -> Mesh:
    """Check config and options, without importing torch.

    Raises ConfigError or DataError for mistakes that would fail later.
    """
    if options.rounds < 1:
        raise ConfigError(f"--rounds {options.rounds}: must be at least 1")
    if not options.memory >= 0:  # NaN fails, too
        raise ConfigError(f"--memory {options.memory}: must be 0 (the free memory) or more GiB")
    for flag, path, suffix in (
        ("--write", options.write, ".toml"),
        ("--json", options.json, ".json"),
        ("--machine", options.machine, ".toml"),
    ):
        check_output_file(flag, path, suffix, options.source)
    if options.machine:
        return _check_machine(config, options, world, ranks_per_node)
    config.model.architecture  # noqa: B018 - raises ConfigError
    config.parallel.check_supported()
    _check_sharding_only(config.parallel)
    vocabulary = config_vocabulary(config)
    # raises ConfigError for a config that the trainer would reject
    return workload_from_config(config, world, ranks_per_node, vocabulary).mesh


def _check_machine(
    config: TrainConfig, options: TuneOptions, world: int, ranks_per_node: int
) -> Mesh:
    for flag in ("memory", "write", "json"):
        if getattr(options, flag):
            raise ConfigError(
                f"--{flag} is for tuning a model, --machine measures independently of a model. "
                "Give only one of them."
            )
    if ranks_per_node and world % ranks_per_node:
        raise ConfigError(
            f"{world} ranks do not fill nodes of {ranks_per_node}; --machine requires identical "
            "nodes"
        )
    backend = config.parallel.communication_backend
    return Mesh.from_config(ParallelConfig(communication_backend=backend), world, ranks_per_node)


def _check_sharding_only(parallel: ParallelConfig) -> None:
    for kind in ("tensor", "context", "expert", "pipeline"):
        key = f"{kind}_parallel_degree"
        degree = getattr(parallel, key)
        if degree > 1:
            raise ConfigError(
                f"parallel.{key} = {degree}: tune only measures sharded data parallelism. Add "
                f"--set parallel.{key}=1, and start as many ranks as share a batch."
            )


def config_vocabulary(config: TrainConfig) -> int:
    """Return the vocabulary size: that of the data, as in training, or of the overrides.

    Raises ConfigError and DataError.
    """
    key = "vocab_size"
    if not config.data.folder and key in config.model.overrides:
        return coerce(config.model.overrides[key], int, f"model.overrides.{key}")
    held = preflight.open_dataset(config, "train", verified=True).manifest.vocab_size
    return coerce(config.model.overrides.get(key, held), int, f"model.overrides.{key}")


def run_tune(config: TrainConfig, options: TuneOptions) -> int:
    """Run as one rank of the job. Raises ConfigError, DataError and NearlinearError."""
    from ...distributed import backend as backends
    from ...distributed import runtime
    from ..cluster import Cluster
    from .machine import format_node, measure_node, node_to_toml
    from .settings import choose_settings

    configured = config.parallel.communication_backend
    mesh = runtime.init({"communication_backend": configured})
    now = runtime.current()
    name = Path(options.machine).stem if options.machine else "here"
    node = measure_node(now, name, options.rounds)
    device = now.device.type
    backend = "nccl" if device == "cuda" else backends.backend_for_device(configured, device)
    rank = now.rank
    runtime.shutdown()
    if rank != 0:
        return 0
    print(format_node(node), flush=True)
    if options.machine:
        write_output_file(options.machine, node_to_toml(node))
        return 0
    cluster = Cluster(node, mesh.nodes, gpus=mesh.world)
    memory = int((options.memory or node.gpu.memory_gib) * 2**30)
    found = choose_settings(config, cluster, memory, config_vocabulary(config), backend)
    title = (
        f"{config.model.name}: micro-batches of {config.batch.micro_batch_size} x "
        f"{config.sequence_length} tokens; {mesh.world} ranks ({device}) on {mesh.nodes} "
        f"{'node' if mesh.nodes == 1 else 'nodes'}"
    )
    print(f"\n{title}\n{found}", flush=True)
    write_output_file(options.write, to_toml(found.tuned_config))
    numbers = {"title": title, **found.as_dict()}
    write_output_file(options.json, json.dumps(numbers, indent=1) + "\n")
    return 0
