"""What one rank does when, in one step: computes, gathers, reduces, meets its replicas.

Read from torch's profiler: operators of the rank's own thread are computation, collectives are
those that gloo's threads run, or that block the caller where the backend works on its thread. The
profiler does not see our lanes, which keep their own record, nor what the nearlinear backend does
for a caller that goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import torch

CLOSE = 0.002  # seconds; computation with smaller gaps is drawn as one piece
SHORT = 0.0005  # what is drawn as nothing
# Operators of c10d; barriers and broadcasts are the race's own.
COLLECTIVES = (
    "c10d::_allgather",
    "c10d::allgather",
    "c10d::_reduce_scatter",
    "c10d::alltoall",
    "c10d::allreduce",
)
Spans = dict[str, list[tuple[float, float]]]


def traced(contestant, batches) -> tuple[float, Spans]:
    """The loss of one step of ``contestant``, and its spans in seconds from the step's begin."""
    lanes = contestant.lanes() if hasattr(contestant, "lanes") else []
    for lane in lanes:
        lane.spans = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        begin = perf_counter()
        with torch.profiler.record_function("the step"):
            loss = contestant.step(batches)
    on_lanes: Spans = {}
    for lane in lanes:
        for label, start, end in lane.spans:
            on_lanes.setdefault(label, []).append((start - begin, end - begin))
        lane.spans = None
    spans = of_events(profile.events()) | on_lanes
    return loss, {kind: tidied(of_kind) for kind, of_kind in spans.items()}


def of_events(events: Iterable) -> Spans:
    """The profiler's events, sorted by what they are for."""
    step = next(event for event in events if event.name == "the step")
    zero = step.time_range.start

    def when(event):
        return (event.time_range.start - zero) / 1e6, (event.time_range.end - zero) / 1e6

    mine = [event for event in events if event.thread == step.thread]
    calls = sorted((when(e), e.name) for e in mine if e.name.startswith(COLLECTIVES))
    on_threads = [e for e in events if e.name.startswith("gloo:")]
    spans: Spans = {"compute": [], "gather": [], "reduce": [], "second_hop": []}
    spans["compute"] = [when(e) for e in mine if e.name.startswith("aten::")]
    # gloo's calls return at once: one that takes its time has run on the caller's thread.
    blocking = [(span, name) for span, name in calls if span[1] - span[0] > SHORT]
    for span, name in blocking:
        spans[kind_of(name)].append(span)
    spans["gather"] += [when(e) for e in on_threads if "all_gather" in e.name]
    # gloo's reduce-scatter is an all-reduce: which one it is, the order of calls tells.
    reducing = sorted(when(e) for e in on_threads if "reduce" in e.name)
    reductions = [call for call in calls if "reduce" in call[1]]
    if len(reductions) > len(reducing):
        reductions = [call for call in reductions if call not in blocking]
    for span, (_, name) in zip(reducing, reductions, strict=False):
        spans[kind_of(name)].append(span)
    return spans


def kind_of(name: str) -> str:
    if "gather" in name:
        return "gather"
    return "reduce" if "scatter" in name or "alltoall" in name else "second_hop"


def tidied(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted, overlapping and close ones joined, short ones left out, to the tenth of a ms."""
    joined: list[list[float]] = []
    for begin, end in sorted(spans):
        if joined and begin - joined[-1][1] < CLOSE:
            joined[-1][1] = max(end, joined[-1][1])
        else:
            joined.append([begin, end])
    return [(round(b, 4), round(e, 4)) for b, e in joined if e - b > SHORT]
