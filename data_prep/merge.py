"""Merge finished input splits into a dataset with a manifest and statistics.

Finished splits are not modified, so a merge can be stopped and repeated. Their train shards are
linked into the dataset. A split with documents that change their destination is rewritten from its
own shards, without its text. The validation documents of all splits are few, so they are rewritten
into shards of the usual size.
"""

import hashlib
import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import documents, storage_paths
from data_prep.assign_splits import Assignment, assign_documents, required_records
from data_prep.documents import DROPPED, LOG, TRAIN
from data_prep.near_dedup import BANDS
from data_prep.plan import PreparationPlan
from data_prep.process_split import STAGES, SplitWriter, replace_folder
from data_prep.provenance import DROPPED_LOG, TABLE_FILE, DocumentTable
from data_prep.resume import (
    DROPPED_FILE,
    FIELDS_FILE,
    LOG_FILE,
    RECORD_FILE,
    SIGNATURES_FILE,
    record_shards,
    split_folder,
    write_history,
)
from data_prep.storage_paths import absolute_path, write_json
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
from nearlinear.data.packing import GROUP, PACKINGS, packing_efficiency
from nearlinear.storage import StoragePath

SEQUENCE_LENGTHS = (512, 1024, 2048, 4096, 8192)
PACKING_METHODS = (*PACKINGS, "truncate")
"""Methods with statistics; "truncate" cuts documents and drops those shorter than a window."""
BIN_EDGES = np.unique(np.round(2 ** (np.arange(64) / 2)).astype(np.int64))
"""Lower edge of each bin of the length histogram, powers of sqrt(2): int64 [bins]."""

_TOKENS_PER_WRITE = 1024 * 1024
_DOCUMENTS_PER_WRITE = 1024


def merge(
    plan: PreparationPlan,
    folder: StoragePath,
    records: list[dict[str, Any]],
    dataset: StoragePath,
) -> Manifest:
    """Write the dataset of finished splits to `dataset`, replacing its content.

    Args:
        folder: Folder of the unfinished output.
        records: Records of the first splits, in order.

    Raises:
        UnusableTextError: There is no document, or none for training.
        DataError: A required split is missing.
    """
    records = required_records(plan, records)
    with storage_paths.workdir(folder) as work:
        for stale in ("rewritten", "merged"):
            shutil.rmtree(work / stale, ignore_errors=True)
        builder = _DatasetBuilder(plan, _FinishedSplits(folder, work), records)
        (dataset / MANIFEST_FILE).remove()  # first: without it, other files are not a dataset
        dataset.rmtree()
        for subset in SPLITS:
            (dataset / subset).mkdir()
        pairs = ((source, dataset / name) for source, name in builder.files())
        for _ in storage_paths.map_concurrent(
            dataset, lambda pair: storage_paths.link_or_copy(*pair), pairs
        ):
            pass
        manifest = builder.manifest()
    plan.tokenizer.write(dataset)
    seconds = {stage: sum(record["seconds"][stage] for record in records) for stage in STAGES}
    write_history(dataset, {"cpu_seconds": seconds, "inputs": plan.inputs})
    for subset in SPLITS:
        (dataset / subset).sync()
    manifest.write(dataset)
    return manifest


@dataclass(frozen=True)
class _FinishedSplits:
    """Files of the finished splits in `folder`; remote files are downloaded to `work`."""

    folder: StoragePath
    work: Path

    def read_log(self, number: int) -> np.ndarray:
        """Return the log of a split: `LOG` [documents]."""
        return np.fromfile(self.local_file(number, LOG_FILE), LOG)

    def read_dropped(self, number: int) -> np.ndarray:
        """Return the documents of a split that rules dropped: `DROPPED_LOG` [documents]."""
        return np.fromfile(self.local_file(number, DROPPED_FILE), DROPPED_LOG)

    def read_signatures(self, number: int) -> np.ndarray:
        """Return the MinHash signatures of a split: uint64 [documents, BANDS]."""
        path = self.local_file(number, SIGNATURES_FILE)
        return np.fromfile(path, np.uint64).reshape(-1, BANDS)

    def local_file(self, number: int, name: str) -> Path:
        """Return the local path of a file of a split."""
        file = split_folder(self.folder, number) / name
        if file.path:
            return file.path
        path = self._downloads(number) / name
        if not path.exists():
            storage_paths.download(file, path)
        return path

    def local_shards(self, number: int, shards: tuple[Shard, ...]) -> Path:
        """Return the local folder that holds these shards of a split."""
        for shard in shards:
            for name in (shard.file, shard.idx_file):
                self.local_file(number, name)
        return split_folder(self.folder, number).path or self._downloads(number)

    def discard_downloads(self, number: int) -> None:
        shutil.rmtree(self._downloads(number), ignore_errors=True)

    def _downloads(self, number: int) -> Path:
        return self.work / "fetched" / f"{number:05d}"


@dataclass
class _DatasetBuilder:
    """Yields the files of a dataset and collects its manifest."""

    plan: PreparationPlan
    splits: _FinishedSplits
    records: list[dict[str, Any]]
    assignment: Assignment = field(init=False)

    def __post_init__(self):
        near = self.plan.settings.get("near_duplicates")
        self.assignment = assign_documents(
            self.plan,
            self.records,
            self.splits.read_log,
            self.splits.work,
            self.splits.read_signatures if near else None,
        )
        self.statistics = DatasetStatistics()
        self.table = DocumentTable(self.splits.work / TABLE_FILE, self.plan.source.fields)
        self.table_entry: dict[str, Any] = {}
        self.shards: dict[str, list[Shard]] = {subset: [] for subset in SPLITS}
        self.input_counts = np.zeros((len(self.plan.inputs), 2), np.int64)
        """Documents and tokens of each input, int64 [inputs, 2]."""

    def files(self) -> Iterator[tuple[StoragePath, str]]:
        """Yield the location and the name in the dataset of each file but the manifest."""
        merged = self.splits.work / "merged"
        val_writer = ShardWriter(
            merged,
            "val",
            vocab_size=self.plan.tokenizer.num_ids,
            eos_id=self.plan.tokenizer.eos_id,
            shard_tokens=self.plan.settings["shard_tokens"],
        )
        for number, record in enumerate(self.records):
            folder, record, lengths = self._final_split(number, record)
            train, val = (record_shards(record)[subset] for subset in SPLITS)
            for shard in train:
                numbered = replace(shard, file=f"train/shard-{len(self.shards['train']):05d}.bin")
                self.shards["train"].append(numbered)
                self.statistics.add_shard("train", lengths[: shard.documents])
                lengths = lengths[shard.documents :]
                yield folder / shard.file, numbered.file
                yield folder / shard.idx_file, numbered.idx_file
            _append_shards(val_writer, folder.path or self.splits.local_shards(number, val), val)
            self.splits.discard_downloads(number)
        for shard in val_writer.close():
            self.shards["val"].append(shard)
            self.statistics.add_shard("val", read_index(merged, shard, val_writer.dtype))
            for name in (shard.file, shard.idx_file):
                yield absolute_path(merged / name), name
        self.table_entry = self.table.close()
        yield absolute_path(self.table.path), TABLE_FILE

    def manifest(self) -> Manifest:
        """Return the manifest; `files` must have been consumed."""
        plan, statistics = self.plan, self.statistics.finish()
        tokenizer, source = plan.tokenizer, plan.source
        inputs = [
            {"path": file.path, "bytes": file.bytes, "documents": counts[0], "tokens": counts[1]}
            for file, counts in zip(plan.inputs, self.input_counts.tolist(), strict=True)
        ]
        splits = [[*plan.splits[number][:3], record["documents"], record["text"]]
                  for number, record in enumerate(self.records)]  # fmt: skip
        return Manifest(
            vocab_size=tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            tokenizer={"name": tokenizer.name, "file": TOKENIZER_FILE, "sha256": tokenizer.sha256,
                       "config_sha256": hashlib.sha256(tokenizer.config_bytes).hexdigest()},
            splits={subset: tuple(shards) for subset, shards in self.shards.items()},
            settings=plan.settings,
            source={"name": source.name, "description": source.description,
                    "text_bytes": statistics["text_bytes"], **source.provenance},
            libraries={"nearlinear": __version__, "numpy": np.__version__,
                       "tokenizers": version("tokenizers"), "python": platform.python_version(),
                       "encoders": sorted({record["backend"] for record in self.records})},
            plan={"inputs": inputs, "splits": splits,
                  "unread": [unread._asdict() for unread in plan.unread],
                  "documents": self.table_entry},
            statistics=statistics,
            marks_targets=tokenizer.marks_targets,
            pairs=tokenizer.pairs,
        )  # fmt: skip

    def _final_split(
        self, number: int, record: dict[str, Any]
    ) -> tuple[StoragePath, dict[str, Any], np.ndarray]:
        """Count a split's documents and rewrite the split if a document changes its destination.

        Returns:
            The split's folder, its record, and the lengths of its train documents,
            int64 [documents].
        """
        plan, entries = self.plan, self.splits.read_log(number)
        targets = self.assignment.destinations(number, entries)
        is_kept = targets != DROPPED
        duplicates = self.assignment.duplicates_of_split(number, entries)
        near_duplicates = self.assignment.near_duplicates_of_split(number, entries)
        self.statistics.add(entries[is_kept])
        self.statistics.add_dropped(
            record["dropped"], entries[duplicates], entries[near_duplicates]
        )
        self.table.add(
            plan.splits[number].input,
            record,
            entries,
            targets,
            duplicates,
            np.where(near_duplicates, self.assignment.cluster_of_each(number, entries), -1),
            self.splits.read_dropped(number),
            self.splits.local_file(number, FIELDS_FILE) if plan.source.fields else None,
        )
        if len(self.input_counts):
            inputs = np.searchsorted(record.get("ends", []), np.flatnonzero(is_kept), side="right")
            inputs += plan.splits[number].input
            np.add.at(self.input_counts, inputs, [1, 0])
            np.add.at(self.input_counts[:, 1], inputs, entries["tokens"][is_kept])
        lengths = entries["tokens"][targets == TRAIN].astype(np.int64)
        before = documents.destinations(entries, plan.seed, plan.val_threshold)
        if np.array_equal(targets, before):
            return split_folder(self.splits.folder, number), record, lengths
        return *self._rewrite(number, record, entries, before, targets), lengths

    def _rewrite(
        self,
        number: int,
        record: dict[str, Any],
        entries: np.ndarray,
        before: np.ndarray,
        targets: np.ndarray,
    ) -> tuple[StoragePath, dict[str, Any]]:
        """Write a split again with its documents moved from `before` to `targets`."""
        folder = absolute_path(self.splits.work / "rewritten" / f"{number:05d}")
        streams = [
            _read_documents(self.plan, self.splits.local_shards(number, shards), shards)
            for shards in record_shards(record).values()
        ]
        with replace_folder(folder) as work:
            writer = SplitWriter(work, self.plan)
            for start in range(0, len(entries), _DOCUMENTS_PER_WRITE):
                part = slice(start, start + _DOCUMENTS_PER_WRITE)
                tokens = [next(streams[subset]) for subset in before[part]]
                writer.add(entries[part], np.concatenate(tokens), targets[part])
            rewritten = {**record, **writer.close()}
            write_json(work / RECORD_FILE, rewritten)
        return folder, rewritten


def _append_shards(writer: ShardWriter, folder: Path, shards: tuple[Shard, ...]) -> None:
    """Append the documents of shards to `writer`, a few MiB at a time."""
    for shard in shards:
        tokens = np.memmap(folder / shard.file, dtype=writer.dtype, mode="r")
        lengths = read_index(folder, shard, writer.dtype)
        for run, place in documents.runs_of_documents(lengths, _TOKENS_PER_WRITE):
            writer.extend(tokens[place], lengths[run])


def _read_documents(
    plan: PreparationPlan, folder: Path, shards: tuple[Shard, ...]
) -> Iterator[np.ndarray]:
    """Yield the tokens of each document of some shards, with EOS."""
    dtype = dtype_for(plan.tokenizer.num_ids)
    for shard in shards:
        tokens = np.memmap(folder / shard.file, dtype=dtype, mode="r")
        start = 0
        for length in read_index(folder, shard, dtype).tolist():
            yield np.asarray(tokens[start : start + length])
            start += length


@dataclass
class DatasetStatistics:
    """Statistics of a dataset, collected one input split or shard at a time."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    longest: int = 0
    """Tokens of the longest document."""
    duplicates: Counter[str] = field(default_factory=Counter)
    near_duplicates: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    """Documents dropped by filter and reason."""

    def __post_init__(self):
        self._histogram = np.zeros(len(BIN_EDGES), np.int64)
        self._subset_tokens: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self._kept: dict[str, dict[int, dict[str, int]]] = {
            subset: {length: {} for length in SEQUENCE_LENGTHS} for subset in SPLITS
        }

    def add(self, entries: np.ndarray) -> None:
        """Count kept documents from their log entries."""
        tokens = entries["tokens"].astype(np.int64)
        if not len(tokens):
            return
        self.documents += len(tokens)
        self.tokens += int(tokens.sum())
        self.text_bytes += int(entries["bytes"].sum(dtype=np.int64))
        self.longest = max(self.longest, int(tokens.max()))
        bins = np.searchsorted(BIN_EDGES, tokens, side="right") - 1
        self._histogram += np.bincount(bins, minlength=len(BIN_EDGES))

    def add_shard(self, subset: str, lengths: np.ndarray) -> None:
        """Count the tokens of a shard that each packing method keeps, as training packs them."""
        self._subset_tokens[subset] += int(lengths.sum(dtype=np.int64))
        for start in range(0, len(lengths), GROUP):
            for length, sums in self._kept[subset].items():
                for method, found in packing_efficiency(
                    lengths[start : start + GROUP], length
                ).items():
                    sums[method] = sums.get(method, 0) + found.tokens

    def add_dropped(
        self, filtered: dict[str, int], duplicates: np.ndarray, near_duplicates: np.ndarray
    ) -> None:
        """Count filtered documents, and duplicates from their log entries.

        Exact duplicates are counted whether or not they are dropped.
        """
        self.filtered.update(filtered)
        for counts, entries in ((self.duplicates, duplicates),
                                (self.near_duplicates, near_duplicates)):  # fmt: skip
            counts["documents"] += len(entries)
            counts["tokens"] += int(entries["tokens"].sum(dtype=np.int64))
            counts["text_bytes"] += int(entries["bytes"].sum(dtype=np.int64))

    def finish(self) -> dict[str, Any]:
        """Return the statistics of the manifest.

        `kept` holds, for train and val, their `tokens`, and the tokens that each packing method of
        `nearlinear.data.packing` keeps by sequence length.
        """
        last = int(np.flatnonzero(self._histogram)[-1]) + 1 if self.documents else 0
        kept_tokens = {}
        for subset, tokens in self._subset_tokens.items():
            kept_tokens[subset] = {"tokens": tokens, "lengths": {
                str(length): {**sums, "concat": tokens // length * length}
                for length, sums in self._kept[subset].items()
            }}  # fmt: skip
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "longest": self.longest,
            "duplicates": dict(self.duplicates),
            "near_duplicates": dict(self.near_duplicates),
            "filtered": dict(sorted(self.filtered.items())),
            "length_histogram": {
                "at_least": BIN_EDGES[:last].tolist(),
                "documents": self._histogram[:last].tolist(),
            },
            "kept": kept_tokens,
        }
