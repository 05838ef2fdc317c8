"""A run with default settings keeps its model, which the commands then find in the run folder."""

import os
import signal
from pathlib import Path

import pytest
import torch
import transformers

import nearlinear as nl
from nearlinear import cli
from nearlinear.checkpoint import save
from nearlinear.config import train as train_config
from nearlinear.distributed import runtime
from nearlinear.errors import CheckpointError, Interrupted
from nearlinear.train import preflight
from nearlinear.train.callbacks import Callback


@pytest.fixture
def run(small_run):
    """Config with the default [checkpoint] table and 2 steps."""
    del small_run["checkpoint"]
    small_run["train"] |= {"steps": 2, "eval_sequences": 0, "sample_tokens": 0}
    small_run["run"]["memory_report"] = False
    return small_run


def fit(run) -> nl.Trainer:
    trainer = nl.Trainer(run)
    trainer.fit()
    runtime.shutdown()
    return trainer


def exported(folder: Path, out: Path):
    assert cli.main(["export", str(folder), str(out)]) == 0
    return transformers.AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_finished_run_is_exported_with_its_tokenizer(run, tmp_path, token_folder, elsewhere):
    folder = Path(run["run"]["folder"])
    if elsewhere:
        run["checkpoint"] = {"folder": str(tmp_path / "other" / "kept")}
    trainer = fit(run)
    model = exported(folder, tmp_path / "hf")
    trained = {name: p.full_tensor() for name, p in trainer.model.named_parameters()}
    for name, value in model.named_parameters():
        assert torch.equal(value, trained[name])
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert words.eos_token_id == model.config.eos_token_id == trainer.dataset.manifest.eos_id
    assert words("The model reads")["input_ids"]
    place = tmp_path / "other" / "kept" if elsewhere else folder / "checkpoints"
    exported(place, tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (
        token_folder / "tokenizer" / "tokenizer.json"
    ).read_bytes()


class Interrupt(Callback):
    def on_step_end(self, step, metrics):
        os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_run_is_saved_exported_and_resumed(run, tmp_path):
    run["train"]["steps"] = 4
    with pytest.raises(Interrupted):
        nl.Trainer(run, callbacks=[Interrupt()]).fit()
    runtime.shutdown()
    folder = Path(run["run"]["folder"])
    [done] = save.steps(folder / "checkpoints")
    assert 0 < done < 4
    exported(folder, tmp_path / "hf")
    assert fit(run).first_step == done


def test_repeated_run_names_its_end_and_changed_keys(run, capsys):
    fit(run)
    run["optimizer"]["lr"] = 1e-4
    assert fit(run).first_step == 2
    said = capsys.readouterr().out
    assert "nothing is left to train" in said and "optimizer.lr = 0.0001 (was 0.005)" in said
    run["checkpoint"] = {"resume": False}
    with pytest.raises(CheckpointError, match="holds the checkpoint of step 2 of an earlier run"):
        nl.Trainer(run)


def test_run_without_checkpoints_says_so(run, tmp_path, capsys, caplog):
    run["checkpoint"] = {"folder": ""}
    folder = Path(run["run"]["folder"])
    fit(run)
    assert not (folder / "checkpoints").exists()
    assert cli.main(["export", str(folder), str(tmp_path / "hf")]) == 2
    assert "has written no checkpoints (checkpoint.folder is empty)" in capsys.readouterr().err
    preflight.check_run(train_config.load(run), 1)
    assert "the trained model is lost" in caplog.text


def test_unsavable_optimizer_turns_default_checkpoints_off(run):
    run["optimizer"] = {"kind": "adamw_8bit"}
    assert train_config.load(run).checkpoint_folder == ""
