"""Entry point of the planner: `plan`, which is ``nl.plan``."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import train as train_config
from ..config.schema import coerce
from ..config.train import TrainConfig
from ..errors import ConfigError
from .cluster import Cluster
from .cluster_spec import parse_cluster
from .fitted_constants import constants_for
from .memory import estimate, vocabulary_of
from .result import PlanResult
from .step_time import step_time
from .workload import workload_from_config


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
    if not isinstance(cluster, Cluster):
        cluster = _cluster(cluster, config)
    constants = constants_for(cluster.node)
    if straggler is not None:
        if not 0 <= coerce(straggler, float, "straggler") < 1:
            raise ConfigError(f"straggler = {straggler}: must be 0 or more, and below 1")
        constants = dataclasses.replace(constants, straggler=straggler)
    words = vocabulary or vocabulary_of(config)
    node = cluster.node
    work = workload_from_config(config, cluster.world, node.gpus, words, cluster.gpu.is_cpu)
    cluster.gpu.peak(work.precision)  # raises for an unsupported precision
    step = step_time(work, cluster, constants)
    memory = estimate(config, cluster.world, vocabulary=words)
    price = node.usd_per_hour if price is None else price
    return PlanResult(config, cluster, work, step, memory, tokens, price)


def _cluster(text: str, config: TrainConfig) -> Cluster:
    text = coerce(text, str, "cluster") or config.plan.cluster
    if not text:
        raise ConfigError(
            "--cluster is missing: name the nodes, as in --cluster p4d.24xlarge:32, or set "
            "plan.cluster in the config"
        )
    return parse_cluster(text, config.plan.machine)
