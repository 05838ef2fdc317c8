"""Export a prepared folder to the file formats of other tools.

`nanogpt` is one file of ids each for train and val. `datatrove` is its `.ds` format with an index
of document ends. `litdata` has chunks that its `TokensLoader` cuts into rows of any length.
`smp-json`, `hf-arrow`, `mds` and `webdataset` have rows of a fixed length, consecutive windows of
the token stream, for the training scripts of SageMaker's model parallel library and of Hugging
Face, for MosaicML's Streaming, and for the webdataset library. Megatron-Core and OLMo-core open the
shards without an export.
"""

import io
import itertools
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from data_prep.arguments import FORMATS
from nearlinear.data.format import Manifest, read_index
from nearlinear.errors import DataError
from nearlinear.storage import require_local
from nearlinear.storage.local import abandoned_directories, atomic_directory

_ROWS_PER_FILE = 16_384
# litdata leaves out the tokens of a chunk that do not fill a row.
_TOKENS_PER_CHUNK = 2**25
_BYTES_PER_MDS_SHARD = 2**26

Writer = Callable[[Path, Path, Manifest, list[str], int], dict[str, int]]


def export(
    folder: str | Path, out: str | Path, kind: str, sequence_length: int = 512
) -> dict[str, int]:
    """Write the dataset at `folder` to the new folder `out`, atomically.

    Args:
        kind: One of `FORMATS`.
        sequence_length: Tokens per row of smp-json, hf-arrow, mds and webdataset.

    Returns:
        The number of rows or tokens written.

    Raises:
        DataError: `out` is not empty, or the format cannot hold the token ids.
    """
    if kind not in FORMATS:
        raise DataError(f"no format {kind!r}: use {', '.join(FORMATS)}")
    if sequence_length < 1:
        raise DataError(f"sequence_length is {sequence_length}: give at least 1")
    folder, out = require_local(folder), Path(os.path.abspath(require_local(out)))
    manifest = Manifest.read(folder)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(
            f"{out} exists and is not an empty folder: name another folder, or remove it"
        )
    if manifest.marks_targets:
        raise DataError(
            f"{folder} holds conversations, of which only some tokens are targets: no other format "
            "here records them, and another tool would train on all; export the original files"
        )
    if kind == "nanogpt" and manifest.dtype.itemsize != 2:
        raise DataError(
            f"nanoGPT reads ids of 2 bytes, but a vocabulary of {manifest.vocab_size} needs 4: "
            "choose another format"
        )
    writers: dict[str, Writer] = {
        "smp-json": _smp_json,
        "hf-arrow": _hf_arrow,
        "nanogpt": _nanogpt,
        "datatrove": _datatrove,
        "litdata": _litdata,
        "mds": _mds,
        "webdataset": _webdataset,
    }
    subsets = [subset for subset in manifest.splits if manifest.splits[subset]]
    for stale in abandoned_directories(out.parent):
        if stale.name.startswith(f"{out.name}."):
            shutil.rmtree(stale, ignore_errors=True)
    with atomic_directory(out) as work:
        return writers[kind](folder, work, manifest, subsets, sequence_length)


def windows(folder: Path, manifest: Manifest, subset: str, length: int) -> Iterator[np.ndarray]:
    """Yield the tokens of train or val as windows: [some windows, length] at a time.

    Tokens at the end that do not fill a window are left out.
    """
    rest = np.empty(0, manifest.dtype)
    for shard in manifest.splits[subset]:
        tokens = np.memmap(folder / shard.file, dtype=manifest.dtype, mode="r")
        step = max(1024 * 1024 // length, 1) * length
        for start in range(0, len(tokens), step):
            part = np.concatenate([rest, tokens[start : start + step]])
            end = len(part) // length * length
            rest = part[end:]
            if end:
                yield part[:end].reshape(-1, length)


def _rows_of_files(
    folder: Path, manifest: Manifest, subset: str, length: int
) -> Iterator[Iterator[np.ndarray]]:
    """Yield the windows of each file of 16,384 rows, to be read before those of the next."""
    rows = itertools.chain.from_iterable(windows(folder, manifest, subset, length))
    for _ in range(0, manifest.total("tokens", subset) // length, _ROWS_PER_FILE):
        yield itertools.islice(rows, _ROWS_PER_FILE)


def _smp_json(
    folder: Path, out: Path, manifest: Manifest, subsets: list[str], length: int
) -> dict[str, int]:
    """Write rows of `input_ids` and `attention_mask`, in files of 16,384 rows."""
    ones = json.dumps([1] * length)
    count = 0
    for subset in subsets:
        target = out / subset
        target.mkdir()
        for number, rows in enumerate(_rows_of_files(folder, manifest, subset, length)):
            name = f"{subset}_dataset_{length}_filtered_{number}.json"
            with open(target / name, "w", encoding="utf-8") as file:
                for row in rows:
                    file.write(f'{{"input_ids":{row.tolist()},"attention_mask":{ones}}}\n')
                    count += 1
    return {"rows": count}


def _hf_arrow(
    folder: Path, out: Path, manifest: Manifest, subsets: list[str], length: int
) -> dict[str, int]:
    """Write a `DatasetDict` for `load_from_disk`: input_ids, attention_mask, labels."""
    import pyarrow as pa
    from datasets import Dataset, DatasetDict

    names = {"train": "train", "val": "validation"}
    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "attention_mask": pa.list_(pa.int8()),
                        "labels": pa.list_(pa.int32())})  # fmt: skip
    with tempfile.TemporaryDirectory(dir=out) as work:
        found = DatasetDict()
        for subset in subsets:
            path = str(Path(work, f"{subset}.arrow"))
            with pa.ipc.new_stream(path, schema) as stream:
                for rows in windows(folder, manifest, subset, length):
                    ends = np.arange(0, rows.size + 1, length, dtype=np.int32)
                    ids = pa.ListArray.from_arrays(ends, rows.astype(np.int32).reshape(-1))
                    ones = pa.ListArray.from_arrays(ends, np.ones(rows.size, np.int8))
                    stream.write_batch(pa.record_batch([ids, ones, ids], schema=schema))
            found[names[subset]] = Dataset.from_file(path)
        found.save_to_disk(out)
        rows = sum(map(len, found.values()))
        found.clear()
    return {"rows": rows}


def _nanogpt(
    folder: Path, out: Path, manifest: Manifest, subsets: list[str], length: int
) -> dict[str, int]:
    """Write `train.bin` and `val.bin`: the concatenated shards."""
    for subset in subsets:
        with open(out / f"{subset}.bin", "wb") as file:
            for shard in manifest.splits[subset]:
                _append(file, folder / shard.file)
    return {"tokens": manifest.total("tokens")}


def _datatrove(
    folder: Path, out: Path, manifest: Manifest, subsets: list[str], length: int
) -> dict[str, int]:
    """Write `.ds` (ids) and `.ds.index` (ends of documents) for each shard."""
    count = 0
    for subset in subsets:
        target = out / subset
        target.mkdir()
        for number, shard in enumerate(manifest.splits[subset]):
            name = f"{number:05d}_{subset}.ds"
            with open(target / name, "wb") as file:
                _append(file, folder / shard.file)
            ends = np.cumsum(read_index(folder, shard, manifest.dtype), dtype="<u8")
            (target / f"{name}.index").write_bytes(ends.tobytes())
            header = f"{manifest.tokenizer['name']}|{manifest.dtype.itemsize}"
            (target / f"{name}.metadata").write_text(f"{header}\n{shard.tokens}\n")
            count += shard.tokens
    return {"tokens": count}


def _litdata(
    folder: Path, out: Path, manifest: Manifest, subsets: list[str], length: int
) -> dict[str, int]:
    """Write chunks of one item: the number of items, its offsets (uint32), and the ids."""
    dtype = {2: "no_header_tensor:20", 4: "no_header_tensor:15"}[manifest.dtype.itemsize]
    config = {"chunk_bytes": _TOKENS_PER_CHUNK * manifest.dtype.itemsize, "chunk_size": None,
              "compression": None, "data_format": [dtype], "encryption": None,
              "data_spec": '[1, {"type": null, "context": null, "children_spec": []}]',
              "item_loader": "TokensLoader"}  # fmt: skip
    for subset in subsets:
        target, chunks = out / subset, []
        target.mkdir()
        for shard in manifest.splits[subset]:
            tokens = np.memmap(folder / shard.file, dtype=manifest.dtype, mode="r")
            for start in range(0, len(tokens), _TOKENS_PER_CHUNK):
                part = tokens[start : start + _TOKENS_PER_CHUNK]
                header = np.array([1, 12, 12 + part.nbytes], "<u4")
                name = f"chunk-0-{len(chunks)}.bin"
                with open(target / name, "wb") as file:
                    header.tofile(file)
                    part.tofile(file)
                chunks.append({"chunk_bytes": int(header[2]), "chunk_size": 1, "dim": len(part),
                               "filename": name})  # fmt: skip
        index = json.dumps({"chunks": chunks, "config": config})
        (target / "index.json").write_text(index, encoding="utf-8")
    return {"tokens": manifest.total("tokens")}


def _mds(
    folder: Path, out: Path, manifest: Manifest, subsets: list[str], length: int
) -> dict[str, int]:
    """Write shards of rows with one column `tokens`, each an array of NumPy.

    A shard is the number of rows and the offsets of the rows (uint32), its description, the rows.
    """
    row_bytes = length * manifest.dtype.itemsize
    described = {"version": 2, "format": "mds", "compression": None, "hashes": [],
                 "size_limit": _BYTES_PER_MDS_SHARD, "column_names": ["tokens"],
                 "column_encodings": [f"ndarray:{manifest.dtype.name}:{length}"],
                 "column_sizes": [row_bytes]}  # fmt: skip
    words = json.dumps(described).encode()
    most = max(1, _BYTES_PER_MDS_SHARD // (row_bytes + 4))
    written = 0
    for subset in subsets:
        target, shards = out / subset, []
        target.mkdir()
        total = manifest.total("tokens", subset) // length
        blocks = windows(folder, manifest, subset, length)
        rows = np.empty((0, length), manifest.dtype)
        for first in range(0, total, most):
            left = count = min(most, total - first)
            offsets = np.arange(count + 1) * row_bytes + 4 * (count + 2) + len(words)
            name = f"shard.{len(shards):05d}.mds"
            with open(target / name, "wb") as file:
                np.array([count, *offsets], "<u4").tofile(file)
                file.write(words)
                while left:
                    rows = rows if len(rows) else next(blocks)
                    part, rows = rows[:left], rows[left:]
                    part.tofile(file)
                    left -= len(part)
            raw = {"basename": name, "bytes": int(offsets[-1]), "hashes": {}}
            shards.append({**described, "samples": count, "raw_data": raw, "zip_data": None})
        written += total
        index = json.dumps({"version": 2, "shards": shards})
        (target / "index.json").write_text(index, encoding="utf-8")
    return {"rows": written}


def _webdataset(
    folder: Path, out: Path, manifest: Manifest, subsets: list[str], length: int
) -> dict[str, int]:
    """Write archives of 16,384 samples with one member `tokens.npy`, an array of NumPy."""
    written = 0
    for subset in subsets:
        target = out / subset
        target.mkdir()
        for number, rows in enumerate(_rows_of_files(folder, manifest, subset, length)):
            with tarfile.open(target / f"{number:05d}.tar", "w") as archive:
                for row in rows:
                    content = io.BytesIO()
                    np.save(content, row, allow_pickle=False)
                    member = tarfile.TarInfo(f"{written:010d}.tokens.npy")
                    member.size = content.tell()
                    content.seek(0)
                    archive.addfile(member, content)
                    written += 1
    return {"rows": written}


def _append(file: IO[bytes], path: Path) -> None:
    with open(path, "rb") as source:
        shutil.copyfileobj(source, file, 1 << 22)
