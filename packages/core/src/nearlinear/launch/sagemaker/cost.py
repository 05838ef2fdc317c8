"""What a job's machines cost: planned, so far, or in the end.

Time is what the service bills; prices come from AWS's price list or from whoever asks, never from
here. Only machines are counted: storage, file systems and traffic come on top. Source: the API
references of DescribeTrainingJob (billing of spot and warm pools) and of the price list, 2026-11.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ...errors import ConfigError, NearlinearError
from ..spec import JobSpec
from .aws import ServiceRefused, client, session, told
from .follow import ENDED

SERVICE = "AmazonSageMaker"
HOME = {"cn": "cn-northwest-1"}  # where the price list is, by the beginning of the job's region
ANYWHERE_ELSE = "us-east-1"
HOUR = 3600


@dataclass(frozen=True)
class Price:
    """Of one machine for an hour."""

    amount: float
    currency: str = ""
    """as in USD; empty: that of whoever gave the price"""
    source: str = "as given"

    def of(self, hours: float) -> str:
        """What ``hours`` cost, in words."""
        return f"{self.amount * hours:,.2f} {self.currency}".strip()


@dataclass(frozen=True)
class Use:
    """How long how many machines are paid for; times in seconds for each machine."""

    instance_type: str
    machines: int
    region: str
    most: float
    """when the service stops the job"""
    billed: float | None = None
    """so far or in the end; None: not begun"""
    trained: float | None = None
    """the same without the discount for spot capacity; None: not known yet"""
    warm: float = 0.0
    """billed while machines waited for another job, or at most to be"""
    ended: bool = False
    spot: bool = False
    steps: int = 0
    """the last step that was reported; 0: none"""

    def hours(self, seconds: float) -> float:
        """Machine-hours."""
        return seconds * self.machines / HOUR


def planned(job: JobSpec) -> Use:
    """Of a job to come."""
    return Use(
        job.instance_type,
        job.nodes,
        job.region,
        most=job.max_hours * HOUR,
        warm=job.keep_warm_minutes * 60,
        spot=job.spot,
    )


def used(found: Mapping, now: datetime | None = None) -> Use:
    """Of what `follow.describe` returns. Raises ConfigError for clusters of several machine types.

    While a job runs, the service names no billed time: it is counted from the start of training,
    and is the most that spot capacity can cost.
    """
    machines = found["ResourceConfig"]
    if "InstanceType" not in machines:
        raise ConfigError(f"{found['TrainingJobName']} has several machine types: no one price")
    begin, end = found.get("TrainingStartTime"), found.get("TrainingEndTime")
    passed = ((end or now or datetime.now(UTC)) - begin).total_seconds() if begin else None
    trained = found.get("TrainingTimeInSeconds", passed)
    metrics = {it["MetricName"]: it["Value"] for it in found.get("FinalMetricDataList", [])}
    return Use(
        machines["InstanceType"],
        machines["InstanceCount"],
        found["TrainingJobArn"].split(":")[3],
        most=found["StoppingCondition"]["MaxRuntimeInSeconds"],
        billed=found.get("BillableTimeInSeconds", trained),
        trained=trained,
        warm=found.get("WarmPoolStatus", {}).get("ResourceRetainedBillableTimeInSeconds", 0),
        ended=found["TrainingJobStatus"] in ENDED,
        spot=found.get("EnableManagedSpotTraining", False),
        steps=int(metrics.get("step", 0)),
    )


def price(use: Use, given: float | None = None) -> tuple[Price | None, str]:
    """The price ``given``, or AWS's; without either, why: machine-hours are worth telling alone.

    Raises ConfigError for a price that is none.
    """
    if given is not None:
        if not 0 < given < float("inf"):
            raise ConfigError(f"--price-per-hour {given}: must be more than 0")
        return Price(given), ""
    try:
        return listed(use.instance_type, use.region or session().region_name), ""
    except NearlinearError as error:
        return None, str(error)


def listed(instance_type: str, region: str) -> Price:
    """AWS's price for training on demand. Raises ServiceRefused where there is none, or several."""
    prices = client("pricing", HOME.get(region[:2], ANYWHERE_ELSE))
    wanted = {"regionCode": region, "instanceName": instance_type}
    filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in wanted.items()]
    with told("asking for prices"):
        pages = prices.get_paginator("get_products").paginate(ServiceCode=SERVICE, Filters=filters)
        found = [json.loads(product) for page in pages for product in page["PriceList"]]
    rates = {rate for product in found for rate in _rates(product, instance_type)}
    if len(rates) != 1:
        what = f"{len(rates)} prices" if rates else "no price"
        raise ServiceRefused(f"AWS lists {what} for training on {instance_type} in {region}")
    ((amount, currency),) = rates
    return Price(amount, currency, f"AWS's price list, on demand in {region}")


def _rates(product: Mapping, instance_type: str):
    """Amounts and currencies for an hour of training: ``USW2-Train:ml.p4d.24xlarge``."""
    usage = product["product"]["attributes"].get("usagetype", "")
    if usage != f"Train:{instance_type}" and not usage.endswith(f"-Train:{instance_type}"):
        return
    for term in product["terms"].get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            for currency, amount in dimension["pricePerUnit"].items():
                yield float(amount), currency


def text(use: Use, rate: Price | None, why_not: str = "") -> str:
    """The account, a line for each item; ``why_not``: of a price that is not known."""

    def line(words: str, seconds: float) -> str:
        hours = use.hours(seconds)
        money = f" = {rate.of(hours)}" if rate else ""
        return f"{words}: {_clock(seconds)} each = {hours:,.1f} machine-hours{money}"

    lines = [f"machines: {use.machines} x {use.instance_type}"]
    if rate:
        amount = f"{rate.amount:g} {rate.currency}".strip()
        lines.append(f"price: {amount} per machine-hour ({rate.source})")
    if use.billed is not None:
        most = ", at most" if use.spot and not use.ended else ""
        lines.append(line("billed" if use.ended else f"billed so far{most}", use.billed))
        lines += _saved(use)
        if rate and use.steps:
            each = rate.of(use.hours(use.billed) / use.steps * 1000)
            lines.append(f"per 1000 steps: {each} (it reached step {use.steps})")
    if use.warm:
        words = "kept warm" if use.billed is not None else "kept warm, at most"
        lines.append(line(words, use.warm))
    if not use.ended:
        lines.append(line("stopped at the latest after", use.most))
    if not rate:
        lines.append(f"price: not known ({why_not}); give it: --price-per-hour X")
    return "\n".join([*lines, "machines alone: storage, file systems and traffic come on top"])


def _saved(use: Use) -> list[str]:
    """What spot capacity saved: the service bills less time than passed."""
    if not (use.spot and use.ended and use.trained):
        return []
    share = 1 - use.billed / use.trained
    return [f"saved by spot capacity: {share:.0%} of {_clock(use.trained)} each"]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
