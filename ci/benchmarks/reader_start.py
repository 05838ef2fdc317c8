"""Time to the first batch of a large data set, from the start and when resuming.

Token files are sparse; indexes are complete, with documents of web page lengths. Every start is a
process of its own, timed from opening the data to the first batch, without imports. Memory is the
growth until then. Packing is measured with an empty and with a filled cache.
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

MODULE = "ci.benchmarks.reader_start"
SHARDS = 40
VOCABULARY = 50_257
BATCH = 8
POSITIONS = (0.0, 0.4, 2.9)  # epochs at which reading starts
METHODS = {
    "concat": {},
    "concat, documents masked": {"mask": True},
    "best fit, masked": {"packing": "best_fit", "mask": True},
}


@dataclass(frozen=True)
class StartResult:
    """Result of one start."""

    reader: str
    length: int
    epochs: float
    """Position at which reading starts."""
    cache: str
    """State of the packing cache: none, empty or kept (from an earlier start)."""
    seconds: float
    cpu_seconds: float
    """CPU seconds; the rest of ``seconds`` waited for the disk or for other programs."""
    mib: float
    """Memory growth."""


def write_shards(folder: Path, tokens: int) -> None:
    """Write shards of about ``tokens`` tokens with sparse token files to ``folder``."""
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


def measure(folder: Path, lengths: list[int]) -> Iterator[StartResult]:
    """Measure every start on the shards written by `write_shards`."""
    cache = folder / "start-cache"
    for length in lengths:
        for name, options in METHODS.items():
            for epochs in POSITIONS:
                for kept in ("empty", "kept") if "packing" in options else ("none",):
                    if kept != "kept":
                        shutil.rmtree(cache, ignore_errors=True)
                    arguments = {"length": length, "epochs": epochs, "cache": str(cache)} | options
                    command = [
                        sys.executable,
                        "-m",
                        "ci.benchmarks.reader_start",
                        str(folder),
                        json.dumps(arguments),
                    ]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    yield StartResult(name, length, epochs, kept, **json.loads(done.stdout))


def start(
    folder: str, length: int, epochs: float, cache: str, packing: str = "concat", mask: bool = False
) -> dict:
    """Open the data, resume and read the first batch in this process."""
    nl.data.Loader, nl.data.TokenDataset  # noqa: B018  import before timing
    before, begin, cpu = peak_mib(), time.perf_counter(), time.process_time()
    dataset = nl.data.TokenDataset(
        folder, sequence_length=length, verify="size", packing=packing, cache=cache
    )
    loader = nl.data.Loader(
        dataset, BATCH, data_rank=0, data_ranks=1, masks=nl.data.Masks(documents=mask)
    )
    loader.load_state_dict(loader.state_dict() | {"next_sample": int(epochs * len(dataset))})
    (batch,) = next(loader)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    assert batch["input_ids"].shape == (BATCH, length)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "mib": peak_mib() - before}


def peak_mib() -> float:
    """Return the peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def format_result(result: StartResult) -> str:
    return (
        f"{result.length:6} {result.reader:26} from epoch {result.epochs:.1f}  "
        f"cache {result.cache:6}"
        f"{result.seconds:8.3f} s, {result.cpu_seconds:.3f} of CPU {result.mib:7.0f} MiB"
    )


def report(folder: Path, tokens: int, lengths: list[int], as_json: bool) -> None:
    """Write the shards and print the result of every start."""
    write_shards(folder, tokens)
    for found in measure(folder, lengths):
        print(json.dumps(asdict(found)) if as_json else format_result(found), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Measure one start.")
    parser.add_argument("folder")
    parser.add_argument("options", type=json.loads)
    options = parser.parse_args(argv)
    print(json.dumps(start(options.folder, **options.options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
