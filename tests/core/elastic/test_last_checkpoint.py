"""The last checkpoint of an elastic run has the same bits, whichever replica writes it."""

from types import SimpleNamespace

import torch

from nearlinear.elastic.job import ElasticJob
from nearlinear.elastic.membership import Decision
from nearlinear.train.elastic_steps import ElasticSteps


class LastSteps(ElasticJob):
    """Replica 1 of two, of which replica 0 is lost after it has written the last checkpoint."""

    def __init__(self):
        self.replica, self.rank, self.seed = 1, 0, 5
        self.members = ((0, "first"), (1, "second"))

    def admit(self, admitted):
        pass

    def decide(self, step, failures, payload):
        self.members = ((1, "second"),)
        return Decision(True, self.members, "")

    def take_events(self):
        return []


def test_another_writer_saves_the_same_random_state():
    saved, job = [], LastSteps()
    reporter = SimpleNamespace(close=lambda: None, log_if_missing=lambda row: None)
    trainer = SimpleNamespace(
        done=16, sentinel=None, last_row={}, reporter=reporter, open_reporter=lambda: reporter,
        save=lambda checkpoints: saved.append(torch.get_rng_state()),
    )  # fmt: skip
    job.seed_after(16)
    expected = torch.get_rng_state()
    steps = object.__new__(ElasticSteps)
    steps.trainer, steps.job = trainer, job
    steps.finish(SimpleNamespace(finish=lambda: None))
    assert len(saved) == 1 and saved[0].equal(expected)
