"""What a race has shown: a line per turn while it runs, and a table of medians at its end."""

from __future__ import annotations

import statistics

from .contestants import ENTRIES
from .plan import Plan

BASELINES = ("zero3", "fsdp2", "fsdp2_nl")
SAME_LOSS = 1e-4  # relative; float32 sums in different orders, over several steps


def describe(plan: Plan) -> str:
    parameters = plan.layers * 12 * plan.width**2 + (plan.vocabulary + plan.sequence) * plan.width
    return (
        f"GPT-2 of {parameters / 1e6:.1f}M parameters, {plan.nodes} nodes x {plan.ranks_per_node} "
        f"ranks at {plan.rate}, shard groups of {plan.shard}; a step is {plan.accumulation} "
        f"micro-batches of {plan.micro_batch} x {plan.sequence} tokens per rank"
    )


def line(turn: dict) -> str:
    warm = "" if turn["timed"] else "  (warm-up)"
    return (
        f"step {turn['step']}  {turn['contestant']:14} {turn['seconds']:7.2f} s  "
        f"{turn['sent_bytes'] / 2**20:7.1f} MiB  loss {turn['loss']:.6f}{warm}"
    )


def render(turns: list[dict]) -> str:
    """Markdown: seconds, their spread, bytes of the busiest NIC, ratios to the baselines."""
    timed = _by_contestant([turn for turn in turns if turn["timed"]])
    medians = {name: statistics.median(t["seconds"] for t in of) for name, of in timed.items()}
    against = [name for name in BASELINES if name in medians]
    head = ["contestant", "s/step", "min-max", "MiB per NIC", *(f"{n} / it" for n in against)]
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
                *(f"{medians[base] / medians[name]:.2f}x" for base in against),
            ]
        )
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
