"""Parse ``--cluster``: a node of the hardware table, or a file of ``nearlinear tune --machine``.

Such a file has the tables ``[gpu.NAME]`` and ``[node.NAME]`` of the hardware table, with measured
rates in place of data sheets. It also has measurements that no data sheet gives: matrix products by
size, collectives by size and placement, and constants of the time model.
"""

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any

from ..config import schema
from ..errors import ConfigError
from .cluster import CONTENTION_COSTS, Accelerator, Cluster, Node, find_node
from .fitted_constants import FittedConstants

SHARES = ("matmul_share", "memory_share", "flash_share", "link_share", "network_share")
"""Constants that multiply a rate."""


def parse_cluster(text: str, tables: dict[str, Any] | None = None) -> Cluster:
    """Parse ``NODE`` or ``NODE:NUMBER``, as in ``p4d.24xlarge:32``. Raises ConfigError.

    ``machine.toml:2`` is two of the nodes measured by ``nearlinear tune --machine machine.toml``.

    Args:
        text: Cluster as given by the user.
        tables: Contents of such a file, given in the config; its node is known by its name there.
    """
    match = re.fullmatch(r"([^:]+)(?::(\d{1,7}))?", text.strip())
    if not match or match[2] is not None and int(match[2]) < 1:
        raise ConfigError(f"--cluster {text}: expected NODE or NODE:NUMBER, as in p4d.24xlarge:32")
    name, nodes = match[1], int(match[2] or 1)
    if name.endswith(".toml"):
        return Cluster(read_measured_node(name), nodes)
    own = node_from_tables(tables, "plan.machine") if tables else None
    return Cluster(own if own and own.name == name else find_node(name), nodes)


def read_measured_node(path: str | Path) -> Node:
    """Read a file written by ``nearlinear tune --machine``. Raises ConfigError."""
    return node_from_tables(schema.read(path), str(path))


def node_from_tables(data: dict[str, Any], where: str) -> Node:
    """Return the single node of ``data``, with its GPU. Raises ConfigError."""
    gpus, nodes = data.get("gpu"), data.get("node")
    if not isinstance(gpus, dict) or not isinstance(nodes, dict) or len(nodes) != 1:
        raise ConfigError(
            f"{where}: expected a table [gpu.NAME] and one [node.NAME], as written by nearlinear "
            "tune --machine"
        )
    ((name, table),) = nodes.items()
    if not isinstance(table, dict) or table.get("gpu") not in list(gpus):
        raise ConfigError(f"{where}: [node.{name}] needs gpu = one of {', '.join(gpus)}")
    gpu = gpus[table["gpu"]]
    if not isinstance(gpu, dict):
        raise ConfigError(f"{where}: [gpu.{table['gpu']}] is not a table")
    accelerator = schema.build(
        Accelerator, {"name": table["gpu"], **gpu}, f"{where}: gpu.{table['gpu']}"
    )
    node = schema.build(Node, {"name": name, **table, "gpu": accelerator}, f"{where}: node.{name}")
    _check_node(node, where)
    return node


def _check_node(node: Node, where: str) -> None:
    """Raise ConfigError for values that no machine has, which would cause divisions by zero."""
    gpu = f"{where}: gpu.{node.gpu.name}"
    here = f"{where}: node.{node.name}"
    _check_rates(node, gpu, here)
    known = {each.name for each in dataclasses.fields(FittedConstants)}
    for key, value in node.measured.items():
        if key not in known:
            raise schema.unknown_key(key, here, known)
        most = 1.0 if key in SHARES or key == "straggler" else math.inf
        _check_range(value, f"{here}.{key}", above=0.0 if key in SHARES else None, most=most)
    for precision, points in node.gpu.products.items():
        if not _is_ascending(points):
            raise ConfigError(
                f"{where}: products.{precision} must be pairs [edge, TFLOPS] above 0 with "
                "ascending edges. Measure again."
            )
    for row in (*node.collectives, *node.contention):
        if row.ranks < 2 or not 1 <= row.nodes <= row.ranks or row.sharing < 1:
            raise ConfigError(
                f"{where}: invalid collective between {row.ranks} ranks on {row.nodes} nodes, "
                f"{row.sharing} at once. Measure again."
            )
    for row in node.contention:
        for key in CONTENTION_COSTS:
            _check_range(getattr(row, key), f"{here}.contention.{key}")
    for row in node.collectives:
        if not _is_ascending(row.points):
            raise ConfigError(
                f"{where}: the points of a collective must be pairs [bytes, seconds] above 0 with "
                "ascending sizes. Measure again."
            )


def _check_rates(node: Node, gpu: str, here: str) -> None:
    """Check data-sheet values. Links that ``tune`` cannot measure are 0, as are watts."""
    for name in ("memory_gib", "hbm_gb_s", "host_gb_s", "multiprocessors"):
        _check_range(getattr(node.gpu, name), f"{gpu}.{name}", above=0.0)
    for name in ("peak_tflops", "matmul_tflops"):
        for precision, value in getattr(node.gpu, name).items():
            _check_range(value, f"{gpu}.{name}.{precision}", above=0.0)
    _check_range(node.gpu.older_kernels, f"{gpu}.older_kernels", above=0.0, most=1.0)
    _check_range(node.gpu.watts, f"{gpu}.watts", above=0.0 if node.gpu.held_to_watts else None)
    _check_range(node.gpu.held_to_watts, f"{gpu}.held_to_watts", most=node.gpu.watts)
    unmeasured = None if node.measured else 0.0
    _check_range(node.gpu.link_gb_s, f"{gpu}.link_gb_s", above=unmeasured)
    _check_range(node.network_gbps, f"{here}.network_gbps", above=unmeasured)
    _check_range(node.gpus, f"{here}.gpus", above=0.0)
    _check_range(node.usd_per_hour, f"{here}.usd_per_hour")


def _check_range(
    value: float, key: str, above: float | None = None, most: float = math.inf
) -> None:
    """Raise ConfigError unless ``value`` is finite, in range, and at least 0 or above ``above``."""
    low = value >= 0 if above is None else value > above  # NaN fails both
    if not low or not value <= most or value == math.inf:
        least = "0 or more" if above is None else f"above {above:g}"
        limit = f", and {most:g} at most" if most < math.inf else ""
        raise ConfigError(f"{key} = {value:g}: must be a number {least}{limit}")


def _is_ascending(points: list[list[float]]) -> bool:
    """True if ``points`` are pairs of finite numbers above 0 whose first numbers ascend."""
    if not points or any(len(p) != 2 or not all(0 < v < math.inf for v in p) for p in points):
        return False
    return all(low < high for (low, _), (high, _) in itertools.pairwise(points))
