"""Layouts that contestants of the race train in, where, and what the planner says of each.

The config of a case is the one by which nearlinear's trainer would do what the contestant does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ci.race.contestants import ENTRIES
from ci.race.plan import Plan
from nearlinear.plan import hardware, parameters, workload
from nearlinear.plan.step import step
from nearlinear.train import config as train_config
from nearlinear.train.config import TrainConfig


@dataclass(frozen=True)
class Case:
    """A contestant of the race, and what of its plan is changed."""

    contestant: str
    changes: dict = field(default_factory=dict)

    def plan(self, place: Place) -> Plan:
        known = {"nodes": place.nodes, "ranks_per_node": place.ranks, "rate": place.rates[0]}
        return Plan((self.contestant,), **(known | self.changes)).check()

    def words(self, place: Place) -> str:
        plan = self.plan(place)
        degree = "" if self.contestant == "compute" else f", shard {shard_degree(self, plan)}"
        return f"{self.contestant}{degree}, {plan.accumulation} x {plan.micro_batch}"


@dataclass(frozen=True)
class Place:
    """A cluster, the rates that its links are set to one after the other, and who runs there."""

    nodes: int
    ranks: int
    rates: tuple[str, ...]
    cases: tuple[Case, ...]

    def where(self, rate: str) -> str:
        return f"{self.nodes} x {self.ranks}, {rate}"


USUAL = (
    Case("compute"),
    Case("fsdp2"),
    Case("fsdp2_nl"),
    Case("hybrid"),
    Case("two_hop"),
    Case("overlapped"),
    Case("ours"),
    Case("ours", {"shard": 4}),
    Case("ours_nl"),
    Case("ours_nl", {"accumulation": 1}),
    Case("two_hop", {"accumulation": 1}),
)
OVERLAPPED = Case("fsdp2"), Case("overlapped"), Case("ours"), Case("ours_nl")
PLACES = (
    Place(4, 1, ("1gbit",), USUAL),
    Place(4, 1, ("300mbit", "3gbit"), (Case("fsdp2"), Case("two_hop"), Case("ours_nl"))),
    Place(2, 2, ("1gbit",), (Case("compute"), *OVERLAPPED)),
)
QUICK = (Place(4, 1, ("1gbit",), USUAL[:7]),)


def shard_degree(case: Case, plan: Plan) -> int:
    """Ranks that share a copy of the states."""
    entry = ENTRIES[case.contestant]
    return plan.world if entry.options.get("kind") == "full" else plan.shard


def config_of(case: Case, plan: Plan) -> TrainConfig:
    """The config by which the trainer would do what the contestant does."""
    options = dict(ENTRIES[case.contestant].options)
    kind = options.pop("kind", "")
    two_hop = options.pop("two_hop", kind != "hybrid")
    backend = options.pop("backend", "")
    if kind:  # FSDP2 by itself: nothing beside computation on the CPU, blocks freed at once
        options |= {
            "overlap_communication": False,
            "prefetch_depth": 0,
            "sdp_max_live_parameters": 0,
        }
    if backend:
        options["communication_backend"] = backend
    options.pop("free_blocks", None)
    alone = kind == "compute"
    return train_config.load(
        {
            "model": {
                "preset": "gpt2-tiny",
                "overrides": {
                    "n_embd": plan.width,
                    "n_layer": plan.layers,
                    "n_head": plan.heads,
                    "n_positions": plan.sequence,
                    "vocab_size": plan.vocabulary,
                },
            },
            "parallel": {
                "hybrid_shard_degree": 1 if alone else shard_degree(case, plan),
                **options,
            },
            "batch": {"micro_batch_size": plan.micro_batch, "accumulation": plan.accumulation},
            "train": {"two_hop": two_hop},
        },
        environment={},
    )


def predicted(case: Case, plan: Plan, node: hardware.Node) -> float:
    """Seconds of a step by the planner, on as many of the tuned nodes as it ran on."""
    options = ENTRIES[case.contestant].options
    alone = options.get("kind") == "compute"
    cluster = hardware.Cluster(node, 1, gpus=1) if alone else hardware.Cluster(node, plan.nodes)
    where = cluster.world, node.gpus
    work = workload.from_config(config_of(case, plan), *where, plan.vocabulary, node.gpu.is_cpu)
    if "kind" in options or options.get("free_blocks"):  # FSDP2's own order of gathering
        work = replace(work, stays_gathered=False)
    return step(work, cluster, parameters.on(node)).seconds


def in_teams(place: Place) -> list[list[Case]]:
    """Cases that can share processes: they differ in who trains alone."""
    found: dict[tuple, list[Case]] = {}
    for case in place.cases:
        entry = ENTRIES[case.contestant]
        key = entry.requires, entry.default_backend, *sorted(case.changes.items())
        found.setdefault(key, []).append(case)
    return list(found.values())
