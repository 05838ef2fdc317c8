"""Faults of a model are found on the launcher, before its ranks start."""

import pytest

from nearlinear import cli
from nearlinear.config import train as train_config
from nearlinear.errors import ConfigError
from nearlinear.launch import local
from nearlinear.train import preflight


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"n_layers": 2}, "model.overrides.n_layers: GPT2Config has no such key"),
        ({"n_embd": 32, "n_head": 3}, "the model cannot be built: .*divisible"),
        ({"n_layer": "two"}, "n_layer"),
    ],
)
def test_bad_overrides_start_no_rank(small_run, tmp_path, monkeypatch, capsys, overrides, reason):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started = []
    monkeypatch.setattr(local, "start_ranks", lambda *_: started.append(1) or 0)
    small_run["model"]["overrides"] = overrides
    with pytest.raises(ConfigError, match=reason):
        preflight.check_run(train_config.load(small_run), 2)
    settings = [f"data.path={small_run['data']['path']}", "data.sequence_length=32"]
    settings += [f"run.folder={tmp_path / 'run'}", "train.eval_sequences=16"]
    settings += [f"model.overrides.{key}={value}" for key, value in overrides.items()]
    command = ["train", "--nproc", "2", *(word for each in settings for word in ("--set", each))]
    assert cli.main(command) == 2 and not started
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_good_overrides_are_remembered(small_run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    preflight.check_run(train_config.load(small_run), 2)
    [known] = (tmp_path / "nearlinear" / "models").iterdir()
    small_run["model"]["overrides"]["n_layer"] = 1
    preflight.check_run(train_config.load(small_run), 2)
    assert len(list(known.parent.iterdir())) == 2
    preflight.check_run(train_config.load(small_run), 2)
    assert len(list(known.parent.iterdir())) == 2
