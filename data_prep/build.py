"""From a source of documents to a folder of token shards, split by split, in bounded memory.

A document goes to the side that a hash of its text chooses, so exact duplicates never straddle
training and validation, and where it goes does not depend on the others. The same source and
settings give the same bytes on every machine, with any number of workers, however often stopped.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep import lock, output, places, pool
from data_prep.backends import BACKENDS
from data_prep.compare import uncompared
from data_prep.filters import FILTERS, datatrove_version
from data_prep.job import Job
from data_prep.places import Place
from data_prep.progress import Progress
from data_prep.records import record_of
from data_prep.settle import Unfit, limited, reached
from data_prep.sources import Source
from data_prep.tokenizer import TextTokenizer, load
from nearlinear.data.format import DEFAULT_SHARD_TOKENS, Manifest
from nearlinear.errors import DataError


def prepare(
    source: Source,
    out: str | Path | None = None,
    *,
    tokenizer: str | TextTokenizer = "gpt2",
    eos_token: str | None = None,
    val_fraction: float = 0.01,
    seed: int = 0,
    dedup: str | None = None,
    filters: Sequence[str] = (),
    near_duplicates: str | None = None,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    workers: int | None = None,
    backends: Sequence[str] = BACKENDS,
    engine: str | None = None,
    tasks: int | None = None,
    engine_options: dict | None = None,
    overwrite: bool = False,
    progress: bool | str = True,
) -> Manifest | None:
    """Write `source` as token shards to `out`, a folder (default `data/<source name>`) or
    `s3://bucket/prefix`.

    `val_fraction` of the documents, chosen by a hash of (seed, text), go to split "val". When a
    small source leaves val empty, the one text with the lowest hash goes there instead (unless
    `val_fraction` is 0 or all documents are alike). `max_documents` and `max_tokens` (EOS counted)
    stop after that many; documents are kept whole. Blank documents are left out, and with `dedup`
    "exact" those whose text came before. `filters` are names of `data_prep.filters.FILTERS`, which
    are applied in turn. With `near_duplicates` "minhash" the first of texts nearly alike stays.

    `workers` processes work at a time (default: one per core, as many as there are splits);
    `backends` are the encoders to try, in turn. `progress` may be "json": a line of JSON each.
    With `engine` ("local", "slurm", "ray") the splits are `tasks` tasks of datatrove's executor
    (default: one per core) instead, which takes `engine_options`; on Slurm they are submitted, and
    the answer is None.

    An intact dataset of the same settings at `out` is checked and returned as it is; one that was
    stopped goes on. Raises `DataError` for one of other settings or one that is submitted (unless
    `overwrite`), a file that changes meanwhile, an empty source or an empty split "train". Whatever
    interrupts, `out` is complete or untouched.
    """
    out = places.at(Path("data") / source.name if out is None else out)
    if not 0 <= val_fraction < 1:
        raise DataError(f"val_fraction is {val_fraction}: give 0 or more and less than 1")
    for name, value in (("max_documents", max_documents), ("max_tokens", max_tokens),
                        ("shard_tokens", shard_tokens), ("workers", workers),
                        ("tasks", tasks)):  # fmt: skip
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}: give at least 1")
    if engine is not None and workers is not None:
        raise DataError(f"workers does nothing with the engine {engine}: give tasks instead")
    if engine is None and (tasks is not None or engine_options):
        name = "engine_options" if tasks is None else "tasks"
        raise DataError(f"{name} does nothing without an engine: name one, or leave it out")
    if dedup not in (None, "exact"):
        raise DataError(f"dedup is {dedup!r}: give 'exact', or leave it out")
    if near_duplicates not in (None, "minhash"):
        raise DataError(f"near_duplicates is {near_duplicates!r}: give 'minhash', or leave it out")
    for name in set(filters) - set(FILTERS):
        raise DataError(f"no filter {name!r}: use {', '.join(FILTERS)}")
    blocks = {}
    if filters or near_duplicates:
        blocks = {"filters": list(filters), "near_duplicates": near_duplicates,
                  "datatrove": datatrove_version()}  # fmt: skip
    words = load(tokenizer, eos_token) if isinstance(tokenizer, str) else tokenizer
    job = Job.plan(
        source,
        words,
        val_fraction=val_fraction,
        seed=seed,
        dedup=dedup,
        max_documents=max_documents,
        max_tokens=max_tokens,
        shard_tokens=shard_tokens,
        **blocks,
    )
    done = output.existing(out, job, overwrite)
    if done is not None:
        output.tidy(out, job)
        if progress:
            for line in _reuse_notes(out, done, job):
                print(line, file=sys.stderr)
        return done
    if engine is not None:
        return _on_engine(engine, job, out, overwrite, tasks or cores(), tuple(backends),
                          engine_options or {})  # fmt: skip
    with (
        output.staging(out, job, overwrite) as (folder, held),
        Progress(source.name, job, show=progress) as bar,
    ):
        return _finish(job, folder, out, bar, workers, backends, held)


def _on_engine(engine, job, out, overwrite, tasks, backends, options) -> Manifest | None:
    """The job under one of datatrove's executors."""
    if job.source.spec is None:
        raise DataError(f"other processes cannot read the source {job.source.name}: use no engine")
    try:
        from data_prep import engines
    except ModuleNotFoundError as error:
        raise DataError(
            f"--engine needs datatrove ({error}): run `pip install 'packages/core[datatrove]'`"
        ) from None
    tasks = min(tasks, len(job.splits))
    if engine == "slurm":
        with output.submitting(out, job, overwrite) as folder:
            engines.launch(engine, folder, out, tasks, backends, **options)
        return None
    with output.staging(out, job, overwrite) as (folder, _):
        engines.launch(engine, folder, out, tasks, backends, **options)
    return Manifest.read(out)


def _finish(
    job: Job,
    folder: Place,
    out: Place,
    bar: Progress,
    workers: int | None,
    backends: Sequence[str],
    held: lock.Lock | None,
) -> Manifest:
    """Do the splits of `job` that are not done in `folder`, merge them, and publish at `out`."""
    pending = _Pending(job, folder, bar)
    workers = min(workers or cores(), max(len(job.splits) - pending.found, 1))
    pool.run(job, folder, iter(pending), workers, backends, bar, held and held.descriptor)
    try:
        return output.finish(job, folder, pending.records(), out)
    except Unfit:  # nothing that could go on
        lock.remove(folder)
        raise


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class _Pending:
    """The splits that are to be done, in order, until a limit is reached."""

    def __init__(self, job: Job, folder: Place, bar: Progress):
        self._job, self._folder = job, folder
        self._records = {}
        numbers = range(len(job.splits))
        found = places.in_turn(folder, lambda number: record_of(folder, job, number), numbers)
        for number, record in zip(numbers, found, strict=True):
            if record:
                self._records[number] = record
                bar.finish_split(number, record)
        self.found = len(self._records)
        if self.found:
            bar.note(f"{self.found} of {len(job.splits)} splits are done: going on")
            if line := uncompared(job):
                bar.note(line)

    def __iter__(self) -> Iterator[int]:
        for number in range(len(self._job.splits)):
            if limited(self._job) and reached(self._job, self.records()):
                return
            if number not in self._records:
                yield number

    def records(self) -> list[dict]:
        """Those of the first splits, up to one that is not done."""
        records = []
        for number in range(len(self._job.splits)):
            if number not in self._records:
                record = record_of(self._folder, self._job, number, check=False)
                if record is None:
                    break
                self._records[number] = record
            records.append(self._records[number])
        return records


def _reuse_notes(out: Place, manifest: Manifest, job: Job) -> Iterator[str]:
    yield f"{out} is already prepared with these settings and intact: nothing to do"
    if line := uncompared(job):
        yield line
    for key, value in job.source.provenance.items():
        if manifest.source.get(key) != value:
            yield (
                f"note: it was made with {key} {manifest.source.get(key)} and {value} is installed "
                "now; --overwrite prepares it anew"
            )
