"""Advice in words, as plain data, and as the settings that a config needs."""

import dataclasses
import json
import math

from ... import schema
from ...train.config import TrainConfig
from ..answer import GIB, Plan
from ..remedy import remedy
from .items import MACHINE
from .walk import Advice, Decision, Option


def text(found: Advice) -> str:
    """The walk, item by item, then what it comes to."""
    lines, number = [], 0
    for each in found.decisions:
        number += not each.again
        head = f"{number}. {each.item.topic}" if not each.again else f"again, {each.item.topic}"
        lines.append(f"{head}: {_line(each)}")
    return "\n".join([*lines, "", _outcome(found)])


def why_text(decisions: list[Decision], plan: Plan) -> str:
    """What speaks for each choice of ``plan`` as it stands."""
    lines = [f"{n}. {d.item.topic}: {_line(d, advice=False)}" for n, d in enumerate(decisions, 1)]
    return "\n".join([*lines, f"{len(lines) + 1}. what binds: {plan.binding}"])


def _line(found: Decision, advice: bool = True) -> str:
    best, now = found.best, _named(found.item, found.value, found.plan)
    parts = [f"{now}; {found.note}"]
    if best is not None:
        cost = "" if found.item.keys else _price(best.plan)
        parts.append(f"{_named(found.item, best.value, best.plan)} gives {change(best)}{cost}")
    if not advice:
        right = "a better choice" if found.taken else found.why
        return "; ".join([*parts, f"{right}: {found.why}" if found.taken else right])
    verdict = "change" if found.taken else "keep"
    return "; ".join(parts) + f" -> {verdict}: {found.why}"


def _named(item, value, plan: Plan) -> str:
    if not item.keys:
        return str(value)
    return " with ".join(f"{key} = {json.dumps(v)}" for key, v in _settings(item, plan).items())


def _settings(item, plan: Plan) -> dict[str, object]:
    """The keys of ``item`` as the config of ``plan`` has them.

    A pipeline's micro-batches are parts of what the others call one.
    """
    cut = item.choice == "micro_batch" and plan.work.mesh.pipeline > 1
    keys = (*item.keys, "parallel.microbatches") if cut else item.keys
    tables = {key: key.partition(".") for key in keys}
    return {key: getattr(getattr(plan.config, t), name) for key, (t, _, name) in tables.items()}


def _price(plan: Plan) -> str:
    usd = plan.usd_per_billion_tokens
    return ", price not known" if math.isnan(usd) else f", {usd:,.0f} USD per billion tokens"


def change(option: Option) -> str:
    """Of tokens per second and of memory."""
    fits = f", {option.over:.1f} more than there are" if option.over else ""
    return f"{option.faster:+.1%} tokens/s and {option.room:+.1f} GiB per GPU{fits}"


def _outcome(found: Advice) -> str:
    before, after = found.before, found.after
    rows = [f"as it was:     {_numbers(before)}"]
    if not before.fits and after is before:
        return (
            "all of it together does not make it fit, so that the config stays as it is\n"
            f"{rows[0]}\n{remedy(before)}"
        )
    if after is before:
        return f"nothing to change\n{rows[0]}"
    return "\n".join([*rows, f"as advised:    {_numbers(after)}"])


def _numbers(plan: Plan) -> str:
    fits = "" if plan.fits else ", which does not fit"
    return (
        f"{plan.seconds:.3f} s per step, {plan.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, "
        f"{plan.memory / GIB:.1f} GiB per GPU{fits}"
    )


def settings(config: TrainConfig) -> str:
    """What ``config`` has that is not the default, as TOML that ``nearlinear train`` accepts."""
    parts = []
    for table in dataclasses.fields(config):
        own = getattr(config, table.name)
        usual = type(own)()
        keys = {
            each.name: getattr(own, each.name)
            for each in dataclasses.fields(own)
            if getattr(own, each.name) != getattr(usual, each.name)
        }
        if keys:
            parts.append("\n".join([f"[{table.name}]", *schema.pairs(keys, bare=True)]))
    return "\n\n".join(parts)


def as_dict(found: Advice) -> dict:
    """Numbers by name: shares of tokens per second, GiB per GPU, seconds per step."""
    return {
        "before": found.before.as_dict(),
        "after": found.after.as_dict(),
        "items": [_plain(each) for each in found.decisions],
    }


def _plain(found: Decision) -> dict:
    best = found.best and {
        "value": found.best.value,
        "settings": _settings(found.item, found.best.plan),
        "tokens_per_second": found.best.faster,
        "gib": found.best.room,
        "fits": not found.best.over,
    }
    return {
        "topic": found.item.topic,
        "keys": list(found.item.keys),
        "value": found.value,
        "settings": _settings(found.item, found.plan),
        "note": found.note,
        "best": best,
        "verdict": "change" if found.taken else "keep",
        "why": found.why,
        "again": found.again,
        "machine": found.item is MACHINE,
    }
