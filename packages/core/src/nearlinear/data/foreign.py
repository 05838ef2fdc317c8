"""Token files of others: Megatron's pairs of .bin and .idx, and nanoGPT's .bin.

They say nothing of whose ids they hold, nor have they checksums; their identity is their size with
their first and last bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from ..errors import DataError
from .documents import DocumentIndex, DocumentsByToken
from .format import Manifest, Shard
from .split import NoSplit, Split

GPT2 = 50_257
_SAMPLED = 2**20  # bytes of a file's beginning and end


def foreign(path: Path, split: str, vocab_size: int, eos_id: int) -> Foreign | None:
    """A split of others' files that `path` names, or None if it names none. Raises `NoSplit`.

    Of a folder: SPLIT.bin, else every .bin of its folder SPLIT, else, as ``train``, every .bin in
    it. A .bin, or its name without that, is ``train``.
    """
    files = _files(path, split)
    if not files and _files(path, "train"):
        raise NoSplit(f"{path} has no split {split!r}: put a {split}.bin beside the other files")
    return Foreign(path, split, files, vocab_size or GPT2, eos_id) if files else None


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


class Foreign(Split):
    """`files` of tokens: int32 or uint16 as their .idx says, uint16 without one."""

    def __init__(self, path: Path, split: str, files: list[Path], vocab_size: int, eos_id: int):
        self.files = files
        empty = [file for file in files if not file.stat().st_size]
        if empty and len(empty) < len(files):
            raise DataError(f"{empty[0]} is empty: copy it again, or take it away")
        self._indexed = all(file.with_suffix(".idx").is_file() for file in files)
        shards, self._dtype = [], np.dtype("<u2")
        for file in files:
            size = file.stat().st_size
            index = _index(file) if self._indexed else None
            dtype = index.dtype if index else self._dtype
            if size % dtype.itemsize or (shards and dtype != self._dtype):
                raise DataError(
                    f"{file} is not {self._dtype.name} tokens as the others are: copy it again, or "
                    "blend what differs (data.sources)"
                )
            self._dtype = dtype
            count = size // dtype.itemsize
            documents = index.documents if index else 0
            shards.append(Shard(file.name, count, documents, size, _sample(file), 0, ""))
        tokenizer = {"name": "of other files", "file": "", "sha256": f"unknown/{vocab_size}"}
        eos_id = vocab_size - 1 if eos_id < 0 else eos_id
        manifest = Manifest(vocab_size, eos_id, tokenizer, {split: tuple(shards)})
        super().__init__(path, split, manifest)

    @property
    def dtype(self) -> np.dtype:
        return self._dtype

    def tokens(self, shard: int) -> np.ndarray:
        return np.asarray(np.memmap(self.files[shard], dtype=self._dtype, mode="r"))

    def documents(self, shard: int) -> DocumentIndex | DocumentsByToken:
        if self._indexed:
            return _index(self.files[shard])
        return DocumentsByToken(self.tokens(shard), self.manifest.eos_id)

    def tokenizer(self) -> Path:
        raise DataError(
            f"{self.path} does not say whose ids it holds: set train.sample_tokens = 0, or prepare "
            "the data with python -m data_prep"
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
