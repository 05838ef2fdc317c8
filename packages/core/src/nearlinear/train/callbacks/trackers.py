"""Experiment trackers: Weights & Biases, MLflow and CloudWatch.

Rank 0 sends the metrics of every logged step to each tracker of ``run.trackers``, beside the files
of the run's folder. A tracker that fails is reported once, and the run goes on. Every service reads
its own settings from the environment::

    WANDB_PROJECT, WANDB_MODE=offline      wandb, which needs `pip install wandb`
    MLFLOW_TRACKING_URI                    mlflow: a folder, a server, or the ARN of SageMaker's
    AWS_DEFAULT_REGION                     cloudwatch, through boto3

Pass an instance to the trainer for other settings::

    Trainer(config, callbacks=[MLflowTracker(experiment="ablation")]).fit()
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.train import TrainConfig
from ...errors import ConfigError
from ...storage.s3 import boto3_session
from . import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class Tracker(Callback):
    """Callback that sends the metrics of logged steps to a service."""

    name = ""
    """Name in ``run.trackers``."""
    module = ""
    """Library that the tracker needs."""
    package = ""
    """Package that contains it."""

    def on_setup(self, trainer: Trainer) -> None:
        """Open the tracker on rank 0, and subscribe to the logged metrics.

        Raises:
            ConfigError: The library is not installed; on all ranks.
        """
        if importlib.util.find_spec(self.module) is None:
            raise ConfigError(
                f"the tracker {self.name} needs {self.module}: pip install {self.package}, or "
                f"remove {self.name} from run.trackers"
            )
        if trainer.reporter.active:
            with trainer.reporter.output(f"the tracker {self.name}"):
                self._translated(self.open, trainer.config)
                trainer.reporter.add_sink(f"the tracker {self.name}", self)

    def open(self, config: TrainConfig) -> None:
        """Start a run of the service for ``config``."""
        raise NotImplementedError

    def send(self, numbers: dict[str, float], step: int) -> None:
        """Send the finite metrics of one step."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the run of the service."""

    def write(self, metrics: dict[str, Any]) -> None:
        """Send the numbers among ``metrics``. Raises OSError if the service fails."""
        numbers = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value) and name != "step"
        }
        self._translated(self.send, numbers, int(metrics["step"]))

    def close(self) -> None:
        """End the run of the service. Raises OSError if the service fails."""
        self._translated(self.finish)

    def _translated(self, call: Any, *arguments: Any) -> None:
        """Call a method of the service, whose errors of any type become OSError."""
        try:
            call(*arguments)
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


class WandbTracker(Tracker):
    """Weights & Biases, online or offline."""

    name, module, package = "wandb", "wandb", "wandb"

    def __init__(self, project: str = "", mode: str = ""):
        """
        Args:
            project: Name of the project; default: WANDB_PROJECT, or nearlinear.
            mode: online, offline or disabled; default: WANDB_MODE, or online.
        """
        self.project, self.mode = project, mode

    def open(self, config: TrainConfig) -> None:
        """Start a run with the config; its files are in the run's folder."""
        wandb = importlib.import_module("wandb")
        given = {"project": self.project} if self.project else {}
        given |= {"mode": self.mode} if self.mode else {}
        self.run: Any = wandb.init(
            name=Path(config.run.folder).name,
            dir=config.run.folder,
            config=dataclasses.asdict(config),
            **given,
        )

    def send(self, numbers: dict[str, float], step: int) -> None:
        """Log the metrics of ``step``."""
        self.run.log(numbers, step=step, commit=True)

    def finish(self) -> None:
        """Upload the rest and end the run."""
        self.run.finish()


class MLflowTracker(Tracker):
    """MLflow: a local store, a server, or SageMaker's managed server by its ARN."""

    name, module, package = "mlflow", "mlflow", "mlflow-skinny"

    def __init__(self, experiment: str = "", uri: str = ""):
        """
        Args:
            experiment: Name of the experiment; default: MLFLOW_EXPERIMENT_NAME, or nearlinear.
            uri: Tracking store; default: MLFLOW_TRACKING_URI, or mlflow's own.
        """
        self.experiment, self.uri = experiment, uri

    def open(self, config: TrainConfig) -> None:
        """Create a run with the non-empty keys of the config as parameters."""
        tracking: Any = importlib.import_module("mlflow").MlflowClient
        self.client: Any = tracking(self.uri or None)
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "nearlinear")
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        run = self.client.create_run(experiment, run_name=Path(config.run.folder).name)
        self.run_id: str = run.info.run_id
        for table, keys in dataclasses.asdict(config).items():
            for key, value in keys.items():
                if value not in ("", None, {}, []):
                    self.client.log_param(self.run_id, f"{table}.{key}", value)

    def send(self, numbers: dict[str, float], step: int) -> None:
        """Log the metrics of ``step``."""
        for name, value in numbers.items():
            self.client.log_metric(self.run_id, name, value, step=step)

    def finish(self) -> None:
        """Mark the run as finished."""
        self.client.set_terminated(self.run_id)


class CloudWatchTracker(Tracker):
    """CloudWatch metrics in one namespace, with the run's name as dimension."""

    name, module, package = "cloudwatch", "boto3", "boto3"

    def __init__(self, namespace: str = "nearlinear", region: str = ""):
        """
        Args:
            namespace: Namespace of the metrics.
            region: AWS region; default: the environment's.
        """
        self.namespace, self.region = namespace, region

    def open(self, config: TrainConfig) -> None:
        """Create the client."""
        self.run_name: str = Path(config.run.folder).name
        self.client: Any = boto3_session(self.region).client("cloudwatch")

    def send(self, numbers: dict[str, float], step: int) -> None:
        """Send the metrics of ``step`` with PutMetricData."""
        dimensions = [{"Name": "Run", "Value": self.run_name}]
        data = [
            {"MetricName": name, "Value": value, "Timestamp": time.time(), "Dimensions": dimensions}
            for name, value in ({"step": float(step)} | numbers).items()
        ]
        self.client.put_metric_data(Namespace=self.namespace, MetricData=data)


TRACKERS = {each.name: each for each in (WandbTracker, MLflowTracker, CloudWatchTracker)}
"""Trackers by their name in ``run.trackers``."""
