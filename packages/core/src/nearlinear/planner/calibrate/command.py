"""Run ``nearlinear tune`` on the ranks of a job: check, measure, choose settings, print.

Every rank measures; the first one chooses, prints and writes. ``--machine`` measures a whole
machine for the planner. Its result depends on no model: rates of a rank, collectives between ranks,
and constants of the time model derived from them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from ...config import schema
from ...config.parallel import ParallelConfig
from ...config.schema import coerce, to_toml
from ...config.train import TrainConfig
from ...distributed import runtime as backends
from ...distributed.mesh import Mesh
from ...distributed.runtime import Runtime
from ...errors import ConfigError
from ...output import check_output_file, format_table, write_output_file
from ...train import preflight
from ...train.model import peak_tflops
from ..cluster import ALL_GATHER, Accelerator, MeasuredCollective, Node
from ..fitted_constants import FittedConstants
from ..workload import workload_from_config
from . import collectives, rates
from .rates import candidate_backends


def measure_node(runtime: Runtime, name: str, rounds: int) -> Node:
    """Measure the node of this job's ranks; all nodes are assumed identical. A collective call."""
    mesh, device = runtime.mesh, runtime.device
    here = min(mesh.ranks_per_node or mesh.world, mesh.world)
    configured = runtime.config.communication_backend
    backend = (
        "nccl" if device.type == "cuda" else backends.backend_for_device(configured, device.type)
    )
    found = rates.measure_rates(runtime, rounds)
    groups = collectives.find_groups(runtime, candidate_backends(backend, device))
    rows = collectives.measure_collectives(runtime, groups, rounds)
    return Node(
        name=name,
        gpu=_accelerator(f"{name}-device", found, rows, runtime, here),
        gpus=here,
        network_gbps=_link_rate([row for row in rows if row.nodes > 1]) * 8,
        sources=[_source(runtime, here)],
        measured=_constants(found, device.type),
        contention=collectives.measure_contention(runtime, groups, rounds),
        collectives=rows,
    )


def _accelerator(
    name: str,
    found: rates.DeviceRates,
    rows: list[MeasuredCollective],
    runtime: Runtime,
    here: int,
) -> Accelerator:
    device = runtime.device
    best = {precision: max(r for _, r in each) for precision, each in found.products.items()}
    peaks = {p: peak_tflops(device, p) for p in best} if device.type == "cuda" else best
    properties = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory
    else:
        memory = rates.free_memory(device, here)
    return Accelerator(
        name=name,
        # an unknown peak is NaN
        peak_tflops={p: peak if peak == peak else best[p] for p, peak in peaks.items()},
        matmul_tflops=best,
        memory_gib=memory / 2**30,
        hbm_gb_s=found.memory / 1e9,
        link_gb_s=_link_rate([row for row in rows if row.nodes == 1]),
        host_gb_s=found.host / 1e9,
        multiprocessors=properties.multi_processor_count if properties else 1,
        watts=0.0,
        sources=[],
        products=found.products,
    )


def _link_rate(rows: list[MeasuredCollective]) -> float:
    """GB/s over the links of one node reached by the largest all-gather; 0 without any."""
    reached = [
        row.crossing * row.points[-1][0] / row.points[-1][1] / 1e9
        for row in rows
        if row.kind == ALL_GATHER
    ]
    return max(reached, default=0.0)


def _constants(found: rates.DeviceRates, device: str) -> dict[str, float]:
    """Return constants of the time model; rates are the slowest rank's, so straggler is 0."""
    precision = "bf16" if device == "cuda" else "fp32"
    best = max(rate for _, rate in found.products[precision]) * 1e12
    return {
        "matmul_share": 1.0,
        "memory_share": 1.0,
        "link_share": 1.0,
        "network_share": 1.0,
        "flash_share": min(1.0, found.attention[precision] / best),
        "kernel_seconds": found.kernel,
        "fresh_seconds": found.fresh * 1e9,
        "straggler": 0.0,
    }


def _source(runtime: Runtime, here: int) -> str:
    """Describe the machine and the date of the measurement."""
    cuda = runtime.device.type == "cuda"
    device = torch.cuda.get_device_name(runtime.device) if cuda else f"CPU ({platform.machine()})"
    today = datetime.date.today().isoformat()
    return (
        f"nearlinear tune, {today}, torch {torch.__version__}: {runtime.mesh.world} ranks, {here} "
        f"per node, on {device}, {os.cpu_count()} cores"
    )


def node_to_toml(node: Node) -> str:
    """Return the tables of ``node`` and its GPU, for `planner.api.read_measured_node`."""
    gpu, table = (
        f"{kind}.{json.dumps(name)}" for kind, name in (("gpu", node.gpu.name), ("node", node.name))
    )
    meanings = schema.field_docs(FittedConstants)
    lines = [
        f"# All ranks at once: nearlinear plan run.toml --cluster {node.name}.toml:NODES",
        "",
        schema.to_toml(node.gpu, gpu),
        f"[{table}]",
        f"gpu = {json.dumps(node.gpu.name)}",
        f"gpus = {node.gpus}  # ranks of a node",
        f"network_gbps = {node.network_gbps!r}  # reached by the largest all-gather, each way",
        f"sources = {json.dumps(node.sources)}",
        "",
        f"[{table}.measured]",
        *(f"{key} = {value!r}  # {meanings[key]}" for key, value in node.measured.items()),
    ]
    for kind in ("contention", "collectives"):
        for row in getattr(node, kind):
            lines += ["", f"[[{table}.{kind}]]", *schema.pairs(dataclasses.asdict(row), bare=True)]
    return "\n".join(lines) + "\n"


def format_node(node: Node) -> str:
    """Format all measurements for a terminal."""
    gpu = node.gpu
    products = [
        f"  {precision}: " + ", ".join(f"{rate:.3g} at {edge:.0f}" for edge, rate in points)
        for precision, points in gpu.products.items()
    ]
    links = [("collective", "backend", "ranks", "nodes", "MiB: ms")]
    for row in node.collectives:
        times = ", ".join(f"{size / 2**20:.3g}: {s * 1e3:.3g}" for size, s in row.points)
        links.append((row.kind, row.backend, str(row.ranks), str(row.nodes), times))
    costs = [("backend", "ranks", "nodes", "interleaved slowdown", "concurrent slowdown")]
    for row in node.contention:
        interleaved = f"{row.turn_share:.1%}, {_ms(row.turn_seconds)} each"
        concurrent = f"{row.borrowed_share:.1%} of collectives, {_ms(row.borrowed_seconds)} each"
        costs.append((row.backend, str(row.ranks), str(row.nodes), interleaved, concurrent))
    measured = [f"  {key} = {value:.3g}" for key, value in node.measured.items()]
    return "\n".join(
        [
            f"{node.name}: {node.sources[0]}",
            "matrix products, TFLOPS at the edge of a cube with as many operations:",
            *products,
            f"operators read and write {gpu.hbm_gb_s:.3g} GB/s; {gpu.memory_gib:.1f} GiB per rank",
            *format_table(links, left=(0, 1, 4)),
            *(format_table(costs) if node.contention else []),
            "constants of the time model:",
            *measured,
        ]
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


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
    validate: int = 3
    """Candidates of which real steps are run; 0 means predictions only."""
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
    if options.validate < 0:
        raise ConfigError(f"--validate {options.validate}: must be 0 (predictions only) or more")
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
    """Run as one rank of the job. Raises ConfigError, DataError and NearlinearError.

    All ranks know the same measurements, make the same choice, and take part in the real steps.
    """
    from ...distributed import runtime
    from ..cluster import Cluster
    from .real_steps import time_steps
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
    if rank == 0:
        print(format_node(node), flush=True)
    if options.machine:
        if rank == 0:
            write_output_file(options.machine, node_to_toml(node))
        return 0
    cluster = Cluster(node, mesh.nodes, gpus=mesh.world)
    memory = int((options.memory or node.gpu.memory_gib) * 2**30)
    vocabulary = config_vocabulary(config)

    def measure(configs: list[TrainConfig]) -> list[float]:
        if rank == 0:
            print(f"running real steps of {len(configs)} settings ...", flush=True)
        return time_steps(configs, vocabulary)

    found = choose_settings(config, cluster, memory, vocabulary, backend, measure, options.validate)
    if rank != 0:
        return 0
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
