"""Verbs of ``nearlinear fsx`` for a folder of this machine."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from ...data.dataset import TokenDataset
from ...data.format import MANIFEST_FILE
from ...data.loader import Loader
from ...data.sampler import MixtureBlockOrder
from ...errors import ConfigError
from .. import spec
from . import hydrate as hydration
from . import lustre
from .throughput import (
    TrainingDemand,
    format_measurements,
    measure_file_system,
    measure_loader,
)


def mount_check(options: argparse.Namespace) -> int:
    """Print mount, space, striping and hydration state of a folder."""
    folder = Path(options.folder)
    for line in lustre.format_folder_info(lustre.inspect_folder(folder)):
        print(line)
    try:
        hydration.require_hydratable(folder)
    except ConfigError as error:
        print(f"hydration: {error}")
    else:
        print(f"hydration: {hydration.measure_progress(lustre.list_files(folder))}")
    return 0


def hydrate(options: argparse.Namespace) -> int:
    """Restore a folder's files from S3."""
    folder = Path(options.folder)
    hydration.require_hydratable(folder)
    files = lustre.list_files(folder)
    if options.dry_run:
        print(hydration.measure_progress(files))
        return 0
    if (folder / MANIFEST_FILE).is_file():
        # The manifest determines the read order of the other files.
        manifests = [
            path for path in hydration.files_in_read_order(folder) if path.suffix == ".json"
        ]
        hydration.restore_files(manifests)
        loader, dataset = _open_loader(options, folder)
        assert not isinstance(loader.order, MixtureBlockOrder)  # of a single folder
        files = hydration.files_in_read_order(folder, loader.order, dataset)
    hydration.restore_files(
        files, batch_size=options.at_once, report=lambda progress: print(progress, flush=True)
    )
    return 0


def throughput(options: argparse.Namespace) -> int:
    """Measure the file system, and the loader if the folder holds token shards."""
    folder, measured = Path(options.folder), None
    lustre.require_folder(folder)
    if not options.seconds > 0:
        raise ConfigError(f"--seconds {options.seconds}: must be more than 0")
    system = measure_file_system(lustre.list_files(folder), options.seconds)
    if (folder / MANIFEST_FILE).is_file():
        loader, _ = _open_loader(options, folder)
        measured = measure_loader(loader, options.seconds)
    for line in format_measurements(system, measured, _training_demand(options)):
        print(line)
    return 0


def _open_loader(options: argparse.Namespace, folder: Path) -> tuple[Loader, TokenDataset]:
    """Open the loader of the training config on the shards in ``folder``."""
    from ...train import preflight
    from ...train.data import build_loader
    from ...train.objectives import build_objective

    _, config = spec.load(options.config, [*options.settings, f"data.path={folder}"])
    dataset = preflight.open_dataset(config, "train", verified=True)
    assert isinstance(dataset, TokenDataset)  # data.path and data.sources exclude each other
    objective = build_objective(config, dataset)
    return build_loader(config, dataset, objective, data_rank=0, data_ranks=1), dataset


def _training_demand(options: argparse.Namespace) -> TrainingDemand | None:
    """Return the demand of training: from --need, or from the metrics of the config's last run."""
    if not options.config:
        return TrainingDemand(options.need) if options.need else None
    job, config = spec.load(options.config, options.settings)
    ranks = config.run.nproc or job.ranks_per_node or 1
    if options.need:
        return TrainingDemand(options.need, ranks)
    metrics = Path(config.run.folder) / "metrics.jsonl"
    if not metrics.is_file():
        return None
    from ...plots import read_metrics

    rates = [step["tokens_per_s"] for step in read_metrics(config.run.folder)]
    return TrainingDemand(statistics.median(rates) / job.nodes, ranks) if rates else None
