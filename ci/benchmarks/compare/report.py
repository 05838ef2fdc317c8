"""Tables and figures of a comparison.

Tables are a line per step while it runs, and Markdown tables of medians. Figures show step times,
step timelines, and efficiency over nodes or link rates.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from nearlinear.plots import GRID, INK, MUTED, PALETTE

from . import traffic
from .config import CompareConfig
from .systems import LADDERS, SYSTEMS

BASELINES = ("zero3", "mics", "fsdp2", "fsdp2_nl")
LOSS_TOLERANCE = 1e-4  # relative; float32 sums in different orders over several steps
KINDS = {
    "compute": ("compute", "#9ca3af"),
    "gather": ("all-gather of parameters", PALETTE[0]),
    "reduce": ("reduce-scatter of gradients", PALETTE[1]),
    "second_hop": ("all-reduce between replicas", PALETTE[3]),
}


def describe(config: CompareConfig) -> str:
    parameters, name = sum(traffic.unit_sizes(config)), {"gpt2": "GPT-2", "llama": "Llama"}
    return (
        f"{name[config.model]} of {parameters / 1e6:.1f}M parameters, {config.nodes} nodes x "
        f"{config.ranks_per_node} ranks at {config.rate}, shard groups of {config.shard}; a step "
        f"is {config.accumulation} micro-batches of {config.micro_batch} x {config.sequence} "
        "tokens per rank"
    )


def title(config: CompareConfig) -> str:
    """Return the settings in which the runs of a race differ."""
    return (
        f"{config.nodes} x {config.ranks_per_node}, {config.rate}, accumulation "
        f"{config.accumulation}, {config.model}"
    )


def peaks_in_parameters(config: CompareConfig, records: list[dict]) -> dict[str, float]:
    """Return the peak of each measured system in sizes P of the float32 parameters."""
    size = traffic.BYTES_PER_PARAMETER * sum(traffic.unit_sizes(config))
    return {r["system"]: r["peak_bytes"] / size for r in records if "peak_bytes" in r}


def format_record(record: dict) -> str:
    note = "" if record["timed"] else "  (warm-up)"
    if record.get("spans"):
        note = "  (traced)"
    elif "peak_bytes" in record:
        note = f"  (peak of tensors {record['peak_bytes'] / 2**20:.0f} MiB)"
    return (
        f"step {record['step']}  {record['system']:14} {record['seconds']:7.2f} s  "
        f"{record['sent_bytes'] / 2**20:7.1f} MiB  loss {record['loss']:.6f}{note}"
    )


def render(config: CompareConfig, records: list[dict]) -> str:
    """Return a Markdown table: seconds, range, bytes sent, their minimum, ratios to baselines.

    With measured memory, the table also has the processor time and the peak of allocated tensors
    of a rank, in MiB and in sizes P of the float32 parameters. A star marks the systems that no
    other beats in both step time and peak.
    """
    timed = _by_system([record for record in records if record["timed"]])
    medians = step_medians(records)
    baselines = [name for name in BASELINES if name in medians]
    peaks = {r["system"]: r["peak_bytes"] for r in records if "peak_bytes" in r}
    front = pareto_front({name: (medians[name], peak) for name, peak in peaks.items()})
    parameters = 4 * sum(traffic.unit_sizes(config))
    head = [
        "system",
        "s/step",
        "min-max",
        "MiB per NIC",
        "minimum",
        *(["processor s", "peak MiB", "in P", "front"] if peaks else []),
        *(f"speed-up over {name}" for name in baselines),
    ]
    rows = [head, [":--", *["--:"] * (len(head) - 1)]]
    for name, of_system in timed.items():
        seconds = [record["seconds"] for record in of_system]
        sent = statistics.median(record["sent_bytes"] for record in of_system) / 2**20
        rows.append(
            [
                SYSTEMS[name].title,
                f"{medians[name]:.2f}",
                f"{min(seconds):.2f}-{max(seconds):.2f}",
                f"{sent:.1f}",
                minimum_mib(config, name),
                *(
                    [
                        f"{statistics.median(r['cpu_seconds'] for r in of_system):.2f}",
                        f"{peaks[name] / 2**20:.0f}",
                        f"{peaks[name] / parameters:.2f}",
                        "*" if name in front else "",
                    ]
                    if peaks
                    else []
                ),
                *(f"{medians[base] / medians[name]:.2f}x" for base in baselines),
            ]
        )
    return markdown(rows)


def render_file(record: dict) -> str:
    """Return the description and the tables of a file written by ``--json``."""
    config = CompareConfig.from_fields(record["config"])
    tables = [render(config, record["results"]), attribution(record["results"])]
    return "\n\n".join([f"{describe(config)}.", *filter(None, tables)])


def attribution(records: list[dict]) -> str:
    """Return a Markdown table of the gain of each part for every completely measured ladder."""
    medians = step_medians(records)
    tables = []
    for order, rungs in LADDERS.items():
        if not set(rungs) <= set(medians):
            continue
        rows = [[order, "s/step", "speed-up", "cumulative"], [":--", "--:", "--:", "--:"]]
        names = list(rungs)
        for before, name in zip([names[0], *names], names, strict=False):
            gains = (medians[before] / medians[name], medians[names[0]] / medians[name])
            rows.append([rungs[name], f"{medians[name]:.2f}", *(f"{gain:.2f}x" for gain in gains)])
        tables.append(markdown(rows))
    return "\n\n".join(tables)


def pareto_front(points: dict[str, tuple[float, float]]) -> set[str]:
    """Return the systems that train together and that no other beats in (seconds, bytes)."""
    own = {name: point for name, point in points.items() if SYSTEMS[name].trains_together}

    def beaten(point: tuple[float, float]) -> bool:
        others = [other for other in own.values() if other != point]
        return any(other[0] <= point[0] and other[1] <= point[1] for other in others)

    return {name for name, point in own.items() if not beaten(point)}


def minimum_mib(config: CompareConfig, name: str) -> str:
    counts = SYSTEMS[name].traffic
    return f"{traffic.minimum_bytes(config, counts(config)) / 2**20:.1f}" if counts else "0.0"


def step_seconds(records: list[dict]) -> dict[str, list[float]]:
    """Return the seconds of each system's timed steps."""
    timed = _by_system([record for record in records if record["timed"]])
    return {name: [record["seconds"] for record in found] for name, found in timed.items()}


def step_medians(records: list[dict]) -> dict[str, float]:
    return {name: statistics.median(seconds) for name, seconds in step_seconds(records).items()}


def markdown(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def deviating_systems(records: list[dict]) -> list[str]:
    """Return the systems whose loss at any step deviates from the median of all systems.

    Systems without communication are excluded.
    """
    found = set()
    for step in {record["step"] for record in records}:
        losses = {
            record["system"]: record["loss"]
            for record in records
            if record["step"] == step and SYSTEMS[record["system"]].trains_together
        }
        if losses:
            median = statistics.median(losses.values())
            limit = LOSS_TOLERANCE * median
            found |= {name for name, loss in losses.items() if abs(loss - median) > limit}
    return sorted(found)


def _by_system(records: list[dict]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for record in records:
        found.setdefault(record["system"], []).append(record)
    return found


def plot_step_times(records: list[dict]):
    """Draw a bar per system for the median, and a dot per timed step."""
    seconds = step_seconds(records)
    names = sorted(seconds, key=lambda name: -statistics.median(seconds[name]))
    figure, ax = _figure(9, 0.42 * len(names) + 1.2)
    for row, name in enumerate(names):
        colour = PALETTE[0] if SYSTEMS[name].library == "nearlinear" else MUTED
        ax.barh(row, statistics.median(seconds[name]), 0.62, color=colour, alpha=0.75)
        ax.plot(seconds[name], [row] * len(seconds[name]), ".", color=INK, ms=4)
    ax.set_yticks(range(len(names)), [SYSTEMS[name].title for name in names])
    ax.set_xlabel("seconds per step")
    return figure


def plot_timelines(records: list[dict]):
    """Draw a panel per system with the spans of rank 0 in one traced step, on a common scale."""
    traced = [record for record in records if record.get("spans")]
    longest = max(end for t in traced for spans in t["spans"].values() for _, end in spans)
    figure, axes = _figure(10, 1.15 * len(traced) + 0.9, len(traced))
    for record, ax in zip(traced, axes, strict=True):
        for row, (kind, (_, colour)) in enumerate(reversed(KINDS.items())):
            bars = [(begin, end - begin) for begin, end in record["spans"].get(kind, ())]
            ax.broken_barh(bars, (row - 0.42, 0.84), color=colour, lw=0)
        ax.set(xlim=(0, longest), ylim=(-0.6, len(KINDS) - 0.4), yticks=[])
        ax.set_title(SYSTEMS[record["system"]].title, fontsize=9, loc="left", color=INK)
    axes[-1].set_xlabel("seconds into the step (slightly slower than untraced steps)")
    handles = [_swatch(colour, words) for words, colour in KINDS.values()]
    figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False, fontsize=9)
    return figure


def plot_fronts(runs: list[dict], ours: tuple[str, ...]):
    """Draw a panel per run: peak memory over step time, with the fronts of ours and the others."""
    from matplotlib.figure import Figure

    columns = min(3, len(runs))
    figure = Figure(
        figsize=(4 * columns, 3.2 * math.ceil(len(runs) / columns)), layout="constrained"
    )
    axes = figure.subplots(math.ceil(len(runs) / columns), columns, squeeze=False).flatten()
    for run, ax in zip(runs, axes, strict=False):
        config, seconds = CompareConfig.from_fields(run["config"]), step_medians(run["results"])
        peaks = peaks_in_parameters(config, run["results"])
        points = {n: (seconds[n], p) for n, p in peaks.items() if SYSTEMS[n].trains_together}
        for words, own, colour, marker in (
            ("nearlinear", True, PALETTE[0], "o"), ("others", False, MUTED, "s"),
        ):  # fmt: skip
            of_kind = {n: point for n, point in points.items() if (n in ours) == own}
            front = sorted(of_kind[n] for n in pareto_front(of_kind))
            if of_kind:
                ax.plot(*zip(*of_kind.values(), strict=True), marker, color=colour, ms=4, alpha=0.6)
                ax.plot(*zip(*front, strict=True), "-", color=colour, marker=marker, label=words)
        ax.set_title(title(config), fontsize=9, loc="left", color=INK)
        ax.set(xlabel="seconds per step", ylabel="peak, in sizes of the parameters")
        ax.grid(color=GRID)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    for ax in axes[len(runs) :]:
        ax.set_axis_off()
    return figure


def plot_efficiency(points: dict[str, list[tuple[float, float]]], label: str):
    """Draw a line per system: efficiency over ``label``."""
    figure, ax = _figure(7, 4)
    own_first = sorted(points.items(), key=lambda item: SYSTEMS[item[0]].library != "nearlinear")
    for (name, found), colour in zip(own_first, PALETTE * 3, strict=False):
        ax.plot(*zip(*sorted(found), strict=True), "o-", color=colour, label=SYSTEMS[name].title)
    ax.set(xlabel=label, ylabel="efficiency", ylim=(0, 1.05))
    ax.grid(axis="y", color=GRID)
    ax.legend(frameon=False, fontsize=9)
    return figure


def save(figure, path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "nearlinear"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _figure(width: float, height: float, panels: int = 0):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(panels or 1, 1, squeeze=False, sharex=True).flatten()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, list(axes) if panels else axes[0]


def _swatch(colour: str, words: str):
    from matplotlib.patches import Patch

    return Patch(color=colour, label=words)
