"""From a source of documents to a folder of token shards, in one pass and bounded memory.

Documents are encoded in batches and appended to the split that a hash of their text chooses, so
exact duplicates never straddle training and validation, and a document's split does not depend
on the others. The same source and settings give the same bytes on every machine.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from data_prep.output import existing, staging
from data_prep.progress import Progress
from data_prep.sources import Source
from data_prep.tokenizer import TextTokenizer, load
from nearlinear import __version__
from nearlinear.data.format import (
    DEFAULT_SHARD_TOKENS,
    SPLITS,
    TOKENIZER_FILE,
    Manifest,
    ShardWriter,
)
from nearlinear.errors import DataError

_BATCH_BYTES = 2 * 1024 * 1024
_BATCH_DOCUMENTS = 2048


def prepare(
    source: Source,
    out: str | Path | None = None,
    *,
    tokenizer: str | TextTokenizer = "gpt2",
    eos_token: str | None = None,
    val_fraction: float = 0.01,
    seed: int = 0,
    max_documents: int | None = None,
    max_tokens: int | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    overwrite: bool = False,
    progress: bool = True,
) -> Manifest:
    """Write `source` as token shards to `out` (default `data/<source name>`).

    `val_fraction` of the documents, chosen by a hash of (seed, text), go to split "val". When a
    small source leaves val empty, the one text with the lowest hash goes there instead (unless
    `val_fraction` is 0 or all documents are alike). `max_documents` and `max_tokens` (EOS counted)
    stop after that many; documents are kept whole. Blank documents are left out.

    An intact dataset of the same settings at `out` is checked and returned as it is. Raises
    `DataError` for one of other settings (unless `overwrite`), an empty source or an empty split
    "train". Whatever interrupts, `out` is complete or untouched.
    """
    out = Path(out) if out is not None else Path("data") / source.name
    if not 0 <= val_fraction < 1:
        raise DataError(f"val_fraction is {val_fraction}: give 0 or more and less than 1")
    for name, value in (("max_documents", max_documents), ("max_tokens", max_tokens),
                        ("shard_tokens", shard_tokens)):  # fmt: skip
        if value is not None and value < 1:
            raise DataError(f"{name} is {value}: give at least 1")
    words = load(tokenizer, eos_token) if isinstance(tokenizer, str) else tokenizer
    settings = {
        "source": source.name,
        **source.settings,
        "tokenizer_sha256": words.sha256,
        "eos_token": words.eos_token,
        "val_fraction": val_fraction,
        "seed": seed,
        "max_documents": max_documents,
        "max_tokens": max_tokens,
        "shard_tokens": shard_tokens,
    }
    unit, total = _goal(source, max_documents, max_tokens)
    done = existing(out, settings, overwrite)
    if done is not None:
        if progress:
            for line in _reuse_notes(out, done, source):
                print(line, file=sys.stderr)
        return done
    job = _Job(source, words, val_fraction, seed, max_documents, max_tokens, shard_tokens)
    with staging(out) as folder, Progress(source.name, unit, total, show=progress) as bar:
        result = job.run(folder, bar)
        _write_tokenizer(folder, words)
        manifest = Manifest(
            vocab_size=words.vocab_size,
            eos_id=words.eos_id,
            tokenizer={"name": words.name, "file": TOKENIZER_FILE, "sha256": words.sha256},
            splits=result.splits,
            settings=settings,
            source={"name": source.name, "description": source.description,
                    "text_bytes": result.text_bytes, **source.provenance},
            libraries={"nearlinear": __version__, "numpy": np.__version__,
                       "tokenizers": version("tokenizers"), "python": platform.python_version()},
        )  # fmt: skip
        manifest.write(folder)
    return manifest


@dataclass(frozen=True)
class _Result:
    splits: dict
    text_bytes: int
    lowest_hash: int
    highest_hash: int


@dataclass(frozen=True)
class _Job:
    """One pass over a source, with all that decides its outcome."""

    source: Source
    words: TextTokenizer
    val_fraction: float
    seed: int
    max_documents: int | None
    max_tokens: int | None
    shard_tokens: int

    def run(self, folder: Path, bar: Progress) -> _Result:
        """Write both splits under `folder`; a second pass only when val would be empty."""
        result = self._pass(folder, int(self.val_fraction * 2**64), bar)
        if not result.splits["train"] and not result.splits["val"]:
            raise DataError(
                f"the source {self.source.name} gave no document with text in it: check the "
                "path, and --text-field for JSON lines"
            )
        several = result.lowest_hash < result.highest_hash
        if self.val_fraction and not result.splits["val"] and several:
            bar.note(
                f"note: no document fell into val at --val-fraction {self.val_fraction}; the one "
                "with the lowest split hash goes there, in a second pass"
            )
            for file in (folder / "train").iterdir():
                file.unlink()
            with Progress("second pass", show=False) as silent:
                result = self._pass(folder, result.lowest_hash + 1, silent)
        if not result.splits["train"]:
            raise DataError(
                f"all documents fell into val at --val-fraction {self.val_fraction}: lower it, or "
                "give more text"
            )
        return result

    def _pass(self, folder: Path, threshold: int, bar: Progress) -> _Result:
        """Encode the source; documents whose hash is below `threshold` go to val."""
        writers = {
            split: ShardWriter(
                folder,
                split,
                vocab_size=self.words.vocab_size,
                eos_id=self.words.eos_id,
                shard_tokens=self.shard_tokens,
            )
            for split in SPLITS
        }
        tokens = text_bytes = 0
        lowest, highest = 2**64, -1
        for raw, ids in self._encoded():
            chosen = split_hash(raw, self.seed)
            lowest, highest = min(lowest, chosen), max(highest, chosen)
            writers["val" if chosen < threshold else "train"].add(ids)
            tokens, text_bytes = tokens + len(ids) + 1, text_bytes + len(raw)
            bar.advance(len(raw), len(ids) + 1)
            if self.max_tokens is not None and tokens >= self.max_tokens:
                break
        splits = {split: writer.close() for split, writer in writers.items()}
        return _Result(splits, text_bytes, lowest, highest)

    def _encoded(self) -> Iterator[tuple[bytes, list[int]]]:
        """Each usable document's UTF-8 bytes and token ids, encoded a batch at a time."""
        for batch in _batches(_usable(self.source.documents(), self.max_documents)):
            encoded = self.words.encode_batch([text for text, _ in batch])
            yield from zip((raw for _, raw in batch), encoded, strict=True)


def split_hash(raw: bytes, seed: int) -> int:
    """Uniform in [0, 2**64), from a document's UTF-8 bytes and the seed alone (blake2b)."""
    key = str(seed).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, key=key).digest(), "little")


def _usable(documents: Iterable[str], limit: int | None) -> Iterator[tuple[str, bytes]]:
    """Documents with text in them and their UTF-8 bytes; lone surrogates become `?`."""
    count = 0
    for text in documents:
        if not text.strip():
            continue
        raw = text.encode("utf-8", errors="replace")
        yield raw.decode("utf-8"), raw
        count += 1
        if count == limit:
            return


def _batches(documents: Iterator[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _goal(source: Source, max_documents: int | None, max_tokens: int | None):
    """What the progress bar counts towards: a unit and its total, or None when unknown."""
    if max_tokens is not None:
        return "tokens", max_tokens
    if max_documents is not None:
        return "documents", max_documents
    if source.expected_documents is not None:
        return "documents", source.expected_documents
    return "bytes", source.expected_bytes


def _reuse_notes(out: Path, manifest: Manifest, source: Source) -> Iterator[str]:
    yield f"{out} is already prepared with these settings and intact: nothing to do"
    for key, value in source.provenance.items():
        if manifest.source.get(key) != value:
            yield (
                f"note: it was made with {key} {manifest.source.get(key)} and {value} is installed "
                "now; --overwrite prepares it anew"
            )


def _write_tokenizer(folder: Path, words: TextTokenizer) -> None:
    """tokenizer.json as it is, and the two lines `AutoTokenizer.from_pretrained` needs."""
    path = folder / TOKENIZER_FILE
    path.parent.mkdir()
    path.write_bytes(words.json_text.encode("utf-8"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words.eos_token}
    path.with_name("tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
