"""From finished splits to a dataset: what is kept is laid out and numbered, and told.

Nothing of the splits is changed: it can be stopped anywhere and done again. A split of which not
every document stays where it is gets written anew from its own shards, without its text. What the
splits hold out is little in each, and is written together: shards of the usual size.
"""

import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from data_prep import documents, places
from data_prep.documents import DROPPED, LOG, TRAIN
from data_prep.filters import BANDS
from data_prep.job import Job, read_json, write_json
from data_prep.places import Place
from data_prep.records import LOG_FILE, NEAR_FILE, RECORD_FILE, shards_of, split_folder
from data_prep.settle import Settled, needed, settle
from data_prep.statistics import Statistics
from data_prep.work import STAGES, Output, made
from nearlinear import __version__
from nearlinear.data.format import (
    MANIFEST_FILE,
    SPLITS,
    TOKENIZER_FILE,
    Manifest,
    Shard,
    ShardWriter,
    dtype_for,
    read_index,
)

HISTORY_FILE = "preparation.json"
_TOKENS_AT_ONCE = 1024 * 1024


def merge(job: Job, folder: Place, records: list[dict], dataset: Place) -> Manifest:
    """Write the dataset of finished `records`, in order, to `dataset`; what was there is removed.

    Raises `Unfit` when there is no document, or none for training, and `DataError` when splits are
    not done that the job needs.
    """
    records = needed(job, records)
    with places.room(folder) as work:
        for stale in ("settled", "merged"):
            shutil.rmtree(work / stale, ignore_errors=True)
        merging = _Merging(job, _Splits(folder, work), records)
        (dataset / MANIFEST_FILE).remove()  # first: without it, the rest is no dataset
        dataset.clear()
        for side in SPLITS:
            (dataset / side).make()
        pairs = ((source, dataset / name) for source, name in merging.files())
        for _ in places.in_turn(dataset, lambda pair: places.lay(*pair), pairs):
            pass
        manifest = merging.manifest()
    job.words.write(dataset)
    seconds = {stage: sum(record["seconds"][stage] for record in records) for stage in STAGES}
    write_json(dataset / HISTORY_FILE, {"cpu_seconds": seconds, "inputs": job.inputs})
    for side in SPLITS:
        (dataset / side).settle()
    manifest.write(dataset)
    return manifest


def history(folder: str | Path | Place) -> dict:
    """How a dataset was made, as far as that is known: CPU seconds by stage, inputs."""
    return read_json(places.at(folder) / HISTORY_FILE) or {}


@dataclass(frozen=True)
class _Splits:
    """The finished splits in `folder`, and `work`, where this machine has room."""

    folder: Place
    work: Path

    def log(self, number: int) -> np.ndarray:
        """Its documents: `LOG` [documents]."""
        return np.fromfile(self.file(number, LOG_FILE), LOG)

    def signatures(self, number: int) -> np.ndarray:
        """Those of its documents: uint64 [documents, 14]."""
        return np.fromfile(self.file(number, NEAR_FILE), np.uint64).reshape(-1, BANDS)

    def file(self, number: int, name: str) -> Path:
        """A file of a split, on this machine."""
        place = split_folder(self.folder, number) / name
        if place.path:
            return place.path
        path = self._fetched(number) / name
        if not path.exists():
            places.fetch(place, path)
        return path

    def local(self, number: int, shards: tuple[Shard, ...]) -> Path:
        """The folder of this machine where the split has these shards."""
        for shard in shards:
            for name in (shard.file, shard.idx_file):
                self.file(number, name)
        place = split_folder(self.folder, number)
        return place.path or self._fetched(number)

    def leave(self, number: int) -> None:
        """Of this split nothing more is needed."""
        shutil.rmtree(self._fetched(number), ignore_errors=True)

    def _fetched(self, number: int) -> Path:
        return self.work / "fetched" / f"{number:05d}"


@dataclass
class _Merging:
    """The files of a dataset, as they come, and then its manifest."""

    job: Job
    splits: _Splits
    records: list[dict]
    settled: Settled = field(init=False)

    def __post_init__(self):
        near = self.splits.signatures if self.job.settings.get("near_duplicates") else None
        self.settled = settle(self.job, self.records, self.splits.log, self.splits.work, near)
        self.statistics = Statistics()
        self.shards = {side: [] for side in SPLITS}
        self.by_input = np.zeros((len(self.job.inputs), 2), np.int64)
        """documents and tokens of each input, int64 [inputs, 2]"""

    def files(self) -> Iterator[tuple[Place, str]]:
        """Where each file of the dataset's shards is, and its name there."""
        merged = self.splits.work / "merged"
        held_out = ShardWriter(
            merged,
            "val",
            vocab_size=self.job.words.vocab_size,
            eos_id=self.job.words.eos_id,
            shard_tokens=self.job.settings["shard_tokens"],
        )
        for number, record in enumerate(self.records):
            place, record, lengths = self._settled_split(number, record)
            train, val = (shards_of(record)[side] for side in SPLITS)
            for shard in train:
                numbered = replace(shard, file=f"train/shard-{len(self.shards['train']):05d}.bin")
                self.shards["train"].append(numbered)
                self.statistics.add_shard("train", lengths[: shard.documents])
                lengths = lengths[shard.documents :]
                yield place / shard.file, numbered.file
                yield place / shard.idx_file, numbered.idx_file
            _append(held_out, place.path or self.splits.local(number, val), val)
            self.splits.leave(number)
        for shard in held_out.close():
            self.shards["val"].append(shard)
            self.statistics.add_shard("val", read_index(merged, shard, held_out.dtype))
            for name in (shard.file, shard.idx_file):
                yield places.at(merged / name), name

    def manifest(self) -> Manifest:
        """What is in it, when all `files` have been asked for."""
        return _manifest(
            self.job, self.records, self.shards, self.statistics.finish(), self.by_input.tolist()
        )

    def _settled_split(self, number: int, record: dict) -> tuple[Place, dict, np.ndarray]:
        """A split with every document where it belongs, which is counted: its place, its record,
        and the lengths of what is for training, int64 [documents].
        """
        job, entries = self.job, self.splits.log(number)
        where = self.settled.of(number, entries)
        kept = where != DROPPED
        self.statistics.add(entries[kept])
        self.statistics.add_dropped(
            record["dropped"],
            duplicates=entries[self.settled.repeated(number, entries)],
            near_duplicates=entries[self.settled.resembling(number, entries)],
        )
        if len(self.by_input):
            inputs = np.searchsorted(record.get("ends", []), np.flatnonzero(kept), side="right")
            inputs += job.splits[number].input
            np.add.at(self.by_input, inputs, [1, 0])
            np.add.at(self.by_input[:, 1], inputs, entries["tokens"][kept])
        lengths = entries["tokens"][where == TRAIN].astype(np.int64)
        before = documents.places(entries, job.seed, job.threshold)
        if np.array_equal(where, before):
            return split_folder(self.splits.folder, number), record, lengths
        return *self._written_anew(number, record, entries, before, where), lengths

    def _written_anew(
        self, number: int, record: dict, entries: np.ndarray, before: np.ndarray, where: np.ndarray
    ) -> tuple[Place, dict]:
        """The split with its documents moved from where they were `before` to `where`."""
        place = places.at(self.splits.work / "settled" / f"{number:05d}")
        streams = [_documents(self.job, self.splits.local(number, shards), shards)
                   for shards in shards_of(record).values()]  # fmt: skip
        with made(place) as work:
            out = Output(work, self.job)
            for start in range(0, len(entries), 1024):
                piece = slice(start, start + 1024)
                tokens = [next(streams[side]) for side in before[piece]]
                out.add(entries[piece], np.concatenate(tokens), where[piece])
            again = {**record, **out.close()}
            write_json(work / RECORD_FILE, again)
        return place, again


def _append(writer: ShardWriter, place: Path, shards: tuple[Shard, ...]) -> None:
    """Write the documents of shards in `place` on, a few MiB at a time."""
    for shard in shards:
        tokens = np.memmap(place / shard.file, dtype=writer.dtype, mode="r")
        lengths = read_index(place, shard, writer.dtype)
        ends = np.cumsum(lengths, dtype=np.int64)
        first = start = 0
        while first < len(ends):
            after = int(np.searchsorted(ends, start + _TOKENS_AT_ONCE, side="right"))
            after = max(after, first + 1)
            writer.extend(tokens[start : ends[after - 1]], lengths[first:after])
            first, start = after, int(ends[after - 1])


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
