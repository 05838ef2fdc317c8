"""Callbacks of the trainer: order of the hooks, metrics, skipped updates, and their cost."""

import contextlib

import pytest

import nearlinear as nl
from nearlinear.distributed.collectives import count_collectives
from nearlinear.train.callbacks import Callback


class Recorder(Callback):
    """A callback that records its hooks."""

    def __init__(self):
        self.hooks = []

    def on_setup(self, trainer):
        self.trainer = trainer

    def on_step_begin(self, step):
        self.hooks.append(f"begin {step.number}")

    def on_data_loaded(self, step):
        self.hooks.append("data")

    def on_micro_batch(self, step, index):
        self.hooks.append(f"micro-batch {index}")

    def on_backward_end(self, step):
        self.hooks.append("backward")

    def on_gradients_ready(self, step):
        self.hooks.append("gradients")
        self.loss = step.loss

    @contextlib.contextmanager
    def update_context(self, step):
        self.hooks.append("update begins")
        yield
        self.hooks.append(f"update {self.trainer.done} ends")

    def on_step_end(self, step, metrics):
        self.hooks.append("end")
        metrics["updates"] = step.updates


class RankNumbers(Callback):
    """A callback with a per-rank metric."""

    def __init__(self, rank):
        self.rank = rank

    def rank_metrics(self, step):
        return {"ten_times_rank": 10.0 * self.rank}


class SkipSecondStep(Callback):
    def on_gradients_ready(self, step):
        if step.number == 2:
            step.skip_reason = "this is a test"


def test_hooks_run_in_documented_order(small_run):
    def work(rank):
        recorder = Recorder()
        trainer = nl.Trainer(small_run, callbacks=[recorder])
        metrics = trainer.step()
        trainer.reporter.close()
        return recorder.hooks, recorder.loss == metrics["loss"], metrics["updates"]

    expected = ["begin 1", "data", "micro-batch 1", "micro-batch 2", "backward", "gradients"]
    expected += ["update begins", "update 1 ends", "end"]
    for hooks, same_loss, updates in nl.spmd.run(work, 2):
        assert hooks == expected and same_loss and updates == 0


def test_rank_metrics_reach_all_ranks_without_another_collective(small_run):
    def work(rank):
        calls, metrics = [], {}
        for callbacks in ([], [RankNumbers(rank)]):
            trainer = nl.Trainer(small_run, callbacks=callbacks)
            trainer.step()
            with count_collectives() as counted:
                metrics = trainer.step()
            trainer.reporter.close()
            calls.append(dict(counted.calls))
        return calls, metrics["ten_times_rank"]

    for (plain, with_callback), gathered in nl.spmd.run(work, 2):
        assert with_callback == plain
        assert gathered == [0.0, 10.0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_callback_can_skip_an_update(small_run, capsys, ranks):
    def work(rank):
        trainer = nl.Trainer(small_run, callbacks=[SkipSecondStep()])
        changed, metrics = [], []
        for _ in range(3):
            before = [p.detach().to_local().clone() for p in trainer.model.parameters()]
            metrics.append(trainer.step())
            after = [p.detach().to_local() for p in trainer.model.parameters()]
            changed.append(any(not a.equal(b) for a, b in zip(before, after, strict=True)))
        trainer.reporter.close()
        return changed, [row["lr"] for row in metrics], metrics[-1]["skipped"]

    for changed, rates, skipped in nl.spmd.run(work, ranks):
        assert changed == [True, False, True] and skipped == 1
        assert rates[1] == rates[2] > rates[0], "the schedule counts updates"
    assert "step 2 is skipped: this is a test" in capsys.readouterr().out
