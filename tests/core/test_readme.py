"""What the package's README says of jobs and checkpoints is what happens."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import nearlinear as nl
from nearlinear import cli
from nearlinear.launch import spec
from nearlinear.parallel.layout import local
from nearlinear.train import config as train_config
from tests.support import parity

README = Path(__file__).resolve().parents[2] / "packages" / "core" / "README.md"
TABLES = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
JOB = next(text for text in TABLES if "[job]" in text)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(JOB)
    return str(path)


@pytest.mark.parametrize("place", ["sagemaker", "emulate"])
def test_the_job_is_without_a_fault(file, place, capsys):
    assert cli.main(["launch", file, "--place", place, "--dry-run"]) == 0
    assert '"InstanceCount": 32' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "inputs", "shown"),
    [
        ("slurm", "{train = {path = '/fsx/tokens'}}", "#SBATCH --nodes=32"),
        ("kubernetes", "{train = {claim = 'tokens'}}", "kind: PyTorchJob"),
        ("local", "{train = {path = '/fsx/tokens'}}", "data.path=/fsx/tokens"),
    ],
)
def test_other_places_take_it_with_inputs_of_their_own(place, inputs, shown, capsys, tmp_path):
    data = tomllib.loads(JOB)
    data["job"]["inputs"] = tomllib.loads(f"inputs = {inputs}")["inputs"]
    for of_sagemaker in ("output", "checkpoints"):
        del data["job"][of_sagemaker]
    nodes = ["--set", "job.nodes=1"] if place == "local" else []
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    assert cli.main(["launch", str(path), "--place", place, "--dry-run", *nodes]) == 0
    assert shown in capsys.readouterr().out


def test_every_table_is_a_config():
    for text in TABLES:
        spec.load(tomllib.loads(text))
        train_config.load(tomllib.loads(text), environment={})


def screen_with(words: str) -> str:
    """The README's block of Python that has ``words``."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if words in block]
    return found


def screen_of_slices(rank):
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    given = {"nl": nl, "torch": torch, "model": model, "loader": [[parity.rows(0, 2)]] * 2}
    exec(screen_with("nl.shard_optimizer("), given)
    states = given["optimizer"].state.values()
    return sum(local(state["exp_avg"]).numel() for state in states), sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_the_screen_of_slices_runs_and_divides_the_state_by_all_ranks():
    held = nl.spmd.run(screen_of_slices, 4)
    assert sum(mine for mine, _ in held) == held[0][1]
    assert max(mine for mine, _ in held) < 0.26 * held[0][1]


def screens_of_parallelism(rank):
    """The README's own lines, one screen after the other, on one of eight ranks."""
    config, batch = parity.build("llama").config, parity.rows(0)
    given = {"nl": nl, "AutoModelForCausalLM": AutoModelForCausalLM, "config": config}
    exec(screen_with("with nl.delayed_init():"), given)
    for part in nl.accumulate(given["model"], [batch]):
        given["model"](**part).loss.backward()
    given["micro_batches"] = [batch, batch]
    given["model"] = parity.unseeded("llama")
    nl.init({"hybrid_shard_degree": 4})
    exec(screen_with("nl.offload_activations"), given)
    piped = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 2}
    nl.init(piped | {"hybrid_shard_degree": 2})
    with nl.delayed_init():
        given |= {"model": parity.unseeded("llama"), "micro_batches": [batch, batch]}
    exec(screen_with("pipe = nl.shard"), given)
    given |= {"model": given["pipe"], "input_ids": batch["input_ids"]}
    exec(screen_with("@nl.step"), given)
    return given["loss"].item()


def test_the_screens_of_parallelism_run():
    losses = nl.spmd.run(screens_of_parallelism, 8)
    assert len(set(losses)) == 1 and 4 < losses[0] < 6


def screens_of_precision_and_memory(rank):
    """A step in float16 whose scheduler waits, and one that is measured."""
    nl.init({"fp16": True, "init_scale": 65536.0, "hybrid_shard_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    model = nl.shard(model)
    optimizer = parity.adamw(model, 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    given = {"nl": nl, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    given["micro_batches"] = [parity.rows(rank), parity.rows(4 + rank)]
    exec(screen_with("nl.loss_scaler(model)"), given)
    exec(screen_with("nl.memory_report("), given | {"print": lambda text: None})
    return given["scaler"].overflow, scheduler.last_epoch


def test_the_screens_of_precision_and_memory_run():
    assert nl.spmd.run(screens_of_precision_and_memory, 4) == [(False, 1)] * 4
