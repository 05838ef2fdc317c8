"""Measure the file system and the loader on the same files, to find the limit of a training run.

The file system is measured with large sequential reads that bypass the page cache where possible
(O_DIRECT, or dropped pages). The loader is measured with its own batches, after dropping the pages
of its files. The memory of the file servers cannot be bypassed, so a second measurement may be
faster.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...data.dataset import TokenDataset
from ...data.loader import Loader
from ...errors import ConfigError

READ_SIZE = 4 * 2**20  # bytes, aligned for O_DIRECT
_READERS = 4  # files read concurrently: a single stream does not saturate the Lustre servers
DEFAULT_SECONDS = 5.0  # per measurement
_MIN_RELIABLE_BYTES = 64 * 2**20
_SATURATED_SHARE = 0.9  # share of a rate above which it counts as reached


@dataclass(frozen=True)
class ReadMeasurement:
    """Sequential read rate of the file system."""

    num_bytes: int
    seconds: float
    cache_note: str
    """Handling of the page cache."""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds


@dataclass(frozen=True)
class LoaderMeasurement:
    """Rate of the loader on one rank."""

    tokens: int
    seconds: float
    bytes_per_token: int
    amplification: float
    """Bytes read from Lustre per byte used, according to the read model in `nearlinear.data`."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Bytes of tokens per second."""
        return self.tokens_per_s * self.bytes_per_token


@dataclass(frozen=True)
class TrainingDemand:
    """Tokens that training consumes on this machine."""

    tokens_per_s: float
    num_ranks: int = 1
    """Ranks of this machine that load data."""


def measure_file_system(files: Sequence[Path], seconds: float = DEFAULT_SECONDS) -> ReadMeasurement:
    """Read ``files`` sequentially in several threads, for at most ``seconds``."""
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise ConfigError("there are no files to read; name a folder that contains some")
    deadline = time.perf_counter() + seconds
    started = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(lambda path: _read_file(path, deadline), files))
    notes = {note for count, note in found if count}
    elapsed = time.perf_counter() - started
    return ReadMeasurement(sum(count for count, _ in found), elapsed, ", ".join(sorted(notes)))


def measure_loader(loader: Loader, seconds: float = DEFAULT_SECONDS) -> LoaderMeasurement:
    """Take at least one step of ``loader`` and continue for ``seconds``.

    The pages of its files are dropped first.
    """
    dataset, tokens = loader.dataset, 0
    assert isinstance(dataset, TokenDataset), "mixtures are not supported"
    for path in dataset.files:
        _drop_pages(Path(path))
    reads = dataset.count_reads()
    started = time.perf_counter()
    while not tokens or time.perf_counter() - started < seconds:
        tokens += sum(batch["input_ids"].numel() for batch in next(loader))
    elapsed = time.perf_counter() - started
    # Bytes of a block that this measurement has not used are used before its group ends.
    amplification = 1.0 if loader.blocks else reads.amplification
    return LoaderMeasurement(tokens, elapsed, dataset.manifest.dtype.itemsize, amplification)


def format_bottleneck(
    system: ReadMeasurement, loader: LoaderMeasurement, demand: TrainingDemand | None = None
) -> str:
    """Name the bottleneck in one sentence.

    Without ``demand``, the sentence gives the training rate above which there is a bottleneck. A
    loader that reads almost at the rate of the file system is limited by the file system.
    """
    amplification = max(1.0, loader.amplification)
    ranks = demand.num_ranks if demand else 1
    read_rate = loader.bytes_per_s * amplification * ranks
    saturates = read_rate >= _SATURATED_SHARE * system.bytes_per_s
    if demand is None:
        name = "file system" if saturates else "loader"
        return (
            f"The {name} is the first bottleneck: training at more than "
            f"{loader.tokens_per_s:,.0f} tokens/s per rank waits for it."
        )
    needed = demand.tokens_per_s * loader.bytes_per_token * amplification
    too_slow = loader.tokens_per_s * ranks < demand.tokens_per_s
    if needed > system.bytes_per_s or (saturates and too_slow):
        blocks = "read in blocks (data.shuffle_block_mib = 4)"
        remedy = blocks if amplification > 2 else "use a faster file system"
        return (
            f"The file system is the bottleneck: training would read {needed / 1e6:,.0f} MB/s of "
            f"{system.bytes_per_s / 1e6:,.0f}; {remedy}."
        )
    share = loader.tokens_per_s * ranks / demand.tokens_per_s
    if share < 1:
        return (
            f"The loader is the bottleneck: it provides {100 * share:.0f} % of the tokens that "
            "training consumes; read ahead (data.read_ahead = 8)."
        )
    return f"No bottleneck: the loader provides {share:.1f} times the tokens of training."


def format_measurements(
    system: ReadMeasurement,
    loader: LoaderMeasurement | None,
    demand: TrainingDemand | None = None,
) -> list[str]:
    """Format the measurements and the bottleneck, one item per line."""
    size = f"{system.num_bytes / 2**20:,.1f} MiB"
    rate = f"{system.bytes_per_s / 1e6:,.0f} MB/s sequential"
    lines = [f"file system: {rate}, over {size} ({system.cache_note})"]
    if system.num_bytes < _MIN_RELIABLE_BYTES:
        lines.append(f"{size} is too little for a reliable rate: startup time dominates")
    if loader is None:
        return [*lines, "no token shards here: the loader was not measured"]
    lines.append(
        f"loader, one rank: {loader.tokens_per_s:,.0f} tokens/s, "
        f"{loader.bytes_per_s / 1e6:,.1f} MB/s; on Lustre it reads {loader.amplification:.1f} "
        "bytes per byte used"
    )
    if demand:
        rate = f"{demand.tokens_per_s * loader.bytes_per_token / 1e6:,.1f} MB/s"
        ranks = f"{demand.num_ranks} ranks" if demand.num_ranks > 1 else "one rank"
        lines.append(f"training, {ranks}: {demand.tokens_per_s:,.0f} tokens/s, {rate}")
    return [*lines, format_bottleneck(system, loader, demand)]


def _read_file(path: Path, deadline: float) -> tuple[int, str]:
    """Read a file until its end or the deadline; return the bytes and the page cache note."""
    file, note = _open_uncached(path)
    done = 0
    try:
        with mmap.mmap(-1, READ_SIZE) as buffer:  # page-aligned, as O_DIRECT requires
            while time.perf_counter() < deadline:
                count = os.preadv(file, [buffer], done)
                done += count
                if count < READ_SIZE:
                    break
    finally:
        os.close(file)
    return done, note


def _open_uncached(path: Path) -> tuple[int, str]:
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT), "bypassing the page cache"
        except OSError:  # not supported by the file system, such as an older tmpfs
            pass
    note = "after dropping cached pages" if _drop_pages(path) else "possibly from the page cache"
    return os.open(path, os.O_RDONLY), note


def _drop_pages(path: Path) -> bool:
    """Ask the kernel to drop a file's cached pages. Returns False if that is not supported.

    The kernel may keep some pages.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
