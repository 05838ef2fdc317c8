"""One run in every rank: make the groups, measure job by job, print on rank 0, write the files."""

import dataclasses
import time

import torch
import torch.distributed as dist

from . import backends, machine, memory, record, step, table
from .data import DTYPES
from .errors import UsageError
from .measure import Blocks, Sample, measure
from .patterns import PATTERNS, Job
from .progress import Progress

VERSIONS = ("torch", "nearlinear-collectives")


def check(options, ranks: int, local_ranks: int) -> None:
    """UsageError for what can be known before ranks meet."""
    if ranks < 2:
        raise UsageError("a collective needs at least 2 ranks: torchrun --nproc-per-node 2 ...")
    backends.import_plugins(options.plugins)
    pairs = backends.parse(options.backends)
    backends.check_known(pairs)
    labels = [label for label, _ in pairs]
    if options.against and options.against not in labels:
        raise UsageError(f"--against {options.against}: not among --backends {' '.join(labels)}")
    if options.step:
        return
    if not list(_groups(options)):
        raise UsageError(
            f"nothing to measure: no pattern of {', '.join(options.patterns)} has "
            f"{' or '.join(options.ops)} (all_reduce has plain and in_place only)"
        )
    if not options.force:
        memory.check(_jobs(options, ranks), local_ranks)


def run(options, arguments: list[str], local_ranks: int) -> int:
    """Everything after the ranks met; the exit status."""
    background, own_seconds = machine.Background(), time.process_time()
    if options.step:
        torch.set_num_threads(1)
    pairs = backends.parse(options.backends)
    contenders = backends.make(pairs)
    against = options.against or pairs[-1][0]
    blocks = Blocks(options.blocks, options.block_ms / 1000)
    kept = record.header("nearlinear_collectives.bench", arguments, *VERSIONS)
    kept["settings"] = {
        "ranks": dist.get_world_size(),
        "threads_per_rank": torch.get_num_threads(),
        "blocks": blocks.number,
        "passes": options.passes,
        "block_ms": options.block_ms,
    }
    if options.step:
        entries, status = _steps(options, contenders, against, blocks, kept)
    else:
        entries, status = _collectives(options, contenders, against, blocks, kept)
    spent = torch.tensor(time.process_time() - own_seconds)
    dist.all_reduce(spent)
    here = spent.item() / dist.get_world_size() * local_ranks
    kept["cores_used_by_others"] = background.cores(here)
    if dist.get_rank() == 0:
        print(machine.background_line(kept["cores_used_by_others"]), flush=True)
        if options.json:
            record.write(options.json, kept)
        if options.csv:
            table.write_csv(options.csv, entries)
        if options.plot:
            from . import plot

            facts = kept["machine"]
            title = f"{dist.get_world_size()} ranks, {facts['cpu']}, {facts['cores']} cores"
            plot.draw(entries, options.plot, title)
    return status


def _collectives(options, contenders, against: str, blocks: Blocks, kept: dict):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    progress = Progress(len(_jobs(options, ranks)) * options.passes, shown=rank == 0)
    progress.line(_machine_line(kept))
    earlier: dict[tuple, list[Sample]] = {}
    for number in range(options.passes - 1):
        for table_and_size in _tables_and_sizes(options):
            progress.step(f"pass {number + 1}: {' '.join(map(str, table_and_size))} B")
            samples = _measure(options, contenders, blocks, *table_and_size)
            earlier[table_and_size] = _joined(earlier.get(table_and_size), samples)
    rows: list[list[Sample]] = []
    for pattern, operation, dtype in _groups(options):
        printer = table.Table([c.label for c in contenders], against)
        number = blocks.number * options.passes
        title = (f"{operation}, {pattern}, {dtype}, {ranks} ranks; {number} blocks of at "
                 f"least {options.block_ms:g} ms per backend, in turn")  # fmt: skip
        for line in printer.head(title):
            progress.line(line)
        for size in options.sizes:
            key = (pattern, operation, dtype, size)
            progress.step(f"{operation} {pattern} {dtype} {size} B")
            rows.append(_joined(earlier.get(key), _measure(options, contenders, blocks, *key)))
            progress.line(printer.row(rows[-1]))
        progress.line()
    kept["ratios"] = table.summary(rows, against)
    for entry in kept["ratios"]:
        progress.line(table.summary_line(entry))
    wrong = sum(sample.wrong for samples in rows for sample in samples)
    progress.line(f"# {wrong} wrong elements in all")
    samples = [sample for row in rows for sample in row]
    entries = [table.entry(sample) for sample in samples]
    kept["results"] = [
        {**entry, "blocks_us": [round(t * 1e6, 3) for t in sample.seconds]}
        for entry, sample in zip(entries, samples, strict=True)
    ]
    return entries, 1 if wrong else 0


def _measure(
    options, contenders, blocks: Blocks, pattern: str, operation: str, dtype: str, size: int
) -> list[Sample]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    job = Job.of_size(operation, size, DTYPES[dtype], options.reduce, rank, ranks)
    try:
        return measure(pattern, PATTERNS[pattern](job), contenders, blocks)
    except Exception as error:
        error.add_note(f"while measuring {operation}, {pattern}, {dtype}, {size} B")
        raise


def _joined(earlier: list[Sample] | None, samples: list[Sample]) -> list[Sample]:
    """One sample per contender, of the blocks of both."""
    if earlier is None:
        return samples
    return [
        dataclasses.replace(new, seconds=old.seconds + new.seconds, wrong=old.wrong + new.wrong)
        for old, new in zip(earlier, samples, strict=True)
    ]


def _steps(options, contenders, against: str, blocks: Blocks, kept: dict):
    progress = Progress(len(options.step), shown=dist.get_rank() == 0)
    progress.line(_machine_line(kept))
    kept["results"], status = [], 0
    for shape in (step.SHAPES[name] for name in options.step):
        progress.step(f"FSDP2 steps of {shape.name} parameters")
        runs = step.runs_of(shape, contenders)
        step.measure(runs, blocks)
        for line in step.lines(runs, against):
            progress.line(line)
        difference = step.disagreement(runs)
        agree = difference <= step.TOLERANCE
        progress.line(f"# losses {'agree' if agree else 'DIFFER'} (largest relative difference "
                      f"{difference:.1e})\n")  # fmt: skip
        status = status if agree else 1
        kept["results"] += [step.entry(run) for run in runs]
    return [{k: v for k, v in e.items() if k != "blocks_ms"} for e in kept["results"]], status


def _groups(options):
    """(pattern, operation, dtype) of each table; what a pattern has no like of is left out."""
    for pattern in options.patterns:
        for operation in options.ops:
            if operation in PATTERNS[pattern].operations:
                for dtype in options.dtypes:
                    yield pattern, operation, dtype


def _tables_and_sizes(options):
    """(pattern, operation, dtype, size) of everything that is measured, in order."""
    for group in _groups(options):
        for size in options.sizes:
            yield *group, size


def _jobs(options, ranks: int) -> list[tuple[str, Job]]:
    return [
        (pattern, Job.of_size(operation, size, DTYPES[dtype], options.reduce, 0, ranks))
        for pattern, operation, dtype, size in _tables_and_sizes(options)
    ]


def _machine_line(kept: dict) -> str:
    facts = kept["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    return (
        f"# {facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, "
        f"{facts['system']}; {versions}"
    )
