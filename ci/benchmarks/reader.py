"""Throughput of training data readers on the same tokens, and the time to their first batch.

    python -m ci.benchmarks.reader --lengths 512 2048
    python -m ci.benchmarks.reader --start             time to first batch of ten billion tokens

The same tokens are stored as token shards, as one file, as an Arrow dataset and as chunks of
litdata (left out unless installed: ``pip install litdata``). Readers run in turn, one round each,
so that other load affects all of them equally. Rates are per CPU second. Batches are checked
against the stored tokens before anything is timed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import nearlinear as nl
from ci.benchmarks import reader_start
from nearlinear.data.format import Manifest, ShardWriter

WARM_UP = 0.3  # seconds, untimed
VOCABULARY = 50_257
DOCUMENT_TOKENS = 1000


@dataclass(frozen=True)
class Result:
    """Result of one reader at one sequence length."""

    length: int
    reader: str
    tokens_per_s: float
    """Tokens per CPU second, median of the rounds."""
    ratio: float
    """Rate relative to the first reader."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ci.benchmarks.reader",
        description="Measure the throughput of data readers, or their time to the first batch.",
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batch", type=int, default=8, help="sequences (default: %(default)s)")
    parser.add_argument("--start", action="store_true", help="measure the time to the first batch")
    parser.add_argument(
        "--tokens", type=int, help="(default: 40,000,000; with --start 10,000,000,000, sparse)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="CPU seconds of a round (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON per reader")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="reader-") as name:
        folder = Path(name)
        if options.start:
            reader_start.report(folder, options.tokens or 10**10, options.lengths, options.json)
            return 0
        write_data(folder, options.tokens or 40_000_000, options.lengths)
        for length in options.lengths:
            for found in measure(folder, length, options):
                print(
                    json.dumps(asdict(found)) if options.json else format_result(found), flush=True
                )
    return 0


def measure(folder: Path, length: int, options) -> list[Result]:
    """Measure every reader at one sequence length."""
    iterators = {
        name: make(folder, length, options.batch)
        for name, make in READERS.items()
        if name != "litdata" or importlib.util.find_spec("litdata")
    }
    for name, batches in iterators.items():
        sample = list(itertools.islice(batches, 20))
        check_batches(folder, length, sample, packed="best fit" in name)
        rate(batches, WARM_UP)
    rates: dict[str, list[float]] = {name: [] for name in iterators}
    for _ in range(options.rounds):
        for name, batches in iterators.items():
            rates[name].append(rate(batches, options.seconds))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    first = next(iter(medians.values()))
    return [Result(length, name, each, each / first) for name, each in medians.items()]


def rate(batches: Iterator[dict], seconds: float) -> float:
    """Return tokens per second of CPU time."""
    tokens, begin = 0, time.process_time()
    while (taken := time.process_time() - begin) < seconds:
        tokens += next(batches)["input_ids"].numel()
    return tokens / taken


def format_result(result: Result) -> str:
    rate = f"{result.tokens_per_s / 1e6:8.1f} Mtok/s"
    return f"{result.length:6} {result.reader:30} {rate}  {result.ratio:6.2f} x"


def write_data(folder: Path, tokens: int, lengths: list[int]) -> None:
    """Write random tokens to ``folder``: as shards, one file, and Arrow rows of each length."""
    from datasets import Dataset

    ids = np.random.default_rng(0).integers(0, VOCABULARY - 1, tokens, dtype=np.uint16)
    ids[DOCUMENT_TOKENS - 1 :: DOCUMENT_TOKENS] = VOCABULARY - 1
    ids.tofile(folder / "tokens.bin")
    writer = ShardWriter(
        folder / "shards", "train", vocab_size=VOCABULARY, eos_id=VOCABULARY - 1,
        shard_tokens=tokens // 8,
    )  # fmt: skip
    for start in range(0, tokens, DOCUMENT_TOKENS):
        writer.add(ids[start : start + DOCUMENT_TOKENS - 1])
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


def dataset(folder: Path, length: int, **options) -> nl.data.TokenDataset:
    """Open the shards written by `write_data`."""
    return nl.data.TokenDataset(
        folder / "shards", sequence_length=length, verify="size", cache=folder / "cache", **options
    )


def nearlinear(folder: Path, length: int, batch: int, **options) -> Iterator[dict]:
    """Read as `nl.Trainer` does."""
    masks = nl.data.Masks(documents=options.pop("document_mask", False))
    loader = nl.data.Loader(
        dataset(folder, length, **options), batch, data_rank=0, data_ranks=1, masks=masks
    )
    return (step[0] for step in loader)


def arrow(folder: Path, length: int, batch: int) -> Iterator[dict]:
    """Read an Arrow dataset through torch's DataLoader, shuffled, with default collation."""
    from datasets import load_from_disk

    rows = load_from_disk(str(folder / f"arrow-{length}")).with_format("torch")
    while True:
        for found in torch.utils.data.DataLoader(rows, batch, shuffle=True, drop_last=True):
            yield found | {"labels": found["input_ids"].clone()}


def grain(folder: Path, length: int, batch: int) -> Iterator[dict]:
    """Read the same windows through Grain, without threads, which are slower here."""
    from grain import MapDataset, ReadOptions

    source = MapDataset.source(nl.data.GrainSource(dataset(folder, length)))
    options = ReadOptions(num_threads=0, prefetch_buffer_size=0)
    batches = source.shuffle(seed=0).repeat().batch(batch).to_iter_dataset(options)
    for found in batches:
        yield {name: torch.from_numpy(array) for name, array in found.items()}


class _Windows(torch.utils.data.Dataset):
    """Windows of a memory-mapped file of tokens."""

    def __init__(self, path: Path, length: int):
        self.tokens, self.length = np.memmap(path, np.uint16, "r"), length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * self.length : (index + 1) * self.length]
        ids = torch.from_numpy(window.astype(np.int64))
        return {"input_ids": ids, "labels": ids}


def memory_map(folder: Path, length: int, batch: int) -> Iterator[dict]:
    """Read a file of all tokens through torch's DataLoader, shuffled."""
    while True:
        yield from torch.utils.data.DataLoader(
            _Windows(folder / "tokens.bin", length), batch, shuffle=True, drop_last=True
        )


def litdata(folder: Path, length: int, batch: int) -> Iterator[dict]:
    """Read chunks of litdata, shuffled. It has no labels, and keeps the dtype int32 of its file."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize
    from litdata.streaming.item_loader import TokensLoader

    chunks = folder / "litdata"
    if not chunks.exists():
        count = (folder / "tokens.bin").stat().st_size // 2
        starts = range(0, count, LITDATA_ITEM)
        optimize(
            functools.partial(_litdata_item, folder / "tokens.bin"), list(starts), str(chunks),
            chunk_size=4 * LITDATA_ITEM, item_loader=TokensLoader(), num_workers=1,
        )  # fmt: skip
    rows = StreamingDataset(
        str(chunks), item_loader=TokensLoader(block_size=length), shuffle=True, drop_last=True
    )
    while True:
        for ids in StreamingDataLoader(rows, batch_size=batch, num_workers=0):
            yield {"input_ids": ids}


LITDATA_ITEM = 2**20
"""Tokens of an item that litdata writes: a multiple of the lengths, as windows begin in chunks."""


def _litdata_item(path: Path, start: int) -> Iterator[torch.Tensor]:
    ids = np.fromfile(path, np.uint16, LITDATA_ITEM, offset=2 * start)
    yield torch.from_numpy(ids.astype(np.int32))


READERS: dict[str, Callable[..., Iterator[dict]]] = {
    "memory map, DataLoader": memory_map,
    "arrow, DataLoader": arrow,
    "litdata": litdata,
    "Grain over the same windows": grain,
    "nearlinear": nearlinear,
    "nearlinear, documents masked": lambda *a: nearlinear(*a, document_mask=True),
    "nearlinear, best fit, masked": lambda *a: nearlinear(
        *a, packing="best_fit", document_mask=True
    ),
}
"""Readers by name; the first is the baseline."""


def check_batches(folder: Path, length: int, batches: list[dict], packed: bool) -> None:
    """Raise AssertionError unless all rows are distinct sequences of the stored tokens."""
    options = {"packing": "best_fit"} if packed else {}
    expected = dataset(folder, length, **options)
    known = {row.tobytes() for row in expected.windows(np.arange(len(expected)))}
    rows = np.concatenate([found["input_ids"].numpy() for found in batches])
    assert rows.dtype in (np.int64, np.int32) and rows.shape[1] == length
    seen = {row.tobytes() for row in rows.astype(np.int64)}
    assert len(seen) == len(rows) and seen <= known


if __name__ == "__main__":
    raise SystemExit(main())
