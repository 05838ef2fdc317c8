"""Ranks that tell each other what came of their work, from threads that must not use collectives.

Words go through the store by which the job's ranks found each other: JSON, never pickle. Rank 0
hears all and answers all, so that what the store carries grows with the ranks, not their square.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch.distributed as dist

LOOK_EVERY = 0.02, 0.5
"""seconds between looks at the store, at first and after a while"""


class Deserted(Exception):
    """``rank`` has not said a word for as long as it was waited for."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank} does not answer")
        self.rank = rank


Patience = Callable[[int], bool]
"""whether a rank is still worth waiting for"""


class Meeting:
    """One of this job's, by its ``name``; all ranks hold it in step."""

    def __init__(self, store: dist.Store, name: str, rank: int, world: int):
        self.store, self.name, self.rank, self.world = store, name, rank, world

    def agree(self, subject: str, value, patient: Patience, made: Callable[[list], object] = list):
        """On all ranks, what rank 0 has ``made`` of their values (JSON), which are in their order.

        Raises Deserted for a rank that has told none: on all ranks alike, unless that is rank 0.
        """
        self.tell(subject, value)
        if self.rank == 0:
            try:
                self.announce(subject, {"agreed": made(self._hear(subject, patient))})
            except Deserted as error:
                self.announce(subject, {"deserted": error.rank})
        answer = self._wait(self._key(subject, "all"), 0, patient)
        if "deserted" in answer:
            raise Deserted(answer["deserted"])
        return answer["agreed"]

    def tell(self, subject: str, value) -> None:
        """Let rank 0 know."""
        self.store.set(self._key(subject, self.rank), json.dumps(value))

    def announce(self, subject: str, value) -> None:
        """Let all ranks know; on rank 0."""
        self.store.set(self._key(subject, "all"), json.dumps(value))

    def forget(self, *subjects: str) -> None:
        """What was agreed, once all have learned it; on rank 0."""
        for subject in subjects:
            self.store.delete_key(self._key(subject, "all"))

    def _hear(self, subject: str, patient: Patience) -> list:
        told = []
        for rank in range(self.world):
            told.append(self._wait(self._key(subject, rank), rank, patient))
            self.store.delete_key(self._key(subject, rank))
        return told

    def _key(self, subject: str, whose) -> str:
        return f"nearlinear/{self.name}/{subject}/{whose}"

    def _wait(self, key: str, rank: int, patient: Patience):
        """What ``rank`` has to say. Never blocks in the store: other threads use it, too."""
        pause, longest = LOOK_EVERY
        while not self.store.check([key]):
            if not patient(rank):
                raise Deserted(rank)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return json.loads(self.store.get(key))
