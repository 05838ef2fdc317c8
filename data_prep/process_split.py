"""Process one input split: read, encode, assign to train or val, and write shards.

Every engine runs this step, on any host. A split is written to a folder that takes its final name
when complete; in a bucket, its record is written last. Two workers that process the same split
write the same bytes, and one result is kept.
"""

import errno
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_prep import documents, near_dedup, storage_paths
from data_prep.documents import (
    BLANK,
    ReadLog,
    filters_of,
    group_batches,
    log_entries,
    read_documents,
)
from data_prep.encoders import Encoder
from data_prep.plan import PreparationPlan
from data_prep.provenance import DROPPED_LOG, FieldsWriter
from data_prep.resume import (
    DROPPED_FILE,
    FIELDS_FILE,
    LOG_FILE,
    RECORD_FILE,
    SIGNATURES_FILE,
    split_folder,
)
from data_prep.storage_paths import write_json
from nearlinear.data.format import SPLITS, ShardWriter
from nearlinear.data.format.shards import sync_and_close
from nearlinear.storage import StoragePath
from nearlinear.storage.local import atomic_directory

STAGES = ("read", "hash", "encode", "near-duplicates", "write")
"""Stages of processing; filters are part of "read"."""


def process_split(
    plan: PreparationPlan,
    number: int,
    folder: StoragePath,
    encoder: Encoder,
    advance: Callable[[int, int, int], None] = lambda documents, bytes, tokens: None,
) -> dict[str, Any]:
    """Process input split `number` under `folder` and return its record.

    Args:
        advance: Called with the documents, bytes of text and tokens of each batch.

    Raises:
        DataError: The text cannot be read, or a file changed since the plan was made.
    """
    seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    with replace_folder(split_folder(folder, number)) as work, plan.check_unchanged(number):
        writer = SplitWriter(work, plan)
        filters = filters_of(plan)
        signatures = (
            _HashedFile(work / SIGNATURES_FILE) if plan.settings.get("near_duplicates") else None
        )
        log = ReadLog()
        fields = FieldsWriter(work / FIELDS_FILE, plan.source.fields)
        batches = group_batches(
            read_documents(plan, number, filters, log), plan.settings["max_documents"]
        )
        tokens_left = plan.settings["max_tokens"]
        first = True
        while tokens_left is None or tokens_left > 0:
            timer = _StageTimer(seconds)
            batch = next(batches, None)
            fields.take(log.rows)
            timer.stop("read")
            if batch is None:
                break
            texts, numbers = batch
            del batch
            entries, texts = log_entries(texts)
            entries["number"] = numbers
            timer.stop("hash")
            if first:
                encoder.verify_sample(texts)
                first = False
            ids, lengths = encoder(texts)
            timer.stop("encode")
            lengths = lengths + (1 if plan.bos_id is None else 2)
            entries["tokens"] = lengths
            if tokens_left is not None:
                kept = int(np.searchsorted(np.cumsum(lengths), tokens_left)) + 1
                entries, lengths = entries[:kept], lengths[:kept]
                tokens_left -= int(lengths.sum())
            if signatures is not None:
                signatures.write(near_dedup.sign(texts[: len(entries)]).tobytes())
                timer.stop("near-duplicates")
            tokens = _add_ends(ids, lengths, plan.bos_id, plan.tokenizer.eos_id)
            targets = documents.destinations(entries, plan.seed, plan.val_threshold)
            writer.add(entries, tokens, targets)
            timer.stop("write")
            advance(len(entries), int(entries["bytes"].sum()), len(tokens))
        timer = _StageTimer(seconds)
        record = {
            "job": plan.digest,
            "split": number,
            "backend": encoder.name,
            **_close_log(log, work / DROPPED_FILE),
            **({FIELDS_FILE: described} if (described := fields.close(number)) else {}),
            **writer.close(),
            **({} if signatures is None else {SIGNATURES_FILE: signatures.close()}),
        }
        timer.stop("write")
        write_json(work / RECORD_FILE, {**record, "seconds": seconds})
    return {**record, "seconds": seconds}


def _close_log(log: ReadLog, path: Path) -> dict[str, Any]:
    """Write the dropped documents, and return the fields of the split's record about them."""
    rules = Counter(rule for *_, rule in log.dropped)
    codes = {rule: code for code, rule in enumerate(sorted(rules))}
    found = [(number, at, codes[rule]) for number, at, rule in log.dropped]
    file = _HashedFile(path)
    file.write(np.array(found, DROPPED_LOG).tobytes())
    return {
        "dropped": {rule: rules[rule] for rule in codes if rule != BLANK},
        "rules": [*codes],
        "ends": log.ends,
        "counts": log.counts,
        DROPPED_FILE: file.close(),
    }


class SplitWriter:
    """Writer of a split's train and val shards and its document log."""

    def __init__(self, folder: Path, plan: PreparationPlan):
        self._writers = [
            ShardWriter(
                folder,
                subset,
                vocab_size=plan.tokenizer.num_ids,
                eos_id=plan.tokenizer.eos_id,
                shard_tokens=plan.settings["shard_tokens"],
            )
            for subset in SPLITS
        ]
        self._log, self._text_digest = _HashedFile(folder / LOG_FILE), xxhash.xxh3_64()
        self._counts: dict[str, int] = dict.fromkeys(("documents", "tokens", "bytes"), 0)

    def add(self, entries: np.ndarray, tokens: np.ndarray, targets: np.ndarray) -> None:
        """Append documents.

        Args:
            entries: Log entries, `LOG` [documents].
            tokens: Tokens of all documents with EOS, concatenated.
            targets: Destination of each document, uint8 [documents].
        """
        ends = np.cumsum(entries["tokens"], dtype=np.int64)
        cuts = np.flatnonzero(np.diff(targets)) + 1
        for start, end in zip([0, *cuts], [*cuts, len(targets)], strict=True):
            if start < end and targets[start] != documents.DROPPED:
                first = ends[start] - entries["tokens"][start]
                writer = self._writers[targets[start]]
                writer.extend(tokens[first : ends[end - 1]], entries["tokens"][start:end])
        entries = entries[targets != documents.DROPPED]
        self._text_digest.update(documents.text_hashes(entries))
        self._log.write(entries.tobytes())
        for name, count in (("documents", len(entries)), ("tokens", entries["tokens"].sum()),
                            ("bytes", entries["bytes"].sum())):  # fmt: skip
            self._counts[name] += int(count)

    def close(self) -> dict[str, Any]:
        """Flush everything to disk and return the fields of the split's record."""
        log = self._log.close()
        shards = {subset: [asdict(shard) for shard in writer.close()]
                  for subset, writer in zip(SPLITS, self._writers, strict=True)}  # fmt: skip
        text = self._text_digest.hexdigest()
        return {**self._counts, "text": text, "shards": shards, LOG_FILE: log}


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path):
        self._file, self._xxh3 = open(path, "wb"), xxhash.xxh3_64()

    def write(self, raw: bytes) -> None:
        self._file.write(raw)
        self._xxh3.update(raw)

    def close(self) -> dict[str, Any]:
        """Flush the file to disk and return its `bytes` and `xxh3`."""
        size = self._file.tell()
        sync_and_close(self._file)
        return {"bytes": size, "xxh3": self._xxh3.hexdigest()}


@contextmanager
def replace_folder(target: StoragePath) -> Iterator[Path]:
    """Yield a local work folder that replaces `target` when the block ends without an error."""
    if target.path is None:
        with tempfile.TemporaryDirectory(prefix="nearlinear-") as work:
            yield Path(work)
            storage_paths.upload(Path(work), target, last=RECORD_FILE)
        return
    try:
        with atomic_directory(target.path) as work:
            yield work
            shutil.rmtree(target.path, ignore_errors=True)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise  # otherwise another worker finished first, with the same bytes


class _StageTimer:
    """Adds the CPU seconds since the previous `stop` to a stage."""

    def __init__(self, seconds: dict[str, float]):
        self._seconds, self._last = seconds, time.process_time()

    def stop(self, stage: str) -> None:
        now = time.process_time()
        self._seconds[stage] += now - self._last
        self._last = now


def _add_ends(ids: np.ndarray, lengths: np.ndarray, bos_id: int | None, eos_id: int) -> np.ndarray:
    """Concatenate documents with EOS after, and BOS, if any, before each.

    `lengths` count both, `ids` has neither.
    """
    ends = np.cumsum(lengths)
    tokens = np.empty(int(ends[-1]), np.uint32)
    is_text = np.ones(len(tokens), bool)
    is_text[ends - 1] = False
    if bos_id is not None:
        is_text[ends - lengths] = False
        tokens[ends - lengths] = bos_id
    tokens[is_text] = ids[: np.count_nonzero(is_text)]
    tokens[ends - 1] = eos_id
    return tokens
