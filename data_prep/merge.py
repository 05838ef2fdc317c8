"""From finished splits to a dataset: limits, duplicates and validation settled, shards numbered.

All of it follows from the logs of the splits alone, and nothing of the splits is changed: it can
be stopped anywhere and done again. A split of which not every document stays where it is gets
written anew from its own shards, without its text.
"""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path

import numpy as np

from data_prep import documents, duplicates
from data_prep.documents import DROPPED, LOG, TRAIN, VAL
from data_prep.job import Job, read_json, write_json
from data_prep.statistics import Statistics
from data_prep.work import (
    LOG_FILE,
    RECORD_FILE,
    STAGES,
    Output,
    made,
    shards_of,
    split_folder,
    sync_folder,
)
from nearlinear import __version__
from nearlinear.data.format import SPLITS, TOKENIZER_FILE, Manifest, Shard, dtype_for, read_index
from nearlinear.errors import DataError

HISTORY_FILE = "preparation.json"


@dataclass(frozen=True)
class _Settled:
    """Where the documents of all splits belong."""

    job: Job
    firsts: list[int]
    """the number of each split's first document"""
    cut: int
    """documents that are read, over all splits"""
    again: np.ndarray
    """whose text came before: bool [documents]"""
    threshold: int
    """documents whose split hash is below it are held out"""

    def of(self, number: int, entries: np.ndarray) -> np.ndarray:
        """The places of the documents of one split: uint8 [documents]."""
        first = self.firsts[number]
        places = documents.places(entries, self.job.seed, self.threshold)
        places[max(self.cut - first, 0) :] = DROPPED
        if self.job.settings["dedup"] == "exact":
            places[self.repeated(number, entries)] = DROPPED
        return places

    def repeated(self, number: int, entries: np.ndarray) -> np.ndarray:
        """Which documents of one split are read and came before: bool [documents]."""
        first = self.firsts[number]
        again = np.array(self.again[first : first + len(entries)])
        again[max(self.cut - first, 0) :] = False
        return again


def merge(job: Job, folder: Path, records: list[dict]) -> Manifest:
    """Lay out the dataset of finished `records`, in order, in `folder`/dataset.

    Raises `DataError` when there is no document, or none for training.
    """
    records = _needed(job, records)
    out = folder / "dataset"
    shutil.rmtree(out, ignore_errors=True)
    for side in SPLITS:
        (out / side).mkdir(parents=True)
    settled = _settle(job, folder, records)
    statistics, shards = Statistics(), {side: [] for side in SPLITS}
    by_input = [[0, 0] for _ in job.inputs]
    for number, record in enumerate(records):
        entries = _log(folder, number)
        places = settled.of(number, entries)
        kept = places != DROPPED
        statistics.add(entries[kept])
        statistics.add_duplicates(entries[settled.repeated(number, entries)])
        if by_input:
            by_input[job.splits[number].input][0] += int(kept.sum())
            by_input[job.splits[number].input][1] += int(entries["tokens"][kept].sum())
        place = split_folder(folder, number)
        if not np.array_equal(places, documents.places(entries, job.seed, job.threshold)):
            place, record = _written_anew(job, folder, number, record, entries, places)
        for side, found in shards_of(record).items():
            for shard in found:
                name = f"{side}/shard-{len(shards[side]):05d}.bin"
                numbered = replace(shard, file=name)
                _link(place / shard.file, out / name)
                _link(place / shard.idx_file, out / numbered.idx_file)
                shards[side].append(numbered)
    manifest = _manifest(job, records, shards, statistics.finish(), by_input)
    job.words.write(out / TOKENIZER_FILE)
    for side in SPLITS:
        sync_folder(out / side)
    manifest.write(out)
    seconds = {stage: sum(record["seconds"][stage] for record in records) for stage in STAGES}
    write_json(out / HISTORY_FILE, {"cpu_seconds": seconds, "inputs": job.inputs})
    sync_folder(out)
    return manifest


def reached(job: Job, records: list[dict]) -> bool:
    """Whether the splits so far, the first ones in order, are all that the limits let be read."""
    return any(
        limit is not None and sum(record[name] for record in records) >= limit
        for name, limit in _limits(job)
    )


def _needed(job: Job, records: list[dict]) -> list[dict]:
    """The first records, up to the one that reaches a limit: others may be done as well."""
    for count in range(1, len(records) if limited(job) else 0):
        if reached(job, records[:count]):
            return records[:count]
    return records


def limited(job: Job) -> bool:
    """Whether not all of the input is to be read."""
    return any(limit is not None for _, limit in _limits(job))


def _limits(job: Job) -> tuple[tuple[str, int | None], ...]:
    settings = job.settings
    return ("documents", settings["max_documents"]), ("tokens", settings["max_tokens"])


def _settle(job: Job, folder: Path, records: list[dict]) -> _Settled:
    count = sum(record["documents"] for record in records)
    cut = _cut(job, folder, records)
    if not cut:
        raise DataError(
            f"the source {job.source.name} gave no document with text in it: check the path, and "
            "--text-field for JSON lines"
        )
    logs = (_log(folder, number) for number in range(len(records)))
    again = duplicates.find(logs, count, folder)
    firsts = [0, *accumulate(record["documents"] for record in records)]
    settled = _Settled(job, firsts, cut, again, job.threshold)
    held_out = training = 0
    lowest, highest = 2**64, -1
    for number in range(len(records)):
        entries = _log(folder, number)
        places = settled.of(number, entries)
        held_out += int((places == VAL).sum())
        training += int((places == TRAIN).sum())
        if (kept := places != DROPPED).any():
            hashes = documents.split_hash(entries[kept], job.seed)
            lowest, highest = min(lowest, int(hashes.min())), max(highest, int(hashes.max()))
    if job.threshold and not held_out and lowest < highest:
        return replace(settled, threshold=lowest + 1)
    if not training:
        raise DataError(
            f"all documents fell into val at --val-fraction {job.settings['val_fraction']}: lower "
            "it, or give more text"
        )
    return settled


def _cut(job: Job, folder: Path, records: list[dict]) -> int:
    """How many documents the limits let be read, in the order of the splits."""
    most, limit = (limit for _, limit in _limits(job))
    count = sum(record["documents"] for record in records)
    count = count if most is None else min(count, most)
    first = tokens = 0
    for number, record in enumerate(records):
        if limit is not None and tokens + record["tokens"] >= limit:
            sums = tokens + np.cumsum(_log(folder, number)["tokens"], dtype=np.int64)
            return min(count, first + int(np.searchsorted(sums, limit)) + 1)
        first, tokens = first + record["documents"], tokens + record["tokens"]
    return count


def _log(folder: Path, number: int) -> np.ndarray:
    return np.fromfile(split_folder(folder, number) / LOG_FILE, LOG)


def _written_anew(
    job: Job, folder: Path, number: int, record: dict, entries: np.ndarray, places: np.ndarray
) -> tuple[Path, dict]:
    """The split with its documents at other `places`, beside the split that was made."""
    place = folder / "settled" / f"{number:05d}"
    before = documents.places(entries, job.seed, job.threshold)
    streams = [_documents(job, split_folder(folder, number), shards)
               for shards in shards_of(record).values()]  # fmt: skip
    with made(place) as work:
        out = Output(work, job)
        for start in range(0, len(entries), 1024):
            piece = slice(start, start + 1024)
            tokens = [next(streams[side]) for side in before[piece]]
            out.add(entries[piece], np.concatenate(tokens), places[piece])
        again = {**record, **out.close()}
        write_json(work / RECORD_FILE, again)
    return place, again


def _documents(job: Job, place: Path, shards: tuple[Shard, ...]) -> Iterator[np.ndarray]:
    """The documents of shards one after another, as tokens with EOS."""
    dtype = dtype_for(job.words.vocab_size)
    for shard in shards:
        tokens = np.memmap(place / shard.file, dtype=dtype, mode="r")
        start = 0
        for length in read_index(place, shard, dtype).tolist():
            yield np.asarray(tokens[start : start + length])
            start += length


def _manifest(
    job: Job, records: list[dict], shards: dict, statistics: dict, by_input: list
) -> Manifest:
    words, source = job.words, job.source
    inputs = [{"path": file.path, "bytes": file.bytes, "documents": counts[0],
               "tokens": counts[1]}
              for file, counts in zip(job.inputs, by_input, strict=True)]  # fmt: skip
    splits = [[*job.splits[number][:3], record["documents"], record["text"]]
              for number, record in enumerate(records)]  # fmt: skip
    return Manifest(
        vocab_size=words.vocab_size,
        eos_id=words.eos_id,
        tokenizer={"name": words.name, "file": TOKENIZER_FILE, "sha256": words.sha256},
        splits={side: tuple(found) for side, found in shards.items()},
        settings=job.settings,
        source={"name": source.name, "description": source.description,
                "text_bytes": statistics["text_bytes"], **source.provenance},
        libraries={"nearlinear": __version__, "numpy": np.__version__,
                   "tokenizers": version("tokenizers"), "python": platform.python_version(),
                   "encoders": sorted({record["backend"] for record in records})},
        plan={"inputs": inputs, "splits": splits},
        statistics=statistics,
    )  # fmt: skip


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where a file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def history(folder: Path) -> dict:
    """How a dataset was made, as far as that is known: CPU seconds by stage, inputs."""
    return read_json(folder / HISTORY_FILE) or {}
