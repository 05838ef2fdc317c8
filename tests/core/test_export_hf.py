"""Hugging Face folders of runs of any layout and of checkpoints: what transformers itself saves."""

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
from nearlinear.checkpoint import about, index, stream
from nearlinear.checkpoint.hf import export, naming, skeleton
from nearlinear.checkpoint.pieces import Piece
from nearlinear.errors import CheckpointError
from nearlinear.spmd.failures import RankError
from tests.support import parity

BOTH = {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2}
STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
EXPERTS = {"expert_parallel_degree": 2, "hybrid_shard_degree": 2}
UNTIED = {"tie_word_embeddings": False}
RUNS = [
    ("gpt2", {}, 1, {}),
    ("gpt2", {}, 4, BOTH),
    ("gpt2", UNTIED, 2, STAGES),
    ("gpt_neox", {}, 2, {"tensor_parallel_degree": 2}),
    ("llama", {}, 4, {"hybrid_shard_degree": 2, "shard_optimizer_state": True}),
    ("llama_tied", {}, 2, STAGES),
    ("llama_tied", {}, 2, STAGES | {"pipeline": "zbv_zero_bubble"}),
    ("mistral", {}, 4, BOTH),
    ("mixtral", {}, 4, EXPERTS),
    ("mixtral", {}, 4, EXPERTS | {"tensor_parallel_degree": 2}),
]


def laid_out(family, config, changes):
    """A model with the values of seed 0, as ``config`` asks."""
    mesh = nl.init(config)
    with nl.spmd.one_at_a_time(seed=0):
        model = parity.build(family, **(parity.layers(family, 4) | changes))
    model = nl.transform(model)
    return nl.shard(nl.pipeline(model) if mesh.pipeline > 1 else model)


def exports(rank, path, family, config, changes=None, **options):
    return nl.export_hf(path, laid_out(family, config, changes or {}), **options)


def source(family, changes=None):
    return parity.build(family, **(parity.layers(family, 4) | (changes or {}))).eval()


def name_of(run) -> str:
    return f"{run[0]} {'untied ' * bool(run[1])}on {run[2]}: {', '.join(run[3])}"


@pytest.mark.parametrize("run", RUNS, ids=name_of)
def test_a_run_is_written_as_transformers_writes_it(run, tmp_path):
    family, changes, ranks, config = run
    here, there = tmp_path / "ours", tmp_path / "theirs"
    nl.spmd.run(lambda rank: exports(rank, here, family, config, changes), ranks)
    model = source(family, changes)
    model.save_pretrained(there)
    assert sorted(os.listdir(here)) == sorted(os.listdir(there))
    for name in os.listdir(there):  # to the byte: names, order, dtypes, values, configs
        assert filecmp.cmp(here / name, there / name, shallow=False), name
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(here).eval()
    ids = parity.rows(0)["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_files_of_a_given_size_written_by_all_ranks(family, tmp_path, monkeypatch):
    """What travels is each byte once, and on no rank more than a tensor at a time."""
    travelling = []
    exchange = dist.all_to_all_single

    def counted(out, *arguments, **keywords):
        travelling.append(out.nbytes)
        return exchange(out, *arguments, **keywords)

    monkeypatch.setattr(export.dist, "all_to_all_single", counted)
    config = {"hybrid_shard_degree": 4}
    run = lambda rank: exports(rank, tmp_path / "many", family, config, max_shard_bytes=20_000)  # noqa: E731
    nl.spmd.run(run, 4)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    told = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert {path.name for path in files} == set(told["weight_map"].values()) and len(files) > 4
    largest = total = 0
    for path in files:
        with safe_open(path, "pt") as values:
            sizes = {name: values.get_tensor(name).nbytes for name in values.keys()}  # noqa: SIM118
        assert sum(sizes.values()) <= 20_000
        assert {told["weight_map"][name] for name in sizes} == {path.name}
        largest, total = max(largest, *sizes.values()), total + sum(sizes.values())
    assert told["metadata"]["total_size"] == total == sum(travelling)
    assert max(travelling) == largest
    model = source(family)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_rounded_and_with_a_tokenizer(tmp_path, token_folder):
    options = {"dtype": torch.bfloat16, "tokenizer": token_folder / "tokenizer"}
    nl.spmd.run(lambda rank: exports(rank, tmp_path / "a", "gpt2", BOTH, **options), 4)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for name, value in source("gpt2").state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16())
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    assert words.decode(words("Every rank reads").input_ids) == "Every rank reads"
    assert words.eos_token == "<|endoftext|>"


def test_a_model_that_was_trained_without_a_cache_generates_with_one(tmp_path):
    nl.spmd.run(lambda rank: exports(rank, tmp_path / "a", "gpt2", {}, {"use_cache": False}), 1)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["use_cache"] is True


def refused(ranks, *arguments, **options) -> str:
    """What all ranks say alike."""

    def work(rank):
        with pytest.raises(CheckpointError) as caught:
            exports(rank, *arguments, **options)
        return str(caught.value)

    (said,) = set(nl.spmd.run(work, ranks))
    return said


def test_what_is_there_is_replaced_only_where_that_is_asked_for(tmp_path):
    path = tmp_path / "a"
    for value in ("llama", "gpt2"):
        nl.spmd.run(lambda rank, f=value: exports(rank, path, f, {}, overwrite=True), 1)
        assert json.loads((path / "config.json").read_text())["model_type"] == value
    assert "exists already" in refused(2, path, "llama", {})
    assert json.loads((path / "config.json").read_text())["model_type"] == "gpt2"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    said = refused(2, tmp_path / "mine", "llama", {}, overwrite=True)
    assert "is no model's folder" in said and (tmp_path / "mine" / "thesis.txt").exists()
    assert sorted(os.listdir(tmp_path)) == ["a", "mine"]


@pytest.mark.parametrize("options", [{"dtype": torch.int8}, {"max_shard_bytes": 0},
                                     {"tokenizer": "nowhere"}])  # fmt: skip
def test_options_that_make_no_sense(options, tmp_path):
    assert next(iter(options)).split("_")[0] in refused(2, tmp_path / "a", "llama", {}, **options)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_to_all_and_leaves_what_was_there(tmp_path, monkeypatch):
    nl.spmd.run(lambda rank: exports(rank, tmp_path / "a", "gpt2", {}), 1)
    write = stream.Stream.add

    def full(self, values):
        if "00003" in self.file.name:
            raise OSError(28, "No space left on device")
        write(self, values)

    monkeypatch.setattr(stream.Stream, "add", full)
    said = refused(2, tmp_path / "a", "llama", {}, overwrite=True, max_shard_bytes=20_000)
    assert "No space left on device" in said and "rank" in said
    assert json.loads((tmp_path / "a" / "config.json").read_text())["model_type"] == "gpt2"
    assert os.listdir(tmp_path) == ["a"]


def test_what_is_no_model_of_transformers(tmp_path):
    def work(rank):
        nl.init({})
        nl.export_hf(tmp_path / "a", nl.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))

    with pytest.raises(RankError, match="Sequential is no model of transformers"):
        nl.spmd.run(work, 2)


def test_a_config_of_another_model(tmp_path):
    def work(rank):
        model = laid_out("llama", {}, {})
        model.config.num_hidden_layers += 1
        nl.export_hf(tmp_path / "a", model)

    with pytest.raises(RankError, match="is only in the config of LlamaForCausalLM"):
        nl.spmd.run(work, 2)


def test_a_model_that_transformers_computes_when_it_saves(monkeypatch):
    bare = skeleton.of_model(source("llama"))
    double = lambda bare, tensors: {name: value * 2 for name, value in tensors.items()}  # noqa: E731
    monkeypatch.setattr(naming, "_converted", double)
    with pytest.raises(CheckpointError, match="computes model.embed_tokens.weight"):
        naming.stored(bare)


def saves(rank, folder, family, config):
    model = laid_out(family, config, {})
    nl.save(folder, model, parity.adamw(model, 1e-3), step=3)
    return about.about(model)


@pytest.mark.parametrize(
    ("family", "ranks", "config"),
    [("gpt2", 4, BOTH), ("mixtral", 4, EXPERTS), ("llama_tied", 2, STAGES)],
)
def test_a_checkpoint_is_written_without_its_ranks(family, ranks, config, tmp_path):
    told = nl.spmd.run(saves, ranks, args=(tmp_path / "kept", family, config))[0]
    here, there = tmp_path / "ours", tmp_path / "theirs"
    described = json.loads(json.dumps(told))["model"]
    nl.export_checkpoint(tmp_path / "kept", here, described)
    source(family).save_pretrained(there)
    for name in os.listdir(there):
        assert filecmp.cmp(here / name, there / name, shallow=False), name
    degrees = {axis: degree for axis, degree in told["layout"].items() if degree > 1}
    assert set(degrees.values()) == {2} and len(degrees) >= 1


def test_a_checkpoint_with_a_changed_byte_is_not_exported(tmp_path):
    told = nl.spmd.run(saves, 2, args=(tmp_path / "kept", "llama", {}))[0]
    path = next((tmp_path / "kept").glob("rank-00001*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        nl.export_checkpoint(tmp_path / "kept", tmp_path / "a", told["model"])
    assert os.listdir(tmp_path) == ["kept"]
    assert index.read(tmp_path / "kept").step == 3


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_view_is_found_again_and_read_in_any_part(data):
    """Transposed, cut and selected: what a loader may have stacked, whatever the family."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4), "shape")
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    traced = torch.empty(shape, device="meta").as_subclass(naming._Traced)
    values, deeds = whole, data.draw(st.lists(st.sampled_from("tcsu"), max_size=4), "deeds")
    for deed in deeds:
        dim = data.draw(st.integers(0, values.dim() - 1)) if values.dim() else None
        if deed == "u" or dim is None:
            change = lambda t: t.unsqueeze(0)  # noqa: E731
        elif deed == "t":
            change = lambda t, d=dim: t.transpose(0, d).contiguous()  # noqa: E731
        elif deed == "s":
            at = data.draw(st.integers(0, values.shape[dim] - 1))
            change = lambda t, d=dim, at=at: t.select(d, at)  # noqa: E731
        else:
            first = data.draw(st.integers(0, values.shape[dim] - 1))
            count = data.draw(st.integers(1, values.shape[dim] - first))
            change = lambda t, d=dim, a=first, n=count: t.narrow(d, a, n)  # noqa: E731
        values, traced = change(values), change(traced)
    block, order = naming._block(traced, shape)
    stored = naming.Stored("there", "here", block, tuple(values.shape), order)
    everything = Piece.whole(shape)
    assert torch.equal(stored.arranged(whole[block.inside(everything)]), values)
    offset = [data.draw(st.integers(0, n - 1)) for n in block.shape]
    part = Piece(
        tuple(a + b for a, b in zip(block.offset, offset, strict=True)),
        tuple(data.draw(st.integers(1, n - a)) for n, a in zip(block.shape, offset, strict=True)),
    )
    assert torch.equal(
        stored.back(values[stored.inside(part)], part), whole[part.inside(everything)]
    )


@pytest.mark.parametrize("change", [lambda t: t.flatten(), lambda t: t.t().reshape(2, 6)])
def test_what_is_no_block_is_told(change):
    traced = torch.empty(3, 4, device="meta").as_subclass(naming._Traced)
    made = change(traced)
    elsewhere = made.untyped_storage()._cdata != traced.untyped_storage()._cdata
    assert elsewhere or naming._block(made, (3, 4)) is None
