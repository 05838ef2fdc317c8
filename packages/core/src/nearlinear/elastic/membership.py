"""Agreement of the first ranks of all replicas, after every step, on the step and its members.

Each member sends a vote to the others. A vote tells if the member holds the complete gradients of
the step, and names the members that it reaches. Votes count if they name the same members. If all
of these hold the gradients, the step is committed: everyone applies its update. Otherwise the
members that are left compute it again. A member that is behind, because the lost one had sent it
nothing, learns from the votes for the next step that its step was committed.

Payloads of the votes hold fingerprints of the training state. Members whose state differs from that
of the majority are excluded, and the others compute the step again.

A step that is computed again gives the same bits, so that members need not know what a lost one has
done. Only a majority may go on, so that two groups never write one run folder. Members that are
lost for sure do not count for it. Of two halves, the first that marks the run folder may.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RankFailure
from .peers import Member, Peers

POLL = 0.1
"""Seconds between looks at the peers without a message."""

LOST_GROUP = "lost"
"""Name of the process groups of a decision that was taken without this member's vote."""

FindFaulty = Callable[[Mapping[int, Any]], list[int]]
"""Returns the replicas to exclude because of the payloads of all in a complete step."""

FRESH, JOINING, ACTIVE = "fresh", "joining", "active"
"""Status of a replica: before any view, ready to join a running job, and a member of one."""


@dataclass(frozen=True)
class Decision:
    """The agreed result of a step."""

    committed: bool
    """True: the update of the step is applied. False: the step is computed again."""
    members: tuple[Member, ...]
    """Members of the next attempt or step, those that have been members for longer first."""
    group: str
    """Unique name of the process groups of these members; empty if the present ones stay."""
    joined: tuple[Member, ...] = ()
    """Members that receive the state first."""
    payloads: dict[int, Any] = field(default_factory=dict)
    """Payload of the vote of each replica for a complete step."""
    step: int = 0
    """The last committed step, for a replica that joins."""
    faulty: tuple[int, ...] = ()
    """Replicas that are excluded, because their state differs; ``payloads`` has that of all."""

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "payloads": {str(k): v for k, v in self.payloads.items()}}

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> Decision:
        return cls(
            read["committed"],
            tuple((index, name) for index, name in read["members"]),
            read["group"],
            tuple((index, name) for index, name in read["joined"]),
            {int(key): value for key, value in read["payloads"].items()},
            read["step"],
            tuple(read["faulty"]),
        )


class Membership:
    """The votes of one first rank.

    Args:
        peers: Its connections.
        minimum: Fewest replicas that go on.
        form_seconds: Seconds to wait for all replicas before a majority begins without the others.
        folder: Folder that all replicas share, for the decision between two halves.
        find_faulty: Called for each complete step.
    """

    def __init__(
        self,
        peers: Peers,
        minimum: int,
        form_seconds: float,
        folder: Path,
        find_faulty: FindFaulty = lambda payloads: [],
    ):
        self.peers: Peers = peers
        self.minimum: int = minimum
        self.form_seconds: float = form_seconds
        self.folder: Path = folder
        self.find_faulty: FindFaulty = find_faulty
        self.own: Member = (peers.replica, peers.incarnation)
        self.view: tuple[Member, ...] = ()
        self.admits: bool = True
        """True if replicas may join after a step."""
        self._votes: dict[Member, dict[str, dict[str, Any]]] = {}
        self._newest: dict[Member, dict[str, Any]] = {}
        self._attempts: dict[str, int] = {}
        self._previous: dict[str, Any] = {}
        self._group = ""
        self._group_step = 0
        self._welcome: dict[str, Any] | None = None
        self._since = time.monotonic()
        peers.status = {"is": FRESH, "step": 0}

    def receive(self, member: Member, message: Mapping[str, Any]) -> None:
        """Take a message of another member."""
        if "vote" in message:
            with self.peers.changed:
                vote = dict(message)
                self._votes.setdefault(member, {})[vote["vote"]] = vote
                newest = self._newest.get(member)
                if newest is None or vote["step"] >= newest["step"]:
                    self._newest[member] = vote
        elif "welcome" in message and self.peers.status.get("is") == JOINING:
            with self.peers.changed:
                self._welcome = message["welcome"]

    def finds_running_job(self) -> bool:
        """Wait until it is known whether this replica begins with others or joins a running job.

        Returns:
            True if other replicas are training already.
        """
        total = len(self.peers.addresses)
        while True:
            with self.peers.changed:
                found = self.peers.connected()
                if any(status["is"] == ACTIVE for status in found.values()):
                    return True
                waited = time.monotonic() - self._since
                if len(found) + 1 == total or (
                    waited > self.form_seconds and self._may_begin(len(found) + 1)
                ):
                    return False
                self._raise_if_fenced()
                if waited > self.form_seconds:
                    raise RankFailure(
                        f"{len(found) + 1} of {total} replicas have started within "
                        f"{self.form_seconds:g} s, too few to begin: start the others first"
                    )
                self.peers.changed.wait(POLL)

    def _may_begin(self, count: int) -> bool:
        return count >= self.minimum and 2 * count > len(self.peers.addresses)

    def form(self, step: int) -> Decision:
        """Begin with the other replicas at ``step``; all must have the same one."""
        self.peers.status = {"is": FRESH, "step": step, "ready": True}
        while True:
            with self.peers.changed:
                self._raise_if_fenced()
                found = self.peers.connected()
                ready = [m for m, status in found.items() if status.get("ready")]
                for member in ready:
                    if found[member]["step"] != step:
                        raise RankFailure(
                            f"replica {member[0]} begins at step {found[member]['step']} and this "
                            f"one at step {step}: both need the same checkpoint folder"
                        )
                waited = time.monotonic() - self._since > self.form_seconds
                complete = len(ready) + 1 == len(self.peers.addresses)
                formed = [m for m, status in found.items() if status["is"] == ACTIVE]
                if formed or complete or (waited and self._may_begin(len(ready) + 1)):
                    self.view = tuple(sorted([self.own, *ready, *formed]))
                    break
                self.peers.changed.wait(POLL)
        return self.decide(step, False, None)

    def join(self) -> Decision:
        """Wait until the running job takes this replica in; return its decision."""
        self.peers.status = {"is": JOINING, "step": 0}
        while True:
            with self.peers.changed:
                self._raise_if_fenced()
                if self._welcome is not None:
                    decision = Decision.from_json(self._welcome)
                    self._install(decision, decision.step)
                    return decision
                if not self.peers.connected() and time.monotonic() - self._since > max(
                    self.form_seconds, 2 * self.peers.silence
                ):
                    raise RankFailure("the running job that this replica was to join is gone")
                self.peers.changed.wait(POLL)

    def decide(self, step: int, complete: bool, payload: Any) -> Decision:
        """Agree on ``step`` with the members of the view.

        Args:
            step: Number of the step in progress.
            complete: True if all ranks of this replica hold the step's gradients.
            payload: JSON value for all members, delivered if the step is committed.

        Raises:
            RankFailure: Too few members are left, or this replica was cut off from them.
        """
        sent = ""
        while True:
            with self.peers.changed:
                self._raise_if_fenced()
                live = self._live()
                key = self._key(step, live)
                votes = [self._votes.get(m, {}).get(key) for m in live if m != self.own]
                ahead = [self._newest[m] for m in live if m in self._newest]
                ahead = [vote for vote in ahead if vote["step"] > step]
                if sent == key and None not in votes:
                    decision = self._conclude(step, live, key, [v for v in votes if v])
                    break
                if ahead:
                    decision = self._follow(step, complete, ahead[0])
                    break
                if sent == key:
                    self.peers.changed.wait(POLL)
                    continue
                vote = {
                    "vote": key,
                    "step": step,
                    "group": self._group,
                    "complete": complete,
                    "payload": payload,
                    "of_lost": self._payloads_of_lost(step, live),
                    "joining": self._joining(live),
                    "previous": self._previous,
                }
                self._votes.setdefault(self.own, {})[key] = vote
                sent = key
            for member in live:
                if member != self.own:
                    self.peers.send(member[0], vote)
        for member in decision.joined:
            told = {**decision.to_json(), "step": step}
            self.peers.send(member[0], {"welcome": told})
        return decision

    def missing(self) -> str:
        """Return why the latest decision's process groups cannot form, or an empty string.

        A member of them is lost, or voted anew before it had the votes for that decision.
        """
        with self.peers.changed:
            for member in self.view:
                if reason := self.peers.lost(member)[0]:
                    return f"replica {member[0]}: {reason}"
                newest = self._newest.get(member)
                if newest and newest["step"] == self._group_step:
                    if self._group not in (newest["vote"], newest["group"]):
                        return f"replica {member[0]} votes again on step {self._group_step}"
        return ""

    def _payloads_of_lost(self, step: int, live: tuple[Member, ...]) -> dict[str, Any]:
        """Return the payloads of members that voted on the complete ``step`` and are lost."""
        lost = [member for member in self.view if member not in live]
        votes = {str(member[0]): self._newest.get(member, {}) for member in lost}
        return {
            replica: vote["payload"] for replica, vote in votes.items()
            if vote.get("step") == step and vote["complete"]
        }  # fmt: skip

    def _joining(self, live: tuple[Member, ...]) -> list[Member]:
        """Return the replicas that are ready to join."""
        if not self.admits:
            return []
        found = self.peers.connected()
        return [m for m, status in found.items() if status["is"] == JOINING and m not in live]

    def _live(self) -> tuple[Member, ...]:
        """Return the members of the view that are left. Raises RankFailure if they are too few."""
        reasons = {m: self.peers.lost(m) for m in self.view}
        live = tuple(m for m in self.view if not reasons[m][0])
        possible = [m for m in self.view if not reasons[m][1]]  # silent ones may go on elsewhere
        majority = 2 * len(live) > len(possible)
        half = 2 * len(live) == len(possible)
        if not (majority or (half and self._claim(live))):
            silent = ", ".join(str(m[0]) for m in possible if m not in live)
            raise RankFailure(
                f"this replica cannot reach replicas {silent} of {len(self.view)}, which may be "
                "training without it: it ends, and joins them when it is started again"
            )
        if len(live) < self.minimum:
            gone = "; ".join(f"replica {m[0]}: {why}" for m, (why, _) in reasons.items() if why)
            raise RankFailure(
                f"{len(live)} replicas are left, and elastic.min_replicas = {self.minimum} ({gone})"
            )
        return live

    def _claim(self, live: tuple[Member, ...]) -> bool:
        """Return True if ``live`` is the half of the view that goes on: the first one to ask."""
        view = hashlib.sha256(json.dumps(self.view).encode()).hexdigest()[:16]
        claim, own = self.folder / f"half-{view}", json.dumps(live)
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = claim.with_suffix(f".{self.own[1].partition('@')[0]}")
        draft.write_text(own)
        with contextlib.suppress(FileExistsError):
            os.link(draft, claim)  # atomic, also on network file systems
        draft.unlink()
        return claim.read_text() == own

    def _key(self, step: int, live: tuple[Member, ...]) -> str:
        base = json.dumps([step, live])
        return json.dumps([step, live, self._attempts.get(base, 0)])

    def _conclude(
        self, step: int, live: tuple[Member, ...], key: str, votes: list[dict[str, Any]]
    ) -> Decision:
        """Decide by the equal votes of all members."""
        own = self._votes[self.own][key]
        others = [m for m in live if m != self.own]
        by_replica = {self.own[0]: own} | {
            member[0]: vote for member, vote in zip(others, votes, strict=True)
        }
        complete = all(vote["complete"] for vote in by_replica.values())
        payloads, faulty = {}, []
        if complete:
            payloads = {index: by_replica[index]["payload"] for index in sorted(by_replica)}
            of_lost = {
                int(r): p for vote in by_replica.values() for r, p in vote["of_lost"].items()
            }
            compared = dict(sorted((of_lost | payloads).items()))
            if faulty := self.find_faulty(compared):
                payloads = compared
        committed = complete and not faulty
        joined: tuple[Member, ...] = ()
        if committed:
            offered = [{tuple(each) for each in vote["joining"]} for vote in by_replica.values()]
            joined = tuple(sorted(set.intersection(*offered)))
        changed = not committed or joined or live != self.view
        members = (*(member for member in live if member[0] not in faulty), *joined)
        decision = Decision(
            committed, members, key if changed else "", joined, payloads, step,
            tuple(faulty),
        )  # fmt: skip
        base = json.dumps([step, live])
        self._attempts[base] = self._attempts.get(base, 0) + 1
        self._install(decision, step)
        return decision

    def _follow(self, step: int, complete: bool, ahead: dict[str, Any]) -> Decision:
        """Commit ``step`` because another member has, which knew that this one is complete."""
        previous = ahead["previous"]
        if not complete or previous.get("step") != step:
            raise RankFailure(
                f"another replica is at step {ahead['step']} and this one at step {step}: it ends, "
                "and joins the others when it is started again"
            )
        decision = Decision.from_json({**previous, "group": LOST_GROUP, "joined": []})
        self._previous = previous
        self._attempts.clear()
        return decision

    def _install(self, decision: Decision, step: int) -> None:
        """Make the members of ``decision`` the view."""
        self.peers.excluded.update(set(self.view) - set(decision.members))
        self.view = decision.members
        if decision.group:
            self._group, self._group_step = decision.group, step
        if decision.committed:
            self._attempts.clear()
            self._previous = {**decision.to_json(), "step": step}
        for votes in self._votes.values():  # only those of this step and later ones matter
            for key in [key for key, vote in votes.items() if vote["step"] < step]:
                del votes[key]
        self.peers.status = {"is": ACTIVE, "step": step}

    def _raise_if_fenced(self) -> None:
        if self.peers.fenced:
            raise RankFailure(f"{self.peers.fenced}: this replica ends, and can be started again")
