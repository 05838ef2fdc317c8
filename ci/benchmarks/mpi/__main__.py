"""Command line of the MPI benchmark.

The exit status is 0, 1 for wrong data or a failed contender, and 2 for an invalid request.
"""

import argparse
import resource
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from ci.benchmarks.collectives import record as bench_record
from ci.benchmarks.collectives.options import parse_sizes
from ci.command_line import make_parser

from . import contenders, measure, table

OPERATIONS = ["all_gather", "reduce_scatter", "all_reduce"]
EXAMPLES = """\
examples:
  python -m ci.benchmarks.mpi --json mpi.json                all contenders, about half an hour
  python -m ci.benchmarks.mpi --keep /tmp/peers --ranks 2 --ops all_reduce --sizes 64K:16M:4
  python -m ci.benchmarks.mpi --contenders engine impi       one MPI library only

Sizes are defined as in nccl-tests: the whole output of all_gather, the whole input of the other
operations. A block is a number of back-to-back calls, timed on the slowest rank. all_reduce works
in place, as in torch.distributed. Contenders: {names}."""


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # handle SIGTERM like Ctrl-C
    with ExitStack() as stack:
        try:
            sizes = parse_sizes(options.sizes)
            if any(size % (4 * ranks) for size in sizes for ranks in options.ranks):
                raise ValueError(
                    "--sizes: every size must be a multiple of 4 bytes times the number of ranks"
                )
            folder = options.keep or Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="nearlinear-mpi-"))
            )
            folder.mkdir(parents=True, exist_ok=True)
            chosen = _prepare(options.contenders, folder.resolve())
        except (ValueError, contenders.Unavailable) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        config = measure.MeasureConfig(
            options.ops,
            options.ranks,
            sizes,
            options.rounds,
            options.blocks,
            options.block_ms / 1000,
            options.limit,
        )
        found: dict[measure.Key, measure.Sample] = {}
        failures: list[str] = []
        background, before = bench_record.BackgroundLoad(), _children_seconds()
        try:
            measure.measure(chosen, config, found, failures)
        except KeyboardInterrupt:
            failures.append("the run was interrupted; results until then are above")
        others = background.cores(_children_seconds() - before)
        libraries = [name for name in options.contenders if name in contenders.LIBRARIES]
        versions = contenders.versions(folder, libraries)
        print(_head(versions))
        print(table.tables(found, chosen, config))
        print("\n" + bench_record.background_line(others).removeprefix("# "))
        if options.json:
            words = sys.argv[1:] if argv is None else argv
            record = bench_record.header("ci.benchmarks.mpi", words)
            record |= {"versions": versions, "cores_used_by_others": others}
            bench_record.write(options.json, record | _results(found, chosen, config))
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    wrong = [key for key, sample in found.items() if sample.wrong]
    for ranks, operation, size, name in wrong:
        print(f"wrong data: {name}, {operation}, {ranks} ranks, {size} B", file=sys.stderr)
    return 1 if wrong or failures else 0


def _parser() -> argparse.ArgumentParser:
    names = [*contenders.OWN, *contenders.LIBRARIES]
    parser = make_parser(
        "ci.benchmarks.mpi",
        "Measure the engine's collectives and three MPI libraries on this machine.",
        EXAMPLES.format(names=", ".join(names)),
    )
    add = parser.add_argument
    add("--contenders", nargs="+", choices=names, default=names, metavar="NAME")
    add("--ops", nargs="+", choices=OPERATIONS, default=OPERATIONS, metavar="OP")
    add("--ranks", nargs="+", type=int, default=[2, 4], metavar="N", help="default: 2 4")
    add("--sizes", nargs="+", default=["1K:256M:4"], metavar="SIZE", help="default: 1K:256M:4")
    add("--rounds", type=int, default=3, help="rounds over all contenders (default: 3)")
    add("--blocks", type=int, default=3, help="blocks per size and round (default: 3)")
    add("--block-ms", type=float, default=20, help="length of a block (default: 20, or 2 calls)")
    add("--limit", type=float, default=3, metavar="SECONDS",
        help="skip larger sizes once a call takes longer (default: 3)")  # fmt: skip
    add("--keep", type=Path, metavar="FOLDER", help="install in this folder and reuse it")
    add("--json", type=Path, metavar="FILE", help="write all numbers with the command")
    return parser


def _prepare(names: list[str], folder: Path) -> list[contenders.Contender]:
    own = [name for name in names if name in contenders.OWN]
    found = contenders.prepare_own(own, folder) if own else []
    for name in names:
        if name in contenders.LIBRARIES:
            found += contenders.prepare_library(name, folder)
    return found


def _children_seconds() -> float:
    """Return the CPU seconds of finished child processes."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _head(versions: dict[str, str]) -> str:
    facts = bench_record.machine_facts()
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, {facts['system']}"
        f"{'; ' + libraries if libraries else ''}\n"
    )


def _results(found, chosen: list[contenders.Contender], config: measure.MeasureConfig) -> dict:
    return {
        "contenders": {contender.name: contender.record() for contender in chosen},
        "results": [
            {
                "ranks": ranks,
                "operation": operation,
                "bytes": size,
                "contender": name,
                "median_us": round(sample.median * 1e6, 3),
                "min_us": round(sample.minimum * 1e6, 3),
                "calls": sample.calls,
                "wrong": sample.wrong,
                "blocks_us": [round(seconds * 1e6, 3) for seconds in sample.seconds],
            }
            for (ranks, operation, size, name), sample in found.items()
        ],
        "ratios": [
            {
                "ranks": ranks,
                "operation": operation,
                "bytes": size,
                "best_mpi_over_engine": round(both[0], 4),
                "of_minima": round(both[1], 4),
            }
            for ranks in config.ranks
            for operation in config.operations
            for size in config.sizes
            if (both := table.speed_ratio(found, chosen, ranks, operation, size))
        ],
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted before the first measurement")
