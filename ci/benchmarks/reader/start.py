"""How long training waits for its first batch of a large data set, wherever it goes on.

Token files are holes of a disk, and indexes are whole, with documents as long as web pages. Every
start is a process of its own, timed from opening the data to the first batch, imports left out; its
memory is what it has taken by then. A packing is timed without what a cache keeps of it, and with.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import nearlinear as nl
from nearlinear.data.format import BLOCK_BYTES, Manifest, Shard, encode_index

MODULE = "ci.benchmarks.reader.start"
SHARDS = 40
VOCABULARY = 50_257
BATCH = 8
POSITIONS = (0.0, 0.4, 2.9)  # epochs
WAYS = {
    "concat": {},
    "concat, documents masked": {"mask": True},
    "best fit, masked": {"packing": "best_fit", "mask": True},
}


@dataclass(frozen=True)
class Started:
    """Of one start."""

    reader: str
    length: int
    epochs: float
    """where it went on"""
    cache: str
    """empty, or of an earlier start"""
    seconds: float
    cpu_seconds: float
    """of them; what is beyond waited for the disk, or for others on this machine"""
    mib: float
    """of memory that it took"""


def write(folder: Path, tokens: int) -> None:
    """Shards of about ``tokens`` in ``folder``, whose token files are sparse."""
    (folder / "train").mkdir(parents=True)
    rng, dtype, shards = np.random.default_rng(0), np.dtype("<u2"), []
    for number in range(SHARDS):
        lengths = 1 + rng.lognormal(6.55, 0.9, max(1, tokens // SHARDS // 1050)).astype(np.int64)
        count, path = int(lengths.sum()), folder / f"train/shard-{number:05d}.bin"
        with path.open("wb") as file:
            file.truncate(count * dtype.itemsize)
        index = encode_index(lengths, dtype)
        path.with_suffix(".idx").write_bytes(index)
        size = count * dtype.itemsize
        blocks = ("0" * 16,) * -(-size // BLOCK_BYTES), ("0" * 8,) * -(-size // BLOCK_BYTES)
        name = f"train/{path.name}"
        shards.append(Shard(name, count, len(lengths), size, "0", len(index), "0", *blocks))
    tokenizer = {"name": "none", "file": "tokenizer/tokenizer.json", "sha256": "0"}
    Manifest(VOCABULARY, VOCABULARY - 1, tokenizer, {"train": tuple(shards)}).write(folder)


def measure(folder: Path, lengths: list[int]) -> Iterator[Started]:
    """Every start from the shards that `write` made."""
    cache = folder / "start-cache"
    for length in lengths:
        for name, options in WAYS.items():
            for epochs in POSITIONS:
                for kept in ("empty", "kept") if "packing" in options else ("none",):
                    if kept != "kept":
                        shutil.rmtree(cache, ignore_errors=True)
                    asked = {"length": length, "epochs": epochs, "cache": str(cache)} | options
                    command = [
                        sys.executable,
                        "-m",
                        "ci.benchmarks.reader.start",
                        str(folder),
                        json.dumps(asked),
                    ]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    yield Started(name, length, epochs, kept, **json.loads(done.stdout))


def start(
    folder: str, length: int, epochs: float, cache: str, packing: str = "concat", mask: bool = False
) -> dict:
    """Open, go on, and read the first batch, in this process."""
    nl.Loader, nl.TokenDataset  # noqa: B018  imports are not timed
    before, begin, cpu = peak_mib(), time.perf_counter(), time.process_time()
    dataset = nl.TokenDataset(
        folder, sequence_length=length, verify="size", packing=packing, cache=cache
    )
    loader = nl.Loader(dataset, BATCH, data_rank=0, data_ranks=1, masks=nl.Masks(documents=mask))
    loader.load_state_dict(loader.state_dict() | {"next_sample": int(epochs * len(dataset))})
    (batch,) = next(loader)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    assert batch["input_ids"].shape == (BATCH, length)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "mib": peak_mib() - before}


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def line(of: Started) -> str:
    return (
        f"{of.length:6} {of.reader:26} from epoch {of.epochs:.1f}  cache {of.cache:6}"
        f"{of.seconds:8.3f} s, {of.cpu_seconds:.3f} of CPU {of.mib:7.0f} MiB"
    )


def report(folder: Path, tokens: int, lengths: list[int], as_json: bool) -> None:
    """Write the shards, and print every start from them."""
    write(folder, tokens)
    for found in measure(folder, lengths):
        print(json.dumps(asdict(found)) if as_json else line(found), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="One start.")
    parser.add_argument("folder")
    parser.add_argument("options", type=json.loads)
    options = parser.parse_args(argv)
    print(json.dumps(start(options.folder, **options.options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
