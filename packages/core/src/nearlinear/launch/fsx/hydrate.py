"""Restore files from S3 to Lustre before a job reads them, in the order of its reads.

FSx shows every object of a linked folder as a file, and copies the whole object at the first read.
Without hydration, the first step waits for these copies on every rank. ``lfs hsm_restore`` requests
the copies ahead of time and returns immediately. `restore_files` waits for one batch of files at a
time, which keeps the queue of the file servers short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...data.dataset import TokenDataset
from ...data.format import MANIFEST_FILE, TOKENIZER_FILE
from ...data.sampler import BlockOrder
from ...errors import ConfigError
from . import lustre

POLL_INTERVAL = 2.0  # seconds
MAX_IDLE_POLLS = 300  # polls without a change before giving up
DEFAULT_BATCH_SIZE = 1000  # files


@dataclass(frozen=True)
class HydrationProgress:
    """Number and size of files, in total and in the file system."""

    num_files: int
    num_bytes: int
    restored_files: int
    restored_bytes: int

    @property
    def share(self) -> float:
        """Share of the bytes that are in the file system; 1 without any bytes."""
        return self.restored_bytes / self.num_bytes if self.num_bytes else 1.0

    def __str__(self) -> str:
        size = f"{self.num_bytes / 2**20:,.1f} MiB"
        if self.restored_files == self.num_files:
            return f"all {self.num_files:,} files ({size}) are in the file system"
        return (
            f"{self.restored_files:,} of {self.num_files:,} files and {100 * self.share:.1f} % of "
            f"{size} are in the file system, the rest only in S3"
        )


def require_hydratable(folder: Path, mount_table: Path | None = None) -> None:
    """Raise ConfigError if ``folder`` is not on Lustre or ``lfs`` is missing."""
    lustre.require_folder(folder)
    mount = lustre.find_mount(folder, mount_table)
    if mount is not None and not mount.is_lustre:
        raise ConfigError(
            f"{folder} is on {mount.fs_type}, not on Lustre: all data is local, and there is "
            "nothing to hydrate"
        )
    if not lustre.has_lfs():
        raise ConfigError(
            f"{folder}: lfs, which lists the files that are only in S3, is not installed; install "
            "the Lustre client"
        )


def measure_progress(files: Sequence[Path]) -> HydrationProgress:
    """Return the hydration progress of files on Lustre."""
    return _progress({path: path.stat().st_size for path in files}, _released_files(files))


def restore_files(
    files: Sequence[Path],
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    report: Callable[[HydrationProgress], None] = lambda progress: None,
    sleep: Callable[[float], None] = time.sleep,
) -> HydrationProgress:
    """Restore ``files`` from S3 in order, and wait for all of them.

    Args:
        files: Files on Lustre, in the order of restoration.
        batch_size: Number of files that are restored at once.
        report: Function that receives the progress at each change.
        sleep: Function that waits between polls.

    Raises:
        ConfigError: No file arrived during `MAX_IDLE_POLLS` polls.
    """
    sizes, released = {path: path.stat().st_size for path in files}, _released_files(files)
    report(_progress(sizes, released))
    remaining = [path for path in files if path in released]
    for batch in lustre.split_into_batches(remaining, batch_size):
        lustre.request_restore(batch)
        waiting, idle_polls = set(batch), 0
        while waiting:
            still = _released_files(waiting)
            if still < waiting:
                released -= waiting - still
                waiting, idle_polls = still, 0
                report(_progress(sizes, released))
            elif (idle_polls := idle_polls + 1) >= MAX_IDLE_POLLS:
                raise ConfigError(
                    f"{len(waiting)} files do not arrive from S3. Run lfs hsm_action "
                    f"{min(waiting)} for the pending action, and nearlinear fsx describe ID for "
                    "the state of the link"
                )
            else:
                sleep(POLL_INTERVAL)
    return _progress(sizes, released)


def _released_files(files: Iterable[Path]) -> set[Path]:
    """Return the files whose data is only in S3."""
    return {path for path, state in lustre.hsm_states(files).items() if state.released}


def _progress(sizes: dict[Path, int], released: set[Path]) -> HydrationProgress:
    restored = [size for path, size in sizes.items() if path not in released]
    return HydrationProgress(len(sizes), sum(sizes.values()), len(restored), sum(restored))


def files_in_read_order(
    folder: Path, order: BlockOrder | None = None, dataset: TokenDataset | None = None
) -> list[Path]:
    """Return the files below ``folder`` in the order in which a training run reads them.

    A folder of token shards begins with the manifest and the tokenizer. The shards follow in the
    order of ``order``, each before its index, and then all other files by name. Without ``order``,
    training reads all shards from the start, and they are sorted by name.
    """
    every = lustre.list_files(folder)
    if not (folder / MANIFEST_FILE).is_file():
        return every
    first = [folder / MANIFEST_FILE, folder / TOKENIZER_FILE]
    if order is not None and dataset is not None:
        files = [Path(file) for file in dataset.files]
        for shard in shards_by_first_use(order, dataset):
            first += [files[shard], files[shard].with_suffix(".idx")]
    existing = [path for path in first if path.is_file()]
    listed = set(existing)
    return [*existing, *(path for path in every if path not in listed)]


def shards_by_first_use(order: BlockOrder, dataset: TokenDataset) -> list[int]:
    """Return the indices of the dataset's shards in the order of their use in the first epoch."""
    windows = order.first_windows(0)
    shards = dataset.extents(windows)[:, 0]
    _, firsts = np.unique(shards, return_index=True)
    return shards[np.sort(firsts)].tolist()
