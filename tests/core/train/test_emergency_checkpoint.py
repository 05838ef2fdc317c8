"""After a fault of one rank, the last complete step is saved and the run resumes from it."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import nearlinear as nl
from ci.faults.ranks import RankProcesses, train
from nearlinear.checkpoint import safetensors_file, save
from nearlinear.checkpoint.verify import find_faults
from nearlinear.distributed import watchdog
from nearlinear.errors import RankError
from nearlinear.train.callbacks import emergency_checkpoint


def values(folder: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    """Return every block of a checkpoint by file and name."""
    paths = sorted(save.step_folder(folder, step).glob("*.safetensors"))
    return {(p.name, name): value for p in paths for name, value in load_file(p).items()}


def equal(one: Path, other: Path, step: int, without: str = "random/") -> bool:
    """Compare bitwise, except random states, which ranks that are threads share."""
    a, b = (
        {key: v for key, v in values(folder, step).items() if not key[1].startswith(without)}
        for folder in (one, other)
    )
    return a.keys() == b.keys() and all(v.equal(b[key]) for key, v in a.items())


@pytest.fixture
def config(small_run, tmp_path):
    small_run["parallel"] = {"hybrid_shard_degree": 2}
    small_run["train"] |= {"steps": 6, "eval_every": 0, "eval_sequences": 0, "sample_tokens": 0}
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept"), "every": 2, "keep": 1}
    small_run["run"]["memory_report"] = False
    return small_run


class OutOfLuck(Exception):
    pass


def in_loader(trainer):
    return trainer.loader, "_read"


def in_forward(trainer):
    return trainer.model.transformer.h[1].mlp.c_fc, "forward"


def in_clipping(trainer):
    return trainer.bad_steps, "check_step"


def in_report(trainer):
    return trainer.reporter, "log_step"


def in_update(trainer):
    return trainer.optimizer, "step"


def faulty(rank: int, config: dict, spot, step: int, fault) -> None:
    """Train, and call ``fault()`` on rank 1 at a ``spot`` of ``step``."""
    trainer = nl.Trainer(config)
    part, name = spot(trainer)
    inner = getattr(part, name)

    def call(*args, **kwargs):
        at = trainer.done + (spot is not in_report)
        if rank == 1 and at == step and torch.is_grad_enabled():
            fault()
        return inner(*args, **kwargs)

    if rank == 1:
        setattr(part, name, call)
    trainer.fit()


def out_of_luck():
    raise OutOfLuck("this batch is bad")


def run_with_fault(config, spot, step, fault=out_of_luck, ranks=4) -> Exception:
    with pytest.raises(RankError) as caught:
        nl.spmd.run(faulty, ranks, args=(config, spot, step, fault), timeout=120)
    return caught.value.__cause__


def go_on(rank: int, config: dict) -> int:
    trainer = nl.Trainer(config)
    trainer.fit()
    return trainer.first_step


@pytest.mark.parametrize(
    ("spot", "layout"),
    [
        (in_loader, {"shard_optimizer_state": True}),
        (in_forward, {}),
        (in_report, {"pipeline_parallel_degree": 2, "microbatches": 2}),
    ],
)
def test_resume_after_a_fault_equals_an_uninterrupted_run(config, tmp_path, spot, layout):
    """The fault is between two checkpoints: schedule, loader and optimizer have advanced."""
    config["parallel"] |= layout
    straight = config | {"checkpoint": {"folder": str(tmp_path / "straight"), "every": 3}}
    nl.spmd.run(go_on, 4, args=(straight,))
    fault_in = 3 if spot is in_report else 4
    error = run_with_fault(config, spot, fault_in)
    folder = Path(config["checkpoint"]["folder"])
    assert isinstance(error, OutOfLuck)
    where = save.step_folder(folder, 3)
    assert error.__notes__ == [f"the state after step 3 is saved in {where}"]
    assert save.steps(folder) == [2, 3], "older checkpoints are kept despite checkpoint.keep"
    assert (folder / "latest").read_text() == "step-00000003\n" and not list(find_faults(where))
    assert nl.spmd.run(go_on, 4, args=(config,)) == [3] * 4
    assert equal(folder, tmp_path / "straight", 6)


def test_other_ranks_name_the_failed_rank_and_the_checkpoint(config):
    said = {}

    def work(rank):
        try:
            faulty(rank, config, in_loader, 4, out_of_luck)
        except nl.errors.RankFailure as error:
            said[rank] = str(error)
            raise

    with pytest.raises(RankError, match="rank 1 of 4 failed: OutOfLuck: this batch is bad"):
        nl.spmd.run(work, 4)
    assert said.keys() == {0, 2, 3}
    for text in said.values():
        assert "rank 1 (host" in text and 'step 4, loading a batch": OutOfLuck: this batch' in text
        assert text.endswith("the state after step 3 is saved in " + str(
            save.step_folder(Path(config["checkpoint"]["folder"]), 3)))  # fmt: skip


def test_hanging_rank_takes_part_in_the_checkpoint(config):
    """The watchdog thread of the rank saves while its main thread hangs."""
    config["train"]["rank_timeout"] = 5
    released = threading.Event()

    def work(rank):
        try:
            faulty(rank, config, in_loader, 4, lambda: released.wait(100))
        except nl.errors.RankFailure as error:
            released.set()
            raise error

    with pytest.raises(RankError, match="rank 1 .* stuck in .step 4, loading.* after step 3 is"):
        nl.spmd.run(work, 4)
    assert save.steps(Path(config["checkpoint"]["folder"])) == [2, 3]


def test_single_rank_saves_after_its_own_error(config):
    config["parallel"] = {}
    trainer = nl.Trainer(config)
    trainer.loader._read = lambda base, inner=trainer.loader._read: (
        out_of_luck() if trainer.done == 3 else inner(base)
    )
    with pytest.raises(OutOfLuck) as caught:
        trainer.fit()
    assert "the state after step 3 is saved in" in caught.value.__notes__[0]
    nl.shutdown()
    assert nl.Trainer(config).first_step == 3
    nl.shutdown()


def test_partial_update_is_not_saved(config):
    error = run_with_fault(config, in_update, 4)
    [note] = error.__notes__
    assert note == "the state could not be saved: rank 1 is inside of the optimizer's update"
    assert save.steps(Path(config["checkpoint"]["folder"])) == [2]


def test_fault_before_the_first_step_saves_nothing(config):
    error = run_with_fault(config, in_loader, 1)
    assert "has not finished a step" in error.__notes__[0]
    assert save.steps(Path(config["checkpoint"]["folder"])) == []


def test_full_disk_keeps_the_older_checkpoint(config, monkeypatch):
    write = safetensors_file.write_file

    def full_at_three(path, *rest):
        if path.parent.name == "step-00000003" and "00002-of" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, *rest)

    monkeypatch.setattr(safetensors_file, "write_file", full_at_three)
    error = run_with_fault(config, in_loader, 4)
    assert "could not be saved: rank 2 cannot write" in error.__notes__[0]
    assert "No space left on device" in error.__notes__[0]
    assert save.steps(Path(config["checkpoint"]["folder"])) == [2]


def test_unresponsive_rank_ends_the_wait(config, monkeypatch):
    monkeypatch.setattr(emergency_checkpoint, "ANSWER_TIMEOUT", 1.0)
    monkeypatch.setattr(emergency_checkpoint, "WRITE_TIMEOUT", 1.0)
    monkeypatch.setattr(watchdog, "EXIT_GRACE", 1.0)
    save = emergency_checkpoint.EmergencyCheckpoint.save

    def all_but_two(self, alarm, steady):
        return "" if self._rank == 2 else save(self, alarm, steady)

    monkeypatch.setattr(emergency_checkpoint.EmergencyCheckpoint, "save", all_but_two)
    error = run_with_fault(config, in_loader, 4)
    assert error.__notes__ == ["the state could not be saved: other ranks do not respond"]


def test_emergency_checkpoint_can_be_disabled(config):
    config["checkpoint"] |= {"emergency": False, "asynchronous": False}
    error = run_with_fault(config, in_loader, 4)
    assert not hasattr(error, "__notes__")
    assert save.steps(Path(config["checkpoint"]["folder"])) == [2]


def fails_once(rank: int, config: dict) -> None:
    """Fail in step 4, unless the checkpoint of step 3 exists."""
    there = save.step_folder(Path(config["checkpoint"]["folder"]), 3).exists()
    faulty(rank, config, in_loader, 0 if there else 4, out_of_luck)
    nl.shutdown()


@pytest.mark.slow
def test_resume_with_dropout_on_processes_is_bitwise_equal(config, tmp_path):
    """Covers each rank's random generators, and the message of a rank ended by another."""
    config["model"]["overrides"] |= {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
    straight = config | {"checkpoint": {"folder": str(tmp_path / "straight")}}
    for run, codes in ((straight, [0, 0]), (config, [1, 1]), (config, [0, 0])):
        ranks = RankProcesses(2, run, tmp_path / "log", train if run is straight else fails_once)
        ranks.wait_for_exit(120)
        ranks.join()
        assert [process.exitcode for process in ranks.processes] == codes
    said = (tmp_path / "log").read_text()
    assert "OutOfLuck: this batch is bad\nthe state after step 3 is saved in" in said
    assert "RankFailure: rank 1 (host" in said
    assert equal(Path(config["checkpoint"]["folder"]), tmp_path / "straight", 6, without="nothing")
