"""The command line: rounds of every reader in turn, medians, ratios to the first one's."""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from . import readers, start

WARM_UP = 0.3  # seconds that are not timed


@dataclass(frozen=True)
class Measured:
    """Of one reader at one length."""

    length: int
    reader: str
    tokens_per_s: float
    """of CPU time, median of the rounds"""
    ratio: float
    """to the first reader's"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.benchmarks.reader")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batch", type=int, default=8, help="sequences (default: %(default)s)")
    parser.add_argument("--start", action="store_true", help="time the first batch alone")
    parser.add_argument(
        "--tokens", type=int, help="(default: 40,000,000; of --start 10,000,000,000, sparse)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a round")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per reader")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="reader-") as name:
        folder = Path(name)
        if options.start:
            start.report(folder, options.tokens or 10**10, options.lengths, options.json)
            return 0
        readers.write(folder, options.tokens or 40_000_000, options.lengths)
        for length in options.lengths:
            for found in measure(folder, length, options):
                print(json.dumps(asdict(found)) if options.json else line(found), flush=True)
    return 0


def measure(folder: Path, length: int, options) -> list[Measured]:
    """Every reader at one length."""
    made = {name: make(folder, length, options.batch) for name, make in readers.READERS.items()}
    for name, batches in made.items():
        few = list(itertools.islice(batches, 20))
        readers.check(folder, length, few, packed="best fit" in name)
        rate(batches, WARM_UP)
    rates: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.rounds):
        for name, batches in made.items():
            rates[name].append(rate(batches, options.seconds))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    first = next(iter(medians.values()))
    return [Measured(length, name, each, each / first) for name, each in medians.items()]


def rate(batches: Iterator[dict], seconds: float) -> float:
    """Tokens in a second of CPU time."""
    tokens, begin = 0, time.process_time()
    while (taken := time.process_time() - begin) < seconds:
        tokens += next(batches)["input_ids"].numel()
    return tokens / taken


def line(of: Measured) -> str:
    return f"{of.length:6} {of.reader:30} {of.tokens_per_s / 1e6:8.1f} Mtok/s  {of.ratio:6.2f} x"


if __name__ == "__main__":
    raise SystemExit(main())
