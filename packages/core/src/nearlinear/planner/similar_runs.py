"""Error of a plan, from published runs like it.

Every published run is predicted with constants fitted without its source, as a plan is predicted
without measurements of its own. Runs are like a plan if they agree in kind of model, precision, GPU
and number of nodes; if there are too few of them, in fewer of these features.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache

from .cluster import Cluster
from .validate import ScoredRun, score_held_out, score_left_out
from .workload import Workload

LEAST = 8
"""Fewest runs whose errors are stated."""
SHARE = 0.8
"""Share of the runs within the stated range."""


@dataclass(frozen=True)
class SimilarRuns:
    """Errors of the published runs most like a plan."""

    features: tuple[str, ...]
    """Features in which they agree with the plan."""
    count: int
    low: float
    """Published over predicted time at the lower end of the middle `SHARE` of the runs."""
    high: float
    """The same at the upper end."""


def similar_runs(work: Workload, cluster: Cluster) -> SimilarRuns:
    """Return the errors of the published runs most like ``work`` on ``cluster``."""
    features = features_of(work, cluster)
    scored = _scored_runs()
    for compared in range(len(features), -1, -1):
        wanted = features[:compared]
        like = [each for each in scored if _features_of_run(each)[:compared] == wanted]
        if len(like) >= LEAST or not compared:
            ratios = sorted(each.run.value / each.predicted for each in like)
            outside = (1 - SHARE) / 2 * (len(ratios) - 1)
            low, high = ratios[math.floor(outside)], ratios[-1 - math.floor(outside)]
            return SimilarRuns(wanted, len(like), low, high)
    raise AssertionError("all runs agree in no feature")


def features_of(work: Workload, cluster: Cluster) -> tuple[str, ...]:
    """Return kind of model, precision, GPU and number of nodes, as compared in this order."""
    return (
        work.kind,
        "fp8" if work.fp8 else work.precision,
        cluster.gpu.model,
        "one node" if cluster.nodes == 1 else "several nodes",
    )


def _features_of_run(scored: ScoredRun) -> tuple[str, ...]:
    return features_of(scored.run.work, scored.run.cluster)


@cache
def _scored_runs() -> list[ScoredRun]:
    """Predict every published run without its source."""
    return [*itertools.chain(*score_left_out().values()), *score_held_out()]
