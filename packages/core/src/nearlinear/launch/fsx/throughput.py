"""Whether the file system or the loader limits a training run: both measured, on the same files.

The file system's rate is that of large reads in order, past the page cache where the system lets
them (O_DIRECT, or pages dropped before). The loader's is that of its own batches, from files whose
pages were dropped. What a file server has in its memory is out of reach from here, so a second
measurement may be faster than the first.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...data.loader import Loader
from ...errors import ConfigError

CALL = 4 * 2**20  # bytes of one read, aligned for O_DIRECT
READERS = 4  # files read side by side: one stream does not fill Lustre's servers
SECONDS = 5.0  # of each measurement
LITTLE = 64 * 2**20  # bytes
ENOUGH = 0.9  # share of a rate from which it counts as reached


@dataclass(frozen=True)
class Sequential:
    """A measurement of the file system."""

    bytes: int
    seconds: float
    how: str
    """how the page cache was kept out"""

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds


@dataclass(frozen=True)
class Loading:
    """A measurement of the loader."""

    tokens: int
    seconds: float
    bytes_per_token: int
    amplification: float
    """bytes fetched for each byte used, as `data.reads` counts them for Lustre"""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def rate(self) -> float:
        """Bytes of tokens per second."""
        return self.tokens_per_s * self.bytes_per_token


def sequential(files: Sequence[Path], seconds: float = SECONDS) -> Sequential:
    """Read ``files`` in order, `READERS` side by side, for so long or to their end."""
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise ConfigError("no files to read: name a folder that holds some")
    deadline = time.perf_counter() + seconds
    started = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        found = list(readers.map(lambda path: _read(path, deadline), files))
    hows = {how for count, how in found if count}
    taken = time.perf_counter() - started
    return Sequential(sum(count for count, _ in found), taken, ", ".join(sorted(hows)))


def loading(loader: Loader, seconds: float = SECONDS) -> Loading:
    """Take steps of ``loader`` for so long, one at least; pages of its files are dropped before."""
    dataset, tokens = loader.dataset, 0
    for path in dataset.files:
        _drop(path)
    counts = dataset.count_reads()
    started = time.perf_counter()
    while not tokens or time.perf_counter() - started < seconds:
        tokens += sum(batch["input_ids"].numel() for batch in next(loader))
    taken = time.perf_counter() - started
    size = dataset.manifest.dtype.itemsize
    # What blocks bring and this second has not used is used before their group ends.
    waste = 1.0 if loader.blocks else counts.amplification
    return Loading(tokens, taken, size, waste)


@dataclass(frozen=True)
class Needed:
    """What a training takes on this machine."""

    tokens_per_s: float
    ranks: int = 1
    """that load on this machine"""


def verdict(system: Sequential, loader: Loading, needed: Needed | None = None) -> str:
    """One sentence: what limits. Without ``needed``, the faster training is, the sooner it does.

    A loader that fetches near the file system's rate is as fast as that lets it be.
    """
    waste = max(1.0, loader.amplification)
    ranks = needed.ranks if needed else 1
    at_the_system = loader.rate * waste * ranks >= ENOUGH * system.rate
    if needed is None:
        most = loader.tokens_per_s
        what = f"a training that takes more than {most:,.0f} tokens/s on a rank waits for it"
        return f"The {'file system' if at_the_system else 'loader'} is the first to limit: {what}."
    takes = needed.tokens_per_s * loader.bytes_per_token * waste
    if takes > system.rate or (at_the_system and loader.tokens_per_s * ranks < needed.tokens_per_s):
        fix = "read in blocks (data.shuffle_block_mib = 4)" if waste > 2 else "take a faster one"
        what = f"the training would fetch {takes / 1e6:,.0f} MB/s of {system.rate / 1e6:,.0f}"
        return f"The file system limits: {what}; {fix}."
    share = loader.tokens_per_s * ranks / needed.tokens_per_s
    if share < 1:
        fix = "read ahead (data.read_ahead = 8)"
        return f"The loader limits: it gives {100 * share:.0f} % of what training takes; {fix}."
    return f"Neither limits: the loader gives {share:.1f} times what the training takes."


def report(system: Sequential, loader: Loading | None, needed: Needed | None = None) -> list[str]:
    """Lines for a person."""
    size = f"{system.bytes / 2**20:,.1f} MiB"
    lines = [f"file system: {system.rate / 1e6:,.0f} MB/s in order, over {size} ({system.how})"]
    if system.bytes < LITTLE:
        lines.append(f"{size} are little to tell a rate from: its start weighs too much")
    if loader is None:
        return [*lines, "no token shards here: the loader was not measured"]
    lines.append(
        f"loader, one rank: {loader.tokens_per_s:,.0f} tokens/s, {loader.rate / 1e6:,.1f} MB/s; "
        f"on Lustre it fetches {loader.amplification:.1f} bytes for each that it uses"
    )
    if needed:
        rate = needed.tokens_per_s * loader.bytes_per_token / 1e6
        ranks = f"{needed.ranks} ranks" if needed.ranks > 1 else "one rank"
        lines.append(f"training, {ranks}: {needed.tokens_per_s:,.0f} tokens/s, {rate:,.1f} MB/s")
    return [*lines, verdict(system, loader, needed)]


def _read(path: Path, deadline: float) -> tuple[int, str]:
    """Bytes read of a file until it ends or the time does, and how the cache was kept out."""
    file, how = _opened(path)
    done = 0
    try:
        with mmap.mmap(-1, CALL) as buffer:  # aligned to pages, as O_DIRECT asks
            while time.perf_counter() < deadline:
                got = os.preadv(file, [buffer], done)
                done += got
                if got < CALL:
                    break
    finally:
        os.close(file)
    return done, how


def _opened(path: Path) -> tuple[int, str]:
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT), "past the page cache"
        except OSError:  # a file system without it, such as an older tmpfs
            pass
    how = "pages dropped before" if _drop(path) else "the page cache could not be kept out"
    return os.open(path, os.O_RDONLY), how


def _drop(path: Path) -> bool:
    """Ask the kernel to forget a file's pages; whether it can be asked. It may keep some."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
