"""What is in a folder of token shards: in text, and as a page with figures.

Reads the folder, or the prefix of a bucket, alone: the tokenizer that decodes a document is the one
beside the shards.
"""

import base64
import html
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep import places
from data_prep.statistics import WAYS
from data_prep.tokenizer import TextTokenizer
from nearlinear.data.format import SPLITS, Manifest, read_index
from nearlinear.errors import DataError

_BAR_WIDTH = 40
_SHOWN_CHARACTERS = 600
_SHOWN_INPUTS = 20


def summary(folder: str | Path) -> str:
    """Documents, tokens, bytes per token, shards, origin and the next command, as text."""
    manifest = Manifest.read(folder)
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
    again = manifest.statistics.get("duplicates", {}).get("documents", 0)
    if again:
        dropped = "dropped" if manifest.settings.get("dedup") else "kept; --dedup exact drops them"
        rows.append(f"  {again:,} documents are exact duplicates, {dropped}")
    rows.append(f"look inside: python -m data_prep inspect {folder}")
    rows.append(f"train on it: nearlinear train --set data.path={folder}")
    return "\n".join(rows)


def inspect(folder: str | Path) -> str:
    """The summary's counts, a histogram of document lengths, and the first document decoded."""
    lines = summary(folder).splitlines()[:-1]
    lengths = document_lengths(folder)
    lines += ["", "tokens per document (end-of-text counted), all splits", *histogram(lengths)]
    first = first_document(folder)
    shown = first[:_SHOWN_CHARACTERS]
    lines += ["", "first document of train", "", shown]
    if len(first) > len(shown):
        lines += ["", f"... and {len(first) - len(shown):,} more characters"]
    return "\n".join(lines)


def facts(folder: str | Path) -> dict:
    """What `inspect` says, for programs: counts by split, tokens per document, the first one."""
    manifest, lengths = Manifest.read(folder), document_lengths(folder)
    return {
        "fingerprint": manifest.fingerprint,
        "splits": {side: {"documents": manifest.total("documents", side),
                          "tokens": manifest.total("tokens", side),
                          "shards": len(manifest.splits[side])} for side in SPLITS},
        "lengths": {"mean": float(lengths.mean()), "median": float(np.median(lengths)),
                    "longest": int(lengths.max())},
        "first_document": first_document(folder),
    }  # fmt: skip


def stats(folder: str | Path) -> str:
    """The manifest's statistics as text: sizes, duplicates, lengths, kept tokens, inputs."""
    manifest = Manifest.read(folder)
    found = _statistics(manifest)
    again = found["duplicates"]
    share = again["tokens"] / max(found["tokens"], 1)
    lines = [
        f"{folder}: {found['documents']:,} documents, {found['tokens']:,} tokens, "
        f"{found['text_bytes'] / 1e6:,.1f} MB of text",
        f"  {found['text_bytes'] / found['tokens']:.2f} bytes per token, longest document "
        f"{found['longest']:,} tokens",
        f"  exact duplicates: {again['documents']:,} documents, {again['tokens']:,} tokens "
        f"({share:.1%})" + (", dropped" if manifest.settings.get("dedup") else ""),
        *_dropped(found),
        "",
        "tokens of train that are kept, by sequence length and packing",
        "  length" + "".join(f"{way:>14}" for way in WAYS),
    ]
    train = found["kept"]["train"]
    for length, kept in train["lengths"].items():
        shares = (f"{kept[way] / train['tokens']:>14.2%}" for way in WAYS)
        lines.append(f"  {length:>6}" + "".join(shares))
    inputs = manifest.plan.get("inputs", [])
    if inputs:
        lines += ["", "inputs"]
        lines += [f"  {file['path']}: {file['documents']:,} documents, {file['tokens']:,} tokens"
                  for file in inputs[:_SHOWN_INPUTS]]  # fmt: skip
    if len(inputs) > _SHOWN_INPUTS:
        lines.append(f"  and {len(inputs) - _SHOWN_INPUTS} more files")
    return "\n".join(lines)


def _dropped(found: dict) -> Iterator[str]:
    """Lines on what filters and near-duplicates took out, when they did."""
    alike = found["near_duplicates"]
    if alike["documents"]:
        yield (f"  near-duplicates: {alike['documents']:,} documents, {alike['tokens']:,} tokens, "
               "dropped")  # fmt: skip
    if found["filtered"]:
        yield f"  filtered: {sum(found['filtered'].values()):,} documents"
    for why, count in sorted(found["filtered"].items(), key=lambda item: -item[1]):
        yield f"    {count:>10,} {why}"


def write_page(folder: str | Path, path: str | Path) -> None:
    """Write the statistics of a dataset and its figures as one HTML file.

    Raises `DataError` without matplotlib.
    """
    try:
        from data_prep import figures
    except ModuleNotFoundError:
        raise DataError(
            "the figures of a report need matplotlib: run `pip install matplotlib`, or leave out "
            "--report"
        ) from None
    parts = [f"<h1>{html.escape(str(folder))}</h1>"]
    parts.append(f"<pre>{html.escape(summary(folder))}\n\n{html.escape(stats(folder))}</pre>")
    for title, figure in figures.all_of(folder).items():
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=110)
        image = base64.b64encode(drawn.getvalue()).decode()
        parts.append(
            f"<h2>{html.escape(title)}</h2><img alt='' src='data:image/png;base64,{image}'>"
        )
    style = "body{font-family:sans-serif;max-width:60em;margin:2em auto}img{max-width:100%}"
    page = f"<!doctype html><meta charset='utf-8'><title>Report</title><style>{style}</style>"
    Path(path).write_text(page + "\n".join(parts), encoding="utf-8")


def _statistics(manifest: Manifest) -> dict:
    if not manifest.statistics:
        raise DataError("the dataset has no statistics: prepare it again with --overwrite")
    return manifest.statistics


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
    place, manifest = places.at(folder), Manifest.read(folder)
    shard = manifest.splits["train"][0]
    count = int(read_index(place, shard, manifest.dtype)[0])
    raw = b"".join((place / shard.file).stream(0, count * manifest.dtype.itemsize))
    ids = np.frombuffer(raw, manifest.dtype)
    text = (place / manifest.tokenizer["file"]).read().decode("utf-8")
    return TextTokenizer(manifest.tokenizer["name"], text, "").decode(ids[:-1])
