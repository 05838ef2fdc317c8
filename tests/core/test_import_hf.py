"""Hugging Face folders read into models of any layout, and runs that start from one."""

import json
import os
import pickle
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import nearlinear as nl
from nearlinear import cli, runtime
from nearlinear.checkpoint.hf import importing
from nearlinear.errors import CheckpointError, ConfigError, DataError
from nearlinear.train import config as train_config
from nearlinear.train import preflight
from tests.support import parity

BOTH = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
EXPERTS = {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}
SHARDED = {"hybrid_shard_degree": 4}
RUNS = [
    ("gpt2", 4, BOTH),
    ("gpt2", 2, STAGES),
    ("gpt_neox", 2, {"tensor_parallel_degree": 2}),
    ("llama", 4, SHARDED),
    ("llama", 4, {"hybrid_shard_degree": 2, "shard_optimizer_state": True}),
    ("llama_tied", 2, STAGES | {"pipeline": "zbv_zero_bubble"}),
    ("mistral", 1, {}),
    ("mixtral", 4, EXPERTS | {"tensor_parallel_degree": 2}),
]


def source(family):
    return parity.build(family, **parity.layers(family, 4))


def saved(model, path, **options):
    model.save_pretrained(path, **options)
    return path


def laid_out(family, config):
    """A model without values."""
    mesh = nl.init(config)
    with nl.delayed_init(values=False):
        model = parity.unseeded(family, **parity.layers(family, 4))
    model = nl.transform(model)
    return nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)


def imports(rank, path, family, config):
    model = laid_out(family, config)
    assert not any(value.any() for value in parity.whole(model, torch.Tensor.detach).values())
    nl.import_hf(path, model)
    return parity.whole(model, torch.Tensor.detach)


def assert_is(found: list[dict], model) -> None:
    expected = dict(model.named_parameters())
    assert set().union(*found) == set(expected)
    for name, value in (item for values in found for item in values.items()):
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]} on {run[1]}: {', '.join(run[2])}")
def test_any_layout_reads_what_transformers_wrote(run, tmp_path):
    family, ranks, config = run
    model = source(family)
    saved(model, tmp_path / "a", max_shard_size=20_000)
    assert_is(nl.spmd.run(imports, ranks, args=(tmp_path / "a", family, config)), model)


@pytest.mark.parametrize(("family", "config"), [("llama", SHARDED), ("mixtral", EXPERTS)])
def test_a_rank_reads_what_it_holds_and_no_more(family, config, tmp_path, monkeypatch):
    model, read = source(family), []
    saved(model, tmp_path / "a")
    original = importing.Folder.read

    def counted(self, *arguments):
        for part in original(self, *arguments):
            read.append(part.nbytes)
            yield part

    monkeypatch.setattr(importing.Folder, "read", counted)
    assert_is(nl.spmd.run(imports, 4, args=(tmp_path / "a", family, config)), model)
    replicas = 4 // config["hybrid_shard_degree"]
    assert sum(read) == replicas * sum(p.nbytes for p in model.parameters())
    assert max(read) <= max(p.nbytes for p in model.parameters()) / 2


def test_folders_that_others_wrote(tmp_path):
    """Without the base model's prefix, with masks for values and a tied head, as on the hub; with
    the frequencies of rotary positions; and with experts stacked as in memory."""
    model = source("gpt2")
    saved(model, tmp_path / "hub")
    values = load_file(tmp_path / "hub" / "model.safetensors")
    values = {name.removeprefix("transformer."): value for name, value in values.items()}
    values |= {
        "h.0.attn.bias": torch.ones(1, 1, 64, 64),
        "lm_head.weight": values["wte.weight"] + 0,
    }
    save_file(values, tmp_path / "hub" / "model.safetensors")
    assert_is(nl.spmd.run(imports, 4, args=(tmp_path / "hub", "gpt2", BOTH)), model)
    rotary = source("llama")
    saved(rotary, tmp_path / "old")
    values = load_file(tmp_path / "old" / "model.safetensors")
    values["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(values, tmp_path / "old" / "model.safetensors")
    assert_is(nl.spmd.run(imports, 1, args=(tmp_path / "old", "llama", {})), rotary)
    mixture = source("mixtral")
    (tmp_path / "stacked").mkdir()
    save_file(dict(mixture.state_dict()), tmp_path / "stacked" / "model.safetensors")
    assert_is(nl.spmd.run(imports, 4, args=(tmp_path / "stacked", "mixtral", EXPERTS)), mixture)


def test_other_precisions_are_converted(tmp_path):
    model = source("llama").bfloat16()
    saved(model, tmp_path / "a")
    for found in nl.spmd.run(imports, 2, args=(tmp_path / "a", "llama", {})):
        for name, value in model.named_parameters():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], value.float())


def refused(path, family="llama") -> str:
    """What both ranks say alike, with the model as it was."""

    def work(rank):
        model = laid_out(family, {"hybrid_shard_degree": 2})
        with pytest.raises(CheckpointError) as caught:
            nl.import_hf(path, model)
        assert not any(v.any() for v in parity.whole(model, torch.Tensor.detach).values())
        return str(caught.value)

    (said,) = set(nl.spmd.run(work, 2))
    assert "\n" not in said
    return said


@pytest.fixture
def folder(tmp_path):
    return saved(source("llama"), tmp_path / "a", max_shard_size=20_000)


def test_names_and_shapes_of_another_model(folder):
    name = "model.layers.0.self_attn.q_proj.weight"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    path = folder / index[name]
    values = load_file(path)
    whole = values.pop(name)
    save_file(values, path)
    assert f"it has no {name}" in refused(folder)
    save_file(values | {name: whole[:-1].contiguous()}, path)
    assert f"has {name} of [31, 32] instead of [32, 32]" in refused(folder)
    save_file(values | {name: whole, "model.extra": whole + 0}, path)
    assert "has model.extra, which LlamaForCausalLM has not" in refused(folder)
    assert "is of another model" in refused(folder, "gpt2")


def test_files_that_are_missing_or_cut_short(folder):
    path = next(folder.glob("model-00002*"))
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    assert f"{path} is no safetensors file, or not all of it" in refused(folder)
    path.unlink()
    assert f"{path} is missing" in refused(folder)
    index = folder / "model.safetensors.index.json"
    for name in ("../secret.safetensors", "/etc/secret.safetensors", "pytorch_model.bin"):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert "is no safetensors file of this folder" in refused(folder)
    index.write_text("{}")
    assert "has no weight_map" in refused(folder)
    index.unlink()
    assert "holds no model" in refused(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pickles, which can run code" in refused(folder)
    assert "is no folder" in refused(folder / "elsewhere")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_pickle_in_any_file_is_never_run(folder, tmp_path, small_run):
    fuse = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(fuse))
    torch.save(Bomb(fuse), folder / "pytorch_model.bin")
    (folder / "tokenizer.json").write_bytes(bomb)
    assert_is(nl.spmd.run(imports, 1, args=(folder, "llama", {})), source("llama"))
    for name in ("model-00001-of-00008.safetensors", "model.safetensors.index.json"):
        shutil.copytree(folder, copy := tmp_path / f"with {name}")
        (copy / name).write_bytes(bomb)
        refused(copy)
    for name in ("config.json", "model.safetensors"):
        path, _ = pretrained(tmp_path / f"bombed {name}")
        (path / name).write_bytes(bomb)
        with pytest.raises((ConfigError, CheckpointError)):
            nl.Trainer(small_run | {"model": {"init_from": str(path)}})
        runtime.shutdown()
    assert not fuse.exists()
    pickle.loads(bomb)  # it would have been there
    assert fuse.exists()


def test_a_model_without_memory_is_to_be_sharded_first(folder):
    def work(rank):
        nl.init({})
        with nl.delayed_init():
            model = parity.unseeded("llama", num_hidden_layers=4)
        with pytest.raises(CheckpointError, match="call nl.shard"):
            nl.import_hf(folder, model)

    nl.spmd.run(work, 1)


def pretrained(path, family="LlamaConfig", **changes):
    """A model with as many ids as the corpus of the tests has."""
    shape = parity.FAMILIES["llama"][1] | {"vocab_size": 304, "pad_token_id": 3} | changes
    torch.manual_seed(3)
    config = getattr(transformers, family)(**shape)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return saved(model, path), model.float()


def begins(rank, config):
    trainer = nl.Trainer(config)
    return parity.whole(trainer.model, torch.Tensor.detach), trainer.first_step, trainer.fit().loss


@pytest.mark.parametrize("family", ["LlamaConfig", "Qwen2Config"])
def test_a_run_starts_from_a_folder_and_goes_on_from_its_checkpoint(family, small_run, tmp_path):
    path, model = pretrained(tmp_path / "pretrained", family)
    small_run["model"] = {"init_from": str(path)}
    small_run["parallel"] = {"tensor_parallel_degree": 2}
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept")}
    small_run["train"] |= {"steps": 2, "stop_after": 1}
    found = nl.spmd.run(begins, 2, args=(small_run,))
    assert_is([values for values, _, _ in found], model)
    small_run["train"]["stop_after"] = 2
    for values, first, _ in nl.spmd.run(begins, 2, args=(small_run,)):
        assert first == 1
        assert any(not torch.equal(values[name], p) for name, p in model.named_parameters())


def test_what_a_folder_and_the_config_do_not_agree_on(small_run, tmp_path):
    path, _ = pretrained(tmp_path / "pretrained")
    small_run["model"] = {"init_from": str(path)}
    config = train_config.load(small_run, environment={})
    assert config.model.longest_sequence == 64 and config.model.family == "llama"
    preflight.check(config, 2)

    def said(error, *settings, ranks=2):
        with pytest.raises(error) as caught:
            preflight.check(train_config.load(small_run, settings, environment={}), ranks)
        return str(caught.value)

    assert "drop model.preset" in said(ConfigError, "model.preset=llama2-7b")
    assert "context of 64 tokens" in said(ConfigError, "data.sequence_length=65")
    assert "is no folder" in said(ConfigError, "model.init_from=nowhere")
    assert "num_attention_heads = 8" in said(
        ConfigError, "parallel.tensor_parallel_degree=3", ranks=3
    )
    small, _ = pretrained(tmp_path / "small", vocab_size=200)
    assert "knows 200" in said(DataError, f"model.init_from={small}")
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | {"quantization_config": {}}))
    elsewhere = shutil.copytree(path, tmp_path / "quantised")
    assert "quantised" in said(ConfigError, f"model.init_from={elsewhere}")


def test_the_command_line_says_it_in_one_line(small_run, tmp_path, capsys):
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"")
    config = tmp_path / "run.json"
    config.write_text(json.dumps(small_run | {"model": {"init_from": str(tmp_path / "pickles")}}))
    assert cli.main(["train", str(config)]) == 2
    assert "such files are pickles" in capsys.readouterr().err
