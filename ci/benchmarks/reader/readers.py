"""The readers: each an endless iterator of batches, and how to tell which rows a batch must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import nearlinear as nl
from nearlinear.data.format import Manifest, ShardWriter

VOCABULARY = 50_257
DOCUMENT = 1000
"""tokens of a document"""


def write(folder: Path, tokens: int, lengths: list[int]) -> None:
    """Random tokens as shards in ``folder``/shards, and as arrow rows of each length."""
    from datasets import Dataset

    ids = np.random.default_rng(0).integers(0, VOCABULARY - 1, tokens, dtype=np.uint16)
    ids[DOCUMENT - 1 :: DOCUMENT] = VOCABULARY - 1
    writer = ShardWriter(
        folder / "shards", "train", vocab_size=VOCABULARY, eos_id=VOCABULARY - 1,
        shard_tokens=tokens // 8,
    )  # fmt: skip
    for start in range(0, tokens, DOCUMENT):
        writer.add(ids[start : start + DOCUMENT - 1])
    tokenizer = {"name": "random", "file": "tokenizer/tokenizer.json", "sha256": "0"}
    Manifest(VOCABULARY, VOCABULARY - 1, tokenizer, {"train": writer.close()}).write(
        folder / "shards"
    )
    for length in lengths:
        rows = ids[: tokens // length * length].reshape(-1, length)
        made = Dataset.from_generator(
            lambda rows=rows: ({"input_ids": row} for row in rows.astype(np.int32)),
            cache_dir=str(folder / "cache"),
        )
        made.save_to_disk(str(folder / f"arrow-{length}"))


def dataset(folder: Path, length: int, **options) -> nl.TokenDataset:
    """The shards that `write` made."""
    return nl.TokenDataset(
        folder / "shards", sequence_length=length, verify="size", cache=folder / "cache", **options
    )


def nearlinear(folder: Path, length: int, batch: int, **options) -> Iterator[dict]:
    """What `nl.Trainer` reads with."""
    masks = nl.Masks(documents=options.pop("document_mask", False))
    loader = nl.Loader(
        dataset(folder, length, **options), batch, data_rank=0, data_ranks=1, masks=masks
    )
    return (step[0] for step in loader)


def arrow(folder: Path, length: int, batch: int) -> Iterator[dict]:
    """torch's DataLoader over an arrow dataset, shuffled, with its default collate."""
    from datasets import load_from_disk

    rows = load_from_disk(str(folder / f"arrow-{length}")).with_format("torch")
    while True:
        for found in torch.utils.data.DataLoader(rows, batch, shuffle=True, drop_last=True):
            yield found | {"labels": found["input_ids"].clone()}


def grain(folder: Path, length: int, batch: int) -> Iterator[dict]:
    """Grain's iterator over the same windows, without threads: they cost more than a map gives."""
    from grain import MapDataset, ReadOptions

    source = MapDataset.source(nl.data.GrainSource(dataset(folder, length)))
    options = ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = source.shuffle(seed=0).repeat().batch(batch).to_iter_dataset(options)
    for found in batches:
        yield {name: torch.from_numpy(array) for name, array in found.items()}


READERS: dict[str, Callable[..., Iterator[dict]]] = {
    "arrow, DataLoader": arrow,
    "Grain over the same windows": grain,
    "nearlinear": nearlinear,
    "nearlinear, documents masked": lambda *a: nearlinear(*a, document_mask=True),
    "nearlinear, best fit, masked": lambda *a: nearlinear(
        *a, packing="best_fit", document_mask=True
    ),
}
"""By name; rates are compared with the first one's."""


def check(folder: Path, length: int, batches: list[dict], packed: bool) -> None:
    """Raise AssertionError unless rows of ``batches`` are sequences of the tokens, none twice."""
    options = {"packing": "best_fit"} if packed else {}
    expected = dataset(folder, length, **options)
    known = {row.tobytes() for row in expected.windows(np.arange(len(expected)))}
    rows = np.concatenate([found["input_ids"].numpy() for found in batches])
    assert rows.dtype == np.int64 and rows.shape[1] == length
    seen = {row.tobytes() for row in rows}
    assert len(seen) == len(rows) and seen <= known
