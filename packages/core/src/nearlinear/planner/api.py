"""Entry points of the planner: `plan` (``nl.plan``), `parse_cluster` and `scaling_curve`.

``--cluster`` names a node of the hardware table or a file of ``nearlinear tune --machine``. Such a
file has the tables ``[gpu.NAME]`` and ``[node.NAME]`` of the hardware table, with measured rates in
place of data sheets. It also has measurements that no data sheet gives: matrix products by size,
collectives by size and placement, and constants of the time model.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import schema
from ..config import train as train_config
from ..config.schema import coerce
from ..config.train import TrainConfig
from ..errors import ConfigError
from ..output import format_table
from .cluster import CONTENTION_COSTS, Accelerator, Cluster, Node, find_node
from .fitted_constants import FittedConstants, constants_for
from .memory import estimate, vocabulary_of, with_fewest_sharing
from .result import PlanResult
from .step_time import step_time
from .workload import workload_from_config

log = logging.getLogger(__name__)


def plan(
    config: TrainConfig | dict[str, Any] | str | Path | None,
    cluster: Cluster | str = "",
    *,
    tokens: float = 0.0,
    vocabulary: int = 0,
    straggler: float | None = None,
    usd_per_hour: float | None = None,
    settings: Sequence[str] = (),
) -> PlanResult:
    """Predict time, memory and cost of ``config`` on ``cluster``, without a cluster or a model.

    Example::

        result = nl.plan("run.toml", "p4d.24xlarge:32", tokens=300e9)
        print(result)
        result.seconds, result.memory, result.fits

    Args:
        config: A config, its contents as a dict, or its file.
        cluster: ``NODE:NUMBER``, or ``machine.toml:2`` for a file of ``nearlinear tune --machine``.
            Default: ``plan.cluster`` of the config.
        tokens: Tokens to train on, for days and cost. 0: the config's steps.
        vocabulary: Vocabulary size. 0: that of the data, or of the model family.
        straggler: Standard deviation of a rank's time over its mean.
        usd_per_hour: Price of a node, above 0. Default: the table's.
        settings: Changes of the config, as in ``"parallel.bf16=true"``.

    Raises ConfigError for an invalid argument, and for a config that the trainer would reject.
    """
    if not 0 <= coerce(tokens, float, "tokens") < math.inf:
        raise ConfigError(f"tokens = {tokens}: must be a finite number, 0 or more")
    if coerce(vocabulary, int, "vocabulary") < 0:
        raise ConfigError(f"vocabulary = {vocabulary}: must be 0 (from the data) or more")
    price = coerce(usd_per_hour, float | None, "price per hour")
    if price is not None and not 0 < price < math.inf:
        raise ConfigError(f"price per hour = {usd_per_hour}: must be a finite number above 0")
    if settings and isinstance(config, TrainConfig):
        raise ConfigError(
            "settings change a config read from a file or a dict. Give one of these, or a "
            "TrainConfig that has the settings."
        )
    if not isinstance(config, TrainConfig):
        config = train_config.load(config, settings)
    if config.lora.rank:
        log.warning(
            "lora.rank = %d: the plan is for training all weights; adapters take less memory",
            config.lora.rank,
        )
    if not isinstance(cluster, Cluster):
        cluster = cluster_of(cluster, config)
    constants = constants_for(cluster.node)
    if straggler is not None:
        if not 0 <= coerce(straggler, float, "straggler") < 1:
            raise ConfigError(f"straggler = {straggler}: must be 0 or more, and below 1")
        constants = dataclasses.replace(constants, straggler=straggler)
    words = vocabulary or vocabulary_of(config)
    node = cluster.node
    try:
        config = with_fewest_sharing(
            config,
            cluster.world,
            cluster.gpu.memory_gib * 2**30,
            ranks_per_node=node.gpus,
            vocabulary=words,
            host_memory=cluster.gpu.is_cpu,
        )
    except ConfigError:  # a plan that does not fit names the missing memory
        config = dataclasses.replace(config, parallel=config.parallel.widest)
    work = workload_from_config(config, cluster.world, node.gpus, words, cluster.gpu.is_cpu)
    cluster.gpu.peak(work.precision)  # raises for an unsupported precision
    step = step_time(work, cluster, constants)
    memory = estimate(config, cluster.world, vocabulary=words)
    price = node.usd_per_hour if price is None else price
    return PlanResult(config, cluster, work, step, memory, tokens, price)


def cluster_of(text: str, config: TrainConfig) -> Cluster:
    """Return the cluster ``text``, or that of the config if it is empty. Raises ConfigError."""
    text = coerce(text, str, "cluster") or config.plan.cluster
    if not text:
        raise ConfigError(
            "--cluster is missing: name the nodes, as in --cluster p4d.24xlarge:32, or set "
            "plan.cluster in the config"
        )
    return parse_cluster(text, config.plan.machine)


SHARES = (
    "matmul_share", "throttled_share", "memory_share", "flash_share", "link_share", "network_share"
)  # fmt: skip
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
    gpu = {key: value for key, value in gpu.items() if key != "held_to_watts"}  # up to 0.9
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
    _check_range(node.gpu.watts, f"{gpu}.watts")
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


@dataclass(frozen=True)
class ScalingPoint:
    """Predicted throughput at one number of GPUs."""

    gpus: int
    tokens_per_second_per_gpu: float
    efficiency: float
    """Rate per GPU, relative to the smallest number of GPUs."""


def scaling_curve(
    config: TrainConfig,
    cluster: Cluster,
    most: int = 16384,
    reference: PlanResult | None = None,
) -> list[ScalingPoint]:
    """Double the nodes of ``cluster`` up to ``most`` GPUs, with a constant batch per rank.

    The shard group stays that of ``cluster``: additional GPUs are additional replicas (MiCS).

    Args:
        config: The config to scale.
        cluster: The smallest cluster.
        most: Largest number of GPUs.
        reference: A plan whose vocabulary and constants also apply here.

    Raises ConfigError for a fixed global batch, and for a cluster larger than ``most``.
    """
    if cluster.world > most:
        raise ConfigError(
            f"the scaling curve ends at {most:,} GPUs, but {cluster.world:,} are given. Start with "
            "fewer."
        )
    if config.batch.sequences:
        raise ConfigError(
            "batch.sequences fixes the global batch, which must grow along a scaling curve. Set "
            "batch.accumulation instead."
        )
    degrees = config.parallel.degrees(cluster.world)
    parallel = dataclasses.replace(
        config.parallel, hybrid_shard_degree=degrees["shard"] * degrees["context"]
    )
    fixed = dataclasses.replace(config, parallel=parallel)
    constants = reference.constants if reference else constants_for(cluster.node)
    words = reference.work.shape.vocabulary if reference else vocabulary_of(config)
    points: list[ScalingPoint] = []
    nodes = cluster.nodes
    while nodes * cluster.node.gpus <= most:
        larger = cluster.resized(nodes)
        work = workload_from_config(fixed, larger.world, larger.node.gpus, words, larger.gpu.is_cpu)
        rate = work.step_tokens / step_time(work, larger, constants).seconds / larger.world
        first = points[0].tokens_per_second_per_gpu if points else rate
        points.append(ScalingPoint(larger.world, rate, rate / first))
        nodes *= 2
    return points


def format_scaling(points: list[ScalingPoint]) -> str:
    """Format a scaling curve as a table."""
    rows = [("GPUs (simulated)", "tokens/s per GPU", "efficiency")]
    rows += [
        (f"{p.gpus:,}", f"{p.tokens_per_second_per_gpu:,.0f}", f"{p.efficiency:.1%}")
        for p in points
    ]
    return "\n".join(format_table(rows))
