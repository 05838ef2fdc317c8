"""Describe a folder of token shards as text, as an HTML page, and as matplotlib figures.

Everything is read from the folder or bucket prefix alone; documents are decoded by the tokenizer
beside the shards.
"""

import base64
import html
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.lookup import why
from data_prep.merge import PACKING_METHODS
from data_prep.provenance import describe_table
from data_prep.resume import read_history
from data_prep.storage_paths import absolute_path
from data_prep.tokenizer import tokenizer_of
from nearlinear.data.format import SPLITS, Manifest, read_index
from nearlinear.errors import DataError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR_WIDTH = 40
_SHOWN_CHARACTERS = 600
_SHOWN_INPUTS = 20
_PACKING_LABELS = {
    "concat": "concat: windows of the stream",
    "best_fit": "best_fit: whole documents, packed",
    "one_document": "one_document: padded",
    "truncate": "truncate: documents that fill a window, cut",
}


def summary(folder: str | Path) -> str:
    """Return documents, tokens, bytes per token, shards, origin and the next commands as text."""
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
    duplicates = manifest.statistics.get("duplicates", {}).get("documents", 0)
    if duplicates:
        dropped = "dropped" if manifest.settings.get("dedup") else "kept; --dedup exact drops them"
        rows.append(f"  {duplicates:,} documents are exact duplicates, {dropped}")
    rows.append(f"look inside: nearlinear data inspect {folder}")
    rows.append(f"train on it: nearlinear train --set data.path={folder}")
    return "\n".join(rows)


def inspect(folder: str | Path) -> str:
    """Return the summary, a histogram of document lengths, and the first document as text."""
    lines = summary(folder).splitlines()[:-1]
    lengths = document_lengths(folder)
    lines += ["", "tokens per document (end-of-text counted), all splits", *histogram(lengths)]
    first = first_document(folder)
    shown = first[:_SHOWN_CHARACTERS]
    lines += ["", f"first document of train{_origin_of_first(folder)}", "", shown]
    if len(first) > len(shown):
        lines += ["", f"... and {len(first) - len(shown):,} more characters"]
    return "\n".join(lines)


def _origin_of_first(folder: str | Path) -> str:
    """Return where the first document of train came from, if the dataset knows it."""
    if describe_table(Manifest.read(folder)) is None:
        return ""
    origin = why(folder, "train:1")
    return f", from {origin.input}:{origin.number}"


def inspect_json(folder: str | Path) -> dict[str, Any]:
    """Return the content of `inspect` for programs."""
    manifest, lengths = Manifest.read(folder), document_lengths(folder)
    return {
        "fingerprint": manifest.fingerprint,
        "splits": {split: {"documents": manifest.total("documents", split),
                           "tokens": manifest.total("tokens", split),
                           "shards": len(manifest.splits[split])} for split in SPLITS},
        "lengths": {"mean": float(lengths.mean()), "median": float(np.median(lengths)),
                    "longest": int(lengths.max())},
        "first_document": first_document(folder),
    }  # fmt: skip


def stats(folder: str | Path) -> str:
    """Return the manifest's statistics as text: sizes, duplicates, packing, inputs."""
    manifest = Manifest.read(folder)
    found = _statistics(manifest)
    duplicates = found["duplicates"]
    share = duplicates["tokens"] / max(found["tokens"], 1)
    lines = [
        f"{folder}: {found['documents']:,} documents, {found['tokens']:,} tokens, "
        f"{found['text_bytes'] / 1e6:,.1f} MB of text",
        f"  {found['text_bytes'] / found['tokens']:.2f} bytes per token, longest document "
        f"{found['longest']:,} tokens",
        f"  exact duplicates: {duplicates['documents']:,} documents, {duplicates['tokens']:,} "
        f"tokens ({share:.1%})" + (", dropped" if manifest.settings.get("dedup") else ""),
        *_dropped_lines(found),
        "",
        "tokens of train that are kept, by sequence length and packing",
        "  length" + "".join(f"{method:>14}" for method in PACKING_METHODS),
    ]
    train = found["kept"]["train"]
    for length, kept in train["lengths"].items():
        shares = (f"{kept[method] / train['tokens']:>14.2%}" for method in PACKING_METHODS)
        lines.append(f"  {length:>6}" + "".join(shares))
    inputs = manifest.plan.get("inputs", [])
    if inputs:
        lines += ["", "inputs"]
        lines += [f"  {file['path']}: {file['documents']:,} documents, {file['tokens']:,} tokens"
                  for file in inputs[:_SHOWN_INPUTS]]  # fmt: skip
    if len(inputs) > _SHOWN_INPUTS:
        lines.append(f"  and {len(inputs) - _SHOWN_INPUTS} more files")
    unread = manifest.plan.get("unread", [])
    lines += [f"  not read: {file['path']} ({file['reason']})" for file in unread[:_SHOWN_INPUTS]]
    if len(unread) > _SHOWN_INPUTS:
        lines.append(f"  not read: {len(unread) - _SHOWN_INPUTS} more files")
    return "\n".join(lines)


def _dropped_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield lines about near-duplicates and filtered documents, if there are any."""
    near = found["near_duplicates"]
    if near["documents"]:
        yield (f"  near-duplicates: {near['documents']:,} documents, {near['tokens']:,} tokens, "
               "dropped")  # fmt: skip
    if found["filtered"]:
        yield f"  filtered: {sum(found['filtered'].values()):,} documents"
    for reason, count in sorted(found["filtered"].items(), key=lambda item: -item[1]):
        yield f"    {count:>10,} {reason}"


def write_page(folder: str | Path, path: str | Path) -> None:
    """Write statistics and figures as one HTML file. Raises `DataError` without matplotlib."""
    try:
        figures = all_figures(folder)
    except ModuleNotFoundError:
        raise DataError(
            "the figures of a report need matplotlib: run `pip install matplotlib`, or leave out "
            "--report"
        ) from None
    parts = [f"<h1>{html.escape(str(folder))}</h1>"]
    parts.append(f"<pre>{html.escape(summary(folder))}\n\n{html.escape(stats(folder))}</pre>")
    for title, figure in figures.items():
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=110)
        image = base64.b64encode(drawn.getvalue()).decode()
        parts.append(
            f"<h2>{html.escape(title)}</h2><img alt='' src='data:image/png;base64,{image}'>"
        )
    style = "body{font-family:sans-serif;max-width:60em;margin:2em auto}img{max-width:100%}"
    page = f"<!doctype html><meta charset='utf-8'><title>Report</title><style>{style}</style>"
    Path(path).write_text(page + "\n".join(parts), encoding="utf-8")


def _statistics(manifest: Manifest) -> dict[str, Any]:
    if not manifest.statistics:
        raise DataError("the dataset has no statistics: prepare it again with --overwrite")
    return manifest.statistics


def document_lengths(folder: str | Path) -> np.ndarray:
    """Return the tokens of each document of all splits, EOS included: int64 [documents]."""
    manifest = Manifest.read(folder)
    shards = [shard for split in manifest.splits.values() for shard in split]
    lengths = [read_index(folder, shard, manifest.dtype) for shard in shards]
    return np.concatenate(lengths).astype(np.int64)


def histogram(lengths: np.ndarray) -> list[str]:
    """Return a line per power of two: range, bar, count, share of documents."""
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
    """Return the first document of train as text."""
    path, manifest = absolute_path(folder), Manifest.read(folder)
    shard = manifest.splits["train"][0]
    count = int(read_index(path, shard, manifest.dtype)[0])
    raw = b"".join((path / shard.file).stream(0, count * manifest.dtype.itemsize))
    ids = np.frombuffer(raw, manifest.dtype) % manifest.vocab_size  # without marks
    return tokenizer_of(path, manifest).decode(ids[:-1].tolist())


def all_figures(folder: str | Path) -> "dict[str, Figure]":
    """Return every figure that the dataset has data for, by title."""
    manifest = Manifest.read(folder)
    figures = {
        "Lengths of documents": plot_lengths(manifest),
        "Tokens kept by packing method": plot_packing(manifest),
        "Tokens, duplicates and bytes": plot_sizes(manifest),
    }
    if len(manifest.plan.get("inputs", [])) > 1:
        figures["Inputs"] = plot_inputs(manifest)
    seconds = read_history(folder).get("cpu_seconds")
    if seconds:
        figures["CPU time by stage"] = plot_stages(manifest, seconds)
    return figures


def plot_lengths(manifest: Manifest) -> "Figure":
    """Plot documents by length, in bins of a factor sqrt(2)."""
    found = manifest.statistics["length_histogram"]
    edges = np.array(found["at_least"])
    figure, axes = _subplots()
    axes.stairs(found["documents"], [*edges, edges[-1] * 2**0.5], fill=True)
    axes.set(xscale="log", xlabel="tokens of a document", ylabel="documents")
    axes.set_xscale("log", base=2)
    return figure


def plot_packing(manifest: Manifest) -> "Figure":
    """Plot the share of train tokens that each packing method keeps."""
    figure, axes = _subplots()
    train = manifest.statistics["kept"]["train"]
    found = {int(length): row for length, row in train["lengths"].items()}
    for method, label in _PACKING_LABELS.items():
        share = [100 * row[method] / train["tokens"] for row in found.values()]
        axes.plot(list(found), share, marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="sequence length", ylabel="tokens kept, %", ylim=(0, 105))
    axes.legend()
    return figure


def plot_sizes(manifest: Manifest) -> "Figure":
    """Plot tokens, duplicate tokens, and the bytes per token of text and of shards."""
    figure, axes = _subplots(columns=2)
    found = manifest.statistics
    axes[0].bar(["all", "duplicates"], [found["tokens"], found["duplicates"]["tokens"]])
    axes[0].set_ylabel("tokens")
    axes[1].bar(["text", "shards"],
                [found["text_bytes"] / found["tokens"], manifest.dtype.itemsize])  # fmt: skip
    axes[1].set_ylabel("bytes per token")
    return figure


def plot_inputs(manifest: Manifest) -> "Figure":
    """Plot the tokens of the 20 largest inputs."""
    files = sorted(manifest.plan["inputs"], key=lambda file: -file["tokens"])[:20]
    figure, axes = _subplots()
    axes.barh([Path(file["path"]).name for file in files], [file["tokens"] for file in files])
    axes.invert_yaxis()
    axes.set_xlabel("tokens")
    return figure


def plot_stages(manifest: Manifest, seconds: dict[str, float]) -> "Figure":
    """Plot the CPU seconds per million tokens of each stage of the preparation."""
    figure, axes = _subplots()
    million_tokens = manifest.statistics["tokens"] / 1e6
    axes.barh(list(seconds), [used / million_tokens for used in seconds.values()])
    axes.invert_yaxis()
    axes.set_xlabel("CPU seconds per million tokens")
    return figure


def _subplots(columns: int = 1) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure  # optional

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    return figure, figure.subplots(1, columns)
