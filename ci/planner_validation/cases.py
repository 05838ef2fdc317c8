"""Layouts of compared systems, the clusters they run on, and the planner's prediction for each.

The config of a case makes nearlinear's trainer run the same collectives as the system.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ci.benchmarks.compare.config import CompareConfig
from ci.benchmarks.compare.systems import SYSTEMS
from nearlinear.config import train as train_config
from nearlinear.config.train import TrainConfig
from nearlinear.planner.cluster import Cluster as PlannerCluster
from nearlinear.planner.cluster import Node
from nearlinear.planner.fitted_constants import constants_for
from nearlinear.planner.step_time import step_time
from nearlinear.planner.workload import workload_from_config


@dataclass(frozen=True)
class LayoutCase:
    """A compared system with changes to its configuration."""

    system: str
    changes: dict = field(default_factory=dict)

    def config(self, cluster: ClusterSetup) -> CompareConfig:
        fields = {"nodes": cluster.nodes, "ranks_per_node": cluster.ranks, "rate": cluster.rates[0]}
        return CompareConfig((self.system,), **(fields | self.changes)).validate()

    def label(self, cluster: ClusterSetup) -> str:
        config = self.config(cluster)
        degree = "" if self.system == "compute" else f", shard {shard_degree(self, config)}"
        return f"{self.system}{degree}, {config.accumulation} x {config.micro_batch}"


@dataclass(frozen=True)
class ClusterSetup:
    """An emulated cluster, the link rates measured in turn, and the cases that run on it."""

    nodes: int
    ranks: int
    """Ranks per node."""
    rates: tuple[str, ...]
    cases: tuple[LayoutCase, ...]

    def label(self, rate: str) -> str:
        return f"{self.nodes} x {self.ranks}, {rate}"


DEFAULT_CASES = (
    LayoutCase("compute"),
    LayoutCase("fsdp2"),
    LayoutCase("fsdp2_nl"),
    LayoutCase("hybrid"),
    LayoutCase("two_hop"),
    LayoutCase("overlapped"),
    LayoutCase("ours"),
    LayoutCase("ours", {"shard": 4}),
    LayoutCase("ours_nl"),
    LayoutCase("ours_nl", {"accumulation": 1}),
    LayoutCase("two_hop", {"accumulation": 1}),
)
COMPARED = LayoutCase("fsdp2"), LayoutCase("overlapped"), LayoutCase("ours"), LayoutCase("ours_nl")
SETUPS = (
    ClusterSetup(4, 1, ("1gbit",), DEFAULT_CASES),
    ClusterSetup(
        4,
        1,
        ("300mbit", "3gbit"),
        (LayoutCase("fsdp2"), LayoutCase("two_hop"), LayoutCase("ours_nl")),
    ),
    ClusterSetup(2, 2, ("1gbit",), (LayoutCase("compute"), *COMPARED)),
)
QUICK_SETUPS = (ClusterSetup(4, 1, ("1gbit",), DEFAULT_CASES[:7]),)


def shard_degree(case: LayoutCase, config: CompareConfig) -> int:
    """Return the number of ranks that share a copy of the states."""
    system = SYSTEMS[case.system]
    return config.world if system.options.get("kind") == "full" else config.shard


def train_config_of(case: LayoutCase, config: CompareConfig) -> TrainConfig:
    """Return the trainer's config with the same collectives as the system."""
    options = dict(SYSTEMS[case.system].options)
    kind = options.pop("kind", "")
    two_hop = options.pop("two_hop", kind != "hybrid")
    backend = options.pop("backend", "")
    if kind:  # FSDP2 on the CPU: no overlap, blocks freed at once
        options |= {
            "overlap_communication": False,
            "prefetch_depth": 0,
            "sdp_max_live_parameters": 0,
        }
    if backend:
        options["communication_backend"] = backend
    options.pop("free_blocks", None)
    compute_only = kind == "compute"
    return train_config.load(
        {
            "model": {
                "preset": "gpt2-tiny",
                "overrides": {
                    "n_embd": config.width,
                    "n_layer": config.layers,
                    "n_head": config.heads,
                    "n_positions": config.sequence,
                    "vocab_size": config.vocabulary,
                },
            },
            "parallel": {
                "hybrid_shard_degree": 1 if compute_only else shard_degree(case, config),
                **options,
            },
            "batch": {"micro_batch_size": config.micro_batch, "accumulation": config.accumulation},
            "train": {"two_hop": two_hop},
        },
        environment={},
    )


def predict_step(case: LayoutCase, config: CompareConfig, node: Node) -> float:
    """Return the planner's seconds per step on the same number of measured nodes."""
    options = SYSTEMS[case.system].options
    compute_only = options.get("kind") == "compute"
    cluster = (
        PlannerCluster(node, 1, gpus=1) if compute_only else PlannerCluster(node, config.nodes)
    )
    layout = cluster.world, node.gpus
    trainer = train_config_of(case, config)
    work = workload_from_config(trainer, *layout, config.vocabulary, node.gpu.is_cpu)
    if "kind" in options or options.get("free_blocks"):  # FSDP2's order of all-gathers
        work = replace(work, gathered_across_micro_batches=False)
    return step_time(work, cluster, constants_for(node)).seconds


def group_cases(cluster: ClusterSetup) -> list[list[LayoutCase]]:
    """Group cases that can share processes: same requirements, backend and changes."""
    groups: dict[tuple, list[LayoutCase]] = {}
    for case in cluster.cases:
        system = SYSTEMS[case.system]
        key = system.requires, system.default_backend, *sorted(case.changes.items())
        groups.setdefault(key, []).append(case)
    return list(groups.values())
