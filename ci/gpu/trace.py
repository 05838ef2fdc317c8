"""Chrome traces of torch.profiler: device intervals, their overlap, and pictures of them."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KERNEL, COPY = "kernel", "copy"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """One kernel or copy on the device; on the CPU, one operator. Times are microseconds."""

    name: str
    kind: str
    stream: int
    begin: float
    end: float


def record(step: Callable[[], Any], device: torch.device, path: Path) -> list[Span]:
    """Profile one call of ``step``, write its trace to ``path`` (.json.gz), return its spans."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities) as found:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    plain = path.with_suffix("")
    found.export_chrome_trace(str(plain))
    text = plain.read_bytes()
    plain.unlink()
    path.write_bytes(gzip.compress(text, 6))
    return spans(json.loads(text), device)


def spans(trace: dict[str, Any], device: torch.device) -> list[Span]:
    """Return the device's spans of a trace in order; on the CPU, the outermost operators."""
    categories = {"kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": COPY}
    if device.type == "cpu":
        categories = {"cpu_op": KERNEL}
    found = []
    for event in trace["traceEvents"]:
        kind = categories.get(event.get("cat", ""))
        if kind is None or event.get("ph") != "X":
            continue
        stream = int(event.get("args", {}).get("stream", event.get("tid", 0)))
        name, begin = event["name"], float(event["ts"])
        if kind == KERNEL and device.type == "cpu" and name.startswith("aten::copy_"):
            kind = COPY
        found.append(Span(name, kind, stream, begin, begin + float(event.get("dur", 0))))
    found.sort(key=lambda span: (span.begin, -span.end))
    return found if device.type == "cuda" else _outermost(found)


def _outermost(ordered: list[Span]) -> list[Span]:
    """Drop operators that run inside others of their thread; keep copies."""
    kept, ends = [], Counter[int]()
    for span in ordered:
        if span.begin >= ends[span.stream] or span.kind == COPY:
            kept.append(span)
            ends[span.stream] = max(ends[span.stream], int(span.end))
    return kept


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals merged where they overlap, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def intersection(one: list[Interval], other: list[Interval]) -> float:
    """Return the length that two lists of merged intervals have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap(found: list[Span]) -> dict[str, float]:
    """Return the time of kernels and copies, and the share of copies hidden behind kernels."""
    kernels = union((s.begin, s.end) for s in found if s.kind == KERNEL)
    copies = union((s.begin, s.end) for s in found if s.kind == COPY)
    hidden = intersection(kernels, copies)
    return {
        "kernel_ms": length(kernels) / 1e3,
        "copy_ms": length(copies) / 1e3,
        "hidden_copies": hidden / length(copies) if copies else 0.0,
    }


def idle_share(found: list[Span]) -> float:
    """Return the share of the time from the first to the last span without any span."""
    busy = union((s.begin, s.end) for s in found)
    return 1 - length(busy) / (busy[-1][1] - busy[0][0]) if busy else 0.0


def seconds_by_name(found: list[Span]) -> Counter[str]:
    seconds: Counter[str] = Counter()
    for span in found:
        seconds[span.name] += (span.end - span.begin) / 1e6  # pyright: ignore[reportArgumentType]
    return seconds


def draw(found: list[Span], path: Path, title: str) -> None:
    """Draw kernels and copies as bars, one row per stream."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    start = min((span.begin for span in found), default=0.0)
    streams = sorted({span.stream for span in found})
    figure = Figure(figsize=(12, 1.2 + 0.5 * len(streams)))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, stream in enumerate(streams):
        for kind, color in ((KERNEL, "tab:blue"), (COPY, "tab:orange")):
            bars = [((s.begin - start) / 1e3, (s.end - s.begin) / 1e3)
                    for s in found if s.stream == stream and s.kind == kind]  # fmt: skip
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color)
    axes.set_yticks(range(len(streams)), [f"stream {stream}" for stream in streams])
    axes.set_xlabel("ms; kernels are blue, copies orange")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
