"""Hugging Face export of models and checkpoints, compared with files saved by transformers."""

import filecmp
import json
import os

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

import nearlinear as nl
from nearlinear.checkpoint import index, metadata, safetensors_file
from nearlinear.checkpoint.hf import export, meta_model, naming
from nearlinear.checkpoint.hf.export import export_checkpoint
from nearlinear.checkpoint.shards import TensorShard
from nearlinear.errors import CheckpointError, RankError
from tests.support import parity

TENSOR_AND_SHARD = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}
PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}
EXPERTS = {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}
UNTIED = {"tie_word_embeddings": False}
RUNS = [
    ("gpt2", {}, 1, {}),
    ("gpt2", {}, 4, TENSOR_AND_SHARD),
    ("gpt2", UNTIED, 2, PIPELINE),
    ("gpt_neox", {}, 2, {"tensor_parallel_degree": 2}),
    ("llama", {}, 4, {"hybrid_shard_degree": 2, "shard_optimizer_state": True}),
    ("llama_tied", {}, 2, PIPELINE),
    ("llama_tied", {}, 2, PIPELINE | {"pipeline": "zbv_zero_bubble"}),
    ("mistral", {}, 4, TENSOR_AND_SHARD),
    ("mixtral", {}, 4, EXPERTS),
    ("mixtral", {}, 8, {"hybrid_shard_degree": 8}),
    ("mixtral", {}, 4, EXPERTS | {"tensor_parallel_degree": 2}),
]


def sharded_model(family, config, changes):
    """Build a model with seed 0 and shard it according to ``config``."""
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build(family, **(parity.layers(family, 4) | changes))
    model = nl.transform(model)
    return nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)


def export_model(rank, path, family, config, changes=None, **options):
    return nl.export_hf(path, sharded_model(family, config, changes or {}), **options)


def reference_model(family, changes=None):
    return parity.build(family, **(parity.layers(family, 4) | (changes or {}))).eval()


def run_id(run) -> str:
    return f"{run[0]} {'untied ' * bool(run[1])}on {run[2]}: {', '.join(run[3])}"


@pytest.mark.parametrize("run", RUNS, ids=run_id)
def test_export_is_byte_identical_to_save_pretrained(run, tmp_path):
    family, changes, ranks, config = run
    here, there = tmp_path / "ours", tmp_path / "theirs"
    nl.spmd.run(lambda rank: export_model(rank, here, family, config, changes), ranks)
    model = reference_model(family, changes)
    model.save_pretrained(there)
    assert sorted(os.listdir(here)) == sorted(os.listdir(there))
    for name in os.listdir(there):  # includes names, order, dtypes, values, and configs
        assert filecmp.cmp(here / name, there / name, shallow=False), name
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(here).eval()
    ids = parity.rows(0)["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_export_limits_file_size_and_transfers_each_byte_once(family, tmp_path, monkeypatch):
    """Check that a rank receives at most a single tensor at a time."""
    received_bytes = []
    exchange = dist.all_to_all_single

    def counted(out, *arguments, **keywords):
        received_bytes.append(out.nbytes)
        return exchange(out, *arguments, **keywords)

    monkeypatch.setattr(export.dist, "all_to_all_single", counted)
    config = {"hybrid_shard_degree": 4}
    run = lambda rank: export_model(rank, tmp_path / "many", family, config, max_shard_bytes=20_000)  # noqa: E731
    nl.spmd.run(run, 4)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    report = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert {path.name for path in files} == set(report["weight_map"].values()) and len(files) > 4
    largest = total = 0
    for path in files:
        with safe_open(path, "pt") as values:
            sizes = {name: values.get_tensor(name).nbytes for name in values.keys()}  # noqa: SIM118
        assert sum(sizes.values()) <= 20_000
        assert {report["weight_map"][name] for name in sizes} == {path.name}
        largest, total = max(largest, *sizes.values()), total + sum(sizes.values())
    assert report["metadata"]["total_size"] == total == sum(received_bytes)
    assert max(received_bytes) == largest
    model = reference_model(family)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_export_converts_dtype_and_copies_tokenizer(tmp_path, token_folder):
    options = {"dtype": torch.bfloat16, "tokenizer": token_folder / "tokenizer"}
    nl.spmd.run(
        lambda rank: export_model(rank, tmp_path / "a", "gpt2", TENSOR_AND_SHARD, **options), 4
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for name, value in reference_model("gpt2").state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16())
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    assert words.decode(words("Every rank reads").input_ids) == "Every rank reads"
    assert words.eos_token == "<|endoftext|>"


def test_export_enables_use_cache(tmp_path):
    nl.spmd.run(
        lambda rank: export_model(rank, tmp_path / "a", "gpt2", {}, {"use_cache": False}), 1
    )
    assert json.loads((tmp_path / "a" / "config.json").read_text())["use_cache"] is True


def export_error(ranks, *arguments, **options) -> str:
    """Return the error message, which must be equal on all ranks."""

    def work(rank):
        with pytest.raises(CheckpointError) as caught:
            export_model(rank, *arguments, **options)
        return str(caught.value)

    (message,) = set(nl.spmd.run(work, ranks))
    return message


def test_export_replaces_a_model_folder_only_with_overwrite(tmp_path):
    path = tmp_path / "a"
    for value in ("llama", "gpt2"):
        nl.spmd.run(lambda rank, f=value: export_model(rank, path, f, {}, overwrite=True), 1)
        assert json.loads((path / "config.json").read_text())["model_type"] == value
    assert "already exists" in export_error(2, path, "llama", {})
    assert json.loads((path / "config.json").read_text())["model_type"] == "gpt2"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    message = export_error(2, tmp_path / "mine", "llama", {}, overwrite=True)
    assert "is not a model folder" in message and (tmp_path / "mine" / "thesis.txt").exists()
    assert sorted(os.listdir(tmp_path)) == ["a", "mine"]


@pytest.mark.parametrize("options", [{"dtype": torch.int8}, {"max_shard_bytes": 0},
                                     {"tokenizer": "nowhere"}])  # fmt: skip
def test_invalid_export_options_raise(options, tmp_path):
    assert next(iter(options)).split("_")[0] in export_error(
        2, tmp_path / "a", "llama", {}, **options
    )
    assert os.listdir(tmp_path) == []


def test_full_disk_raises_on_all_ranks_and_keeps_existing_folder(tmp_path, monkeypatch):
    nl.spmd.run(lambda rank: export_model(rank, tmp_path / "a", "gpt2", {}), 1)
    write = safetensors_file.SafetensorsWriter.add

    def full(self, values):
        if "00003" in self.file.name:
            raise OSError(28, "No space left on device")
        write(self, values)

    monkeypatch.setattr(safetensors_file.SafetensorsWriter, "add", full)
    message = export_error(2, tmp_path / "a", "llama", {}, overwrite=True, max_shard_bytes=20_000)
    assert "No space left on device" in message and "rank" in message
    assert json.loads((tmp_path / "a" / "config.json").read_text())["model_type"] == "gpt2"
    assert os.listdir(tmp_path) == ["a"]


def test_export_of_non_transformers_model_raises(tmp_path):
    def work(rank):
        nl.init({})
        nl.export_hf(tmp_path / "a", nl.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))

    with pytest.raises(RankError, match="Sequential is not a transformers model"):
        nl.spmd.run(work, 2)


def test_export_with_mismatched_config_raises(tmp_path):
    def work(rank):
        model = sharded_model("llama", {}, {})
        model.config.num_hidden_layers += 1
        nl.export_hf(tmp_path / "a", model)

    with pytest.raises(RankError, match="is only in the config of LlamaForCausalLM"):
        nl.spmd.run(work, 2)


def test_export_rejects_weights_computed_by_save_pretrained(monkeypatch):
    bare = meta_model.build_like(reference_model("llama"))
    double = lambda bare, tensors: {name: value * 2 for name, value in tensors.items()}  # noqa: E731
    monkeypatch.setattr(naming, "_convert", double)
    with pytest.raises(CheckpointError, match="computes model.embed_tokens.weight"):
        naming.hf_tensors(bare)


def save_checkpoint(rank, folder, family, config):
    model = sharded_model(family, config, {})
    nl.save(folder, model, parity.adamw(model, 1e-3), step=3)
    return metadata.describe_run(model)


@pytest.mark.parametrize(
    ("family", "ranks", "config"),
    [("gpt2", 4, TENSOR_AND_SHARD), ("mixtral", 4, EXPERTS), ("llama_tied", 2, PIPELINE)],
)
def test_export_checkpoint_runs_on_a_single_process(family, ranks, config, tmp_path):
    report = nl.spmd.run(save_checkpoint, ranks, args=(tmp_path / "kept", family, config))[0]
    here, there = tmp_path / "ours", tmp_path / "theirs"
    described = json.loads(json.dumps(report))["model"]
    export_checkpoint(tmp_path / "kept", here, described)
    reference_model(family).save_pretrained(there)
    for name in os.listdir(there):
        assert filecmp.cmp(here / name, there / name, shallow=False), name
    degrees = {axis: degree for axis, degree in report["layout"].items() if degree > 1}
    assert set(degrees.values()) == {2} and len(degrees) >= 1


def test_export_checkpoint_rejects_a_changed_byte(tmp_path):
    report = nl.spmd.run(save_checkpoint, 2, args=(tmp_path / "kept", "llama", {}))[0]
    path = next((tmp_path / "kept").glob("rank-00001*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        export_checkpoint(tmp_path / "kept", tmp_path / "a", report["model"])
    assert os.listdir(tmp_path) == ["kept"]
    assert index.read(tmp_path / "kept").step == 3


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_traced_views_map_to_blocks_and_back(data):
    """Combine transpose, narrow, select, and unsqueeze, the operations of weight converters."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4), "shape")
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    traced = torch.empty(shape, device="meta").as_subclass(naming._Traced)
    values, operations = (
        whole,
        data.draw(st.lists(st.sampled_from("tcsu"), max_size=4), "operations"),
    )
    for operation in operations:
        dim = data.draw(st.integers(0, values.dim() - 1)) if values.dim() else None
        if operation == "u" or dim is None:
            change = lambda t: t.unsqueeze(0)  # noqa: E731
        elif operation == "t":
            change = lambda t, d=dim: t.transpose(0, d).contiguous()  # noqa: E731
        elif operation == "s":
            at = data.draw(st.integers(0, values.shape[dim] - 1))
            change = lambda t, d=dim, at=at: t.select(d, at)  # noqa: E731
        else:
            first = data.draw(st.integers(0, values.shape[dim] - 1))
            count = data.draw(st.integers(1, values.shape[dim] - first))
            change = lambda t, d=dim, a=first, n=count: t.narrow(d, a, n)  # noqa: E731
        values, traced = change(values), change(traced)
    block, order = naming._find_block(traced, shape)
    stored = naming.HFTensor("there", "here", block, tuple(values.shape), order)
    full_shard = TensorShard.full(shape)
    assert torch.equal(stored.to_hf(whole[block.slices_in(full_shard)]), values)
    offset = [data.draw(st.integers(0, n - 1)) for n in block.shape]
    part = TensorShard(
        tuple(a + b for a, b in zip(block.offset, offset, strict=True)),
        tuple(data.draw(st.integers(1, n - a)) for n, a in zip(block.shape, offset, strict=True)),
    )
    assert torch.equal(
        stored.from_hf(values[stored.hf_slices(part)], part), whole[part.slices_in(full_shard)]
    )


@pytest.mark.parametrize("change", [lambda t: t.flatten(), lambda t: t.t().reshape(2, 6)])
def test_find_block_returns_none_for_other_operations(change):
    traced = torch.empty(3, 4, device="meta").as_subclass(naming._Traced)
    changed = change(traced)
    is_copy = changed.untyped_storage()._cdata != traced.untyped_storage()._cdata
    assert is_copy or naming._find_block(changed, (3, 4)) is None
