"""Walk the checklist: try what each item could be, and take what helps before the next is asked.

A choice is taken where the step gets shorter by `WORTH`, or where memory needs it. Items later in
the list may make room for what an earlier one had given up, so the list is walked again until
nothing changes.
"""

from dataclasses import dataclass, replace

from ...errors import ConfigError
from ...train.config import TrainConfig
from .. import hardware
from ..answer import GIB, Plan
from ..hardware import Cluster
from .items import ITEMS, MACHINE, Item
from .trial import Trial, faster, over, room

WORTH = 0.01  # of the tokens per second, for which a setting is changed
WALKS = 4  # at most
FREED = 0.005  # of what is needed: memory for which a setting is changed while nothing fits


@dataclass(frozen=True)
class Option:
    """Something else that an item could be."""

    value: object
    faster: float
    """tokens per second, as a share of those before"""
    room: float
    """GiB per GPU more"""
    over: float
    """GiB that it does not fit by; 0 where it does"""
    plan: Plan


@dataclass(frozen=True)
class Decision:
    """What was found of an item, and what was decided."""

    item: Item
    plan: Plan
    """that it was asked of"""
    value: object
    note: str
    best: Option | None
    """of the others; None where there are none"""
    taken: bool
    why: str
    again: bool = False
    """in a later walk"""


@dataclass(frozen=True)
class Advice:
    """The whole walk."""

    before: Plan
    after: Plan
    """the one before where nothing helps, or where what helps is not enough"""
    decisions: list[Decision]

    @property
    def config(self) -> TrainConfig:
        """As advised."""
        return self.after.config

    def __str__(self) -> str:
        from .report import text

        return text(self)


def walk(trial: Trial, plan: Plan) -> Advice:
    """Walk from ``plan`` on, each item with what those before it have changed.

    A walk that ends where memory does not suffice has nothing to advise: it stays with ``plan``.
    """
    decisions, now = [], plan
    for turn in range(WALKS):
        changed = False
        for item in ITEMS if not turn else ITEMS[1:]:  # machines stay what they are
            found = decide(item, now, trial)
            if found.taken:
                now, changed = found.best.plan, True
            if found.taken or not turn:
                decisions.append(replace(found, again=turn > 0))
        if not changed:
            break
    return Advice(plan, now if now.fits else plan, decisions)


def why(trial: Trial, plan: Plan) -> list[Decision]:
    """What each item says of ``plan`` as it is; nothing is taken."""
    return [decide(item, plan, trial) for item in ITEMS]


def decide(item: Item, plan: Plan, trial: Trial) -> Decision:
    """Try every value of ``item`` in place of the plan's."""
    note = item.note(plan, trial)
    if item is MACHINE:
        return _machine(plan, trial, note)
    value = item.value(plan)
    found = []
    for other in item.values(plan, trial):
        tried = trial.changed(plan, **{item.choice: other}) if other != value else None
        if tried is not None:
            found.append(_option(other, tried, plan))
    if not found:
        return Decision(item, plan, value, note, None, False, "there is nothing else to set here")
    best = _best(found)
    taken, words = _verdict(best, plan)
    return Decision(item, plan, value, note, best, taken, words)


def _option(value, tried: Plan, plan: Plan) -> Option:
    return Option(value, faster(tried, plan), room(tried, plan), over(tried), tried)


def _best(found: list[Option]) -> Option:
    """The fastest that fits, of those about as fast the one that needs least; else the smallest."""
    fitting = [option for option in found if not option.over]
    if not fitting:
        return min(found, key=lambda option: option.over)
    most = max(option.faster for option in fitting)
    close = [option for option in fitting if option.faster >= most - WORTH / 2]
    return min(close, key=lambda option: option.room)


def _verdict(best: Option, plan: Plan) -> tuple[bool, str]:
    short = over(plan)
    if short and not best.over:
        return True, "needed to fit"
    if short:
        freed = -best.room > FREED * plan.memory / GIB
        return freed, "nearer to fitting" if freed else "does not make it fit"
    if best.over:
        return False, "every other value needs more memory than there is"
    if best.faster >= WORTH:
        return True, "faster"
    return False, "no other value that fits is faster"


def _machine(plan: Plan, trial: Trial, note: str) -> Decision:
    """As many of other nodes: the fastest where it fits. A machine is no key, so none is taken."""
    cluster, found = plan.cluster, []
    for name in hardware.names():
        node = hardware.node(name)
        same = node.gpus == cluster.node.gpus and name != cluster.node.name
        if same and node.gpu.memory_gib >= cluster.gpu.memory_gib:
            try:
                tried = trial.plan(plan.config, Cluster(node, cluster.nodes))
            except ConfigError:
                continue
            found.append(_option(name, tried, plan))
    best = min(found, key=lambda option: (option.over, -option.faster), default=None)
    words = "it fits here" if plan.fits else "it does not fit as it is: see below"
    return Decision(MACHINE, plan, cluster.node.name, note, best, False, words)
