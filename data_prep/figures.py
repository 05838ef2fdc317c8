"""Figures of a prepared dataset, for the report and for notebooks; each is a matplotlib Figure."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from data_prep.merge import history
from nearlinear.data.format import Manifest

_WAYS = {
    "concat": "concat: windows of the stream",
    "best_fit": "best_fit: documents whole, packed",
    "one_document": "one_document: padded",
    "truncate": "documents that fill a window, cut",
}


def all_of(folder: str | Path) -> dict[str, Figure]:
    """Every figure there is something to draw of, by title."""
    manifest = Manifest.read(folder)
    figures = {
        "Lengths of documents": lengths(manifest),
        "What each way of packing keeps": kept(manifest),
        "Tokens, duplicates and bytes": sizes(manifest),
    }
    if len(manifest.plan.get("inputs", [])) > 1:
        figures["Inputs"] = inputs(manifest)
    seconds = history(folder).get("cpu_seconds")
    if seconds:
        figures["Throughput by stage"] = stages(manifest, seconds)
    return figures


def lengths(manifest: Manifest) -> Figure:
    """Documents, and the tokens in them, by length: bins of a factor sqrt(2)."""
    found = manifest.statistics["length_histogram"]
    edges = np.array(found["at_least"])
    figure, axes = _axes()
    axes.stairs(found["documents"], [*edges, edges[-1] * 2**0.5], fill=True)
    axes.set(xscale="log", xlabel="tokens of a document", ylabel="documents")
    axes.set_xscale("log", base=2)
    return figure


def kept(manifest: Manifest) -> Figure:
    """The share of train's tokens that training sees: what truncation throws away."""
    figure, axes = _axes()
    train = manifest.statistics["kept"]["train"]
    found = {int(length): row for length, row in train["lengths"].items()}
    for way, words in _WAYS.items():
        share = [100 * row[way] / train["tokens"] for row in found.values()]
        axes.plot(list(found), share, marker="o", label=words)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="sequence length", ylabel="tokens kept, %", ylim=(0, 105))
    axes.legend()
    return figure


def sizes(manifest: Manifest) -> Figure:
    """Tokens kept and duplicated, and bytes per token of text and of shards."""
    figure, axes = _axes(columns=2)
    found = manifest.statistics
    axes[0].bar(["all", "duplicates"], [found["tokens"], found["duplicates"]["tokens"]])
    axes[0].set_ylabel("tokens")
    axes[1].bar(["text", "shards"],
                [found["text_bytes"] / found["tokens"], manifest.dtype.itemsize])  # fmt: skip
    axes[1].set_ylabel("bytes per token")
    return figure


def inputs(manifest: Manifest) -> Figure:
    """Tokens of each input, the 20 largest."""
    files = sorted(manifest.plan["inputs"], key=lambda file: -file["tokens"])[:20]
    figure, axes = _axes()
    axes.barh([Path(file["path"]).name for file in files], [file["tokens"] for file in files])
    axes.invert_yaxis()
    axes.set_xlabel("tokens")
    return figure


def stages(manifest: Manifest, seconds: dict[str, float]) -> Figure:
    """Tokens per CPU second of each stage of the preparation."""
    figure, axes = _axes()
    spent = {stage: used for stage, used in seconds.items() if used > 0}
    rates = [manifest.statistics["tokens"] / used / 1e6 for used in spent.values()]
    axes.barh(list(spent), rates)
    axes.set(xscale="log", xlabel="M tokens per CPU second")
    return figure


def _axes(columns: int = 1):
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    return figure, figure.subplots(1, columns)
