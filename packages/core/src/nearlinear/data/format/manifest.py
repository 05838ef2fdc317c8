"""Manifest of a dataset, `index.json`: its shards with checksums, and the origin of the tokens.

Fields that determine the token stream enter the fingerprint. Settings, plan, statistics and source
are informative only.
"""

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ... import storage
from ...errors import DataError
from .shards import Shard, dtype_for

FORMAT_NAME = "nearlinear-token-shards"
FORMAT_VERSION = 2
MANIFEST_FILE = "index.json"
TOKENIZER_FILE = "tokenizer/tokenizer.json"


@dataclass(frozen=True)
class Manifest:
    """Contents of `index.json`. Only vocabulary, tokenizer and shards enter the fingerprint."""

    vocab_size: int
    eos_id: int
    tokenizer: dict[str, Any]  # name, file, sha256
    splits: dict[str, tuple[Shard, ...]]
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the preparation. Later runs into the same folder must use the same settings."""
    source: dict[str, Any] = field(default_factory=dict)
    """Name, description and versions of the text source."""
    libraries: dict[str, Any] = field(default_factory=dict)
    """Versions of the libraries used by the preparation."""
    plan: dict[str, Any] = field(default_factory=dict)
    """`inputs`: path, bytes, kept documents and kept tokens of each input file. `splits`, in order:
    input, start, end, number of documents read, xxh3_64 of the hashes of their texts."""
    statistics: dict[str, Any] = field(default_factory=dict)
    """Documents, tokens, text bytes, duplicates, length histogram, tokens kept by each packing."""

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the `.bin` files."""
        return dtype_for(self.vocab_size)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of everything that determines the token stream, 64 hex digits.

        Settings, plan, statistics, library versions and source do not enter.
        """
        identity = {
            "format": [FORMAT_NAME, FORMAT_VERSION],
            "vocabulary": [self.vocab_size, self.eos_id, self.tokenizer["sha256"]],
            "shards": {s: [[p.tokens, p.documents, p.sha256] for p in shards]
                       for s, shards in self.splits.items()},
        }  # fmt: skip
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @property
    def tokenizer_id(self) -> dict[str, Any]:
        """Tokenizer that produced the token ids: its name and the sha256 of its file."""
        return {name: self.tokenizer[name] for name in ("name", "sha256")}

    def total(self, name: str, split: str | None = None) -> int:
        """Sum the shard field `name` (`tokens`, `documents` or `bytes`) over one or all splits."""
        splits = self.splits.values() if split is None else [self.splits[split]]
        return sum(getattr(shard, name) for shards in splits for shard in shards)

    def write(self, folder: str | Path | storage.StoragePath) -> None:
        """Write `index.json` atomically."""
        totals = {s: {n: self.total(n, s) for n in ("tokens", "documents", "bytes")}
                  for s in self.splits}  # fmt: skip
        document = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "dtype": self.dtype.name,
            "fingerprint": self.fingerprint,
            "totals": totals,
            **asdict(self),
        }
        raw = json.dumps(document, indent=1, ensure_ascii=False).encode()
        (storage.as_path(folder) / MANIFEST_FILE).put(raw)

    @classmethod
    def read(cls, folder: str | Path | storage.StoragePath) -> "Manifest":
        """Read and check `index.json` of a folder or of `s3://bucket/prefix`.

        Raises:
            DataError: If the manifest is missing, damaged or of another version.
        """
        place = storage.as_path(folder)
        prepare = f"prepare it with `python -m data_prep botocore --out {place}`"
        try:
            raw = (place / MANIFEST_FILE).read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            if not place.exists():
                raise DataError(f"no token shards at {place}: {prepare}") from None
            raise DataError(
                f"{place} holds no {MANIFEST_FILE}: it is not a folder of token shards, or its "
                f"preparation did not finish; {prepare}"
            ) from None
        return cls.parse(raw, f"{place / MANIFEST_FILE}")

    @classmethod
    def parse(cls, raw: bytes, path: str | Path) -> "Manifest":
        """Parse the bytes of an `index.json`. `path` appears in errors.

        Raises:
            DataError: If `raw` is not a valid manifest of this version.
        """
        prepare = "prepare the data again with `python -m data_prep`"
        try:
            document = json.loads(raw)
            name, version = document["format"], document["version"]
        except (ValueError, TypeError, KeyError):
            raise DataError(
                f"{path} is not a token-shard manifest: name another folder, or {prepare}"
            ) from None
        if name != FORMAT_NAME or version != FORMAT_VERSION:
            raise DataError(
                f"{path} is {name!r} version {version}, this nearlinear reads {FORMAT_NAME!r} "
                f"version {FORMAT_VERSION}: {prepare}"
            )
        try:
            return cls._parse(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{path} is damaged ({error}): copy it again, or prepare the data again"
            ) from None

    @classmethod
    def _parse(cls, document: dict) -> "Manifest":
        splits = {s: tuple(map(Shard.parse, shards)) for s, shards in document["splits"].items()}
        names = ("vocab_size", "eos_id", "tokenizer", "settings", "source", "libraries", "plan",
                 "statistics")  # fmt: skip
        manifest = cls(splits=splits, **{name: document[name] for name in names})
        for split, shards in splits.items():
            for number, shard in enumerate(shards):
                if shard.file != f"{split}/shard-{number:05d}.bin":
                    raise ValueError(f"unexpected file name {shard.file}")
                if shard.bytes != shard.tokens * manifest.dtype.itemsize or shard.tokens < 1:
                    raise ValueError(f"bytes and tokens of {shard.file} are inconsistent")
        if document["dtype"] != manifest.dtype.name:
            raise ValueError("dtype does not match vocab_size")
        if document["fingerprint"] != manifest.fingerprint:
            raise ValueError("fingerprint does not match the contents")
        return manifest
