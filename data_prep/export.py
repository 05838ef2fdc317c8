"""A prepared folder as other tools read it: their files, with the tokens that are in ours.

`nanogpt` is one file of ids per side, `datatrove` its `.ds` with the ends of documents beside it;
`smp-json` and `hf-arrow` have rows of a fixed length, windows of the stream, as the training
scripts of SageMaker's model parallel library and of Hugging Face expect them. Megatron-Core opens
our shards as they are.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from data_prep.arguments import FORMATS
from data_prep.places import on_disk
from nearlinear.data.format import Manifest, read_index
from nearlinear.errors import DataError
from nearlinear.storage.folders import making

_ROWS_PER_FILE = 16_384


def export(
    folder: str | Path, out: str | Path, kind: str, sequence_length: int = 512
) -> dict[str, int]:
    """Write the dataset at `folder` to the new folder `out`; how many of what it wrote.

    `kind` is one of smp-json, hf-arrow, nanogpt, datatrove. Whatever interrupts, `out` is complete
    or not there. Raises `DataError` when it has something in it, or the other format cannot hold
    the ids.
    """
    if kind not in FORMATS:
        raise DataError(f"no format {kind!r}: use {', '.join(FORMATS)}")
    if sequence_length < 1:
        raise DataError(f"sequence_length is {sequence_length}: give at least 1")
    folder, out = on_disk(folder), Path(os.path.abspath(on_disk(out)))
    manifest = Manifest.read(folder)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out} exists and is not an empty folder: name another, or remove it")
    if kind == "nanogpt" and manifest.dtype.itemsize != 2:
        raise DataError(
            f"nanoGPT reads ids of 2 bytes, and {manifest.vocab_size} entries need 4: export "
            "another format"
        )
    writers: dict[str, Callable] = {
        "smp-json": _smp_json,
        "hf-arrow": _hf_arrow,
        "nanogpt": _nanogpt,
        "datatrove": _datatrove,
    }
    sides = [side for side in manifest.splits if manifest.splits[side]]
    with making(out) as work:
        return writers[kind](folder, work, manifest, sides, sequence_length)


def windows(folder: Path, manifest: Manifest, side: str, length: int) -> Iterator[np.ndarray]:
    """The stream of a side in windows of `length` tokens, [some windows, length] at a time.

    What does not fill a window at the end is left out.
    """
    rest = np.empty(0, manifest.dtype)
    for shard in manifest.splits[side]:
        tokens = np.memmap(folder / shard.file, dtype=manifest.dtype, mode="r")
        step = max(1024 * 1024 // length, 1) * length
        for start in range(0, len(tokens), step):
            piece = np.concatenate([rest, tokens[start : start + step]])
            whole = len(piece) // length * length
            rest = piece[whole:]
            if whole:
                yield piece[:whole].reshape(-1, length)


def _smp_json(folder, out, manifest, sides, length) -> dict[str, int]:
    """Rows of `input_ids` and `attention_mask`, files of 16,384 rows in a folder per side."""
    ones = json.dumps([1] * length)
    count = 0
    for side in sides:
        place = out / side
        place.mkdir()
        number, left, file = 0, 0, None
        for rows in windows(folder, manifest, side, length):
            for row in rows.tolist():
                if not left:
                    if file is not None:
                        file.close()
                    name = f"{side}_dataset_{length}_filtered_{number}.json"
                    file = open(place / name, "w", encoding="utf-8")
                    number, left = number + 1, _ROWS_PER_FILE
                file.write(f'{{"input_ids":{row},"attention_mask":{ones}}}\n')
                left, count = left - 1, count + 1
        if file is not None:
            file.close()
    return {"rows": count}


def _hf_arrow(folder, out, manifest, sides, length) -> dict[str, int]:
    """A `DatasetDict` for `load_from_disk`: input_ids, attention_mask and labels of each row."""
    import pyarrow as pa
    from datasets import Dataset, DatasetDict

    names = {"train": "train", "val": "validation"}
    schema = pa.schema({"input_ids": pa.list_(pa.int32()), "attention_mask": pa.list_(pa.int8()),
                        "labels": pa.list_(pa.int32())})  # fmt: skip
    with tempfile.TemporaryDirectory(dir=out) as place:
        found = DatasetDict()
        for side in sides:
            path = str(Path(place, f"{side}.arrow"))
            with pa.ipc.new_stream(path, schema) as stream:
                for rows in windows(folder, manifest, side, length):
                    ends = np.arange(0, rows.size + 1, length, dtype=np.int32)
                    ids = pa.ListArray.from_arrays(ends, rows.astype(np.int32).reshape(-1))
                    ones = pa.ListArray.from_arrays(ends, np.ones(rows.size, np.int8))
                    stream.write_batch(pa.record_batch([ids, ones, ids], schema=schema))
            found[names[side]] = Dataset.from_file(path)
        found.save_to_disk(out)
        rows = sum(map(len, found.values()))
        found.clear()
    return {"rows": rows}


def _nanogpt(folder, out, manifest, sides, length) -> dict[str, int]:
    """`train.bin` and `val.bin`: the payloads one after another."""
    for side in sides:
        with open(out / f"{side}.bin", "wb") as file:
            for shard in manifest.splits[side]:
                _append(file, folder / shard.file)
    return {"tokens": manifest.total("tokens")}


def _datatrove(folder, out, manifest, sides, length) -> dict[str, int]:
    """`.ds` and `.ds.index` for each shard, in a folder per side: ids, and ends of documents."""
    count = 0
    for side in sides:
        place = out / side
        place.mkdir()
        for number, shard in enumerate(manifest.splits[side]):
            name = f"{number:05d}_{side}.ds"
            with open(place / name, "wb") as file:
                _append(file, folder / shard.file)
            ends = np.cumsum(read_index(folder, shard, manifest.dtype), dtype="<u8")
            (place / f"{name}.index").write_bytes(ends.tobytes())
            words = f"{manifest.tokenizer['name']}|{manifest.dtype.itemsize}"
            (place / f"{name}.metadata").write_text(f"{words}\n{shard.tokens}\n")
            count += shard.tokens
    return {"tokens": count}


def _append(file, path: Path) -> None:
    with open(path, "rb") as source:
        while piece := source.read(1 << 22):
            file.write(piece)
