"""Measure a whole machine for the planner (``nearlinear tune --machine FILE``).

The result depends on no model: rates of a rank, collectives between ranks, and constants of the
time model derived from them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform

import torch

from ...config import schema
from ...distributed import backend as backends
from ...distributed.runtime import Runtime
from ...text_table import format_table
from ...train.flops import peak_tflops
from ..cluster import ALL_GATHER, Accelerator, MeasuredCollective, Node
from ..fitted_constants import FittedConstants
from . import collectives, rates
from .timing import candidate_backends


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
    """Return the tables of ``node`` and its GPU, for `cluster_spec.read_measured_node`."""
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
