"""Last checks before a job is sent: the planner's memory, the price, and a confirmation.

`forecast` plans the job on its own cluster. `refusals` returns the reasons to refuse it, which the
option ``--force`` overrides: they rest on estimates and on recorded tables. `confirm` asks for the
money.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

from ..config.train import TrainConfig
from ..errors import ConfigError
from ..hardware import find_instance_type
from ..output import format_duration
from ..planner.api import parse_cluster, plan
from ..planner.cluster import Cluster, find_node, node_names
from ..planner.explain import suggest_fit
from ..planner.memory.report import GIB
from ..planner.result import SECONDS_PER_DAY, PlanResult
from .sagemaker.cost import HourlyPrice
from .sagemaker.job_checks import check_offering
from .spec import JobSpec, Problem

PLANNED_PLACES = ("sagemaker", "slurm", "kubernetes")
"""Backends whose jobs run on the machines that ``[job]`` names."""


@dataclass(frozen=True)
class Forecast:
    """Plan of a job on its own machines, or the reason why there is none."""

    plan: PlanResult | None
    unknown: str = ""
    """Reason of a missing plan; empty if the config is invalid or a plan exists."""
    rejected: str = ""
    """Reason for which the trainer would reject the config on these machines."""


def forecast(job: JobSpec, config: TrainConfig) -> Forecast:
    """Plan ``config`` on the machines of ``job``. Needs no network and no torch."""
    cluster = job_cluster(job, config)
    if cluster is None:
        return Forecast(
            None,
            f"the planner does not know {job.instance_type!r}; set plan.cluster to a file of "
            "nearlinear tune --machine",
        )
    if not config.model.is_readable:
        return Forecast(
            None, f"model.init_from = {config.model.init_from!r} is not on this machine"
        )
    try:
        return Forecast(plan(config, cluster))
    except ConfigError as error:
        return Forecast(None, rejected=str(error))


def job_cluster(job: JobSpec, config: TrainConfig) -> Cluster | None:
    """Return the machines of ``job`` as a cluster of the planner, or None if they are unknown."""
    if job.instance_type.removeprefix("ml.") in node_names():
        cluster = Cluster(find_node(job.instance_type), job.nodes)
    elif config.plan.cluster and find_instance_type(job.instance_type) is None:
        cluster = parse_cluster(config.plan.cluster, config.plan.machine).resized(job.nodes)
    else:
        return None
    ranks = job.world_size
    return cluster if ranks == cluster.world else dataclasses.replace(cluster, gpus=ranks)


def refusals(job: JobSpec, found: Forecast) -> list[Problem]:
    """Return the reasons of the planner and of the tables against sending ``job``."""
    if found.rejected:
        return [Problem("the config", found.rejected, "see nearlinear plan, or pass --force")]
    problems = []
    if job.place == "sagemaker":
        problems += check_offering(job)
    if found.plan is not None and not found.plan.fits:
        result = found.plan
        cause = (
            f"{result.memory / GIB:.1f} GiB per GPU are required, "
            f"{result.cluster.gpu.memory_gib:.1f} of a {result.cluster.gpu.name} of "
            f"{job.instance_type} are available"
        )
        remedy = f"{suggest_fit(result)}; see nearlinear plan --explain, or pass --force"
        problems.append(Problem("memory", cause, remedy))
    return problems


def table_price(instance_type: str) -> HourlyPrice | None:
    """Return EC2's on-demand price of a machine in the hardware table, if it has one."""
    name = instance_type.removeprefix("ml.")
    node = find_node(name) if name in node_names() else None
    if node is None or not node.usd_per_hour:
        return None
    return HourlyPrice(
        node.usd_per_hour, "USD", f"EC2 on demand, {node.priced}; SageMaker's price may differ"
    )


def summary(job: JobSpec, found: Forecast) -> str:
    """Describe the planned run in a line, with a warning if the time limit ends it."""
    lines = []
    result = found.plan
    if result is None:
        lines.append(f"not planned: {found.unknown or found.rejected}")
    else:
        lines.append(
            f"planned: {result.memory / GIB:.1f} of {result.cluster.gpu.memory_gib:.1f} GiB per "
            f"GPU, MFU {result.mfu:.1%}, {result.steps:,} steps in "
            f"{format_duration(result.days * SECONDS_PER_DAY)}"
        )
        if result.days * 24 > job.max_hours:
            reached = job.max_hours / 24 / result.days
            lines.append(
                f"warning: job.max_hours = {job.max_hours:g} ends the run after about "
                f"{reached:.0%} of its steps; raise it, or resume from a checkpoint"
            )
    return "\n".join(lines)


def price_line(
    job: JobSpec, found: Forecast, price: HourlyPrice | None, why_unknown: str = ""
) -> str:
    """Describe the price of the planned run, and of the time limit."""
    if price is None:
        return f"price: unknown ({why_unknown or 'not in the table'}); pass --price-per-hour X"
    most = f"at most {price.format(job.max_hours * job.nodes)} in {job.max_hours:g} h"
    if found.plan is None:
        return f"price: {most} ({price.source})"
    hours = min(found.plan.days * 24, job.max_hours)
    return f"price: {price.format(hours * job.nodes)}, {most} ({price.source})"


def confirm(question: str, yes: bool) -> bool:
    """Ask on the terminal, and return the answer. Without a terminal, ``yes`` is required.

    Raises:
        ConfigError: There is no terminal, and ``yes`` was not given.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(
            "there is no terminal to confirm the price on; nothing was sent. Pass --yes to submit"
        )
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
