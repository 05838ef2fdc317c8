"""An interrupted run resumes with the losses of an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import nearlinear as nl
from data_prep import prepare, sources
from nearlinear.checkpoint import save
from nearlinear.distributed import runtime
from nearlinear.errors import CheckpointError
from tests.support.command_line import end_after, write


def start(config: Path, *settings: str, **options) -> subprocess.Popen:
    changes = [word for setting in settings for word in ("--set", setting)]
    return subprocess.Popen(
        [sys.executable, "-m", "nearlinear.cli", "train", str(config), *changes],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, **options,
    )  # fmt: skip


def final_values(folder: Path, step: int) -> dict:
    """Return every block of a checkpoint by file and name."""
    return {
        (path.name, name): value
        for path in sorted(save.step_folder(folder, step).glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(small_run, tmp_path):
    small_run["model"]["overrides"] |= {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
    small_run["train"]["eval_sequences"] = small_run["train"]["sample_tokens"] = 0

    def train(folder: str, **loop):
        config = small_run | {"checkpoint": {"folder": str(tmp_path / folder), "every": 2}}
        return nl.Trainer(config | {"train": small_run["train"] | loop}).fit()

    straight = train("straight")
    train("broken", stop_after=3)
    assert save.steps(tmp_path / "broken") == [2, 3]
    resumed = train("broken")
    assert (resumed.steps, resumed.loss) == (straight.steps, straight.loss)
    one, other = (final_values(tmp_path / name, 6) for name in ("straight", "broken"))
    assert one.keys() == other.keys()
    assert all(value.equal(other[name]) for name, value in one.items())


def test_resume_refuses_tokens_of_another_tokenizer(small_run, token_folder, tmp_path):
    """The vocabulary has the same size, so that only the tokenizer's hash differs."""
    small_run["train"] |= {"stop_after": 1, "eval_sequences": 0, "sample_tokens": 0}
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept")}
    nl.Trainer(small_run).fit()
    runtime.shutdown()
    tokenizer = json.loads((token_folder / "tokenizer" / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (tmp_path / "other.json").write_text(json.dumps(tokenizer))
    prepare(
        sources.jsonl([token_folder.parent / "documents.jsonl"]),
        tmp_path / "tokens",
        tokenizer=str(tmp_path / "other.json"),
        val_fraction=0.1,
        progress=False,
    )
    small_run["data"]["path"] = str(tmp_path / "tokens")
    words = r"of the tokenizer .* \(sha256 .*tokens is of the tokenizer other"
    with pytest.raises(CheckpointError, match=words):
        nl.Trainer(small_run)


def losses_of(rank: int, config: dict) -> list[float]:
    trainer = nl.Trainer(config)
    return [trainer.first_step, *(trainer.step()["loss"] for _ in range(3))]


@pytest.mark.parametrize("ranks", [2, 4])
def test_resume_on_other_ranks_uses_the_same_samples(small_run, tmp_path, ranks):
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept")}
    small_run["batch"] = {"micro_batch_size": 4}
    nl.Trainer(small_run | {"train": small_run["train"] | {"stop_after": 3}}).fit()
    expected = losses_of(0, small_run)
    small_run["batch"] = {"micro_batch_size": 4 // ranks}
    small_run["parallel"] = {"hybrid_shard_degree": 2}
    for first, *losses in nl.spmd.run(losses_of, ranks=ranks, args=(small_run,)):
        assert first == expected[0] == 3
        assert losses == pytest.approx(expected[1:], abs=1e-6)


def losses_until(rank: int, config: dict, last: int) -> list[tuple]:
    trainer = nl.Trainer(config | {"train": config["train"] | {"stop_after": last}})
    steps, step = [], trainer.step
    trainer.step = lambda: steps.append(step()) or steps[-1]
    trainer.fit()
    return [(row["step"], row["loss"], row["batch_id"]) for row in steps]


def test_elastic_run_keeps_samples_and_losses(small_run, tmp_path):
    """On 4, 2, 1 and again 4 ranks, each step has the sequences and the loss of 4 ranks."""
    small_run["batch"] = {"micro_batch_size": 1, "sequences": 8}
    small_run["parallel"] = {"hybrid_shard_degree": 1}
    small_run["train"] |= {"steps": 8, "eval_sequences": 0, "sample_tokens": 0}
    expected = nl.spmd.run(losses_until, 4, args=(small_run, 8))[0]
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept")}
    found = []
    for ranks, last in ((4, 2), (2, 4), (1, 6), (4, 8)):
        found += nl.spmd.run(losses_until, ranks, args=(small_run, last))[0]
    assert [row[::2] for row in found] == [row[::2] for row in expected]
    losses = [row[1] for row in expected]
    assert [row[1] for row in found] == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("key", ["shard_optimizer_state", "offload_optimizer"])
def test_optimizer_state_placement_does_not_change_the_losses(small_run, tmp_path, key):
    """On 2 shards x 2 replicas, before and after a resume."""
    small_run["parallel"] = {"hybrid_shard_degree": 2}
    expected = nl.spmd.run(losses_of, 4, args=(small_run,))[0][1:]
    small_run["parallel"][key] = True
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept")}
    stopped = small_run | {"train": small_run["train"] | {"stop_after": 2, "eval_sequences": 0}}
    nl.spmd.run(run_to_its_end, 4, args=(stopped,))
    for first, loss in nl.spmd.run(next_loss, 4, args=(small_run,)):
        assert first == 2
        assert loss == pytest.approx(expected[2], abs=1e-6)


def run_to_its_end(rank: int, config: dict):
    return nl.Trainer(config).fit()


def next_loss(rank: int, config: dict) -> tuple[int, float]:
    trainer = nl.Trainer(config)
    return trainer.first_step, trainer.step()["loss"]


def test_finished_run_resumes_without_steps(small_run, tmp_path):
    config = small_run | {"checkpoint": {"folder": str(tmp_path / "kept")}}
    nl.Trainer(config).fit()
    assert nl.Trainer(config).fit().steps == 6


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_the_same_command_resumes(small_run, tmp_path, ranks):
    small_run["train"] |= {"steps": 2000, "eval_every": 0}
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept")}
    small_run["run"]["nproc"] = ranks
    config = write(small_run, tmp_path)
    running = start(config)
    metrics = Path(small_run["run"]["folder"], "metrics.jsonl")
    said = end_after(running, metrics, 3)
    assert running.returncode == 128 + signal.SIGTERM, said
    [done] = save.steps(tmp_path / "kept")
    assert done >= 3 and "stopped" in said
    if ranks > 1:
        return  # a run of several processes resumes in tests/core/launch/test_emulate.py
    again = start(config, f"train.steps={done + 2}")
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, out + err
    assert f"resumed after step {done}" in out and f"step={done + 1} " in out
    assert f"step={done} " not in out
