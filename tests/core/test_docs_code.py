"""Code blocks and job tables of the documentation run as documented."""

import dataclasses
import inspect
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch.distributed import fsdp
from transformers import AutoModelForCausalLM

import nearlinear as nl
from nearlinear import cli
from nearlinear.config import parallel as parallel_config
from nearlinear.config import train as train_config
from nearlinear.fsdp.model_state import local_tensor
from nearlinear.launch import spec
from tests.support import parity

DOCS = Path(__file__).resolve().parents[2] / "packages" / "core" / "docs"
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md")))
TABLES = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
JOB = next(text for text in TABLES if "[job]" in text)


@pytest.fixture
def job_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(JOB)
    return str(path)


@pytest.mark.parametrize("place", ["sagemaker", "emulate"])
def test_job_passes_dry_run(job_file, place, capsys):
    assert cli.main(["launch", job_file, "--place", place, "--dry-run"]) == 0
    assert '"InstanceCount": 32' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "inputs", "shown"),
    [
        ("slurm", "{train = {path = '/fsx/tokens'}}", "#SBATCH --nodes=32"),
        ("kubernetes", "{train = {claim = 'tokens'}}", "kind: PyTorchJob"),
        ("local", "{train = {path = '/fsx/tokens'}}", "data.path=/fsx/tokens"),
    ],
)
def test_job_runs_in_other_places_with_their_inputs(place, inputs, shown, capsys, tmp_path):
    data = tomllib.loads(JOB)
    data["job"]["inputs"] = tomllib.loads(f"inputs = {inputs}")["inputs"]
    for key in ("output", "checkpoints"):
        del data["job"][key]
    nodes = ["--set", "job.nodes=1"] if place == "local" else []
    if place == "slurm":  # without a container
        del data["job"]["image"]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    assert cli.main(["launch", str(path), "--place", place, "--dry-run", *nodes]) == 0
    assert shown in capsys.readouterr().out


def test_tables_are_valid_configs():
    for text in TABLES:
        spec.load(tomllib.loads(text))
        train_config.load(tomllib.loads(text), environment={})


def code_block(text: str) -> str:
    """Return the only Python block of the pages that contains ``text``, except those of the API."""
    pages = (path for path in sorted(DOCS.rglob("*.md")) if path.name != "api.md")
    text_of_pages = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    blocks = re.findall(r"```python\n(.*?)```", text_of_pages, re.DOTALL)
    (found,) = [block for block in blocks if text in block]
    return found


def run_optimizer_block(rank):
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    variables = {"nl": nl, "torch": torch, "model": model, "loader": [[parity.rows(0, 2)]] * 2}
    exec(code_block("nl.shard_optimizer("), variables)
    states = variables["optimizer"].state.values()
    return sum(local_tensor(state["exp_avg"]).numel() for state in states), sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_shard_optimizer_block_divides_state_by_all_ranks():
    held = nl.spmd.run(run_optimizer_block, 4)
    assert sum(mine for mine, _ in held) == held[0][1]
    assert max(mine for mine, _ in held) < 0.26 * held[0][1]


def run_parallelism_blocks(rank):
    """Execute the blocks on parallelism in sequence, on one of eight ranks."""
    config, batch = parity.build("llama").config, parity.rows(0)
    variables = {"nl": nl, "AutoModelForCausalLM": AutoModelForCausalLM, "config": config}
    exec(code_block("with nl.deferred_init():"), variables)
    for part in nl.accumulate(variables["model"], [batch]):
        variables["model"](**part).loss.backward()
    variables["micro_batches"] = [batch, batch]
    variables["model"] = parity.unseeded("llama")
    nl.init({"hybrid_shard_degree": 4})
    exec(code_block("nl.offload_activations"), variables)
    degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "microbatches": 2}
    nl.init(degrees | {"hybrid_shard_degree": 2})
    with nl.deferred_init():
        variables |= {"model": parity.unseeded("llama"), "micro_batches": [batch, batch]}
    exec(code_block("pipe = nl.shard"), variables)
    variables |= {"model": variables["pipe"], "input_ids": batch["input_ids"]}
    exec(code_block("@smp.step"), variables)
    return variables["loss"].item()


def test_parallelism_blocks_run():
    losses = nl.spmd.run(run_parallelism_blocks, 8)
    assert len(set(losses)) == 1 and 4 < losses[0] < 6


def run_precision_and_memory_blocks(rank):
    """Execute the blocks on loss scaling and on the memory report."""
    nl.init({"fp16": True, "init_scale": 65536.0, "hybrid_shard_degree": 2})
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    model = nl.shard(model)
    optimizer = parity.adamw(model, 1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    variables = {"nl": nl, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    variables["micro_batches"] = [parity.rows(rank), parity.rows(4 + rank)]
    exec(code_block("nl.loss_scaler(model)"), variables)
    exec(code_block("with nl.accumulation("), variables)
    exec(code_block("nl.memory_report("), variables | {"print": lambda text: None})
    return variables["scaler"].overflow, variables["step"].ended, scheduler.last_epoch


def test_precision_and_memory_blocks_run():
    assert nl.spmd.run(run_precision_and_memory_blocks, 4) == [(False, True, 1)] * 4


def run_migrated_loop(rank, block):
    """Execute a loop of a migration page on two micro-batches per rank and step."""
    tensor_ranks = 2 if "tensor_parallel_degree" in block else 1
    data_rank, data_ranks = rank // tensor_ranks, 4 // tensor_ranks
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build("llama")
    pieces = [parity.split(parity.rows(step), 2 * data_ranks) for step in range(2)]
    loader = [each[2 * data_rank : 2 * data_rank + 2] for each in pieces]
    variables = {"model": model, "loader": loader}
    exec(block, variables)
    return {name: whole(p) for name, p in variables["model"].named_parameters()}


def whole(parameter):
    return parameter.full_tensor().detach() if hasattr(parameter, "full_tensor") else parameter


def migration_page(name):
    return (DOCS / "migration" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["smp_v2", "deepspeed", "fsdp", "accelerate", "lightning"])
def test_migrated_loop_trains_as_one_process(page):
    (block,) = re.findall(r"```python\n(.*?)```", migration_page(page), re.DOTALL)
    model = parity.build("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        model(**parity.rows(step)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expected = dict(model.named_parameters())
    for values in nl.spmd.run(lambda rank: run_migrated_loop(rank, block), 4):
        for name, value in values.items():
            if value.shape == expected[name].shape:  # tensor ranks hold a part
                torch.testing.assert_close(value, expected[name].detach(), atol=1e-5, rtol=1e-4)


def test_loop_before_migration_trains_as_the_one_after(monkeypatch):
    """FSDP2 averages the means of micro-batches, so every label counts here."""
    rows = parity.rows
    monkeypatch.setattr(
        parity, "rows", lambda step: {name: rows(step)["input_ids"] for name in rows(step)}
    )
    text = migration_page("fsdp")
    (before,) = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    (after,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = (
        "import torch\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
    )
    old, new = (
        nl.spmd.run(lambda rank, block=block: run_migrated_loop(rank, block), 4)[0]
        for block in (names + before, after)
    )
    for name, value in old.items():
        torch.testing.assert_close(new[name], value, atol=1e-5, rtol=1e-4)


def deepspeed_keys():
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    return [field.alias or name for name, field in config.model_fields.items()]


def fsdp_keys():
    first, second = fsdp.FullyShardedDataParallel, fsdp.fully_shard
    methods = [name for name in vars(fsdp.FSDPModule) if not name.startswith("_")]
    arguments = [*inspect.signature(first).parameters, *inspect.signature(second).parameters]
    return [*methods, *arguments, *fsdp.ShardingStrategy.__members__]


def accelerate_keys():
    accelerate = pytest.importorskip("accelerate")
    plugin = accelerate.utils.FullyShardedDataParallelPlugin
    fields = [field.name for field in dataclasses.fields(plugin)]
    return [*fields, *inspect.signature(accelerate.Accelerator).parameters]


@pytest.mark.parametrize(
    ("page", "keys"),
    [("deepspeed", deepspeed_keys), ("fsdp", fsdp_keys), ("accelerate", accelerate_keys)],
)
def test_migration_page_has_every_option_of_the_installed_library(page, keys):
    rows = re.findall(r"^\| (`.*?) \|", migration_page(page), re.MULTILINE)
    listed = set(re.findall(r"\w+", " ".join(rows)))
    assert len(keys()) > 20 and not set(keys()) - listed


@pytest.mark.parametrize("page", ["deepspeed", "fsdp", "accelerate", "lightning"])
def test_migration_page_names_existing_settings_and_calls(page):
    text = migration_page(page)
    config = train_config.TrainConfig()
    tables = "|".join(field.name for field in dataclasses.fields(config))
    settings = re.findall(rf"`({tables})\.(\w+)", text)
    assert len(settings) > 5
    for table, key in settings:
        assert hasattr(getattr(config, table), key), f"{table}.{key}"
    for name in re.findall(r"\bnl\.(\w+)", text):
        assert hasattr(nl, name), name


def test_smp_page_lists_every_alias_and_ignored_key():
    _, names = migration_page("smp_v1").split("## Keys with another name")
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", names, re.MULTILINE))
    assert rows == parallel_config.ALIASES
    listed = set(re.findall(r"`(\w+)`", names.partition("no effect:")[2].partition(".")[0]))
    assert listed == parallel_config.IGNORED_V1_KEYS


@pytest.mark.parametrize("page", ["bytes", "rooflines", "degrees", "differences"])
def test_solutions_of_problems_are_correct(page):
    text = (DOCS / "problems" / f"{page}.md").read_text(encoding="utf-8")
    assert text.count("{dropdown} Solution") == 10
    variables = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, variables)
