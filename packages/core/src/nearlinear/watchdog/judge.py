"""Which rank holds up the others, by what all have said of themselves.

A rank is not late because it takes long, for all compile, evaluate and save now and then, but
because others have gone on to what they cannot do without it. So two that stand still are compared:
operations are numbered alike on all ranks, and who is at an earlier one is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .alarm import Alarm
from .beat import Beat

SHOWN = 4
"""ranks that a deadlock is told of"""


@dataclass(frozen=True)
class Seen:
    """A rank as the judge sees it."""

    beat: Beat | None
    """its last word; None: there was none yet"""
    unheard: float
    """seconds since it came"""
    gone: bool = False
    """whether its process is known not to be there"""

    @property
    def still(self) -> float:
        """Seconds for which it has not gone on, as the usual ones count."""
        return (self.beat.still + self.unheard) / self.beat.patience


@dataclass(frozen=True)
class Limits:
    """Seconds after which a rank is given up."""

    hung: float
    """that others have waited for it"""
    silent: float
    """without a word"""
    setting: str = ""
    """what the first is called where it is set"""


def judge(ranks: Sequence[Seen], limits: Limits, comparable: bool = True) -> Alarm | None:
    """The fault there is, if there is one.

    ``comparable``: whether places inside of an operation, too, come in one order on all ranks.
    """
    for rank, seen in enumerate(ranks):
        if seen.beat is None:
            if seen.unheard > limits.hung:
                return absent(rank, seen)
        elif not seen.beat.left and (seen.gone or seen.unheard > limits.silent):
            return silent(rank, seen)
    if any(seen.beat is None for seen in ranks):
        return None
    inside = {rank: seen for rank, seen in enumerate(ranks) if not seen.beat.left}
    if not inside or any(seen.still <= limits.hung for seen in inside.values()):
        return None  # some of them go on
    return _deserted(ranks, inside) or _standing_still(inside, limits, comparable)


def absent(rank: int, seen: Seen) -> Alarm:
    """The alarm for a rank that nobody has heard of."""
    text = f"rank {rank} has not begun {seen.unheard:.0f} s after others have"
    return Alarm("silent", rank, f"{text}: see its log")


def silent(rank: int, seen: Seen) -> Alarm:
    """The alarm for a rank that is dead, as far as can be told."""
    beat = seen.beat
    what = f"has died (process {beat.pid})" if seen.gone else "is not heard of, or has died"
    text = f"rank {rank} on {beat.host} {what}, at {_since(seen)}"
    return Alarm("silent", rank, f"{text}: see its log and its host's, and start the run again")


def _standing_still(ranks: dict[int, Seen], limits: Limits, comparable: bool) -> Alarm | None:
    """Among ranks none of which goes on: the one that the others wait for."""
    count = min(seen.beat.count for seen in ranks.values())
    late = {rank: seen for rank, seen in ranks.items() if seen.beat.count == count}
    if len(late) == len(ranks):  # then the one that does something else than wait
        late = {rank: seen for rank, seen in ranks.items() if not seen.beat.waits}
    if len(late) in (0, len(ranks)) and comparable:
        place = min(seen.beat.place for seen in ranks.values())
        late = {rank: seen for rank, seen in ranks.items() if seen.beat.place == place}
    if len(late) in (0, len(ranks)):
        all_wait = all(seen.beat.waits for seen in ranks.values())
        return _deadlock(ranks) if all_wait and len(ranks) > 1 else None
    rank, seen = max(late.items(), key=lambda item: item[1].still)
    other = next(each for each in ranks if each not in late)
    text = (
        f"rank {rank} on {seen.beat.host} hangs at {_since(seen)}, and others wait for it, as rank "
        f"{other} does at {ranks[other].beat}: look there"
    )
    if limits.setting:
        text += f", or raise {limits.setting} if it may take longer than {limits.hung:g} s"
    return Alarm("hung", rank, text)


def _deadlock(ranks: dict[int, Seen]) -> Alarm:
    told = [f"rank {rank} on {seen.beat.host} at {seen.beat}" for rank, seen in ranks.items()]
    more = f" and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    first = next(iter(ranks.values()))
    text = (
        f"all ranks wait for each other for {first.still:.0f} s: {'; '.join(told[:SHOWN])}{more}: "
        "their collectives do not match, or the network between them is gone"
    )
    return Alarm("deadlock", None, text)


def _deserted(ranks: Sequence[Seen], inside: dict[int, Seen]) -> Alarm | None:
    """A rank that others wait for, although it has left."""
    if not all(seen.beat.waits for seen in inside.values()):
        return None
    waiting, for_it = next(iter(inside.items()))
    for rank, seen in enumerate(ranks):
        if seen.beat.left:
            text = (
                f"rank {rank} on {seen.beat.host} has left the run at {seen.beat.doing}, and rank "
                f"{waiting} waits for it at {_since(for_it)}: see its log"
            )
            return Alarm("left", rank, text)
    return None


def _since(seen: Seen) -> str:
    seconds = seen.beat.still + seen.unheard
    clock = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
    return f"{seen.beat}, since {clock} ({seconds:.0f} s)"
