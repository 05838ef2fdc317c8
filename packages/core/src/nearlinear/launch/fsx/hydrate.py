"""Bring files from S3 onto Lustre before a job asks for them, in the order in which it will.

FSx shows every object of a linked folder as a file at once, and copies its bytes when it is first
read, whole: the first step would wait for that on every rank. ``lfs hsm_restore`` asks for it
ahead of time; it returns at once, so batches are waited for, to keep the servers' queue short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...data.blocks import BlockOrder
from ...data.dataset import TokenDataset
from ...data.format import MANIFEST_FILE, TOKENIZER_FILE
from ...errors import ConfigError
from . import lfs, mount

PAUSE = 2.0  # seconds between looks
MOST_LOOKS = 300  # without a change
AT_ONCE = 1000  # files whose restore may be under way


@dataclass(frozen=True)
class Progress:
    """How much of a folder is in the file system."""

    files: int
    bytes: int
    files_here: int
    bytes_here: int

    @property
    def share(self) -> float:
        """Of the bytes; 1 for a folder without any."""
        return self.bytes_here / self.bytes if self.bytes else 1.0

    def __str__(self) -> str:
        size = f"{self.bytes / 2**20:,.1f} MiB"
        if self.files_here == self.files:
            return f"all {self.files:,} files ({size}) are in the file system"
        return (
            f"{self.files_here:,} of {self.files:,} files and {100 * self.share:.1f} % of {size} "
            "are in the file system, the rest only in S3"
        )


def check(folder: Path, mounts: Path | None = None) -> None:
    """Raise ConfigError where it cannot be told which files are only in S3."""
    mount.require(folder)
    found = mount.of(folder, mounts)
    if found is not None and not found.lustre:
        raise ConfigError(
            f"{folder} is on {found.kind}, not on Lustre: all of it is here, nothing to hydrate"
        )
    if not lfs.there():
        raise ConfigError(
            f"{folder}: which files are only in S3 cannot be told without lfs; install the Lustre "
            "client, as on the machine that mounted it"
        )


def progress(files: Sequence[Path]) -> Progress:
    """Of files on Lustre."""
    return _counted({path: path.stat().st_size for path in files}, _released(files))


def restore(
    files: Sequence[Path],
    *,
    at_once: int = AT_ONCE,
    say: Callable[[Progress], None] = lambda found: None,
    pause: Callable[[float], None] = time.sleep,
) -> Progress:
    """Bring ``files`` in their order, so many at once, until all are there.

    ``say`` is told of every change. Raises ConfigError where no file comes any more.
    """
    sizes, released = {path: path.stat().st_size for path in files}, _released(files)
    say(_counted(sizes, released))
    for batch in lfs.batches([path for path in files if path in released], at_once):
        lfs.restore(batch)
        waiting, looks = set(batch), 0
        while waiting:
            still = _released(waiting)
            if still < waiting:
                released -= waiting - still
                waiting, looks = still, 0
                say(_counted(sizes, released))
            elif (looks := looks + 1) >= MOST_LOOKS:
                raise ConfigError(
                    f"{len(waiting)} files do not come from S3: lfs hsm_action {min(waiting)} says "
                    "what is under way, nearlinear fsx describe ID how the link stands"
                )
            else:
                pause(PAUSE)
    return _counted(sizes, released)


def _released(files: Iterable[Path]) -> set[Path]:
    """Those whose bytes are only in S3."""
    return {path for path, state in lfs.states(files).items() if state.released}


def _counted(sizes: dict[Path, int], released: set[Path]) -> Progress:
    here = [size for path, size in sizes.items() if path not in released]
    return Progress(len(sizes), sum(sizes.values()), len(here), sum(here))


def in_order(
    folder: Path, order: BlockOrder | None = None, dataset: TokenDataset | None = None
) -> list[Path]:
    """The files below ``folder`` in the order in which a training run wants them.

    Of token shards: the manifest and the tokenizer, then shards as ``order`` comes to them (without
    it all are wanted at once, and come by name), each before its index; then the rest.
    """
    every = mount.files(folder)
    if not (folder / MANIFEST_FILE).is_file():
        return every
    first = [folder / MANIFEST_FILE, folder / TOKENIZER_FILE]
    if order is not None and dataset is not None:
        for shard in first_used(order, dataset):
            first += [dataset.files[shard], dataset.files[shard].with_suffix(".idx")]
    known = [path for path in first if path.is_file()]
    later = set(known)
    return [*known, *(path for path in every if path not in later)]


def first_used(order: BlockOrder, dataset: TokenDataset) -> list[int]:
    """The dataset's shards in the order in which its first epoch comes to them."""
    windows = order.first_windows(0)
    shards = dataset.extents(windows)[:, 0]
    _, firsts = np.unique(shards, return_index=True)
    return shards[np.sort(firsts)].tolist()
