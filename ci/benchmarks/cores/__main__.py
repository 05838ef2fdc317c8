"""The command line: compile distance.c, run it for a while, print what it found."""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("distance.c")
TIMES = 20  # measurements in each sample
NEAR = 130  # nanoseconds: between what is usual within a core complex and between two


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.benchmarks.cores",
        description="Print how long a cache line takes between two cores, once a period.",
    )
    parser.add_argument("--cores", nargs=2, type=int, default=(0, 1), metavar="CORE")
    parser.add_argument("--samples", type=int, default=10, metavar="N", help="(default: 10)")
    parser.add_argument("--period", type=float, default=0.5, metavar="S", help="(default: 0.5)")
    options = parser.parse_args(argv)
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang"))), None)
    if compiler is None:
        print("no C compiler: install gcc or clang", file=sys.stderr)
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
    """Nanoseconds one way, the median of some measurements."""
    command = [str(program), *map(str, cores), str(TIMES)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return statistics.median(float(line) for line in done.stdout.split())


if __name__ == "__main__":
    sys.exit(main())
