"""What was measured and picked, as text, as a TOML fragment, and as plain data."""

import dataclasses
import json

from ..columns import table
from .choose import Job, Layout, best, can_hide
from .estimate import Work
from .measure import Measurement
from .reasons import Setting, gib, ms


@dataclasses.dataclass(frozen=True)
class Findings:
    """Everything that one call of ``nearlinear tune`` found."""

    title: str
    """model, ranks, device"""
    work: Work
    job: Job
    measurements: list[Measurement]
    layouts: list[Layout]
    asked: Layout | None
    """what the config asks for now; None where that does not fit"""
    settings: list[Setting]


def text(found: Findings) -> str:
    """The whole account, for a terminal."""
    parts = [
        found.title,
        _measured(found),
        _estimated(found),
        _step(found),
        "picked:\n" + "\n".join(_line(setting) for setting in found.settings),
        toml(found.settings),
    ]
    return "\n\n".join(part for part in parts if part)


def toml(settings: list[Setting]) -> str:
    """The settings as the table ``[parallel]``, to paste into a config."""
    lines = [f"{setting.key} = {json.dumps(setting.value)}" for setting in settings]
    return "\n".join(["[parallel]", *lines])


def plain(found: Findings) -> dict:
    """The same as numbers and words: seconds, bytes, parameters."""
    job = found.job
    return {
        "title": found.title,
        "ranks": job.world,
        "memory": job.memory,
        "work": dataclasses.asdict(found.work),
        "measured": [dataclasses.asdict(row) for row in found.measurements],
        "estimated": [dataclasses.asdict(layout) for layout in found.layouts],
        "before": dataclasses.asdict(found.asked) if found.asked else None,
        "settings": {s.key: dataclasses.asdict(s) for s in found.settings},
    }


def _measured(found: Findings) -> str:
    work = found.work
    block = f"one block, one micro-batch: {ms(work.forward)} forward, {ms(work.backward)} backward"
    if not found.measurements:
        return f"measured, slowest rank, median:\n  {block}"
    rows = [("degree", "collective", "MiB", "backend", "ms", "GB/s")]
    for row in found.measurements:
        rate = row.bytes / max(row.seconds, 1e-9) / 1e9
        size = f"{row.bytes / 2**20:.3g}"
        time = ms(row.seconds).removesuffix(" ms")
        rows.append((str(row.degree), row.collective, size, row.backend, time, f"{rate:.2f}"))
    head = "measured, slowest rank, median (GB/s: MiB over ms, not counting how often bytes move):"
    return "\n".join([head, *table(rows, left=(1, 3)), f"  {block}"])


def _estimated(found: Findings) -> str:
    head = (
        "estimated from that, per optimizer step (every collective at its time alone, one after "
        "the other):"
    )
    rows = [("degree", "backend", "GiB/rank", "gathers", "reductions", "replicas", "sum, ms", "")]
    for layout in found.layouts:
        step = layout.step
        parts = (step.gathers, step.reductions, step.joins, step.total)
        times = [ms(part).removesuffix(" ms") for part in parts]
        mark = "<- picked" if layout == best(found.layouts) else ""
        memory = f"{layout.memory / 2**30:.3g}"
        rows.append((str(layout.degree), layout.backend, memory, *times, mark))
    return "\n".join([head, *table(rows, left=(1, 7))])


def _step(found: Findings) -> str:
    """How much of the communication computation can hide, and what the settings save."""
    work, chosen = found.work, best(found.layouts)
    step = chosen.step
    if found.asked is None:
        before = f"hybrid_shard_degree = {found.job.config.hybrid_shard_degree} does not fit here"
    else:
        before = f"{ms(found.asked.step.total)} with the config as it is"
    lines = [f"communication per step: {ms(step.total)} with these settings, {before} (estimate)"]
    hidden = can_hide(work, found.job, chosen)
    if hidden:
        lines.append(
            f"the blocks compute {ms(work.compute)} per step: at most {hidden / step.total:.0%} of "
            "it can hide behind them"
        )
    elif step.total:
        lines.append(
            "none of it hides behind computation: on the CPU that takes shard groups of "
            "several ranks, and overlap_communication = true"
        )
    lines.append(
        f"memory: {gib(chosen.memory)} of {gib(found.job.memory)} per rank, "
        f"{gib(work.activations)} of it activations"
    )
    return "\n".join(lines)


def _line(setting: Setting) -> str:
    value, previous = json.dumps(setting.value), json.dumps(setting.previous)
    was = "as it was" if value == previous else f"was {previous}"
    return f"  {setting.key} = {value} ({was}): {setting.reason}"
