"""Steps that would do harm are skipped, alike on all ranks, and end the run when there are many."""

import json
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.errors import NearlinearError
from nearlinear.spmd.failures import RankError
from nearlinear.train.bad_steps import ENOUGH, WINDOW, BadSteps

NORMS = st.lists(st.sampled_from([0.0, 1.0, 1.5, 40.0, math.inf, math.nan]), max_size=200)


@given(norms=NORMS, factor=st.sampled_from([0.0, 2.0, 30.0]), at=st.integers(0, 200))
def test_what_is_skipped_is_what_the_rule_says(norms, factor, at):
    """Also where the judge goes on from its saved state."""
    judge, good, skipped = BadSteps(1000, factor), [], 0
    for step, norm in enumerate(norms):
        if step == at:
            state, judge = json.loads(json.dumps(judge.state_dict())), BadSteps(1000, factor)
            judge.load_state_dict(state)
        usual = statistics.median(good[-WINDOW:]) if len(good) >= ENOUGH else math.inf
        bad = not math.isfinite(norm) or (factor > 0 and norm > factor * usual)
        assert bool(judge.judge(step, 1.0, norm)) == bad
        skipped += bad
        good += [] if bad else [norm]
        assert judge.skipped == skipped


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_so_many_in_a_row_and_no_more(allowed):
    judge = BadSteps(allowed, 0.0)
    for row in (range(allowed), range(allowed)):
        assert all("the loss is nan" in judge.judge(step, math.nan, 1.0) for step in row)
        assert judge.judge(9, 1.0, 1.0) == ""
    for step in range(allowed):
        judge.judge(step, 1.0, math.inf)
    with pytest.raises(NearlinearError, match="step 7: .* stops before .*: lower optimizer.lr"):
        judge.judge(7, 1.0, math.inf)


def spoiled(trainer, steps: set[int], rank: int = 0):
    """The same trainer; gradients of ``steps`` are not finite, first of all on ``rank``."""

    def spoil(module, args, output):
        if trainer.done + 1 in steps and trainer.rank == rank and module.training:
            return output * math.nan
        return output

    trainer.model.get_input_embeddings().register_forward_hook(spoil)
    return trainer


def shards(trainer) -> list[torch.Tensor]:
    return [p.detach().to_local().clone() for p in trainer.model.parameters()]


def test_a_skipped_step_changes_nothing_and_the_run_goes_on(small_run, tmp_path):
    """Spoiled on one of four ranks; all skip it, and the next steps are those of a run in which
    the batch was never there for the schedule."""
    small_run["run"]["log_every"] = 1
    small_run["train"] |= {"steps": 6, "eval_sequences": 0, "sample_tokens": 0}

    def work(rank):
        trainer = spoiled(nl.Trainer(small_run), {1, 3}, rank=2)
        rows, changed = [], []
        for _ in range(4):
            before = shards(trainer)
            rows.append(trainer.step())
            pairs = zip(before, shards(trainer), strict=True)
            changed.append(any(not a.equal(b) for a, b in pairs if a.numel()))
        trainer.reporter.close()
        return rows, changed

    for rows, changed in nl.spmd.run(work, 4):
        assert changed == [False, True, False, True]
        assert [row["skipped"] for row in rows] == [1, 1, 2, 2]
        assert rows[0]["lr"] == rows[1]["lr"] < rows[2]["lr"] == rows[3]["lr"]
        assert len({row["batch_id"] for row in rows}) == 4
        assert [math.isnan(row["loss"]) for row in rows] == [True, False, True, False]


def test_too_many_end_the_run_with_advice(small_run):
    small_run["train"] |= {"steps": 9, "bad_steps_in_a_row": 2, "eval_sequences": 0}

    def work(rank):
        spoiled(nl.Trainer(small_run), {3, 4, 5, 6}).fit()

    with pytest.raises(RankError, match="step 5: the loss is nan .* as 2 before it were: lower"):
        nl.spmd.run(work, 2)


def test_what_was_skipped_is_known_after_an_end(small_run, tmp_path):
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept")}
    small_run["train"] |= {"steps": 6, "stop_after": 3, "eval_sequences": 0, "sample_tokens": 0}

    def work(rank, bad):
        trainer = spoiled(nl.Trainer(small_run), bad)
        found = trainer.bad_steps.skipped, list(trainer.bad_steps.norms)
        trainer.fit()
        return found, trainer.bad_steps.skipped, list(trainer.bad_steps.norms)

    _, skipped, norms = nl.spmd.run(work, 1, args=({2},))[0]
    assert skipped == 1 and len(norms) == 2
    small_run["train"]["stop_after"] = 4
    assert nl.spmd.run(work, 1, args=(set(),))[0][0] == (skipped, norms)
