"""Hugging Face import into models of any layout, and runs that start from a pretrained model."""

import json
import os
import pickle
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import nearlinear as nl
from nearlinear import cli
from nearlinear.checkpoint.hf import importing
from nearlinear.config import train as train_config
from nearlinear.distributed import runtime
from nearlinear.errors import CheckpointError, ConfigError, DataError
from nearlinear.train import preflight
from tests.support import parity

TENSOR_AND_SHARD = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
EXPERTS = {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}
SHARDED = {"hybrid_shard_degree": 4}
RUNS = [
    ("gpt2", 4, TENSOR_AND_SHARD),
    ("gpt2", 2, PIPELINE),
    ("gpt_neox", 2, {"tensor_parallel_degree": 2}),
    ("llama", 4, SHARDED),
    ("llama", 4, {"hybrid_shard_degree": 2, "shard_optimizer_state": True}),
    ("llama_tied", 2, PIPELINE | {"pipeline": "zbv_zero_bubble"}),
    ("mistral", 1, {}),
    ("mixtral", 4, EXPERTS | {"tensor_parallel_degree": 2}),
]


def reference_model(family):
    return parity.build(family, **parity.layers(family, 4))


def save_pretrained(model, path, **options):
    model.save_pretrained(path, **options)
    return path


def sharded_model(family, config):
    """Build and shard a model without initialized values."""
    mesh = nl.init(config)
    with nl.deferred_init(values=False):
        model = parity.unseeded(family, **parity.layers(family, 4))
    model = nl.transform(model)
    return nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)


def import_model(rank, path, family, config):
    model = sharded_model(family, config)
    assert not any(value.any() for value in parity.whole(model, torch.Tensor.detach).values())
    nl.import_hf(path, model)
    return parity.whole(model, torch.Tensor.detach)


def assert_parameters_equal(found: list[dict], model) -> None:
    expected = dict(model.named_parameters())
    assert set().union(*found) == set(expected)
    for name, value in (item for values in found for item in values.items()):
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]} on {run[1]}: {', '.join(run[2])}")
def test_import_into_any_layout_matches_transformers(run, tmp_path):
    family, ranks, config = run
    model = reference_model(family)
    save_pretrained(model, tmp_path / "a", max_shard_size=20_000)
    assert_parameters_equal(
        nl.spmd.run(import_model, ranks, args=(tmp_path / "a", family, config)), model
    )


@pytest.mark.parametrize(("family", "config"), [("llama", SHARDED), ("mixtral", EXPERTS)])
def test_import_reads_only_the_shards_of_each_rank(family, config, tmp_path, monkeypatch):
    model, read = reference_model(family), []
    save_pretrained(model, tmp_path / "a")
    original = importing.HFFolder.read

    def counting_read(self, *arguments):
        for part in original(self, *arguments):
            read.append(part.nbytes)
            yield part

    monkeypatch.setattr(importing.HFFolder, "read", counting_read)
    assert_parameters_equal(
        nl.spmd.run(import_model, 4, args=(tmp_path / "a", family, config)), model
    )
    replicas = 4 // config["hybrid_shard_degree"]
    assert sum(read) == replicas * sum(p.nbytes for p in model.parameters())
    assert max(read) <= max(p.nbytes for p in model.parameters()) / 2


def test_import_accepts_legacy_and_in_memory_tensor_names(tmp_path):
    """Import three variants: names without the base model prefix plus attention masks and a tied
    head, as on the hub; stored rotary frequencies; and experts stacked as in memory.
    """
    model = reference_model("gpt2")
    save_pretrained(model, tmp_path / "hub")
    values = load_file(tmp_path / "hub" / "model.safetensors")
    values = {name.removeprefix("transformer."): value for name, value in values.items()}
    values |= {
        "h.0.attn.bias": torch.ones(1, 1, 64, 64),
        "lm_head.weight": values["wte.weight"] + 0,
    }
    save_file(values, tmp_path / "hub" / "model.safetensors")
    assert_parameters_equal(
        nl.spmd.run(import_model, 4, args=(tmp_path / "hub", "gpt2", TENSOR_AND_SHARD)), model
    )
    rotary = reference_model("llama")
    save_pretrained(rotary, tmp_path / "old")
    values = load_file(tmp_path / "old" / "model.safetensors")
    values["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(values, tmp_path / "old" / "model.safetensors")
    assert_parameters_equal(
        nl.spmd.run(import_model, 1, args=(tmp_path / "old", "llama", {})), rotary
    )
    mixture = reference_model("mixtral")
    (tmp_path / "stacked").mkdir()
    save_file(dict(mixture.state_dict()), tmp_path / "stacked" / "model.safetensors")
    assert_parameters_equal(
        nl.spmd.run(import_model, 4, args=(tmp_path / "stacked", "mixtral", EXPERTS)), mixture
    )


def test_import_converts_dtype(tmp_path):
    model = reference_model("llama").bfloat16()
    save_pretrained(model, tmp_path / "a")
    for found in nl.spmd.run(import_model, 2, args=(tmp_path / "a", "llama", {})):
        for name, value in model.named_parameters():
            assert found[name].dtype == torch.float32
            assert torch.equal(found[name], value.float())


def import_error(path, family="llama") -> str:
    """Return the error message of both ranks, and check that the model is unchanged."""

    def work(rank):
        model = sharded_model(family, {"hybrid_shard_degree": 2})
        with pytest.raises(CheckpointError) as caught:
            nl.import_hf(path, model)
        assert not any(v.any() for v in parity.whole(model, torch.Tensor.detach).values())
        return str(caught.value)

    (message,) = set(nl.spmd.run(work, 2))
    assert "\n" not in message
    return message


@pytest.fixture
def folder(tmp_path):
    return save_pretrained(reference_model("llama"), tmp_path / "a", max_shard_size=20_000)


def test_import_rejects_mismatched_names_and_shapes(folder):
    name = "model.layers.0.self_attn.q_proj.weight"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    path = folder / index[name]
    values = load_file(path)
    whole = values.pop(name)
    save_file(values, path)
    assert f"it has no {name}" in import_error(folder)
    save_file(values | {name: whole[:-1].contiguous()}, path)
    assert f"has {name} of [31, 32] instead of [32, 32]" in import_error(folder)
    save_file(values | {name: whole, "model.extra": whole + 0}, path)
    assert "has model.extra, which LlamaForCausalLM does not have" in import_error(folder)
    assert "is of another model" in import_error(folder, "gpt2")


def test_import_rejects_missing_truncated_and_foreign_files(folder):
    path = next(folder.glob("model-00002*"))
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    assert f"{path} is not a complete safetensors file" in import_error(folder)
    path.unlink()
    assert f"{path} is missing" in import_error(folder)
    index = folder / "model.safetensors.index.json"
    for name in ("../secret.safetensors", "/etc/secret.safetensors", "pytorch_model.bin"):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert "is not a safetensors file of this folder" in import_error(folder)
    index.write_text("{}")
    assert "has no weight_map" in import_error(folder)
    index.unlink()
    assert "holds no model" in import_error(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "Pickle files can run code" in import_error(folder)
    assert "is not a folder" in import_error(folder / "elsewhere")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_import_never_unpickles(folder, tmp_path, small_run):
    marker = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(marker))
    torch.save(Bomb(marker), folder / "pytorch_model.bin")
    (folder / "tokenizer.json").write_bytes(bomb)
    assert_parameters_equal(
        nl.spmd.run(import_model, 1, args=(folder, "llama", {})), reference_model("llama")
    )
    for name in ("model-00001-of-00008.safetensors", "model.safetensors.index.json"):
        shutil.copytree(folder, copy := tmp_path / f"with {name}")
        (copy / name).write_bytes(bomb)
        import_error(copy)
    for name in ("config.json", "model.safetensors"):
        path, _ = pretrained(tmp_path / f"bombed {name}")
        (path / name).write_bytes(bomb)
        with pytest.raises((ConfigError, CheckpointError)):
            nl.Trainer(small_run | {"model": {"init_from": str(path)}})
        runtime.shutdown()
    assert not marker.exists()
    pickle.loads(bomb)  # the pickle itself works
    assert marker.exists()


def test_import_before_shard_raises(folder):
    def work(rank):
        nl.init({})
        with nl.deferred_init():
            model = parity.unseeded("llama", num_hidden_layers=4)
        with pytest.raises(CheckpointError, match="call nl.shard"):
            nl.import_hf(folder, model)

    nl.spmd.run(work, 1)


def pretrained(path, family="LlamaConfig", **changes):
    """Save a pretrained model with the vocabulary size of the test corpus."""
    shape = parity.FAMILIES["llama"][1] | {"vocab_size": 304, "pad_token_id": 3} | changes
    torch.manual_seed(3)
    config = getattr(transformers, family)(**shape)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return save_pretrained(model, path), model.float()


def start_and_train(rank, config):
    trainer = nl.Trainer(config)
    return parity.whole(trainer.model, torch.Tensor.detach), trainer.first_step, trainer.fit().loss


@pytest.mark.parametrize("family", ["LlamaConfig", "Qwen2Config"])
def test_run_starts_from_pretrained_folder_and_resumes_from_checkpoint(family, small_run, tmp_path):
    path, model = pretrained(tmp_path / "pretrained", family)
    small_run["model"] = {"init_from": str(path)}
    small_run["parallel"] = {"tensor_parallel_degree": 2}
    small_run["checkpoint"] = {"folder": str(tmp_path / "kept")}
    small_run["train"] |= {"steps": 2, "stop_after": 1}
    found = nl.spmd.run(start_and_train, 2, args=(small_run,))
    assert_parameters_equal([values for values, _, _ in found], model)
    small_run["train"]["stop_after"] = 2
    for values, first, _ in nl.spmd.run(start_and_train, 2, args=(small_run,)):
        assert first == 1
        assert any(not torch.equal(values[name], p) for name, p in model.named_parameters())


def test_config_that_contradicts_the_pretrained_folder_raises(small_run, tmp_path):
    path, _ = pretrained(tmp_path / "pretrained")
    small_run["model"] = {"init_from": str(path)}
    config = train_config.load(small_run, environment={})
    assert config.model.longest_sequence == 64 and config.model.family == "llama"
    preflight.check_run(config, 2)

    def preflight_error(error, *settings, ranks=2):
        with pytest.raises(error) as caught:
            preflight.check_run(train_config.load(small_run, settings, environment={}), ranks)
        return str(caught.value)

    assert "remove model.preset" in preflight_error(ConfigError, "model.preset=llama2-7b")
    assert "context of 64 tokens" in preflight_error(ConfigError, "data.sequence_length=65")
    assert "is not a folder" in preflight_error(ConfigError, "model.init_from=nowhere")
    assert "num_attention_heads = 8" in preflight_error(
        ConfigError, "parallel.tensor_parallel_degree=3", ranks=3
    )
    small, _ = pretrained(tmp_path / "small", vocab_size=200)
    assert "has 200 ids" in preflight_error(DataError, f"model.init_from={small}")
    data = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | {"quantization_config": {}}))
    elsewhere = shutil.copytree(path, tmp_path / "quantised")
    assert "quantized" in preflight_error(ConfigError, f"model.init_from={elsewhere}")


def test_train_command_reports_pickle_only_folder(small_run, tmp_path, capsys):
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"")
    described = {"model_type": "llama", "max_position_embeddings": 128}
    (tmp_path / "pickles" / "config.json").write_text(json.dumps(described))
    config = tmp_path / "run.json"
    config.write_text(json.dumps(small_run | {"model": {"init_from": str(tmp_path / "pickles")}}))
    assert cli.main(["train", str(config)]) == 2
    assert "Pickle files can run code" in capsys.readouterr().err
