"""``nearlinear tune --machine FILE``: measure the machine itself, for ``nearlinear plan``.

What is written depends on no model: rates of a rank (`rates`), collectives between ranks (`sweep`),
and the parameters of the planner's time model that follow from them.
"""

import dataclasses
import datetime
import json
import os
import platform

import torch

from .. import backends, runtime, schema
from ..columns import table
from ..plan.hardware import Accelerator, Node
from ..plan.machine import ALL_GATHER, Collective
from ..plan.parameters import Parameters
from ..train.config import TrainConfig
from ..train.flops import peak_tflops
from . import memory, rates, sweep
from .contention import contention
from .measure import candidates


def measure(config: TrainConfig, name: str, rounds: int) -> Node:
    """The node this job's ranks stand on, as measured; the same on every rank.

    All nodes are taken for equal. A collective call.
    """
    mesh = runtime.init({"communication_backend": config.parallel.communication_backend})
    now = runtime.current()
    here = min(mesh.ranks_per_node or mesh.world, mesh.world)
    meant = backends.for_device(config.parallel.communication_backend, now.device.type)
    backend = "nccl" if now.device.type == "cuda" else meant
    found = rates.measure_rates(now, rounds)
    names = candidates(backend, now.device)
    places = sweep.places(now, names)
    rows = sweep.sweep(now, places, rounds)
    return Node(
        name=name,
        gpu=_accelerator(f"{name}-device", found, rows, now, here),
        gpus=here,
        network_gbps=_rate([row for row in rows if row.nodes > 1]) * 8,
        sources=[_said(now, here)],
        measured=_parameters(found, now.device.type),
        contention=contention(now, places, rounds),
        collectives=rows,
    )


def _accelerator(name: str, found: rates.Rates, rows, now, here: int) -> Accelerator:
    best = {precision: max(r for _, r in each) for precision, each in found.products.items()}
    peaks = {p: peak_tflops(now.device, p) for p in best} if now.device.type == "cuda" else best
    properties = None
    if now.device.type == "cuda":
        properties = torch.cuda.get_device_properties(now.device)
        room = properties.total_memory
    else:
        room = memory.free_memory(now.device, here)
    return Accelerator(
        name=name,
        peak_tflops={p: peak if peak == peak else best[p] for p, peak in peaks.items()},
        matmul_tflops=best,
        memory_gib=room / 2**30,
        hbm_gb_s=found.memory / 1e9,
        link_gb_s=_rate([row for row in rows if row.nodes == 1]),
        host_gb_s=found.host / 1e9,
        multiprocessors=properties.multi_processor_count if properties else 1,
        watts=0.0,
        sources=[],
        products=found.products,
    )


def _rate(rows: list[Collective]) -> float:
    """GB/s over the links of one node that the largest all-gather reached; 0 without any."""
    reached = [
        row.crossing * row.points[-1][0] / row.points[-1][1] / 1e9
        for row in rows
        if row.kind == ALL_GATHER
    ]
    return max(reached, default=0.0)


def _parameters(found: rates.Rates, device: str) -> dict[str, float]:
    """What the planner's parameters are here; rates are the slowest rank's, so nobody straggles."""
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


def _said(now: runtime.Runtime, here: int) -> str:
    """What was measured, where and when."""
    cuda = now.device.type == "cuda"
    device = torch.cuda.get_device_name(now.device) if cuda else f"CPU ({platform.machine()})"
    today = datetime.date.today().isoformat()
    return (
        f"nearlinear tune, {today}, torch {torch.__version__}: {now.mesh.world} ranks, {here} per "
        f"node, on {device}, {os.cpu_count()} cores"
    )


def to_toml(node: Node) -> str:
    """The tables of ``node`` and its GPU, as `plan.machine.read` takes them."""
    gpu, table = (
        f"{kind}.{json.dumps(name)}" for kind, name in (("gpu", node.gpu.name), ("node", node.name))
    )
    meanings = schema.field_docs(Parameters)
    lines = [
        f"# All ranks at once: nearlinear plan run.toml --cluster {node.name}.toml:NODES",
        "",
        schema.to_toml(node.gpu, gpu),
        f"[{table}]",
        f"gpu = {json.dumps(node.gpu.name)}",
        f"gpus = {node.gpus}  # ranks of a node",
        f"network_gbps = {node.network_gbps!r}  # that the largest all-gather reached, each way",
        f"sources = {json.dumps(node.sources)}",
        "",
        f"[{table}.measured]",
        *(f"{key} = {value!r}  # {meanings[key]}" for key, value in node.measured.items()),
    ]
    for kind in ("contention", "collectives"):
        for row in getattr(node, kind):
            lines += ["", f"[[{table}.{kind}]]", *schema.pairs(dataclasses.asdict(row), bare=True)]
    return "\n".join(lines) + "\n"


def text(node: Node) -> str:
    """What was measured, for a terminal."""
    gpu = node.gpu
    products = [
        f"  {precision}: " + ", ".join(f"{rate:.3g} at {edge:.0f}" for edge, rate in points)
        for precision, points in gpu.products.items()
    ]
    links = [("collective", "backend", "ranks", "nodes", "MiB: ms")]
    for row in node.collectives:
        times = ", ".join(f"{size / 2**20:.3g}: {s * 1e3:.3g}" for size, s in row.points)
        links.append((row.kind, row.backend, str(row.ranks), str(row.nodes), times))
    costs = [("backend", "ranks", "nodes", "products lose in turn", "and beside")]
    for row in node.contention:
        in_turn = f"{row.turn_share:.1%}, {_ms(row.turn_seconds)} each"
        beside = f"{row.borrowed_share:.1%} of collectives, {_ms(row.borrowed_seconds)} each"
        costs.append((row.backend, str(row.ranks), str(row.nodes), in_turn, beside))
    measured = [f"  {key} = {value:.3g}" for key, value in node.measured.items()]
    return "\n".join(
        [
            f"{node.name}: {node.sources[0]}",
            "products, TFLOPS at the edge of a cube with as many operations:",
            *products,
            f"operators read and write {gpu.hbm_gb_s:.3g} GB/s; {gpu.memory_gib:.1f} GiB per rank",
            *table(links, left=(0, 1, 4)),
            *(table(costs) if node.contention else []),
            "parameters of the time model here:",
            *measured,
        ]
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
