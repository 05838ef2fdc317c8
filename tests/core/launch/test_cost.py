"""Cost of a job: planned, so far and final, at AWS's list price or a given price."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from nearlinear import cli
from nearlinear.launch import spec
from nearlinear.launch.sagemaker import cost
from nearlinear.launch.sagemaker.aws import AWSError
from tests.core import answers

pytest.importorskip("boto3")
BEGIN = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)
KIND = "ml.p4d.24xlarge"


@pytest.fixture
def aws(monkeypatch):
    """A server that answers AWS calls with prepared responses."""
    with answers.serving() as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.address)
        monkeypatch.setenv("AWS_DEFAULT_REGION", answers.REGION)
        for name, value in answers.KEYS.items():
            monkeypatch.setenv(name, value)
        yield found


def product(usage: str, amount: str, currency: str = "USD") -> str:
    """Return an entry of the price list in AWS's format."""
    rate = {"unit": "Hrs", "pricePerUnit": {currency: amount}}
    terms = {"OnDemand": {"A.B": {"priceDimensions": {"A.B.C": rate}}}}
    attributes = {"usagetype": usage, "instanceName": KIND, "regionCode": answers.REGION}
    return json.dumps({"product": {"attributes": attributes}, "terms": terms})


def described(**changes) -> dict:
    return {
        "TrainingJobName": "gpt2-1",
        "TrainingJobArn": "arn:aws:sagemaker:eu-west-1:123456789012:training-job/gpt2-1",
        "TrainingJobStatus": "InProgress",
        "ResourceConfig": {"InstanceType": KIND, "InstanceCount": 32},
        "StoppingCondition": {"MaxRuntimeInSeconds": 36 * 3600},
        "TrainingStartTime": BEGIN,
    } | changes


ENDED = {
    "TrainingJobStatus": "Completed",
    "TrainingEndTime": BEGIN + timedelta(hours=10),
    "TrainingTimeInSeconds": 36_000,
    "BillableTimeInSeconds": 9_000,
    "EnableManagedSpotTraining": True,
    "FinalMetricDataList": [{"MetricName": "step", "Value": 5000.0}],
}


def account(found: dict, rate=None, hours=3.0) -> list[str]:
    use = cost.actual_usage(found, BEGIN + timedelta(hours=hours))
    return cost.format_cost(use, rate, "because").splitlines()


def test_running_job_is_billed_by_elapsed_time_up_to_its_limit():
    lines = account(described(), cost.HourlyPrice(20, "USD", "a list"))
    assert "price: 20 USD per machine-hour (a list)" in lines
    assert "billed so far: 3:00:00 each = 96.0 machine-hours = 1,920.00 USD" in lines
    assert any("36:00:00 each = 1,152.0 machine-hours = 23,040.00 USD" in line for line in lines)


def test_ended_spot_job_uses_the_billed_time_of_the_service():
    lines = account(described(**ENDED), cost.HourlyPrice(20, "USD"))
    assert "billed: 2:30:00 each = 80.0 machine-hours = 1,600.00 USD" in lines
    assert "saved by spot capacity: 75% of 10:00:00 each" in lines
    assert "per 1000 steps: 320.00 USD (last step: 5000)" in lines
    assert not any("at the latest" in line for line in lines)


def test_elapsed_time_is_an_upper_bound_for_a_running_spot_job():
    lines = account(described(EnableManagedSpotTraining=True))
    assert "billed so far, at most: 3:00:00 each = 96.0 machine-hours" in lines


def test_job_waiting_for_machines_has_no_cost():
    found = described()
    del found["TrainingStartTime"]
    assert not any("billed" in line for line in account(found))


def test_warm_pool_is_billed_separately():
    warm = {"WarmPoolStatus": {"Status": "Reused", "ResourceRetainedBillableTimeInSeconds": 900}}
    lines = account(described(**ENDED | warm), cost.HourlyPrice(20))
    assert "kept warm: 0:15:00 each = 8.0 machine-hours = 160.00" in lines


def test_missing_price_reports_reason_and_remedy():
    lines = account(described())
    assert "price: unknown (because); pass --price-per-hour X" in lines
    assert not any("USD" in line for line in lines)


def test_heterogeneous_cluster_is_rejected():
    groups = {"InstanceGroups": [{"InstanceType": KIND, "InstanceCount": 1}]}
    with pytest.raises(cost.ConfigError, match="several machine types"):
        cost.actual_usage(described(ResourceConfig=groups))


def test_list_price_selects_on_demand_training(aws):
    """The list also has pages of prices of the same machine for other uses."""
    others = [product(f"USW2-{use}:{KIND}", "9.5") for use in ("Host", "Processing", "Notebk")]
    others.append(product(f"USW2-Train:{KIND}-x", "1"))
    aws.give("GetProducts", 200, {"PriceList": others, "NextToken": "more"})
    aws.give("GetProducts", 200, {"PriceList": [product(f"USW2-Train:{KIND}", "25.25")]})
    found = cost.list_price(KIND, answers.REGION)
    assert (found.amount, found.currency) == (25.25, "USD") and "us-west-2" in found.source
    _, asked = aws.asked[0]
    wanted = {each["Field"]: each["Value"] for each in asked["Filters"]}
    assert wanted == {"regionCode": answers.REGION, "instanceName": KIND}
    assert aws.asked[1][1]["NextToken"] == "more"


@pytest.mark.parametrize(
    ("products", "words"),
    [
        ([], "no price for training on ml.p4d.24xlarge in us-west-2"),
        ([product(f"Train:{KIND}", "1"), product(f"USW2-Train:{KIND}", "2")], "2 prices"),
    ],
)
def test_list_price_must_be_unique(aws, products, words):
    aws.give("GetProducts", 200, {"PriceList": products})
    with pytest.raises(AWSError, match=words):
        cost.list_price(KIND, answers.REGION)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f'[job]\ninstance_type = "{KIND}"\nnodes = 4\nmax_hours = 1.5\n')
    return str(path)


def test_cost_command_prints_upper_bound_of_a_config(aws, config, capsys):
    aws.give("GetProducts", 200, {"PriceList": [product(f"USW2-Train:{KIND}", "25")]})
    assert cli.main(["cost", config, "--set", "job.keep_warm_minutes=15"]) == 0
    said = capsys.readouterr().out
    assert "1:30:00 each = 6.0 machine-hours = 150.00 USD" in said
    assert "kept warm, at most: 0:15:00 each = 1.0 machine-hours = 25.00 USD" in said


def test_given_price_makes_no_aws_call(aws, config, capsys):
    assert cli.main(["cost", config, "--price-per-hour", "20"]) == 0
    assert "6.0 machine-hours = 120.00\n" in capsys.readouterr().out
    assert aws.asked == []


def test_denied_price_list_still_prints_machine_hours(aws, config, capsys):
    aws.refuse("GetProducts", "AccessDeniedException", "not authorized")
    assert cli.main(["cost", config]) == 0
    said = capsys.readouterr().out
    assert "6.0 machine-hours" in said and "--price-per-hour" in said and "not authorized" in said


def test_recorded_price_replaces_a_denied_price_list(aws, config, capsys):
    aws.refuse("GetProducts", "AccessDeniedException", "not authorized")
    assert cli.main(["cost", config, "--set", 'job.instance_type="ml.p5.48xlarge"']) == 0
    said = capsys.readouterr().out
    assert "EC2 on demand" in said and "not authorized" in said and "USD" in said


def test_cost_command_of_a_submitted_job(aws, capsys):
    stamps = {
        key: value.timestamp() if isinstance(value, datetime) else value
        for key, value in described(**ENDED).items()
    }
    aws.give("DescribeTrainingJob", 200, stamps)
    aws.give("GetProducts", 200, {"PriceList": [product(f"EU-Train:{KIND}", "20")]})
    assert cli.main(["cost", "gpt2-1"]) == 0
    assert "80.0 machine-hours = 1,600.00 USD" in capsys.readouterr().out
    filters = aws.asked[1][1]["Filters"]
    assert {"Type": "TERM_MATCH", "Field": "regionCode", "Value": "eu-west-1"} in filters


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt2-1", "--set", "job.nodes=2"], "'gpt2-1' is the name of a job"),
        (["CONFIG", "--price-per-hour", "-1"], "more than 0"),
        (["CONFIG", "--price-per-hour", "nan"], "more than 0"),
        (["none.toml"], "no such config file"),
    ],
)
def test_cost_command_rejects_invalid_arguments(config, capsys, arguments, words):
    given = [config if word == "CONFIG" else word for word in arguments]
    assert cli.main(["cost", *given]) == 2
    assert words in capsys.readouterr().err


def test_planned_spot_job_has_an_upper_bound():
    job, _ = spec.load({"job": {"spot": True, "max_hours": 2.0, "nodes": 3}})
    use = cost.planned_usage(job)
    assert use.machine_hours(use.time_limit) == 6 and use.billed is None
