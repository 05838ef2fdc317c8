"""Trackers receive the metrics of every logged step, and their failures do not end a run.

Weights & Biases (offline) and MLflow (a local folder) are the real libraries where they are
installed; CloudWatch is moto's.
"""

import json
from pathlib import Path

import pytest

from nearlinear.config import train as train_config
from nearlinear.errors import ConfigError
from nearlinear.train.callbacks import trackers
from nearlinear.train.trainer import Trainer


def run(small_run, *callbacks, **run_keys):
    small_run["run"] |= run_keys
    small_run["train"] |= {"steps": 3, "eval_sequences": 0, "sample_tokens": 0}
    small_run["run"]["memory_report"] = False
    Trainer(train_config.load(small_run, environment={}), callbacks=list(callbacks)).fit()
    with open(f"{small_run['run']['folder']}/metrics.jsonl") as lines:
        return [json.loads(line) for line in lines]


def test_cloudwatch_holds_the_loss_of_every_step(aws_services, small_run):
    import boto3

    rows = run(small_run, trackers=["cloudwatch"])
    found = boto3.client("cloudwatch").get_metric_data(
        StartTime=rows[0]["time"] - 600,
        EndTime=rows[-1]["time"] + 600,
        MetricDataQueries=[
            {
                "Id": "loss",
                "MetricStat": {
                    "Metric": {
                        "Namespace": "nearlinear",
                        "MetricName": "loss",
                        "Dimensions": [{"Name": "Run", "Value": "run"}],
                    },
                    "Period": 3600,
                    "Stat": "Sum",
                },
            }
        ],
    )
    assert sum(found["MetricDataResults"][0]["Values"]) == pytest.approx(
        sum(row["loss"] for row in rows)
    )


def test_mlflow_store_equals_the_metrics_file(small_run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow 3.12 and later
    tracker = trackers.MLflowTracker("mine", f"file:{tmp_path / 'mlruns'}")
    rows = run(small_run, tracker)
    history = tracker.client.get_metric_history(tracker.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(row["step"], row["loss"]) for row in rows]
    found = tracker.client.get_run(tracker.run_id)
    assert found.info.status == "FINISHED" and found.data.params["model.preset"] == "gpt2-tiny"
    assert mlflow.active_run() is None


def test_wandb_offline_run_is_written(small_run, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    seen = {}

    class Wandb(trackers.WandbTracker):
        def finish(self):
            seen.update(dict(self.run.summary))  # the library forgets it with the run
            super().finish()

    tracker = Wandb("mine", "offline")
    rows = run(small_run, tracker)
    assert seen["loss"] == pytest.approx(rows[-1]["loss"]) and seen["_step"] == 3
    assert tracker.run.config["model"]["preset"] == "gpt2-tiny"
    (file,) = (each for each in Path(small_run["run"]["folder"]).rglob("run-*.wandb"))
    assert file.stat().st_size > 0


class Failing(trackers.Tracker):
    name, module = "failing", "json"
    sent = 0

    def open(self, config):
        pass

    def send(self, numbers, step):
        self.sent += 1
        raise RuntimeError("no connection")


def test_failing_tracker_is_reported_once_and_the_run_goes_on(small_run, caplog):
    tracker = Failing()
    assert len(run(small_run, tracker)) == 3 and tracker.sent == 3
    assert caplog.text.count("the tracker failing cannot be written") == 1
    assert "no connection" in caplog.text


def test_missing_library_is_an_error_with_the_package(small_run, monkeypatch):
    monkeypatch.setattr(trackers.WandbTracker, "module", "no_such_library")
    with pytest.raises(ConfigError, match="pip install wandb, or remove wandb"):
        run(small_run, trackers=["wandb"])


def test_unknown_tracker_is_rejected_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'wandb'"):
        train_config.load({"run": {"trackers": ["wanddb"]}}, environment={})
    assert tuple(trackers.TRACKERS) == train_config.TRACKERS
