"""Run the benchmark on every rank: make the groups, measure, print on rank 0, write the files."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ci.benchmarks.collectives import backends, measure, record, training_step
from ci.benchmarks.collectives.backends import Contender
from ci.benchmarks.collectives.measure import Blocks, Sample
from ci.benchmarks.collectives.options import MODULE, UsageError, format_size
from ci.benchmarks.collectives.patterns import DTYPES, PATTERNS, Workload

VERSIONS = ("torch", "nearlinear-collectives")
PROCESS_BYTES = 400 * 2**20  # an interpreter with torch and a few groups, rounded up
BACKEND_COPIES = 2  # internal buffers of a backend as a multiple of the size, such as gloo's copies
PROGRESS_WIDTH = 24


def check_options(options: argparse.Namespace, ranks: int, local_ranks: int) -> None:
    """Raise UsageError for a request that cannot be carried out, before ranks meet."""
    if ranks < 2:
        raise UsageError("a collective needs at least 2 ranks: torchrun --nproc-per-node 2 ...")
    if options.plot:
        record.check_plot_file(options.plot)
    backends.import_plugins(options.plugins)
    pairs = backends.parse_backends(options.backends)
    backends.check_backends(pairs)
    labels = [label for label, _ in pairs]
    if options.against and options.against not in labels:
        raise UsageError(f"--against {options.against}: not among --backends {' '.join(labels)}")
    if options.step:
        return
    if not list(_tables(options)):
        raise UsageError(
            f"nothing to measure: none of the patterns {', '.join(options.patterns)} supports "
            f"{' or '.join(options.ops)} (all_reduce has plain and in_place only)"
        )
    if not options.force:
        check_memory(_workloads(options, ranks), local_ranks)


def estimate_memory(
    workloads: list[tuple[str, Workload]], local_ranks: int
) -> tuple[int, Workload | None]:
    """Estimate the bytes this machine needs for the largest of (pattern, workload).

    Returns:
        The estimate and the largest workload.
    """
    largest, which = 0, None
    for pattern, workload in workloads:
        size = PATTERNS[pattern].memory(workload) + BACKEND_COPIES * workload.bytes
        if size > largest:
            largest, which = size, workload
    return local_ranks * (PROCESS_BYTES + largest), which


def check_memory(workloads: list[tuple[str, Workload]], local_ranks: int) -> None:
    """Raise UsageError if the estimate exceeds the machine's free memory."""
    free = record.memory_bytes()
    needed, workload = estimate_memory(workloads, local_ranks)
    if not free or needed <= free or workload is None:
        return
    rest = free / local_ranks - PROCESS_BYTES
    fits = max(0, int(workload.bytes * rest / (needed / local_ranks - PROCESS_BYTES)))
    limit = format_size(2 ** (fits.bit_length() - 1)) if fits else ""
    advice = f"sizes up to {limit} fit" if fits else "use fewer ranks"
    raise UsageError(
        f"{local_ranks} ranks with {workload.operation} of {format_size(workload.bytes)} need "
        f"about {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free: {advice} "
        "(--sizes), or --force to try"
    )


class Progress:
    """A progress bar on stderr if it is a terminal; otherwise only the lines of the tables."""

    def __init__(self, steps: int, shown: bool) -> None:
        self.steps, self.done = steps, 0
        self.bar = shown and sys.stderr.isatty()
        self.shown = shown
        self.start = time.monotonic()

    def step(self, description: str) -> None:
        """Show the next step; call before each step."""
        if self.bar:
            full = PROGRESS_WIDTH * self.done // self.steps
            elapsed = time.monotonic() - self.start
            text = f"[{'#' * full}{'.' * (PROGRESS_WIDTH - full)}] {self.done}/{self.steps}"
            line = f"\r\x1b[K{text} {elapsed:.0f} s  {description}"
            print(line, end="", file=sys.stderr, flush=True)
        self.done += 1

    def line(self, text: str = "") -> None:
        """Print a line to stdout without tearing the bar."""
        if self.bar:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        if self.shown:
            print(text, flush=True)


def run(options: argparse.Namespace, arguments: list[str], local_ranks: int) -> int:
    """Run the benchmark after the ranks have met, and return the exit status.

    Args:
        options: Options of `options.parse`.
        arguments: Command line to store in the record.
        local_ranks: Ranks on this machine.
    """
    background, own_seconds = record.BackgroundLoad(), time.process_time()
    if options.step:
        torch.set_num_threads(1)
    pairs = backends.parse_backends(options.backends)
    contenders = backends.make_contenders(pairs)
    against = options.against or pairs[-1][0]
    blocks = Blocks(options.blocks, options.block_ms / 1000)
    results = record.header(MODULE, arguments, *VERSIONS)
    results["settings"] = {
        "ranks": dist.get_world_size(),
        "threads_per_rank": torch.get_num_threads(),
        "blocks": blocks.number,
        "passes": options.passes,
        "block_ms": options.block_ms,
    }
    measure_all = _measure_steps if options.step else _measure_collectives
    entries, status = measure_all(options, contenders, against, blocks, results)
    cpu_seconds = torch.tensor(time.process_time() - own_seconds)
    dist.all_reduce(cpu_seconds)
    on_this_machine = cpu_seconds.item() / dist.get_world_size() * local_ranks
    results["cores_used_by_others"] = background.cores(on_this_machine)
    if dist.get_rank() == 0:
        print(record.background_line(results["cores_used_by_others"]), flush=True)
        if options.json:
            record.write(options.json, results)
        if options.csv:
            measure.write_csv(options.csv, entries)
        if options.plot:
            facts = results["machine"]
            title = f"{dist.get_world_size()} ranks, {facts['cpu']}, {facts['cores']} cores"
            record.plot_bus_bandwidth(entries, options.plot, title)
    return status


def _measure_collectives(
    options: argparse.Namespace,
    contenders: list[Contender],
    against: str,
    blocks: Blocks,
    results: dict,
) -> tuple[list[dict], int]:
    """Measure all tables and add them to ``results``; return (entries, exit status)."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    progress = Progress(len(_workloads(options, ranks)) * options.passes, shown=rank == 0)
    progress.line(record.machine_line(results))
    earlier: dict[tuple, list[Sample]] = {}
    for number in range(options.passes - 1):
        for table_and_size in _tables_and_sizes(options):
            progress.step(f"pass {number + 1}: {' '.join(map(str, table_and_size))} B")
            samples = _measure(options, contenders, blocks, *table_and_size)
            earlier[table_and_size] = _combine(earlier.get(table_and_size), samples)
    rows: list[list[Sample]] = []
    for pattern, operation, dtype in _tables(options):
        table = measure.Table([c.label for c in contenders], against)
        number = blocks.number * options.passes
        title = (f"{operation}, {pattern}, {dtype}, {ranks} ranks; {number} blocks of at "
                 f"least {options.block_ms:g} ms per backend, in turn")  # fmt: skip
        for line in table.head(title):
            progress.line(line)
        for size in options.sizes:
            key = (pattern, operation, dtype, size)
            progress.step(f"{operation} {pattern} {dtype} {size} B")
            rows.append(_combine(earlier.get(key), _measure(options, contenders, blocks, *key)))
            progress.line(table.row(rows[-1]))
        progress.line()
    results["ratios"] = measure.summary(rows, against)
    for entry in results["ratios"]:
        progress.line(measure.summary_line(entry))
    wrong = sum(sample.wrong for samples in rows for sample in samples)
    progress.line(f"# {wrong} wrong elements in all")
    samples = [sample for row in rows for sample in row]
    entries = [measure.entry(sample) for sample in samples]
    results["results"] = [
        {**entry, "blocks_us": [round(t * 1e6, 3) for t in sample.seconds]}
        for entry, sample in zip(entries, samples, strict=True)
    ]
    return entries, 1 if wrong else 0


def _measure(
    options: argparse.Namespace,
    contenders: list[Contender],
    blocks: Blocks,
    pattern: str,
    operation: str,
    dtype: str,
    size: int,
) -> list[Sample]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    workload = Workload.from_size(operation, size, DTYPES[dtype], options.reduce, rank, ranks)
    try:
        return measure.measure(pattern, PATTERNS[pattern](workload), contenders, blocks)
    except Exception as error:
        error.add_note(f"while measuring {operation}, {pattern}, {dtype}, {size} B")
        raise


def _combine(earlier: list[Sample] | None, samples: list[Sample]) -> list[Sample]:
    """Merge the blocks of two passes into one sample per contender."""
    if earlier is None:
        return samples
    return [
        dataclasses.replace(new, seconds=old.seconds + new.seconds, wrong=old.wrong + new.wrong)
        for old, new in zip(earlier, samples, strict=True)
    ]


def _measure_steps(
    options: argparse.Namespace,
    contenders: list[Contender],
    against: str,
    blocks: Blocks,
    results: dict,
) -> tuple[list[dict], int]:
    """Measure training steps and add them to ``results``; return (entries, exit status)."""
    progress = Progress(len(options.step), shown=dist.get_rank() == 0)
    progress.line(record.machine_line(results))
    results["results"], status = [], 0
    for model_size in (training_step.MODEL_SIZES[name] for name in options.step):
        progress.step(f"FSDP2 steps of {model_size.name} parameters")
        runs = training_step.make_runs(model_size, contenders)
        training_step.measure_steps(runs, blocks)
        for line in training_step.table_lines(runs, against):
            progress.line(line)
        difference = training_step.loss_disagreement(runs)
        agree = difference <= training_step.TOLERANCE
        progress.line(f"# losses {'agree' if agree else 'DIFFER'} (largest relative difference "
                      f"{difference:.1e})\n")  # fmt: skip
        status = status if agree else 1
        results["results"] += [training_step.step_entry(run) for run in runs]
    entries = [{k: v for k, v in e.items() if k != "blocks_ms"} for e in results["results"]]
    return entries, status


def _tables(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield (pattern, operation, dtype) of each table; skip unsupported operations."""
    for pattern in options.patterns:
        for operation in options.ops:
            if operation in PATTERNS[pattern].operations:
                for dtype in options.dtypes:
                    yield pattern, operation, dtype


def _tables_and_sizes(options: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """Yield (pattern, operation, dtype, size) of every measurement, in order."""
    for table in _tables(options):
        for size in options.sizes:
            yield *table, size


def _workloads(options: argparse.Namespace, ranks: int) -> list[tuple[str, Workload]]:
    return [
        (pattern, Workload.from_size(operation, size, DTYPES[dtype], options.reduce, 0, ranks))
        for pattern, operation, dtype, size in _tables_and_sizes(options)
    ]
