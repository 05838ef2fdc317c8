"""Resolve a dataset path to a source of token shards, also in the formats of other projects.

Those are Megatron's pairs of .bin and .idx files, and nanoGPT's .bin files. They contain neither
the tokenizer nor checksums. A file is identified by its size and its first and last MiB.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import xxhash

from ..errors import DataError
from .cache import cache_folder
from .format import MANIFEST_FILE, Manifest, Shard
from .source import DocumentIndex, DocumentsByToken, LocalShards, NoSplit, ShardSource

CHANNEL = "channel:"
CHANNELS = Path("/opt/ml/input/data")
"""Folder of the input channels of a SageMaker job."""


def open_split(
    path: str | Path,
    split: str,
    verify: str,
    cache: str | Path | None = None,
    cache_gib: float = 0,
    vocab_size: int = 0,
    eos_id: int = -1,
) -> ShardSource:
    """Open one split of a dataset.

    Args:
        path: One of

            - a folder with an index.json: token shards;
            - `s3://bucket/prefix`: token shards in a bucket;
            - `channel:name`: the folder of an input channel of a SageMaker job;
            - a .bin file, its name without the suffix, or a folder of such files: Megatron's format
              if each has an .idx file beside it, else nanoGPT's.
        split: Name of the split.
        verify: Extent of the integrity check, see `TokenDataset`.
        cache: Cache folder for remote shards; defaults to ~/.cache/nearlinear.
        cache_gib: Size limit of the cache in GiB, or 0 for no limit.
        vocab_size: Vocabulary size of Megatron and nanoGPT files; 0 means GPT-2's.
        eos_id: EOS id of Megatron and nanoGPT files; -1 means the last id.

    Raises:
        DataError: If the data is missing or damaged, or an argument does not apply to it.
    """
    name = os.fspath(path)
    if name.startswith(CHANNEL):
        path = _channel(name.removeprefix(CHANNEL))
    elif re.match("s3:/", name):
        from .bucket import RemoteShards

        _reject_vocabulary(name, vocab_size, eos_id)
        return RemoteShards(name, split, cache_folder(cache), cache_gib)
    path = Path(path)
    if not (path / MANIFEST_FILE).is_file():
        if found := open_megatron(path, split, vocab_size, eos_id):
            return found
    _reject_vocabulary(name, vocab_size, eos_id)
    return LocalShards(path, split, verify)


def _reject_vocabulary(path: str, vocab_size: int, eos_id: int) -> None:
    if vocab_size or eos_id >= 0:
        raise DataError(
            f"{path} holds token shards, and {MANIFEST_FILE} defines their vocabulary: drop "
            "data.vocab_size and data.eos_id"
        )


def _channel(name: str) -> Path:
    """Return the folder of an input channel of this SageMaker job."""
    words = (
        name.upper(),
        re.sub("[^A-Z0-9]", "_", name.upper()),
    )  # spellings differ between launchers
    told = [os.environ[known] for word in words if (known := f"SM_CHANNEL_{word}") in os.environ]
    folder = Path(told[0] if told else CHANNELS / name)
    if not folder.is_dir():
        raise DataError(
            f"{CHANNEL}{name}: this job has no such channel ({folder} is not a folder): add an "
            "input channel of this name to the job, or give a folder"
        )
    return folder


GPT2 = 50_257
_SAMPLED = 2**20  # bytes hashed at each end of a file


def open_megatron(path: Path, split: str, vocab_size: int, eos_id: int) -> MegatronFiles | None:
    """Open one split of Megatron or nanoGPT files, or return None if `path` has no such files.

    In a folder, the split is SPLIT.bin, else every .bin file of the subfolder SPLIT, else, for the
    split `train`, every .bin file. A single .bin file, with or without its suffix, is `train`.

    Raises:
        NoSplit: If `path` has such files but not this split.
    """
    files = _files(path, split)
    if not files and _files(path, "train"):
        raise NoSplit(f"{path} has no split {split!r}: put a {split}.bin beside the other files")
    return MegatronFiles(path, split, files, vocab_size or GPT2, eos_id) if files else None


def _files(path: Path, split: str) -> list[Path]:
    if path.is_dir():
        named, below = path / f"{split}.bin", path / split
        if named.is_file():
            return [named]
        if below.is_dir():
            return sorted(below.glob("*.bin"))
        return sorted(path.glob("*.bin")) if split == "train" else []
    pair = path if path.suffix == ".bin" else path.with_name(path.name + ".bin")
    return [pair] if split == "train" and pair.is_file() else []


class MegatronFiles(ShardSource):
    """Token files without a manifest: the dtype of their .idx files, or uint16 without them."""

    files: list[Path]

    def __init__(self, path: Path, split: str, files: list[Path], vocab_size: int, eos_id: int):
        self.files = files
        empty = [file for file in files if not file.stat().st_size]
        if empty and len(empty) < len(files):
            raise DataError(f"{empty[0]} is empty: copy it again, or remove it")
        self._indexed = all(file.with_suffix(".idx").is_file() for file in files)
        shards, shared = [], np.dtype("<u2")
        for file in files:
            size = file.stat().st_size
            index = _index(file) if self._indexed else None
            dtype = index.dtype if index else shared
            if size % dtype.itemsize or (shards and dtype != shared):
                raise DataError(
                    f"{file} does not hold {shared.name} tokens like the other files: copy it "
                    "again, or mix files of different dtypes with data.sources"
                )
            shared = dtype
            count = size // dtype.itemsize
            documents = index.documents if index else 0
            shards.append(Shard(file.name, count, documents, size, _sample(file), 0, ""))
        tokenizer = {"name": "of other files", "file": "", "sha256": f"unknown/{vocab_size}"}
        eos_id = vocab_size - 1 if eos_id < 0 else eos_id
        manifest = Manifest(vocab_size, eos_id, tokenizer, {split: tuple(shards)})
        super().__init__(path, split, manifest, shared)

    def tokens(self, shard: int) -> np.ndarray:
        return np.asarray(np.memmap(self.files[shard], dtype=self.dtype, mode="r"))

    def documents(self, shard: int) -> DocumentIndex | DocumentsByToken:
        if self._indexed:
            return _index(self.files[shard])
        return DocumentsByToken(self.tokens(shard), self.manifest.eos_id)

    def tokenizer(self) -> Path:
        raise DataError(
            f"{self.path} has no tokenizer: set train.sample_tokens = 0, or prepare the data with "
            "nearlinear data"
        )


def _index(file: Path) -> DocumentIndex:
    return DocumentIndex(file.with_suffix(".idx"), file.stat().st_size)


def _sample(file: Path) -> str:
    found = xxhash.xxh3_128(str(file.stat().st_size).encode())
    with open(file, "rb") as opened:
        found.update(opened.read(_SAMPLED))
        opened.seek(max(0, file.stat().st_size - _SAMPLED))
        found.update(opened.read())
    return found.hexdigest()
