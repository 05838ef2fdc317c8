"""Measure the latency between two cores: ``python -m ci.benchmarks.cores``.

The host of a virtual machine may move its cores. Within one core complex a cache line moves in
about 60 ns, between two complexes in about 250 ns, and ranks that share memory slow down equally.
Report this figure with every timing.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("core_distance.c")
MEASUREMENTS = 20  # per sample
NEAR = 130  # nanoseconds; separates one core complex from two


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.benchmarks.cores",
        description="Print the latency of a cache line between two cores, once per period.",
    )
    parser.add_argument("--cores", nargs=2, type=int, default=(0, 1), metavar="CORE")
    parser.add_argument("--samples", type=int, default=10, metavar="N", help="(default: 10)")
    parser.add_argument("--period", type=float, default=0.5, metavar="S", help="(default: 0.5)")
    options = parser.parse_args(argv)
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang"))), None)
    if compiler is None:
        print("error: no C compiler was found. Install gcc or clang.", file=sys.stderr)
        return 2
    found = []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "distance")
        subprocess.run([compiler, "-O2", "-pthread", str(SOURCE), "-o", str(program)], check=True)
        for number in range(options.samples):
            time.sleep(options.period if number else 0)
            found.append(sample(program, options.cores))
            print(f"{found[-1]:.0f} ns", flush=True)
    near = sum(nanoseconds < NEAR for nanoseconds in found)
    print(f"median {statistics.median(found):.0f} ns; near (< {NEAR} ns) {near} of {len(found)}")
    return 0


def sample(program: Path, cores: tuple[int, int]) -> float:
    """Return the median one-way latency in nanoseconds."""
    command = [str(program), *map(str, cores), str(MEASUREMENTS)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return statistics.median(float(line) for line in done.stdout.split())


if __name__ == "__main__":
    sys.exit(main())
