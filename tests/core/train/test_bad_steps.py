"""Bad steps are skipped alike on all ranks, and too many in a row end the run."""

import json
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nearlinear as nl
from nearlinear.errors import NearlinearError, RankError
from nearlinear.train.callbacks.bad_steps import MIN_NORMS, NORM_WINDOW, BadStepDetector

NORMS = st.lists(st.sampled_from([0.0, 1.0, 1.5, 40.0, math.inf, math.nan]), max_size=200)


@given(norms=NORMS, factor=st.sampled_from([0.0, 2.0, 30.0]), at=st.integers(0, 200))
def test_detector_follows_the_documented_rule(norms, factor, at):
    """Restoring the saved state in between changes nothing."""
    detector, good, skipped = BadStepDetector(1000, factor), [], 0
    for step, norm in enumerate(norms):
        if step == at:
            state, detector = (
                json.loads(json.dumps(detector.state_dict())),
                BadStepDetector(1000, factor),
            )
            detector.load_state_dict(state)
        typical = statistics.median(good[-NORM_WINDOW:]) if len(good) >= MIN_NORMS else math.inf
        bad = not math.isfinite(norm) or (factor > 0 and norm > factor * typical)
        assert bool(detector.check_step(step, 1.0, norm)) == bad
        skipped += bad
        good += [] if bad else [norm]
        assert detector.skipped == skipped


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_detector_limits_consecutive_bad_steps(allowed):
    detector = BadStepDetector(allowed, 0.0)
    for row in (range(allowed), range(allowed)):
        assert all("the loss is nan" in detector.check_step(step, math.nan, 1.0) for step in row)
        assert detector.check_step(9, 1.0, 1.0) == ""
    for step in range(allowed):
        detector.check_step(step, 1.0, math.inf)
    with pytest.raises(NearlinearError, match="step 7: .* stops before .*: lower optimizer.lr"):
        detector.check_step(7, 1.0, math.inf)


def spoiled(trainer, steps: set[int], rank: int = 0):
    """Return ``trainer`` with non-finite activations on ``rank`` in the given steps."""

    def spoil(module, args, output):
        if trainer.done + 1 in steps and trainer.rank == rank and module.training:
            return output * math.nan
        return output

    trainer.model.get_input_embeddings().register_forward_hook(spoil)
    return trainer


def shards(trainer) -> list[torch.Tensor]:
    return [p.detach().to_local().clone() for p in trainer.model.parameters()]


def test_skipped_step_does_not_change_the_model(small_run, tmp_path):
    """Every rank skips a step that is bad on one rank, and the learning rate does not advance."""
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


def test_too_many_bad_steps_end_the_run(small_run):
    small_run["train"] |= {"steps": 9, "bad_steps_in_a_row": 2, "eval_sequences": 0}

    def work(rank):
        spoiled(nl.Trainer(small_run), {3, 4, 5, 6}).fit()

    with pytest.raises(
        RankError, match="step 5: the loss is nan .* and 2 steps before it were skipped.*: lower"
    ):
        nl.spmd.run(work, 2)


def test_skipped_steps_are_restored_from_a_checkpoint(small_run, tmp_path):
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
