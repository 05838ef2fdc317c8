"""One split: read, encode, hold out, write. The step that every engine runs, on any host.

A split is made in a folder of its own that takes its name when all in it is on disk, so it is done
or it is not; in a bucket its record is written when the rest is there. Two workers that do the same
split write the same bytes, and one of them is kept.
"""

import errno
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import xxhash

from data_prep import documents, places
from data_prep.backends import Encoder
from data_prep.filters import Filters, signatures
from data_prep.job import Job, write_json
from data_prep.places import Place
from data_prep.records import LOG_FILE, NEAR_FILE, RECORD_FILE, split_folder
from nearlinear.data.format import SPLITS, ShardWriter
from nearlinear.data.format.shards import sync_and_close
from nearlinear.storage.folders import making

STAGES = ("read", "hash", "encode", "near-duplicates", "write")
"""filters are part of reading"""

_BATCH_CHARACTERS = 256 * 1024


def do_split(
    job: Job,
    number: int,
    folder: Place,
    encoder: Encoder,
    advance: Callable[[int, int, int], None] = lambda documents, bytes, tokens: None,
) -> dict:
    """Prepare split `number` of `job` under `folder` and return its record.

    `advance` hears of documents, bytes of text and tokens as they are done. Raises `DataError` for
    text that cannot be read, and for a file that has changed since the job was planned.
    """
    spent = dict.fromkeys(STAGES, 0.0)
    with made(split_folder(folder, number)) as place, job.reading(number):
        out, filters = Output(place, job), Filters(job.filters)
        near = _Hashed(place / NEAR_FILE) if job.settings.get("near_duplicates") else None
        ends: list[int] = []
        batches = _batches(_texts(job, number, filters, ends), job.settings["max_documents"])
        left = job.settings["max_tokens"]
        first = True
        while left is None or left > 0:
            clock = _Clock(spent)
            texts = next(batches, None)
            clock.stop("read")
            if texts is None:
                break
            entries, texts = _described(texts)
            clock.stop("hash")
            if first:
                encoder.certify(texts)
                first = False
            ids, lengths = encoder(texts)
            clock.stop("encode")
            lengths = lengths + 1
            entries["tokens"] = lengths
            if left is not None:
                kept = int(np.searchsorted(np.cumsum(lengths), left)) + 1
                entries, lengths = entries[:kept], lengths[:kept]
                left -= int(lengths.sum())
            if near is not None:
                near.write(signatures()(texts[: len(entries)]).tobytes())
                clock.stop("near-duplicates")
            tokens = _with_ends(ids, lengths, job.words.eos_id)
            out.add(entries, tokens, documents.places(entries, job.seed, job.threshold))
            clock.stop("write")
            advance(len(entries), int(entries["bytes"].sum()), len(tokens))
        clock = _Clock(spent)
        record = {
            "job": job.identity,
            "split": number,
            "backend": encoder.name,
            "dropped": dict(sorted(filters.dropped.items())),
            "ends": ends,
            **out.close(),
            **({} if near is None else {NEAR_FILE: near.close()}),
        }
        clock.stop("write")
        write_json(place / RECORD_FILE, {**record, "seconds": spent})
    return {**record, "seconds": spent}


def same_text(job: Job, number: int, count: int, text: str) -> bool:
    """Whether a split still has, up to the limits, the `count` documents whose hash is `text`."""
    most, digest, found = job.settings["max_documents"], xxhash.xxh3_64(), 0
    beyond = job.settings["max_tokens"] is None and count != most
    for texts in _batches(_texts(job, number, Filters(job.filters)), count + beyond):
        entries, _ = _described(texts)
        digest.update(documents.hashes(entries))
        found += len(texts)
    return found == count and digest.hexdigest() == text


class Output:
    """The shards of both sides of a split, and the log of its documents."""

    def __init__(self, place: Path, job: Job):
        self._writers = [
            ShardWriter(
                place,
                side,
                vocab_size=job.words.vocab_size,
                eos_id=job.words.eos_id,
                shard_tokens=job.settings["shard_tokens"],
            )
            for side in SPLITS
        ]
        self._log, self._text = _Hashed(place / LOG_FILE), xxhash.xxh3_64()
        self._counts = dict.fromkeys(("documents", "tokens", "bytes"), 0)

    def add(self, entries: np.ndarray, tokens: np.ndarray, places: np.ndarray) -> None:
        """Append documents: log entries [n], tokens of them all, and where each of them goes."""
        ends = np.cumsum(entries["tokens"], dtype=np.int64)
        cuts = np.flatnonzero(np.diff(places)) + 1
        for start, end in zip([0, *cuts], [*cuts, len(places)], strict=True):
            if start < end and places[start] != documents.DROPPED:
                first = ends[start] - entries["tokens"][start]
                writer = self._writers[places[start]]
                writer.extend(tokens[first : ends[end - 1]], entries["tokens"][start:end])
        entries = entries[places != documents.DROPPED]
        self._text.update(documents.hashes(entries))
        self._log.write(entries.tobytes())
        for name, count in (("documents", len(entries)), ("tokens", entries["tokens"].sum()),
                            ("bytes", entries["bytes"].sum())):  # fmt: skip
            self._counts[name] += int(count)

    def close(self) -> dict:
        """Have all of it on disk; the fields of a record."""
        log = self._log.close()
        shards = {side: [asdict(shard) for shard in writer.close()]
                  for side, writer in zip(SPLITS, self._writers, strict=True)}  # fmt: skip
        text = self._text.hexdigest()
        return {**self._counts, "text": text, "shards": shards, LOG_FILE: log}


class _Hashed:
    """A file that is written, and its hash."""

    def __init__(self, path: Path):
        self._file, self._xxh3 = open(path, "wb"), xxhash.xxh3_64()

    def write(self, raw: bytes) -> None:
        self._file.write(raw)
        self._xxh3.update(raw)

    def close(self) -> dict:
        """Have it on disk; its `bytes` and `xxh3`."""
        size = self._file.tell()
        sync_and_close(self._file)
        return {"bytes": size, "xxh3": self._xxh3.hexdigest()}


@contextmanager
def made(place: Place) -> Iterator[Path]:
    """A folder to work in that is at `place`, in place of what was there, once the block ended."""
    if place.path is None:
        with tempfile.TemporaryDirectory(prefix="nearlinear-") as work:
            yield Path(work)
            places.upload(Path(work), place, last=RECORD_FILE)
        return
    try:
        with making(place.path) as work:
            yield work
            shutil.rmtree(place.path, ignore_errors=True)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise  # else another worker was first, with the same bytes


class _Clock:
    """Adds the CPU seconds since it was last asked to a stage."""

    def __init__(self, spent: dict[str, float]):
        self._spent, self._last = spent, time.process_time()

    def stop(self, stage: str) -> None:
        now = time.process_time()
        self._spent[stage] += now - self._last
        self._last = now


def _texts(
    job: Job, number: int, filters: Filters, ends: list[int] | None = None
) -> Iterator[list[str]]:
    """The documents of a split that have text in them, and pass the job's filters, some at a time.

    `ends` gets how many there are to the end of each input that has been read whole.
    """
    count = 0
    for split in job.source.by_input(job.splits[number]):
        for texts in job.source.some(split):
            if isinstance(texts, str):
                raise TypeError(f"the reader of {job.source.name} gives text, not lists of texts")
            texts = [text for text in texts if text and not text.isspace()]
            if job.filters:
                texts = list(filters(texts))
            count += len(texts)
            yield texts
            del texts  # they may be large, and are encoded by now
        if ends is not None:
            ends.append(count)


def _batches(some: Iterator[list[str]], limit: int | None) -> Iterator[list[str]]:
    """At most `limit` documents in lists that are encoded together; no more are asked for."""
    left = sys.maxsize if limit is None else limit
    batch, size = [], 0
    while left > 0 and (texts := next(some, None)) is not None:
        batch += texts[:left]
        left -= len(texts)
        size += sum(map(len, texts))
        del texts  # they may be large
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _described(texts: list[str]) -> tuple[np.ndarray, list[str]]:
    """The log's entries of texts, and the texts as UTF-8 can hold them: surrogates become `?`."""
    try:
        return documents.describe(texts), texts
    except UnicodeEncodeError:
        texts = [text.encode("utf-8", errors="replace").decode("utf-8") for text in texts]
        return documents.describe(texts), texts


def _with_ends(ids: np.ndarray, lengths: np.ndarray, eos_id: int) -> np.ndarray:
    """Documents one after another, each with its EOS: `lengths` count it, `ids` has none."""
    ends = np.cumsum(lengths)
    tokens = np.empty(int(ends[-1]), np.uint32)
    inside = np.ones(len(tokens), bool)
    inside[ends - 1] = False
    tokens[inside] = ids[: len(tokens) - len(lengths)]
    tokens[ends - 1] = eos_id
    return tokens
