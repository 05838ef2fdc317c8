"""Token files of other projects, read in place.

| files | project | dtype from | documents from |
|---|---|---|---|
| .bin with .idx | Megatron | .idx | .idx |
| .bin | nanoGPT | always uint16 | the EOS id |
| .ds | datatrove | .ds.index or .ds.metadata | .ds.index, else the EOS id |
| .npy | OLMo, NumPy | the vocabulary size, or NumPy's header | the EOS id |
| index.json with .bin | litdata | index.json | the EOS id |
| index.json with .mds | Streaming of MosaicML | index.json | the EOS id |

They contain neither the tokenizer nor checksums. A file is identified by its size and its first and
last MiB. Sources: Megatron-LM `megatron/core/datasets`, datatrove `pipeline/tokens`, OLMo-core
`data/numpy_dataset.py`, litdata `streaming/item_loader.py` and `constants.py`, Streaming
`base/format/mds`.
"""

from __future__ import annotations

import abc
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..errors import DataError
from .format import FORMAT_NAME, MANIFEST_FILE, Manifest, Shard, dtype_for
from .source import DocumentEnds, DocumentIndex, Documents, DocumentsByToken, NoSplit, ShardSource

GPT2 = 50_257
_SAMPLED = 2**20  # bytes read at each end of a file


def open_token_files(path: Path, split: str, vocab_size: int, eos_id: int) -> TokenFiles | None:
    """Open one split of token files of another project, or return None if `path` has none.

    In a folder, the split is SPLIT.bin, else every .bin file of the subfolder SPLIT, else, for the
    split `train`, every .bin file; the same for the other suffixes. A single file is `train`, also
    a .bin file without its suffix. An index of litdata or Streaming names the files of its folder.

    Raises:
        NoSplit: If `path` has such files but not this split.
    """
    here = _indexed(path)
    if found := _indexed(path / split) or (here if split == "train" else None):
        return TokenFiles(path, split, *found, vocab_size, eos_id)
    if here or _indexed(path / "train"):
        raise NoSplit(f"{path} has no split {split!r}: put a folder {split} with its index there")
    if (path / MANIFEST_FILE).is_file():  # token shards
        return None
    for suffix, format_ in _FORMATS.items():
        if files := _files(path, split, suffix):
            return TokenFiles(path, split, files, format_, vocab_size, eos_id)
        if _files(path, "train", suffix):
            raise NoSplit(
                f"{path} has no split {split!r}: put a {split}{suffix} beside the other files"
            )
    return None


def _files(path: Path, split: str, suffix: str) -> list[Path]:
    if path.is_dir():
        named, below = path / f"{split}{suffix}", path / split
        if named.is_file():
            return [named]
        if below.is_dir():
            return sorted(below.glob(f"*{suffix}"))
        return sorted(path.glob(f"*{suffix}")) if split == "train" else []
    if suffix == ".bin" and path.suffix not in _FORMATS:
        path = path.with_name(path.name + suffix)
    return [path] if split == "train" and path.suffix == suffix and path.is_file() else []


class TokenFiles(ShardSource):
    """One split of token files of another project. All files have the same format and dtype."""

    files: list[Path]

    def __init__(
        self,
        path: Path,
        split: str,
        files: list[Path],
        format_: _Format,
        vocab_size: int,
        eos_id: int,
    ):
        self.files = files
        self._format = format_
        empty = [file for file in files if not file.stat().st_size]
        if empty and len(empty) < len(files):
            raise DataError(f"{empty[0]} is empty: copy it again, or remove it")
        indices = [index for file in files if (index := self._format.index_path(file))]
        absent = [index for index in indices if not index.is_file()]
        self._indexed = len(absent) < len(indices)
        if self._indexed and absent:
            raise DataError(f"{absent[0]} is missing beside its tokens: copy it again")
        self._starts: list[int] = []
        dtype, shards = None, []
        for file in files:
            index = self._format.index(file) if self._indexed else None
            found, start = self._format.layout(file, index, vocab_size, eos_id)
            dtype, size = dtype or found, file.stat().st_size - start
            if found != dtype or size % dtype.itemsize:
                raise DataError(
                    f"{file} does not hold {dtype.name} tokens like the other files: copy it "
                    "again, or mix files of different dtypes with data.sources"
                )
            count = size // dtype.itemsize
            if index and index.tokens != count:
                raise DataError(
                    f"{self._format.index_path(file)} describes {index.tokens} tokens but "
                    f"{file.name} has {count}: the files do not belong together; copy both again"
                )
            identity = _check_and_identify(file, start, dtype, vocab_size or GPT2)
            documents = index.documents if index else 0
            shards.append(Shard(file.name, count, documents, size, identity, 0, ""))
            self._starts.append(start)
        vocab_size = vocab_size or GPT2
        tokenizer = {"name": "of other files", "file": "", "sha256": f"unknown/{vocab_size}"}
        eos_id = vocab_size - 1 if eos_id < 0 else eos_id
        manifest = Manifest(vocab_size, eos_id, tokenizer, {split: tuple(shards)})
        super().__init__(path, split, manifest, dtype)

    def tokens(self, shard: int) -> np.ndarray:
        start = self._starts[shard]
        return np.asarray(np.memmap(self.files[shard], dtype=self.dtype, mode="r", offset=start))

    def documents(self, shard: int) -> Documents:
        if self._indexed:
            return self._format.index(self.files[shard])
        return DocumentsByToken(self.tokens(shard), self.manifest.eos_id)

    def tokenizer(self) -> Path:
        raise DataError(
            f"{self.path} has no tokenizer: set train.sample_tokens = 0, or prepare the data with "
            "nearlinear data"
        )


def _check_and_identify(file: Path, start: int, dtype: np.dtype, vocab_size: int) -> str:
    """Return a hash of the size and both ends of a file, whose first ids are checked."""
    size = file.stat().st_size
    found = xxhash.xxh3_128(str(size).encode())
    last = start + max(0, size - start - _SAMPLED) // dtype.itemsize * dtype.itemsize
    with open(file, "rb") as opened:
        head = opened.read(start + _SAMPLED)
        opened.seek(last)
        for part in (head, opened.read()):
            found.update(part)
        ids = np.frombuffer(head[start:], dtype)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise DataError(
            f"{file} has ids from {ids.min()} to {ids.max()}, but the vocabulary has {vocab_size}: "
            "set data.vocab_size and data.eos_id to those of its tokenizer"
        )
    return found.hexdigest()


Index = DocumentIndex | DocumentEnds
Layout = tuple[np.dtype, int]
"""Dtype of the tokens, and the byte at which they begin."""


class _Format(abc.ABC):
    @abc.abstractmethod
    def layout(self, file: Path, index: Index | None, vocab_size: int, eos_id: int) -> Layout:
        """Return the layout of a file. The vocabulary may be unknown (0) and so may EOS (-1)."""

    def index_path(self, file: Path) -> Path | None:
        """Return the path of the index of a file's documents, which may be absent."""
        return None

    def index(self, file: Path) -> Index:
        """Open that index."""
        raise NotImplementedError


class _Bin(_Format):
    """Megatron's files, and without their index nanoGPT's."""

    def layout(self, file: Path, index: Index | None, vocab_size: int, eos_id: int) -> Layout:
        return (index.dtype if isinstance(index, DocumentIndex) else np.dtype("<u2")), 0

    def index_path(self, file: Path) -> Path:
        return file.with_suffix(".idx")

    def index(self, file: Path) -> DocumentIndex:
        return DocumentIndex(self.index_path(file), file.stat().st_size)


class _Datatrove(_Format):
    def layout(self, file: Path, index: Index | None, vocab_size: int, eos_id: int) -> Layout:
        if file.with_name(f"{file.name}.loss").exists():
            raise DataError(
                f"{file}.loss excludes tokens from the loss, which is not supported here: prepare "
                "the text with nearlinear data, or remove the .loss files to train on all tokens"
            )
        described, bytes_ = file.with_name(f"{file.name}.metadata"), ""
        if described.is_file():  # first line: "tokenizer|bytes per token"
            bytes_ = described.read_text(encoding="utf-8").partition("\n")[0].rpartition("|")[2]
        elif index and index.tokens:
            bytes_ = str(file.stat().st_size // index.tokens)
        if bytes_ not in ("2", "4"):
            raise DataError(
                f"{described} does not say whether a token has 2 or 4 bytes: write it again with "
                "datatrove's option save_final_metadata"
            )
        return np.dtype(f"<u{bytes_}"), 0

    def index_path(self, file: Path) -> Path:
        return file.with_name(f"{file.name}.index")

    def index(self, file: Path) -> DocumentEnds:
        return DocumentEnds(self.index_path(file))


class _Npy(_Format):
    """OLMo's files, which have no header in spite of their suffix, and NumPy's, which have one."""

    def layout(self, file: Path, index: Index | None, vocab_size: int, eos_id: int) -> Layout:
        with open(file, "rb") as opened:
            if opened.read(6) != b"\x93NUMPY":
                return self._without_header(file, vocab_size, eos_id)
        try:
            found = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{file} is not an array of NumPy ({error}): write it again") from None
        if found.ndim != 1 or found.dtype.kind not in "ui":
            raise DataError(
                f"{file} is an array {list(found.shape)} of {found.dtype}: token ids are a "
                "one-dimensional array of integers"
            )
        return found.dtype, found.offset

    def _without_header(self, file: Path, vocab_size: int, eos_id: int) -> Layout:
        if not vocab_size or eos_id < 0:
            raise DataError(
                f"{file} has no header, like OLMo's files: set data.vocab_size and data.eos_id to "
                "those of its tokenizer, which determine the dtype and the documents"
            )
        return dtype_for(vocab_size), 0


class _Litdata(_Format):
    """Chunks of litdata for its `TokensLoader`: the number of items, their offsets, the ids."""

    def __init__(self, index: Path, config: dict[str, Any]):
        described = config["data_format"]
        if config.get("compression") or config.get("encryption"):
            raise DataError(f"{index} is of compressed or encrypted chunks: {_WRITE_PLAIN}")
        kind, _, code = str(described[0]).partition(":")
        self._dtype = _LITDATA_DTYPES.get(code)
        if len(described) != 1 or kind != "no_header_tensor" or self._dtype is None:
            raise DataError(
                f"{index} is of items {described}: token ids are one tensor of integers per item, "
                "written for litdata's TokensLoader"
            )

    def layout(self, file: Path, index: Index | None, vocab_size: int, eos_id: int) -> Layout:
        assert self._dtype is not None
        return self._dtype, _data_start(file)


class _Mds(_Format):
    """Shards of Streaming: the number of rows, their offsets, a description, the rows."""

    def __init__(self, index: Path, shards: list[dict[str, Any]]):
        if any(shard["compression"] for shard in shards):
            raise DataError(f"{index} is of compressed shards: {_WRITE_PLAIN}")
        kinds = sorted(
            {tuple(shard.get("column_encodings", [shard["format"]])) for shard in shards}
        )
        found = re.fullmatch(r"ndarray:(u?int(?:8|16|32|64)):\d+", kinds[0][0])
        if not found or len(kinds) > 1 or len(kinds[0]) > 1:
            raise DataError(
                f"{index} is of rows {' or '.join(map(', '.join, kinds))}: token ids are one "
                "column ndarray:DTYPE:LENGTH of integers; write them in this way"
            )
        self._dtype = np.dtype(found[1])

    def layout(self, file: Path, index: Index | None, vocab_size: int, eos_id: int) -> Layout:
        return self._dtype, _data_start(file)


_WRITE_PLAIN = "token ids are read in place: write them without compression"
_LITDATA_DTYPES = {"11": np.dtype("u1"), "12": np.dtype("i1"), "13": np.dtype("<i2"),
                   "14": np.dtype("<i2"), "15": np.dtype("<i4"), "16": np.dtype("<i4"),
                   "17": np.dtype("<i8"), "18": np.dtype("<i8"), "20": np.dtype("<u2")}  # fmt: skip
"""Dtypes by litdata's code."""


def _data_start(file: Path) -> int:
    """Return the first offset of a file of rows: their number, offsets (uint32), ..., the rows.

    Raises:
        DataError: If the file does not end where the last row does.
    """
    size = file.stat().st_size
    with open(file, "rb") as opened:
        count = int.from_bytes(opened.read(4), "little")
        known = 4 * (count + 2) <= size
        offsets = np.fromfile(opened, "<u4", count + 1) if known else np.empty(0)
    if not known or offsets[-1] != size:
        raise DataError(f"{file} is cut off or of another format: copy it again")
    return int(offsets[0])


def _indexed(folder: Path) -> tuple[list[Path], _Format] | None:
    """Return the files and the format of a folder with an index of litdata or Streaming."""
    path = folder / MANIFEST_FILE  # has the same name
    try:
        with open(path, "rb") as file:
            begin = file.read(256)
            index = {} if FORMAT_NAME.encode() in begin else json.loads(begin + file.read())
    except (OSError, ValueError):  # absent, or damaged, which `LocalShards` describes
        return None
    try:
        if "chunks" in index and "config" in index:
            names = [chunk["filename"] for chunk in index["chunks"]]
            format_: _Format = _Litdata(path, index["config"])
        elif "shards" in index and index["version"] == 2:
            names = [shard["raw_data"]["basename"] for shard in index["shards"]]
            format_ = _Mds(path, index["shards"])
        else:
            return None
    except (IndexError, KeyError, TypeError):
        raise DataError(f"{path} is not an index of litdata or Streaming: copy it again") from None
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is missing, and {path} names it: copy it again")
    return files, format_


_FORMATS = {".bin": _Bin(), ".ds": _Datatrove(), ".npy": _Npy()}
