"""Timeline of one rank in one step: compute, gather, reduce and second-hop spans.

Spans are read from torch's profiler. Operators of the main thread are compute. Collectives are
gloo's worker-thread events, or calls that block the main thread. The profiler does not record
nearlinear's communication threads, which keep their own record, nor the threads of the nearlinear
backend during asynchronous calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import torch

MERGE_GAP = 0.002  # seconds; spans with smaller gaps are merged
MIN_LENGTH = 0.0005  # seconds; shorter spans are dropped
# c10d operators of a system; barriers and broadcasts belong to the benchmark.
COLLECTIVES = (
    "c10d::_allgather",
    "c10d::allgather",
    "c10d::_reduce_scatter",
    "c10d::alltoall",
    "c10d::allreduce",
)
Spans = dict[str, list[tuple[float, float]]]


def run_traced(adapter, batches) -> tuple[float, Spans]:
    """Run one step and return its loss and its spans in seconds from the start of the step."""
    threads = adapter.comm_threads() if hasattr(adapter, "comm_threads") else []
    for thread in threads:
        thread.spans = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        begin = perf_counter()
        with torch.profiler.record_function("the step"):
            loss = adapter.step(batches)
    recorded: Spans = {}
    for thread in threads:
        for label, start, end in thread.spans:
            recorded.setdefault(label, []).append((start - begin, end - begin))
        thread.spans = None
    spans = spans_of_events(profile.events()) | recorded
    return loss, {kind: merge_spans(of_kind) for kind, of_kind in spans.items()}


def spans_of_events(events: Iterable) -> Spans:
    """Sort profiler events by purpose."""
    step = next(event for event in events if event.name == "the step")
    zero = step.time_range.start

    def interval(event):
        return (event.time_range.start - zero) / 1e6, (event.time_range.end - zero) / 1e6

    main_thread = [event for event in events if event.thread == step.thread]
    calls = sorted((interval(e), e.name) for e in main_thread if e.name.startswith(COLLECTIVES))
    worker_events = [e for e in events if e.name.startswith("gloo:")]
    spans: Spans = {"compute": [], "gather": [], "reduce": [], "second_hop": []}
    spans["compute"] = [interval(e) for e in main_thread if e.name.startswith("aten::")]
    # gloo's calls return at once, so a long call, or one of another backend, blocked its caller.
    shortest = MIN_LENGTH if worker_events else 0.0
    blocking = [(span, name) for span, name in calls if span[1] - span[0] > shortest]
    for span, name in blocking:
        spans[collective_kind(name)].append(span)
    spans["gather"] += [interval(e) for e in worker_events if "all_gather" in e.name]
    # gloo implements reduce-scatter as all-reduce; the order of calls distinguishes the two.
    reducing = sorted(interval(e) for e in worker_events if "reduce" in e.name)
    reductions = [call for call in calls if "reduce" in call[1]]
    if len(reductions) > len(reducing):
        reductions = [call for call in reductions if call not in blocking]
    for span, (_, name) in zip(reducing, reductions, strict=False):
        spans[collective_kind(name)].append(span)
    return spans


def collective_kind(name: str) -> str:
    if "gather" in name:
        return "gather"
    return "reduce" if "scatter" in name or "alltoall" in name else "second_hop"


def merge_spans(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sort spans, merge overlapping and close ones, drop short ones and round to 0.1 ms."""
    merged: list[list[float]] = []
    for begin, end in sorted(spans):
        if merged and begin - merged[-1][1] < MERGE_GAP:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([begin, end])
    return [(round(b, 4), round(e, 4)) for b, e in merged if e - b > MIN_LENGTH]
