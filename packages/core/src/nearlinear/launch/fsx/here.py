"""The verbs of ``nearlinear fsx`` that look at a folder of this machine."""

from __future__ import annotations

import statistics
from pathlib import Path

from ...data.format import MANIFEST_FILE
from ...errors import ConfigError
from .. import spec
from . import hydrate as hydration
from . import mount
from . import throughput as rates


def mount_check(options) -> int:
    """Say what a folder is on."""
    folder = Path(options.folder)
    found = mount.look(folder)
    for line in mount.report(found):
        print(line)
    try:
        hydration.check(folder)
    except ConfigError as error:
        print(f"in S3 only: {error}")
    else:
        print(f"in S3 only: {hydration.progress(mount.files(folder))}")
    return 0


def hydrate(options) -> int:
    """Bring a folder's files from S3."""
    folder = Path(options.folder)
    hydration.check(folder)
    files = mount.files(folder)
    if options.dry_run:
        print(hydration.progress(files))
        return 0
    if (folder / MANIFEST_FILE).is_file():
        first = [path for path in hydration.in_order(folder) if path.suffix == ".json"]
        hydration.restore(first)  # the order of the rest is written in them
        loader = _loader(options, folder)
        files = hydration.in_order(folder, loader.order, loader.dataset)
    hydration.restore(files, at_once=options.at_once, say=lambda now: print(now, flush=True))
    return 0


def throughput(options) -> int:
    """Measure the file system, and the loader where there are token shards."""
    folder, found = Path(options.folder), None
    mount.require(folder)
    if not options.seconds > 0:
        raise ConfigError(f"--seconds {options.seconds}: give more than 0")
    system = rates.sequential(mount.files(folder), options.seconds)
    if (folder / MANIFEST_FILE).is_file():
        found = rates.loading(_loader(options, folder), options.seconds)
    for line in rates.report(system, found, _needed(options)):
        print(line)
    return 0


def _loader(options, folder: Path):
    """The loader of the training that a config describes, on the shards in ``folder``."""
    from ...train import preflight
    from ...train.batches import loader_of

    _, config = spec.load(options.config, [*options.settings, f"data.path={folder}"])
    dataset = preflight.open_dataset(config, "train", verified=True)
    return loader_of(config, dataset, data_rank=0, data_ranks=1)


def _needed(options) -> rates.Needed | None:
    """What training takes on this machine: as told, or as its last run has left it."""
    if not options.config:
        return rates.Needed(options.need) if options.need else None
    job, config = spec.load(options.config, options.settings)
    ranks = config.run.nproc or job.ranks_per_node or 1
    if options.need:
        return rates.Needed(options.need, ranks)
    metrics = Path(config.run.folder) / "metrics.jsonl"
    if not metrics.is_file():
        return None
    from ...plots import read_metrics

    found = [step["tokens_per_s"] for step in read_metrics(config.run.folder)]
    return rates.Needed(statistics.median(found) / job.nodes, ranks) if found else None
