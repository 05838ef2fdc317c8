"""Cost of the machines of a SageMaker job: planned, so far, or final.

Times are those that the service bills. Prices come from AWS's price list or from the user; this
module contains none. Storage, file systems and network traffic are not included. Sources: the API
references of DescribeTrainingJob (billing of spot capacity and warm pools) and of the price list,
2026-11.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ...errors import ConfigError, NearlinearError
from ..spec import JobSpec
from .aws import AWSError, create_client, create_session, translate_errors
from .jobs import FINAL_STATES

_SERVICE_CODE = "AmazonSageMaker"
_PRICING_REGIONS = {"cn": "cn-northwest-1"}  # region of the price list, by prefix of the job's
_DEFAULT_PRICING_REGION = "us-east-1"
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class HourlyPrice:
    """Price of one machine for one hour."""

    amount: float
    currency: str = ""
    """Currency code such as USD; empty for a price given by the user."""
    source: str = "as given"
    """Origin of the price, for display."""

    def format(self, hours: float) -> str:
        """Format the cost of ``hours``."""
        return f"{self.amount * hours:,.2f} {self.currency}".strip()


@dataclass(frozen=True)
class JobUsage:
    """Billed machines and times. All times are seconds per machine."""

    instance_type: str
    num_machines: int
    region: str
    time_limit: float
    """Time after which the service stops the job."""
    billed: float | None = None
    """Billed time so far or at the end; None before the start of training."""
    trained: float | None = None
    """The same without the discount for spot capacity; None if not known yet."""
    warm: float = 0.0
    """Billed time of a warm pool; for a planned job, its upper bound."""
    ended: bool = False
    spot: bool = False
    steps: int = 0
    """Last reported step; 0: none."""

    def machine_hours(self, seconds: float) -> float:
        """Convert seconds per machine to hours of all machines."""
        return seconds * self.num_machines / _SECONDS_PER_HOUR


def planned_usage(job: JobSpec) -> JobUsage:
    """Return the upper bounds of a job that has not been submitted."""
    return JobUsage(
        job.instance_type,
        job.nodes,
        job.region,
        time_limit=job.max_hours * _SECONDS_PER_HOUR,
        warm=job.keep_warm_minutes * 60,
        spot=job.spot,
    )


def actual_usage(description: Mapping[str, Any], now: datetime | None = None) -> JobUsage:
    """Return the usage in the result of `jobs.describe_job`.

    While a job runs, the service does not report the billed time. It is then measured from the
    start of training, which is an upper bound for spot capacity.

    Raises:
        ConfigError: The cluster has several instance types.
    """
    resources = description["ResourceConfig"]
    if "InstanceType" not in resources:
        raise ConfigError(
            f"{description['TrainingJobName']} has several machine types, which have no common "
            "price; add up their costs from AWS's price list"
        )
    begin, end = description.get("TrainingStartTime"), description.get("TrainingEndTime")
    passed = ((end or now or datetime.now(UTC)) - begin).total_seconds() if begin else None
    trained = description.get("TrainingTimeInSeconds", passed)
    metrics = {
        metric["MetricName"]: metric["Value"]
        for metric in description.get("FinalMetricDataList", [])
    }
    warm_pool = description.get("WarmPoolStatus", {})
    return JobUsage(
        resources["InstanceType"],
        resources["InstanceCount"],
        description["TrainingJobArn"].split(":")[3],
        time_limit=description["StoppingCondition"]["MaxRuntimeInSeconds"],
        billed=description.get("BillableTimeInSeconds", trained),
        trained=trained,
        warm=warm_pool.get("ResourceRetainedBillableTimeInSeconds", 0),
        ended=description["TrainingJobStatus"] in FINAL_STATES,
        spot=description.get("EnableManagedSpotTraining", False),
        steps=int(metrics.get("step", 0)),
    )


def find_price(usage: JobUsage, given: float | None = None) -> tuple[HourlyPrice | None, str]:
    """Return the ``given`` price or AWS's list price, or (None, reason) if there is neither.

    A missing price is not an error, because machine-hours are useful alone.

    Raises:
        ConfigError: The given price is not positive and finite.
    """
    if given is not None:
        if not 0 < given < float("inf"):
            raise ConfigError(f"--price-per-hour {given}: must be finite and more than 0")
        return HourlyPrice(given), ""
    try:
        return list_price(usage.instance_type, usage.region or create_session().region_name), ""
    except NearlinearError as error:
        return None, str(error)


def list_price(instance_type: str, region: str) -> HourlyPrice:
    """Return AWS's on-demand price for training.

    Raises:
        AWSError: The list has no price, or several different ones.
    """
    client = create_client("pricing", _PRICING_REGIONS.get(region[:2], _DEFAULT_PRICING_REGION))
    wanted = {"regionCode": region, "instanceName": instance_type}
    filters = [{"Type": "TERM_MATCH", "Field": k, "Value": v} for k, v in wanted.items()]
    with translate_errors("reading AWS's price list"):
        paginator = client.get_paginator("get_products")
        pages = paginator.paginate(ServiceCode=_SERVICE_CODE, Filters=filters)
        products = [json.loads(product) for page in pages for product in page["PriceList"]]
    rates = {rate for product in products for rate in _training_rates(product, instance_type)}
    if len(rates) != 1:
        count = f"{len(rates)} prices" if rates else "no price"
        raise AWSError(f"AWS lists {count} for training on {instance_type} in {region}")
    ((amount, currency),) = rates
    return HourlyPrice(amount, currency, f"AWS's price list, on demand in {region}")


def _training_rates(product: Mapping[str, Any], instance_type: str) -> Iterator[tuple[float, str]]:
    """Yield the hourly rates of a training product, such as ``USW2-Train:ml.p4d.24xlarge``."""
    usage_type = product["product"]["attributes"].get("usagetype", "")
    if usage_type != f"Train:{instance_type}" and not usage_type.endswith(
        f"-Train:{instance_type}"
    ):
        return
    for term in product["terms"].get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            for currency, amount in dimension["pricePerUnit"].items():
                yield float(amount), currency


def format_cost(usage: JobUsage, price: HourlyPrice | None, why_unknown: str = "") -> str:
    """Format the cost with one line per item.

    Args:
        usage: Billed machines and times.
        price: Price of a machine-hour, or None to print machine-hours only.
        why_unknown: Reason of a missing price.
    """

    def item(label: str, seconds: float) -> str:
        hours = usage.machine_hours(seconds)
        money = f" = {price.format(hours)}" if price else ""
        return f"{label}: {_format_time(seconds)} each = {hours:,.1f} machine-hours{money}"

    lines = [f"machines: {usage.num_machines} x {usage.instance_type}"]
    if price:
        amount = f"{price.amount:g} {price.currency}".strip()
        lines.append(f"price: {amount} per machine-hour ({price.source})")
    if usage.billed is not None:
        bound = ", at most" if usage.spot and not usage.ended else ""
        lines.append(item("billed" if usage.ended else f"billed so far{bound}", usage.billed))
        lines += _spot_savings(usage)
        if price and usage.steps:
            each = price.format(usage.machine_hours(usage.billed) / usage.steps * 1000)
            lines.append(f"per 1000 steps: {each} (last step: {usage.steps})")
    if usage.warm:
        label = "kept warm" if usage.billed is not None else "kept warm, at most"
        lines.append(item(label, usage.warm))
    if not usage.ended:
        lines.append(item("stopped at the latest after", usage.time_limit))
    if not price:
        lines.append(f"price: unknown ({why_unknown}); pass --price-per-hour X")
    return "\n".join([*lines, "not included: storage, file systems and network traffic"])


def _spot_savings(usage: JobUsage) -> list[str]:
    """Format the savings of spot capacity: the service bills less time than has passed."""
    if not (usage.spot and usage.ended and usage.trained and usage.billed is not None):
        return []
    share = 1 - usage.billed / usage.trained
    return [f"saved by spot capacity: {share:.0%} of {_format_time(usage.trained)} each"]


def _format_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
