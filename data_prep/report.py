"""What is in a folder of token shards, in text: a summary, document lengths, the first document.

Reads the folder alone: the tokenizer that decodes a document is the one beside the shards.
"""

from pathlib import Path

import numpy as np

from data_prep.tokenizer import TextTokenizer
from nearlinear.data.format import SPLITS, Manifest, read_index

_BAR_WIDTH = 40
_SHOWN_CHARACTERS = 600


def summary(folder: str | Path) -> str:
    """Documents, tokens, bytes per token, shards, origin and the next command, as text."""
    folder, manifest = Path(folder), Manifest.read(folder)
    rows = [f"{manifest.source.get('name', '?')} -> {folder}"]
    for split in SPLITS:
        shards = manifest.splits[split]
        rows.append(
            f"  {split:<5} {manifest.total('documents', split):>12,} documents "
            f"{manifest.total('tokens', split):>15,} tokens  {len(shards)} shard"
            + ("s" if len(shards) != 1 else "")
        )
    tokens = manifest.total("tokens")
    size = f"{manifest.total('bytes') / 1e6:.1f} MB on disk as {manifest.dtype.name}"
    text_bytes = manifest.source.get("text_bytes", 0)
    rows.append(f"  {text_bytes / tokens:.2f} bytes of text per token, {size}")
    rows.append(
        f"  tokenizer {manifest.tokenizer['name']}, fingerprint {manifest.fingerprint[:12]}"
    )
    rows.append(f"look inside: python -m data_prep inspect {folder}")
    rows.append(f"train on it: nearlinear train --set data.path={folder}")
    return "\n".join(rows)


def inspect(folder: str | Path) -> str:
    """The summary's counts, a histogram of document lengths, and the first document decoded."""
    folder = Path(folder)
    lines = summary(folder).splitlines()[:-1]
    lengths = document_lengths(folder)
    lines += ["", "tokens per document (end-of-text counted), all splits", *histogram(lengths)]
    first = first_document(folder)
    shown = first[:_SHOWN_CHARACTERS]
    lines += ["", "first document of train", "", shown]
    if len(first) > len(shown):
        lines += ["", f"... and {len(first) - len(shown):,} more characters"]
    return "\n".join(lines)


def document_lengths(folder: str | Path) -> np.ndarray:
    """Tokens per document over all splits, int64 [documents], EOS counted."""
    manifest = Manifest.read(folder)
    shards = [shard for split in manifest.splits.values() for shard in split]
    lengths = [read_index(folder, shard, manifest.dtype) for shard in shards]
    return np.concatenate(lengths).astype(np.int64)


def histogram(lengths: np.ndarray) -> list[str]:
    """One line per power of two: the range, a bar, the count, the share of documents."""
    powers = np.frexp(lengths)[1] - 1  # floor(log2), exactly
    counts = np.bincount(powers)
    lines = []
    for power in range(int(powers.min()), len(counts)):
        bar = "#" * round(_BAR_WIDTH * counts[power] / counts.max())
        low, high = 2**power, 2 ** (power + 1) - 1
        share = 100 * counts[power] / len(lengths)
        span = f"  {low:>9,} - {high:<9,} {bar:<{_BAR_WIDTH}}"
        lines.append(f"{span} {counts[power]:>10,} {share:5.1f} %")
    lines.append(
        f"  mean {lengths.mean():,.0f}, median {np.median(lengths):,.0f}, "
        f"longest {lengths.max():,} tokens"
    )
    return lines


def first_document(folder: str | Path) -> str:
    """The first document of split "train" as text, decoded by the tokenizer beside the shards."""
    folder, manifest = Path(folder), Manifest.read(folder)
    shard = manifest.splits["train"][0]
    count = int(read_index(folder, shard, manifest.dtype)[0])
    ids = np.fromfile(folder / shard.file, dtype=manifest.dtype, count=count)
    text = (folder / manifest.tokenizer["file"]).read_bytes().decode("utf-8")
    return TextTokenizer(manifest.tokenizer["name"], text, "").decode(ids[:-1])
