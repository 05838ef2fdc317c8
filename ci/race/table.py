"""What a race has shown: a line per turn while it runs, and a table of medians at its end."""

from __future__ import annotations

import statistics

from . import theory
from .contestants import ENTRIES, LADDERS
from .plan import Plan

BASELINES = ("zero3", "mics", "fsdp2", "fsdp2_nl")
SAME_LOSS = 1e-4  # relative; float32 sums in different orders, over several steps


def describe(plan: Plan) -> str:
    parameters = plan.layers * 12 * plan.width**2 + (plan.vocabulary + plan.sequence) * plan.width
    return (
        f"GPT-2 of {parameters / 1e6:.1f}M parameters, {plan.nodes} nodes x {plan.ranks_per_node} "
        f"ranks at {plan.rate}, shard groups of {plan.shard}; a step is {plan.accumulation} "
        f"micro-batches of {plan.micro_batch} x {plan.sequence} tokens per rank"
    )


def line(turn: dict) -> str:
    warm = "  (traced)" if turn.get("spans") else "" if turn["timed"] else "  (warm-up)"
    return (
        f"step {turn['step']}  {turn['contestant']:14} {turn['seconds']:7.2f} s  "
        f"{turn['sent_bytes'] / 2**20:7.1f} MiB  loss {turn['loss']:.6f}{warm}"
    )


def render(plan: Plan, turns: list[dict]) -> str:
    """Markdown: seconds, their spread, bytes sent and the least possible, ratios to baselines."""
    timed = _by_contestant([turn for turn in turns if turn["timed"]])
    medians = step_medians(turns)
    against = [name for name in BASELINES if name in medians]
    head = [
        "contestant",
        "s/step",
        "min-max",
        "MiB per NIC",
        "least",
        *(f"{n} / it" for n in against),
    ]
    rows = [head, [":--", *["--:"] * (len(head) - 1)]]
    for name, of in timed.items():
        seconds = [turn["seconds"] for turn in of]
        sent = statistics.median(turn["sent_bytes"] for turn in of) / 2**20
        rows.append(
            [
                ENTRIES[name].title,
                f"{medians[name]:.2f}",
                f"{min(seconds):.2f}-{max(seconds):.2f}",
                f"{sent:.1f}",
                least_mib(plan, name),
                *(f"{medians[base] / medians[name]:.2f}x" for base in against),
            ]
        )
    return markdown(rows)


def whole(record: dict) -> str:
    """Markdown of a record that ``--json`` wrote: the race, its tables."""
    plan = Plan(**record["plan"])
    tables = [render(plan, record["results"]), attribution(record["results"])]
    return "\n\n".join([f"{describe(plan)}.", *filter(None, tables)])


def attribution(turns: list[dict]) -> str:
    """Markdown: what each part adds to those before it, for every ladder that has raced whole."""
    medians = step_medians(turns)
    found = []
    for order, rungs in LADDERS.items():
        if not set(rungs) <= set(medians):
            continue
        rows = [[order, "s/step", "times faster", "in all"], [":--", "--:", "--:", "--:"]]
        names = list(rungs)
        for before, name in zip([names[0], *names], names, strict=False):
            gains = (medians[before] / medians[name], medians[names[0]] / medians[name])
            rows.append([rungs[name], f"{medians[name]:.2f}", *(f"{gain:.2f}x" for gain in gains)])
        found.append(markdown(rows))
    return "\n\n".join(found)


def least_mib(plan: Plan, name: str) -> str:
    traffic = ENTRIES[name].traffic
    return f"{theory.least_bytes(plan, traffic(plan)) / 2**20:.1f}" if traffic else "0.0"


def seconds_of(turns: list[dict]) -> dict[str, list[float]]:
    """Of each contestant's timed turns."""
    timed = _by_contestant([turn for turn in turns if turn["timed"]])
    return {name: [turn["seconds"] for turn in of] for name, of in timed.items()}


def step_medians(turns: list[dict]) -> dict[str, float]:
    return {name: statistics.median(seconds) for name, seconds in seconds_of(turns).items()}


def markdown(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def astray(turns: list[dict]) -> list[str]:
    """Contestants whose loss, at any step, is not that of most; those without communication may."""
    found = set()
    for step in {turn["step"] for turn in turns}:
        losses = {
            turn["contestant"]: turn["loss"]
            for turn in turns
            if turn["step"] == step and ENTRIES[turn["contestant"]].trains_together
        }
        if losses:
            middle = statistics.median(losses.values())
            found |= {n for n, loss in losses.items() if abs(loss - middle) > SAME_LOSS * middle}
    return sorted(found)


def _by_contestant(turns: list[dict]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for turn in turns:
        found.setdefault(turn["contestant"], []).append(turn)
    return found
